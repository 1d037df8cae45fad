"""What a decode worker runs next: rows that decode, local prefill chunks, preemption. Pure.

Capacity is reserved at admission (uncached prompt pages and some growth). Beyond it rows grow while
there is room; when there is none the youngest row gives its pages up and comes back later with
prompt + output as its prompt, which changes no token, because a token depends on the text before
it, the seed and its position alone.

Lengths. tokens settled: n = len(req.tokens), of which n - 1 have KV. A step in flight may add one,
so n - 1 + num_in_flight is the host's bound of the KV length on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from worker.api import FinishReason, Sampling
from worker.cache.book import PageBook
from worker.config import EngineConfig
from worker.errors import OutOfPages
from worker.plan import TAILS, Chunk, Drawn, Plan, RowStart, Tail
from worker.schedule.req import Phase, Req
from worker.schedule.rows import RowTable

if TYPE_CHECKING:
    from worker.sampling.grammar import Matcher


class DecodeScheduler:
    """Rows, pages and order of one decode worker.

    Invariant: a request is in exactly one of: `fetching` elsewhere, local, ready, running,
    preempted, or FINISHED. Every one but the preempted and finished has a hold.
    """

    def __init__(
        self,
        book: PageBook,
        engine: EngineConfig,
        eos_ids: frozenset[int],
        on_preempt: Callable[[], None] = lambda: None,
    ) -> None:
        self.book = book
        self.local: deque[Req] = deque()
        self.ready: deque[Req] = deque()
        self.running: dict[int, Req] = {}  # by row
        self.preempted: list[Req] = []
        self._engine = engine
        self._eos_ids = eos_ids
        self._on_preempt = on_preempt
        self._rows = RowTable(engine.max_num_reqs, engine.penalty_rows)
        self._step = 0
        self._arrivals = 0
        self._was_chunk = False
        self._now = 0.0
        self._launched: dict[int, tuple[list[Req], bool]] = {}  # sampled, from chunks
        self._leaving: set[Req] = set()  # victims with a step in flight

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of local prefills that no step has been launched for."""
        return sum(len(req.tokens) - req.num_planned_tokens for req in self.local)

    def admit(self, req: Req) -> bool:
        """Open a hold for a new or resumed request; False when there is no room, unchanged then.

        New requests wait behind preempted ones.
        """
        new = req.arrival == 0
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
        elif req in self.preempted:
            self.preempted.remove(req)
        req.hold, req.num_table_pages = hold, 0
        req.num_computed_tokens = req.num_planned_tokens = hold.num_matched
        req.phase = Phase.FETCHING
        return True

    def prefill_locally(self, req: Req) -> None:
        """Queue the rest of its prompt here; KV of tokens[: num_computed_tokens] is present."""
        req.num_planned_tokens = req.num_computed_tokens
        req.phase = Phase.LOCAL
        self.local.append(req)

    def commit(self, req: Req) -> None:
        """KV of tokens[:-1] is here and final: it enters the tree, the request waits for a row."""
        assert req.hold is not None
        req.num_computed_tokens = len(req.tokens) - 1
        self.book.commit(req.hold, req.tokens[:-1])
        req.phase = Phase.READY
        self.ready.append(req)

    def plan(self, now: float = 0.0) -> Plan | None:
        """The next step; None when nothing can run now, though it may at the very next call.

        `now` is marked at requests that get their first row.
        """
        self._now = now
        for req in [each for each in self.ready]:
            if not self._rows.num_free:
                break
            if not self._rows.can_take(req.sampling):
                continue  # waits for a penalty slot; others may go first
            self.ready.remove(req)
            self._take_row(req, active=True)
            self._rows.tell_pages(req)
            req.phase = Phase.RUNNING
            self.running[req.row] = req
        plan = None
        if self.local and not (self._was_chunk and self.running):
            plan = self._plan_chunks()
        return plan or self._plan_decode()

    def matchers(self, step: int) -> list[Matcher | None]:
        """Of the rows that step `step`, which has not settled, draws for; None: no grammar."""
        sampled, _ = self._launched[step]
        return [req.matcher for req in sampled]

    def settle(self, step: int, drawn: list[Drawn]) -> list[tuple[Req, Drawn, FinishReason | None]]:
        """Step `step` has finished: append its tokens. (request, drawn, reason) of live ones.

        Requests with a reason are not finished here: the caller does that, through `finish`.
        """
        self.book.settled(step)
        news: list[tuple[Req, Drawn, FinishReason | None]] = []
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
            if from_chunk and req.hold is not None:
                self.book.commit(req.hold, req.tokens[:-1])
            reason = _reason(req, self._eos_ids)
            assert (reason is not None) == result.finished, f"{req.key}: device and host disagree"
            if req.matcher is not None and req.matcher.stopped:
                reason = FinishReason.STOP  # complete, also where it took the last token allowed
            news.append((req, result, reason))
            if req in self._leaving:
                self._leaving.discard(req)
                if reason is None:
                    self._leave(req)
        return news

    def finish(self, req: Req, reason: FinishReason) -> None:
        """Give back all that `req` holds, at any phase; a second call does nothing.

        Whole pages of its committed tokens stay in the tree. No pull into its pages may be running.
        """
        if req.phase is Phase.FINISHED:
            return
        if req.phase is Phase.LOCAL and req in self.local:
            self.local.remove(req)
        elif req.phase is Phase.READY:
            self.ready.remove(req)
        elif req.phase is Phase.PREEMPTED and req in self.preempted:
            self.preempted.remove(req)
        self._leaving.discard(req)
        self._give_up(req)
        req.phase, req.finish_reason = Phase.FINISHED, reason

    # Planning.

    def _plan_chunks(self) -> Plan | None:
        budget = int(self._engine.max_prefill_tokens)
        chunks: list[Chunk] = []
        sampled: list[Req] = []
        for req in list(self.local):
            if budget == 0 or (not req.row and not self._rows.num_free):
                break
            assert req.hold is not None
            if not req.row:
                if not self._rows.can_take(req.sampling):
                    continue
                self._take_row(req, active=False)
            start = req.num_planned_tokens
            end = min(len(req.tokens), start + budget)
            self.book.bind(req.hold, end)  # reserved at admission: cannot fail
            self._rows.tell_pages(req)
            last = end == len(req.tokens)
            chunks.append(Chunk(req.row, start, tuple(req.tokens[start:end]), last))
            req.num_planned_tokens = end
            budget -= end - start
            if last:
                self.local.remove(req)
                req.phase = Phase.RUNNING
                self.running[req.row] = req
                sampled.append(req)
        if not chunks:
            return None
        self._was_chunk = True
        return self._launch(
            sampled,
            chunks=tuple(chunks),
            max_seq_len_ub=max(chunk.start + len(chunk.tokens) for chunk in chunks),
        )

    def _plan_decode(self) -> Plan | None:
        self._was_chunk = False
        chosen: list[Req] = []
        for req in sorted(self.running.values(), key=lambda req: req.arrival):
            if req in self._leaving or len(req.tokens) + req.num_in_flight >= req.max_len:
                continue  # a victim, or its last token is in flight
            if req.row in self.running and self._ensure_slots(req):
                chosen.append(req)
        if not chosen:
            return None
        bound = max(len(req.tokens) + req.num_in_flight for req in chosen)
        return self._launch(chosen, decode=tuple(req.row for req in chosen), max_seq_len_ub=bound)

    def _launch(
        self,
        sampled: list[Req],
        *,
        max_seq_len_ub: int,
        chunks: tuple[Chunk, ...] = (),
        decode: tuple[int, ...] = (),
    ) -> Plan:
        self._step += 1
        for req in sampled:
            req.num_in_flight += 1
        self._launched[self._step] = sampled, bool(chunks)
        self.book.launched(self._step)
        tail: Tail = "none"
        if sampled:
            tail = TAILS[max(TAILS.index(_tail(req.sampling)) for req in sampled)]
        releases, starts, pages = self._rows.drain()
        return Plan(
            self._step,
            releases,
            starts,
            pages,
            chunks,
            decode,
            tail,
            max_seq_len_ub,
            penalized=any(req.sampling.changes_logits for req in sampled),
            num_logprobs=max((req.sampling.logprobs for req in sampled), default=-1),
            masked=any(req.matcher is not None for req in sampled),
        )

    def _ensure_slots(self, req: Req) -> bool:
        """Slots for the bound plus two tokens a step, or somebody is preempted."""
        assert req.hold is not None
        num_slots = min(len(req.tokens) + req.num_in_flight + 1, req.max_len)
        while True:
            try:
                self.book.bind(req.hold, num_slots)
            except OutOfPages:
                if self._leaving:
                    return False  # a victim's pages come when the step in flight settles
                candidates = [r for r in self.running.values() if r not in self._leaving]
                victim = max(candidates, key=lambda r: r.arrival)
                self._on_preempt()
                if victim.num_in_flight:
                    self._leaving.add(victim)
                    return False
                self._leave(victim)
                if victim is req:
                    return False
            else:
                self._rows.tell_pages(req)
                return True

    # Rows and pages of one request.

    def _take_row(self, req: Req, *, active: bool) -> None:
        req.row = self._rows.take()
        req.marks.row_at = req.marks.row_at or self._now
        seq_len = len(req.tokens) - 1 if active else 0
        last_token = req.tokens[-1] if active else 0
        min_len = req.num_prompt_tokens + req.sampling.min_tokens
        start = RowStart(req.row, req.sampling, req.max_len, min_len, active, seq_len, last_token)
        if req.sampling.changes_logits:
            num = req.num_prompt_tokens
            prompt, output = tuple(req.tokens[:num]), tuple(req.tokens[num:])
            slot = self._rows.take_penalty_slot(req.row)
            start = msgspec.structs.replace(start, penalty_slot=slot, prompt=prompt, output=output)
        self._rows.start(start)

    def _leave(self, req: Req) -> None:
        """A victim goes, with nothing of it in flight; it resumes as prompt + output."""
        self._give_up(req)
        req.phase = Phase.PREEMPTED
        self.preempted.append(req)
        self.preempted.sort(key=lambda r: r.arrival)

    def _give_up(self, req: Req) -> None:
        if req.row:
            self.running.pop(req.row, None)
            self._rows.release(req.row)
            req.row = 0
        if req.hold is not None:
            self.book.commit(req.hold, req.tokens[: req.num_computed_tokens])
            self.book.close(req.hold)
            req.hold = None


def _reason(req: Req, eos_ids: frozenset[int]) -> FinishReason | None:
    """Why `req` ended with its last token, by the same rules as the device."""
    token, sampling = req.tokens[-1], req.sampling
    num_output = len(req.tokens) - req.num_prompt_tokens
    is_stop = token in sampling.stop_ids or (not sampling.ignore_eos and token in eos_ids)
    if is_stop and num_output > sampling.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(req.tokens) >= req.max_len else None


def _tail(sampling: Sampling) -> Tail:
    """The cheapest sampling tail that serves this request."""
    if sampling.temperature == 0:
        return "greedy"
    filters = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return "filtered" if filters else "random"
