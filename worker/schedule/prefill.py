"""What a prefill worker computes next: chunks of prompts, short ones first (`schedule.order`).

A prompt is admitted only with a reservation for all pages that it has at a time. So it never waits
for memory half-way, and announced pages are never preempted. If decode asks for it, the step that
ends a prompt also draws the token that follows.
"""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from worker.api import Prefill
from worker.cache.book import PageBook
from worker.config import EngineConfig
from worker.plan import Chunk, Drawn, Plan, RowStart, tail_of
from worker.schedule.asked import PromptLimits, check_prefill
from worker.schedule.order import in_order, note_passed
from worker.schedule.pace import Pace
from worker.schedule.req import PrefillReq
from worker.schedule.rows import RowTable

if TYPE_CHECKING:
    from worker.transfer.tier.tier import Tier

# A prompt that one step computes whole is short. Within so many seconds of one, more may come.
SHORT_S = 2.0


class PrefillScheduler:
    """Admission and chunking of one prefill worker.

    A request has a row, for its page table, until its last chunk is planned. The row is started
    only if that chunk draws a token.
    """

    def __init__(
        self, book: PageBook, engine: EngineConfig, limits: PromptLimits, pace: Pace
    ) -> None:
        self.book, self._limits = book, limits
        self.tier: Tier[PrefillReq] | None = None  # below the pool
        self.waiting: deque[PrefillReq] = deque()  # with tokens not yet in a step; oldest first
        self._pace = pace
        self.max_reqs = int(engine.max_num_reqs) + engine.max_waiting  # that wait
        self.rows = RowTable(int(engine.max_num_reqs))
        self._step = 0
        self._short_at = -SHORT_S  # when a step was planned that computes a short prompt
        # By step number, until it settles.
        self.launched: dict[int, list[tuple[PrefillReq, Chunk]]] = {}

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that are not yet in a step."""
        return sum(req.num_target_tokens - req.num_planned_tokens for req in self.waiting)

    def admit(self, asked: Prefill) -> PrefillReq | None:
        """Admit a prompt of at least two tokens; None if there is no room for it now.

        Raises UserError if it is longer than the limit, or cannot be computed.
        """
        check_prefill(asked, self._limits)
        tokens = asked.tokens
        if len(self.waiting) >= self.max_reqs:
            return None
        num_stored = len(tokens) - (asked.sampling is None)
        most = len(tokens) - 1
        keep_from = asked.num_matched // self.book.page_size
        hold = self.book.open(
            tokens, num_stored, max_matched=most, salt=asked.salt, keep_from=keep_from
        )
        if hold is None:
            return None
        rest = asked.link_bytes_per_s, asked.sampling, asked.num_prompt_tokens
        req = PrefillReq(tokens, hold, *rest, num_computed_tokens=0, num_planned_tokens=0)
        if self.tier is not None:
            req.loads = self.tier.begin(req, hold, tokens, num_stored - 1 if hold.slot else most)
        if not req.loads:
            self._resume(req)
        if req.num_planned_tokens < req.num_target_tokens:
            self.waiting.append(req)
        return req

    def _resume(self, req: PrefillReq) -> None:
        """Have a prompt go on behind what the tree has of it."""
        num = self.book.snapshots.resume(req.hold, len(req.tokens) - (req.sampling is None) - 1)
        req.num_computed_tokens = req.num_planned_tokens = req.num_cached_tokens = num

    def loaded(self, req: PrefillReq) -> None:
        """A tier has brought what it had of a prompt, which goes on behind that."""
        req.loads = False
        if req.dropped:
            self.book.close(req.hold)
            return
        self._resume(req)
        if req.num_planned_tokens == req.num_target_tokens:
            self.waiting.remove(req)

    def may_get_short(self, now: float) -> bool:
        """Whether short prompts are likely to come during the next step."""
        return now - self._short_at < SHORT_S

    def _step_tokens(self, order: Sequence[PrefillReq], now: float) -> int:
        """Choose how many tokens the next step may have; order: of what can be computed."""
        most = self._pace.step_tokens(self.num_queued_tokens, order[0].link_bytes_per_s)
        if self.may_get_short(now):
            done = [(req.num_target_tokens, req.num_planned_tokens) for req in order]
            most = self._pace.short_step(most, [(target - num, num) for target, num in done])
        return max(most, self._limits.grain)

    def plan(self, now: float = 0.0) -> Plan | None:
        """Return the next step, or None if nothing waits.

        now: stored as started_at of the requests whose first step this is.
        """
        arrived = list(self.waiting)
        here = [req for req in arrived if not req.loads]
        if not here:
            return None
        order = in_order(here, begun_first=self.rows.are_scarce)
        budget = self._step_tokens(order, now)
        launched: list[tuple[PrefillReq, Chunk]] = []
        for req in order:
            if not req.row and not self.rows.num_free:
                continue
            start = req.num_planned_tokens
            end = chunk_end(start, budget, req.num_target_tokens, self._limits.grain)
            if end == start:
                break  # less is left of the step than a chunk needs, or nothing
            stored = self.book.snapshots.store(req.hold, start, end, req.num_target_tokens)
            end = stored.end
            if not req.row:
                req.row, req.started_at = self.rows.take(), now
            self.book.bind(req.hold, end)  # reserved at admission: cannot fail
            self.rows.queue_pages(req)
            draws = req.sampling is not None and end == req.num_target_tokens
            chunk = Chunk(
                req.row, start, req.tokens[start:end], draws, req.hold.slot,
                store_from=req.hold.num_matched, snapshot=(stored.at, stored.slot),
            )  # fmt: skip
            launched.append((req, chunk))
            req.num_planned_tokens = end
            if end == req.num_target_tokens:
                self.waiting.remove(req)
                if start == req.num_cached_tokens:
                    self._short_at = now
            budget -= end - start
        if not launched:
            return None
        self._step += 1
        self.launched[self._step] = launched
        note_passed(arrived, {req: len(chunk.tokens) for req, chunk in launched})
        starts = tuple(_start(req) for req, chunk in launched if chunk.sample)
        # The device needs no releases: a row that draws ends after its token, others never start.
        _, _, pages = self.rows.drain()
        for req, _ in launched:
            if req.num_planned_tokens == req.num_target_tokens:
                self._leave_row(req)
        self.book.launched(self._step)
        return Plan(
            self._step,
            starts=starts,
            pages=pages,
            chunks=tuple(chunk for _, chunk in launched),
            tail=tail_of(start.sampling for start in starts),
            max_seq_len_ub=max(req.num_planned_tokens for req, _ in launched),
            num_keys=sum(req.num_planned_tokens for req, _ in launched),
            copies=self.book.snapshots.drain() if self.book.snapshots.copies else None,
        )

    def settle(self, step: int, drawn: Sequence[Drawn]) -> list[PrefillReq]:
        """Record that step `step` has finished; returns the requests that it computed for.

        Announce them before `commit`, so that decode pulls while the prefix tree is updated.
        drawn: of the chunks with `sample`, in their order.
        """
        self.book.settled(step)
        computed: list[PrefillReq] = []
        results = iter(drawn)
        for req, chunk in self.launched.pop(step):
            result = next(results) if chunk.sample else None
            if not req.dropped:
                req.num_computed_tokens = chunk.start + len(chunk.tokens)
                req.token = None if result is None else result.tokens[0]
                computed.append(req)
        return computed

    def commit(self, reqs: Sequence[PrefillReq]) -> None:
        """Enter the computed pages of `reqs` into the prefix tree.

        Where pages go as the prompt is computed, those that it still needs follow at its end: if
        another prompt could lock them, they would not be there for the rest of this one.
        """
        for req in reqs:
            self.book.trim(req.hold, req.num_computed_tokens, req.tokens)
            if not self.book.span or req.num_computed_tokens == req.num_target_tokens:
                self.book.commit(req.hold, req.tokens[: req.num_stored_tokens])

    def drop(self, req: PrefillReq) -> None:
        """Forget a request at any stage and free its pages; a second call does nothing.

        No lease on its pages may live.
        """
        if req.dropped:
            return
        req.dropped = True
        if req in self.waiting:
            self.waiting.remove(req)
        self._leave_row(req)
        if self.tier is None or not self.tier.cancel(req):  # else `loaded` closes it
            self.book.close(req.hold)

    def _leave_row(self, req: PrefillReq) -> None:
        if req.row:
            self.rows.release(req.row)
            req.row = 0


def _start(req: PrefillReq) -> RowStart:
    """Start the row of a request whose last chunk is planned, to draw one token and no more."""
    assert req.sampling is not None
    return RowStart(
        req.row,
        req.sampling,
        max_len=len(req.tokens) + 1,
        min_len=req.num_prompt_tokens + req.sampling.min_tokens,
        state_slot=req.hold.slot,
    )


def chunk_end(start: int, budget: int, target: int, grain: int) -> int:
    """Where a chunk from `start` on ends; `start` if the budget is too small for one."""
    end = start + budget
    return target if end >= target else max(start, end // grain * grain)
