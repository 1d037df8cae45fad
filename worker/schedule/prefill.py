"""What a prefill worker computes next: chunks of prompts, first come first served. Pure.

A prompt is admitted only with a reservation for all its pages, so it never waits for memory in the
middle and announced pages are never preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from worker.cache.book import PageBook
from worker.config import EngineConfig
from worker.plan import Chunk, Plan, RowStart
from worker.schedule.pace import Pace
from worker.schedule.req import PrefillReq
from worker.schedule.rows import RowTable


class PrefillScheduler:
    """Admission and chunking of one prefill worker, for prompts of up to `max_len` tokens.

    Steps are as long as `pace` says, or as long as they may be.
    """

    def __init__(
        self,
        book: PageBook,
        engine: EngineConfig,
        max_len: int = 1 << 62,
        pace: Pace | None = None,
    ) -> None:
        self.book = book
        self.waiting: deque[PrefillReq] = deque()  # not all planned yet, in order of arrival
        self._engine = engine
        self._pace = pace
        self._max_len = max_len  # what a row of the device's page table can hold
        self._rows = RowTable(engine.max_num_reqs)
        self._step = 0
        self._launched: dict[int, list[tuple[PrefillReq, Chunk]]] = {}

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that no step has been launched for."""
        return sum(req.num_target_tokens - req.num_planned_tokens for req in self.waiting)

    def admit(
        self, key: str, tokens: Sequence[int], link_bytes_per_s: float = 0.0
    ) -> PrefillReq | None:
        """Take a prompt of at least two tokens, or None when there is no room for it.

        `link_bytes_per_s`: to its decode worker; 0 = not known.
        """
        if len(tokens) > self._max_len:
            return None
        if len(self.waiting) >= self._engine.max_num_reqs + self._engine.max_waiting:
            return None
        target = len(tokens) - 1
        hold = self.book.open(tokens, target, max_matched=target)
        if hold is None:
            return None
        matched = hold.num_matched
        req = PrefillReq(
            key,
            tuple(tokens),
            hold,
            num_computed_tokens=matched,
            num_planned_tokens=matched,
            link_bytes_per_s=link_bytes_per_s,
        )
        if matched < target:
            self.waiting.append(req)
        return req

    def plan(self, now: float = 0.0) -> Plan | None:
        """The next step, or None when nothing is to be computed; `now` marks who begins."""
        budget = self._max_step_tokens()
        launched: list[tuple[PrefillReq, Chunk]] = []
        max_len = 0
        for req in list(self.waiting):
            if budget == 0 or (not req.row and not self._rows.num_free):
                break
            start = req.num_planned_tokens
            end = min(req.num_target_tokens, start + budget)
            self._enter_row(req, now)
            self.book.bind(req.hold, end)  # reserved at admission: cannot fail
            self._rows.tell_pages(req)
            launched.append((req, Chunk(req.row, start, req.tokens[start:end])))
            req.num_planned_tokens = end
            if end == req.num_target_tokens:
                self.waiting.popleft()
            budget -= end - start
            max_len = max(max_len, end)
        if not launched:
            return None
        self._step += 1
        self._launched[self._step] = launched
        releases, starts, pages = self._rows.drain()
        for req, _ in launched:
            if req.num_planned_tokens == req.num_target_tokens:
                self._leave_row(req)
        self.book.launched(self._step)
        return Plan(
            step=self._step,
            releases=releases,
            starts=starts,
            pages=pages,
            chunks=tuple(chunk for _, chunk in launched),
            max_seq_len_ub=max_len,
        )

    def _max_step_tokens(self) -> int:
        if self._pace is None or not self.waiting:
            return int(self._engine.max_prefill_tokens)
        return self._pace.step_tokens(self.num_queued_tokens, self.waiting[0].link_bytes_per_s)

    def chunks_of(self, step: int) -> Sequence[tuple[PrefillReq, Chunk]]:
        """What step `step`, which has not settled, computes."""
        return self._launched[step]

    def settle(self, step: int) -> list[PrefillReq]:
        """Step `step` has finished on the device; the requests whose KV has grown.

        They are to be announced, then entered into the prefix tree by `commit`: decode pulls
        meanwhile.
        """
        self.book.settled(step)
        grown: list[PrefillReq] = []
        for req, chunk in self._launched.pop(step):
            if not req.dropped:
                req.num_computed_tokens = chunk.start + len(chunk.tokens)
                grown.append(req)
        return grown

    def commit(self, grown: Sequence[PrefillReq]) -> None:
        """Let other prompts begin with what has been computed of these."""
        for req in grown:
            self.book.commit(req.hold, req.tokens[: req.num_computed_tokens])

    def drop(self, req: PrefillReq) -> None:
        """Forget a request at any stage and give its pages back; a second call does nothing.

        The caller makes sure that no lease on its pages lives.
        """
        if req.dropped:
            return
        req.dropped = True
        if req in self.waiting:
            self.waiting.remove(req)
        self._leave_row(req)
        self.book.close(req.hold)

    def _enter_row(self, req: PrefillReq, now: float) -> None:
        if not req.row:
            req.started_at = now
            req.row = self._rows.take()
            self._rows.start(RowStart(req.row, None, 0, 0))

    def _leave_row(self, req: PrefillReq) -> None:
        if req.row:
            self._rows.release(req.row)
            req.row = 0
