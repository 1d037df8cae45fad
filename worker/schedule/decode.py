"""What a decode worker runs next: decode rows, local prefill chunks, preemption.

Admission reserves pages for the uncached prompt and growth_tokens of output. After that a row takes
free pages as it grows. When no page is left, the youngest row is preempted: it gives up its pages
and is admitted again later with prompt + output as its prompt. Its tokens do not change, because a
token depends only on the text before it, the seed and its position.

Lengths: a request has n = len(req.tokens) settled tokens, and KV of n - 1. A step in flight adds
its width at most. So KV on the device is n - 1 + num_slots_in_flight tokens at most.
"""

from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from worker.api import FinishReason
from worker.cache.book import PageBook
from worker.config import EngineConfig, SpecConfig
from worker.errors import OutOfPages
from worker.plan import TAILS, Chunk, Drawn, Plan
from worker.schedule.prefill import chunk_end
from worker.schedule.req import DISAGREE, Phase, Req, append, finish_reason
from worker.schedule.rows import RowTable
from worker.schedule.shares import RouterShares
from worker.schedule.width import WidthPolicy

ARRIVAL = attrgetter("arrival")

# What a step did for one request: what was drawn, how many of its tokens count (the last ones of
# req.tokens), why it ends if it does. A plain tuple, as there are hundreds a step.
Settled: TypeAlias = tuple[Req, Drawn, int, FinishReason | None]


class InFlight(NamedTuple):
    """The requests of a step in flight."""

    sampled: list[Req]  # it draws for them
    computed: list[tuple[Req, Chunk]]  # its chunks, if it has any
    width: int = 1


class DecodeScheduler:
    """Rows, pages and order of one decode worker.

    Invariant: an admitted request that is not FINISHED is in exactly one of `local`, `ready`,
    `running`, `preempted`, or is FETCHING and known to Inbound. All but preempted requests have a
    hold.
    """

    def __init__(
        self,
        book: PageBook,
        engine: EngineConfig,
        eos_ids: frozenset[int],
        *,
        widths: WidthPolicy | None = None,
        spec: SpecConfig | None = None,
        grain: int = 1,
    ) -> None:
        """grain: chunks that are not a prompt's last end at multiples of it."""
        self._grain = grain
        spec = spec or SpecConfig()
        self.book = book
        self.local: deque[Req] = deque()
        self.ready: deque[Req] = deque()
        self.running: dict[int, Req] = {}  # by row
        self.preempted: list[Req] = []
        self._engine = engine
        self.eos_ids = eos_ids
        self.shares = RouterShares(book, engine)
        # Called as a request loses its row, and just before it gets one.
        self.on_preempt: Callable[[Req], None] = lambda req: None
        self.on_row: Callable[[Req, float], None] = lambda req, now: None
        self.widths = widths or WidthPolicy((1,))
        self._block = spec.block
        self._rows = RowTable(
            int(engine.max_num_reqs), int(engine.penalty_rows), with_text=spec.reads_text
        )
        self.step = 0  # number of the step planned last
        self._arrivals = 0
        self._last_was_prefill = False  # prefill and decode alternate while both have work
        self.launched: dict[int, InFlight] = {}  # by step number, until it settles
        self.leaving: set[Req] = set()  # preempted as soon as their step in flight settles

    @property
    def has_work(self) -> bool:
        """Whether a step runs or can run; preempted requests may wait for pages of fetches."""
        return bool(self.running or self.ready or self.local)

    def admit(self, req: Req) -> bool:
        """Open a hold for a new or preempted request; False, changing nothing, if it does not fit.

        A new request is also refused while preempted ones wait, or if it leaves too little for the
        shares of other routers. But if its router has less than its own, it waits for none, and a
        request of another is preempted for it.
        """
        new, shares = req.phase is Phase.NEW, self.shares
        if new and self.preempted and not shares.is_short(req.router):
            return False
        num_slots = min(len(req.tokens) + self._engine.growth_tokens, req.max_len)
        # What the tree holds has no logits.
        most = 0 if req.is_to_score else len(req.tokens) - 1
        hold = self.book.open(req.tokens, num_slots, max_matched=most, salt=req.salt)
        if hold is not None and not shares.allow_pages(req.router):
            self.book.close(hold)
            hold = None
        if hold is None:
            if new and not self.leaving and (victim := shares.victim_for(req.router)) is not None:
                self.preempt(victim)
            return False
        shares.holders.add(req)
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

    def make_ready(self, req: Req) -> None:
        """Enter KV of tokens[:-1], which is final, into the tree; queue `req` for a row."""
        assert req.hold is not None
        req.num_computed_tokens = len(req.tokens) - 1
        self.book.commit(req.hold, req.tokens[:-1])
        req.phase = Phase.READY
        self.ready.append(req)

    def plan(self, now: float = 0.0) -> Plan | None:
        """Return the next step, or None if nothing can run now.

        None may also mean that a request is being preempted: its pages become free when its step
        settles. now: noted in the timeline of a request that gets a row.
        """
        for req in list(self.ready):
            if not self._rows.num_free:
                break  # no row is free, so no waiting request can start
            if not (self._rows.can_take(req.sampling) and self.shares.allow_row(req.router)):
                continue  # others may go first, of which some need no penalty slot
            self.ready.remove(req)
            self.on_row(req, now)
            assert req.hold is not None
            # Binds the last token's slot, too: a drafter stores its KV there before the first
            # decode step is planned. Reserved at admission, so `bind` cannot fail.
            self.book.bind(req.hold, len(req.tokens))
            self._rows.enter(req, now, active=True)
            self._rows.queue_pages(req)
            req.phase = Phase.RUNNING
            self.running[req.row] = req
        if self.local and not (self._last_was_prefill and self.running):
            plan = self._plan_chunks(now)
            if plan is not None:
                self._last_was_prefill = True
                return plan
        self._last_was_prefill = False
        width = self.widths.choose(len(self.running)) if self.widths.max_width > 1 else 1
        return (self._plan_decode(width) if width > 1 else None) or self._plan_decode(1)

    def settle(self, step: int, drawn: list[Drawn]) -> list[Settled]:
        """Append the tokens of step `step`, which has finished.

        The caller calls `finish` for results with a finish reason. Requests that have ended since
        the launch are left out.
        """
        self.book.settled(step)
        results: list[Settled] = []
        sampled, from_chunk, width = self.launched.pop(step)
        for req, chunk in from_chunk:
            if req.hold is not None:
                self.book.trim(req.hold, chunk.start + len(chunk.tokens), req.tokens)
        for req, result in zip(sampled, drawn, strict=True):
            req.num_in_flight -= 1
            req.num_slots_in_flight -= width
            if req.phase is Phase.FINISHED:
                continue
            num = len(result.tokens)
            assert num, f"{req.key} drew from an inactive row"
            if num == 1 and req.matcher is None:  # most rows of most steps
                req.tokens.append(result.tokens[0])
                reason = finish_reason(req, self.eos_ids)
                assert (reason is not None) == result.finished, f"{req.key}: {DISAGREE}"
                req.num_computed_tokens = len(req.tokens) - 1
            else:
                num, reason = append(req, result, self.eos_ids)
            if from_chunk:
                assert req.hold is not None
                self.book.commit(req.hold, req.tokens[:-1])
            results.append((req, result, num, reason))
            if self.leaving and req in self.leaving:
                self.leaving.discard(req)
                if reason is None:
                    self._preempt(req)
        return results

    def finish(self, req: Req) -> None:
        """Give back all that `req` holds, at any phase; a second call does nothing.

        No pull into its pages may run.
        """
        if req.phase is Phase.FINISHED:
            return
        queues = {Phase.LOCAL: self.local, Phase.READY: self.ready, Phase.PREEMPTED: self.preempted}
        if req.phase in queues:
            queues[req.phase].remove(req)
        self.leaving.discard(req)
        self._release(req)
        req.phase = Phase.FINISHED

    def _plan_chunks(self, now: float) -> Plan | None:
        budget = int(self._engine.max_prefill_tokens)
        computed: list[tuple[Req, Chunk]] = []
        sampled: list[Req] = []
        for req in list(self.local):
            if budget == 0 or (not req.row and not self._rows.num_free):
                break
            assert req.hold is not None
            start = req.num_planned_tokens
            end = chunk_end(start, budget, len(req.tokens), self._grain)
            if end == start:
                break  # less is left of the step than a chunk needs
            if not req.row:
                if not (self._rows.can_take(req.sampling) and self.shares.allow_row(req.router)):
                    continue
                self.on_row(req, now)
                self._rows.enter(req, now, active=False)
            last = end == len(req.tokens)
            # As in `plan`, with the slot of the token to be drawn, for a drafter.
            self.book.bind(req.hold, end + last)
            self._rows.queue_pages(req)
            tokens = tuple(req.tokens[start:end])
            scored = req.to_score(start, end)
            computed.append((req, Chunk(req.row, start, tokens, last, req.hold.slot, scored)))
            req.num_planned_tokens = end
            budget -= end - start
            if last:
                self.local.remove(req)
                req.phase = Phase.RUNNING
                self.running[req.row] = req
                sampled.append(req)
        if not computed:
            return None
        ends = [req.num_planned_tokens for req, _ in computed]
        return self._launch(InFlight(sampled, computed), ends)

    def _plan_decode(self, width: int) -> Plan | None:
        """The next step with windows of `width`, whose pages are bound here.

        The slots of the step after it, and of its drafts, are bound one step early (`ahead`: more
        than the width where the drafter's block is longer). Where pages are too few, width 1
        preempts requests and wider ones return None.
        """
        chosen: list[Req] = []
        lengths: list[int] = []
        ahead = max(width, self._block) if width > 1 else 1
        for req in sorted(self.running.values(), key=ARRIVAL):
            if len(req.tokens) + req.num_in_flight >= req.max_len or req in self.leaving:
                continue  # its last token is in flight, or it is being preempted
            # Making room for an older request may just have preempted this one.
            if req.hold is None:
                continue
            bound = len(req.tokens) - 1 + req.num_slots_in_flight
            fits = bound + width + ahead <= req.hold.num_slots
            if not fits and not self._bind(req, bound, width, ahead):
                if width > 1:
                    return None
                continue
            chosen.append(req)
            # An active row has KV of less than max_len tokens, whatever the host's bound is.
            lengths.append((bound if bound < req.max_len else req.max_len - 1) + width)
        return self._launch(InFlight(chosen, [], width), lengths) if chosen else None

    def _launch(self, launched: InFlight, lengths: list[int]) -> Plan:
        """The plan of the next step; lengths: its rows' bounds of KV."""
        self.step += 1
        for req in launched.sampled:
            req.num_in_flight += 1
            req.num_slots_in_flight += launched.width
        self.launched[self.step] = launched
        self.book.launched(self.step)
        draws = {req.draw for req in launched.sampled}
        chunks = tuple(chunk for _, chunk in launched.computed)
        return Plan(
            self.step,
            *self._rows.drain(),
            chunks,
            () if chunks else tuple(req.row for req in launched.sampled),
            TAILS[max((draw.tail for draw in draws), default=0)],
            max(lengths),
            penalized=any(draw.penalized for draw in draws),
            num_logprobs=max((draw.num_logprobs for draw in draws), default=-1),
            masked=any(draw.masked for draw in draws),
            width=launched.width,
            num_keys=sum(lengths),
            num_prompt_logprobs=max(
                (req.sampling.prompt_logprobs for req, chunk in launched.computed if chunk.scored),
                default=-1,
            ),
        )

    def _bind(self, req: Req, bound: int, width: int, ahead: int) -> bool:
        """Bind pages for a window and `ahead` slots behind it; at width 1 preempt requests for it.

        The youngest request is preempted first. False: `req` cannot run in this step. Either it was
        preempted itself, or pages become free only when a preempted request's step settles, or
        windows of `width` are too wide.
        """
        assert req.hold is not None
        slots = window_slots(bound, width, ahead, req.max_len)
        self.book.trim(req.hold, req.num_computed_tokens)
        while True:
            try:
                self.book.bind(req.hold, slots)
            except OutOfPages:
                if width > 1 or self.leaving:
                    return False
                victim = max(self.running.values(), key=ARRIVAL)
                if not self.preempt(victim) or victim is req:
                    return False
            else:
                self._rows.queue_pages(req)
                return True

    def preempt(self, req: Req) -> bool:
        """Take its row and pages from `req`, at once or when its step in flight settles: False."""
        self.on_preempt(req)
        if req.num_in_flight:
            self.leaving.add(req)
            return False
        self._preempt(req)
        return True

    def _preempt(self, req: Req) -> None:
        """Free the row and pages of `req`, which has no step in flight, and queue it again."""
        self._release(req)
        req.phase = Phase.PREEMPTED
        self.preempted.append(req)
        self.preempted.sort(key=ARRIVAL)

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
            self.shares.holders.discard(req)


def window_slots(bound: int, width: int, ahead: int, max_len: int) -> int:
    """Slots of a row with KV of up to `bound` tokens: for this window, and `ahead` for the next.

    Both may pass the end of the text; what lies there is computed and never used.
    """
    return min(bound + width + ahead, max_len + ahead - 1)
