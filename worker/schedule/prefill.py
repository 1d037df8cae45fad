"""What a prefill worker computes next: chunks of prompts, first come first served.

A prompt is admitted only with a reservation for all its pages, so it never waits for memory
half-way, and announced pages are never preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from worker.cache.book import PageBook
from worker.config import EngineConfig
from worker.errors import UserError
from worker.plan import Chunk, Plan
from worker.schedule.pace import Pace
from worker.schedule.req import PrefillReq
from worker.schedule.rows import RowTable


class PrefillScheduler:
    """Admission and chunking of one prefill worker; its rows have a page table and no more."""

    def __init__(self, book: PageBook, engine: EngineConfig, max_len: int, pace: Pace) -> None:
        self.book = book
        self.waiting: deque[PrefillReq] = deque()  # with tokens not yet in a step; oldest first
        self._engine = engine
        self._pace = pace
        self._max_len = max_len  # tokens of a prompt that a row's page table can hold
        self._rows = RowTable(int(engine.max_num_reqs))
        self._step = 0
        self._launched: dict[int, list[tuple[PrefillReq, Chunk]]] = {}

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that are not yet in a step."""
        return sum(req.num_target_tokens - req.num_planned_tokens for req in self.waiting)

    def admit(self, tokens: Sequence[int], link_bytes_per_s: float = 0.0) -> PrefillReq | None:
        """Admit a prompt of at least two tokens; None if there is no room for it now.

        link_bytes_per_s: of the link to its decode worker; 0 = not known.

        Raises:
            UserError: it is longer than max_len.
        """
        if len(tokens) > self._max_len:
            raise UserError(f"{len(tokens)} tokens of prompt; the limit here is {self._max_len}")
        if len(self.waiting) >= int(self._engine.max_num_reqs) + self._engine.max_waiting:
            return None
        target = len(tokens) - 1
        hold = self.book.open(tokens, target, max_matched=target)
        if hold is None:
            return None
        num = hold.num_matched
        req = PrefillReq(tuple(tokens), hold, link_bytes_per_s, num, num)
        if num < target:
            self.waiting.append(req)
        return req

    def plan(self, now: float = 0.0) -> Plan | None:
        """Return the next step, or None if nothing waits.

        now: stored as started_at of the requests whose first step this is.
        """
        if not self.waiting:
            return None
        link_bytes_per_s = self.waiting[0].link_bytes_per_s
        budget = self._pace.step_tokens(self.num_queued_tokens, link_bytes_per_s)
        launched: list[tuple[PrefillReq, Chunk]] = []
        for req in list(self.waiting):
            if budget == 0 or (not req.row and not self._rows.num_free):
                break
            if not req.row:
                req.row, req.started_at = self._rows.take(), now
            start = req.num_planned_tokens
            end = min(req.num_target_tokens, start + budget)
            self.book.bind(req.hold, end)  # reserved at admission: cannot fail
            self._rows.queue_pages(req)
            launched.append((req, Chunk(req.row, start, req.tokens[start:end])))
            req.num_planned_tokens = end
            if end == req.num_target_tokens:
                self.waiting.popleft()
            budget -= end - start
        self._step += 1
        self._launched[self._step] = launched
        # Releases are dropped and there are no starts: the device keeps only page tables for these
        # rows.
        _, _, pages = self._rows.drain()
        for req, _ in launched:
            if req.num_planned_tokens == req.num_target_tokens:
                self._leave_row(req)
        self.book.launched(self._step)
        return Plan(
            self._step,
            pages=pages,
            chunks=tuple(chunk for _, chunk in launched),
            max_seq_len_ub=max(req.num_planned_tokens for req, _ in launched),
        )

    def chunks_of(self, step: int) -> Sequence[tuple[PrefillReq, Chunk]]:
        """Return what step `step` computes; it must not have settled."""
        return self._launched[step]

    def settle(self, step: int) -> list[PrefillReq]:
        """Record that step `step` has finished; returns the requests that it computed for.

        Announce them before `commit`, so that decode pulls while the prefix tree is updated.
        """
        self.book.settled(step)
        computed: list[PrefillReq] = []
        for req, chunk in self._launched.pop(step):
            if not req.dropped:
                req.num_computed_tokens = chunk.start + len(chunk.tokens)
                computed.append(req)
        return computed

    def commit(self, reqs: Sequence[PrefillReq]) -> None:
        """Enter the computed pages of `reqs` into the prefix tree."""
        for req in reqs:
            self.book.commit(req.hold, req.tokens[: req.num_computed_tokens])

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
        self.book.close(req.hold)

    def _leave_row(self, req: PrefillReq) -> None:
        if req.row:
            self._rows.release(req.row)
            req.row = 0
