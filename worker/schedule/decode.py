"""What a decode worker runs next: decode rows, local prefill chunks, preemption.

Admission reserves pages for the uncached prompt and growth_tokens of output. After that a row takes
free pages as it grows. When none is left, the youngest row is preempted: it gives up its pages and
is admitted again later with prompt + output as its prompt. Its tokens do not change, because each
depends only on the text before it, the seed and its position.

Lengths: a request has n = len(req.tokens) settled tokens, and KV of n - 1. Each step in flight may
add one, so the host's bound of the KV length on the device is n - 1 + num_in_flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter

from worker.api import FinishReason
from worker.cache.book import PageBook
from worker.config import EngineConfig
from worker.errors import OutOfPages
from worker.plan import TAILS, Chunk, Drawn, Plan
from worker.schedule.req import Phase, Req, finish_reason
from worker.schedule.rows import RowTable

ARRIVAL = attrgetter("arrival")


class DecodeScheduler:
    """Rows, pages and order of one decode worker.

    Invariant: an admitted request that is not FINISHED is in exactly one of `local`, `ready`,
    `running`, `preempted`, or is FETCHING and known to Inbound. All but the preempted have a hold.
    """

    def __init__(
        self,
        book: PageBook,
        engine: EngineConfig,
        eos_ids: frozenset[int],
        on_preempt: Callable[[Req], None] = lambda req: None,
        on_row: Callable[[Req, float], None] = lambda req, now: None,
    ) -> None:
        self.book = book
        self.local: deque[Req] = deque()
        self.ready: deque[Req] = deque()
        self.running: dict[int, Req] = {}  # by row
        self.preempted: list[Req] = []
        self._engine = engine
        self._eos_ids = eos_ids
        self._on_preempt = on_preempt
        self._on_row = on_row  # told just before a request whose KV is here gets a row
        self._rows = RowTable(int(engine.max_num_reqs), int(engine.penalty_rows))
        self._step = 0
        self._arrivals = 0
        self._last_was_prefill = False  # prefill and decode alternate while both have work
        # Step number -> the requests it samples, and those of its chunks if it is a prefill step.
        self._launched: dict[int, tuple[list[Req], list[Req]]] = {}
        self._leaving: set[Req] = set()  # preempted as soon as their step in flight settles

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of local prefills that are not yet in a step."""
        return sum(len(req.tokens) - req.num_planned_tokens for req in self.local)

    def admit(self, req: Req) -> bool:
        """Open a hold for a new or preempted request; False, changing nothing, if it does not fit.

        A new request is also refused while preempted ones wait.
        """
        new = req.phase is Phase.NEW
        if new and self.preempted:
            return False
        num_slots = min(len(req.tokens) + self._engine.growth_tokens, req.max_len)
        hold = self.book.open(req.tokens, num_slots, max_matched=len(req.tokens) - 1)
        if hold is None:
            return False
        if new:
            self._arrivals += 1
            req.arrival = self._arrivals
            req.num_cached_tokens = hold.num_matched
        else:
            self.preempted.remove(req)
        req.hold, req.num_table_pages = hold, 0
        req.num_computed_tokens = hold.num_matched
        req.phase = Phase.FETCHING
        return True

    def prefill_locally(self, req: Req) -> None:
        """Queue the rest of the prompt; KV of tokens[: num_computed_tokens] is here."""
        req.num_planned_tokens = req.num_computed_tokens
        req.phase = Phase.LOCAL
        self.local.append(req)

    def commit(self, req: Req) -> None:
        """Enter KV of tokens[:-1], all here and final, into the tree; queue `req` for a row."""
        assert req.hold is not None
        req.num_computed_tokens = len(req.tokens) - 1
        self.book.commit(req.hold, req.tokens[:-1])
        req.phase = Phase.READY
        self.ready.append(req)

    def plan(self, now: float = 0.0) -> Plan | None:
        """Return the next step, or None if nothing can run now.

        None may be due to preemption: the victim's pages become free when its step settles.
        now: stored in req.marks.row_at when a request gets its first row.
        """
        for req in list(self.ready):
            if not self._rows.num_free:
                break  # no row is free, so no waiting request can start
            if not self._rows.can_take(req.sampling):
                continue  # no penalty slot is free: requests that need none may go first
            self.ready.remove(req)
            self._on_row(req, now)
            self._rows.enter(req, now, active=True)
            self._rows.queue_pages(req)
            req.phase = Phase.RUNNING
            self.running[req.row] = req
        plan = None
        if self.local and not (self._last_was_prefill and self.running):
            plan = self._plan_chunks(now)
        return plan or self._plan_decode()

    def reqs_of(self, step: int) -> tuple[Sequence[Req], Sequence[Req]]:
        """Return the requests that unsettled step `step` samples, and those of its chunks."""
        return self._launched[step]

    def settle(self, step: int, drawn: list[Drawn]) -> list[tuple[Req, Drawn, FinishReason | None]]:
        """Append the tokens of finished step `step`; returns (request, drawn, reason to end).

        Requests that ended meanwhile are left out. The caller calls `finish` if there is a reason.
        """
        self.book.settled(step)
        results: list[tuple[Req, Drawn, FinishReason | None]] = []
        sampled, from_chunk = self._launched.pop(step)
        for req, result in zip(sampled, drawn, strict=True):
            req.num_in_flight -= 1
            if req.phase is Phase.FINISHED:
                continue
            assert result.valid, f"{req.key} drew from an inactive row"
            req.tokens.append(result.token)
            if req.matcher is not None:
                req.matcher.consume(result.token)
            req.num_computed_tokens = len(req.tokens) - 1
            if from_chunk:
                assert req.hold is not None
                self.book.commit(req.hold, req.tokens[:-1])
            reason = finish_reason(req, self._eos_ids)
            assert (reason is not None) == result.finished, f"{req.key}: device and host disagree"
            if req.matcher is not None and req.matcher.stopped:
                reason = FinishReason.STOP  # the grammar is complete: STOP wins over LENGTH
            results.append((req, result, reason))
            if self._leaving and req in self._leaving:
                self._leaving.discard(req)
                if reason is None:
                    self._preempt(req)
        return results

    def finish(self, req: Req) -> None:
        """Give back all that `req` holds, at any phase; a second call does nothing.

        No pull into its pages may run.
        """
        if req.phase is Phase.FINISHED:
            return
        if req.phase is Phase.LOCAL:
            self.local.remove(req)
        elif req.phase is Phase.READY:
            self.ready.remove(req)
        elif req.phase is Phase.PREEMPTED:
            self.preempted.remove(req)
        self._leaving.discard(req)
        self._release(req)
        req.phase = Phase.FINISHED

    def _plan_chunks(self, now: float) -> Plan | None:
        budget = int(self._engine.max_prefill_tokens)
        chunks: list[Chunk] = []
        computed: list[Req] = []
        sampled: list[Req] = []
        for req in list(self.local):
            if budget == 0 or (not req.row and not self._rows.num_free):
                break
            assert req.hold is not None
            if not req.row:
                if not self._rows.can_take(req.sampling):
                    continue
                self._rows.enter(req, now, active=False)
            start = req.num_planned_tokens
            end = min(len(req.tokens), start + budget)
            self.book.bind(req.hold, end)  # reserved at admission: cannot fail
            self._rows.queue_pages(req)
            last = end == len(req.tokens)
            chunks.append(Chunk(req.row, start, tuple(req.tokens[start:end]), last))
            computed.append(req)
            req.num_planned_tokens = end
            budget -= end - start
            if last:
                self.local.remove(req)
                req.phase = Phase.RUNNING
                self.running[req.row] = req
                sampled.append(req)
        if not chunks:
            return None
        self._last_was_prefill = True
        ends = [chunk.start + len(chunk.tokens) for chunk in chunks]
        return self._launch(sampled, ends, computed, chunks=tuple(chunks))

    def _plan_decode(self) -> Plan | None:
        self._last_was_prefill = False
        chosen: list[Req] = []
        lengths: list[int] = []
        for req in sorted(self.running.values(), key=ARRIVAL):
            num_tokens = len(req.tokens) + req.num_in_flight
            if num_tokens >= req.max_len or req in self._leaving:
                continue  # its last token is in flight, or it is being preempted
            # Making room for an older request may just have preempted this one.
            if req.hold is None or (num_tokens >= req.hold.num_slots and not self._bind_slot(req)):
                continue
            chosen.append(req)
            lengths.append(num_tokens)
        rows = tuple(req.row for req in chosen)
        return self._launch(chosen, lengths, [], decode=rows) if rows else None

    def _launch(
        self,
        sampled: list[Req],
        lengths: list[int],
        computed: list[Req],
        *,
        chunks: tuple[Chunk, ...] = (),
        decode: tuple[int, ...] = (),
    ) -> Plan:
        self._step += 1
        for req in sampled:
            req.num_in_flight += 1
        self._launched[self._step] = sampled, computed
        self.book.launched(self._step)
        draws = {req.draw for req in sampled}
        return Plan(
            self._step,
            *self._rows.drain(),
            chunks,
            decode,
            TAILS[max((draw.tail for draw in draws), default=0)],
            max(lengths),
            penalized=any(draw.penalized for draw in draws),
            num_logprobs=max((draw.num_logprobs for draw in draws), default=-1),
            masked=any(draw.masked for draw in draws),
            num_keys=sum(lengths),
        )

    def _bind_slot(self, req: Req) -> bool:
        """Bind a page for the token that this step draws; preempt if need be.

        The step itself stores KV of the token before it. The slot of the drawn token is used by the
        next step and is bound one step early. The youngest request is preempted.

        False: `req` cannot run in this step. Either it was preempted itself, or a victim's pages
        become free only when its step in flight settles.
        """
        assert req.hold is not None
        num_slots = len(req.tokens) + req.num_in_flight + 1
        while True:
            try:
                self.book.bind(req.hold, num_slots)
            except OutOfPages:
                if self._leaving:
                    return False
                victim = max(self.running.values(), key=lambda r: r.arrival)
                self._on_preempt(victim)
                if victim.num_in_flight:
                    self._leaving.add(victim)
                    return False
                self._preempt(victim)
                if victim is req:
                    return False
            else:
                self._rows.queue_pages(req)
                return True

    def _preempt(self, req: Req) -> None:
        """Free the row and pages of `req`, which has no step in flight, and queue it again."""
        self._release(req)
        req.phase = Phase.PREEMPTED
        self.preempted.append(req)
        self.preempted.sort(key=lambda r: r.arrival)

    def _release(self, req: Req) -> None:
        """Give back row and pages; full pages of computed tokens stay in the prefix tree."""
        if req.row:
            self.running.pop(req.row, None)
            self._rows.release(req.row)
            req.row = 0
        if req.hold is not None:
            self.book.commit(req.hold, req.tokens[: req.num_computed_tokens])
            self.book.close(req.hold)
            req.hold = None


def has_work(scheduler: DecodeScheduler) -> bool:
    """Whether a step can run or runs. The preempted may wait for pages that pulls hold."""
    return bool(scheduler.running or scheduler.ready or scheduler.local)
