"""RowTable: which rows are free, and the row changes that the next plan carries."""

import heapq

from worker.api import Sampling
from worker.plan import RowPages, RowStart
from worker.schedule.req import PrefillReq, Req


class RowTable:
    """The free rows of the step state, and the row changes queued since the last plan.

    Row 0 is never given out. A row that is released may be taken again in the same plan: releases
    are applied before starts, and both run on the device's stream behind steps in flight.
    """

    def __init__(
        self, num_rows: int, num_penalty_slots: int = 0, *, with_text: bool = False
    ) -> None:
        self._with_text = with_text  # starts carry all tokens
        self._num_rows, self._free = num_rows, list(range(1, num_rows + 1))
        self._free_slots = list(range(num_penalty_slots, 0, -1))
        self._slot_of: dict[int, int] = {}  # row -> penalty slot
        self._releases: list[int] = []
        self._starts: list[RowStart] = []
        self._pages: list[RowPages] = []
        self.snapshots: list[tuple[int, int]] = []  # see Plan.snapshots

    @property
    def num_free(self) -> int:
        """Rows that can be taken now."""
        return len(self._free)

    @property
    def are_scarce(self) -> bool:
        """Whether less than half of the rows are free."""
        return 2 * len(self._free) < self._num_rows

    def num_left(self, sampling: Sampling) -> int:
        """How many such requests a row is free for, and a penalty slot if they need one."""
        num_slots = len(self._free_slots) if sampling.changes_logits else len(self._free)
        return min(len(self._free), num_slots)

    def take(self) -> int:
        """Remove and return the lowest free row."""
        return heapq.heappop(self._free)

    def enter(self, req: Req, now: float, *, active: bool) -> None:
        """Give `req` a row, and a penalty slot if it needs one, and queue the row's start.

        active: KV of tokens[:-1] is stored, the row decodes at once. False: chunks follow.
        """
        req.row, num, slot = self.take(), req.num_prompt_tokens, 0
        req.timeline.row(now)
        if req.sampling.changes_logits:
            self._slot_of[req.row] = slot = self._free_slots.pop()
        start = RowStart(
            req.row,
            req.sampling,
            req.max_len,
            min_len=num + req.sampling.min_tokens,
            active=active,
            seq_len=len(req.tokens) - 1 if active else 0,
            last_token=req.tokens[-1] if active else 0,
            penalty_slot=slot,
            prompt=tuple(req.tokens[:num]) if slot else (),
            output=tuple(req.tokens[num:]) if slot else (),
            text=tuple(req.tokens) if self._with_text else (),
            state_slot=req.hold.slot if req.hold is not None else 0,
        )
        self._starts.append(start)

    def queue_pages(self, req: Req | PrefillReq) -> None:
        """Queue the pages of `req` that are not in the device's page table yet."""
        assert req.hold is not None
        new = req.hold.pages[req.num_table_pages :]
        if new:
            self._pages.append(RowPages(req.row, req.num_table_pages, tuple(new)))
            req.num_table_pages += len(new)

    def release(self, row: int) -> None:
        """Free a row and drop its changes that no plan has carried yet."""
        self._starts = [start for start in self._starts if start.row != row]
        self._pages = [pages for pages in self._pages if pages.row != row]
        self.snapshots = [pair for pair in self.snapshots if pair[0] != row]
        self._releases.append(row)
        if row in self._slot_of:
            self._free_slots.append(self._slot_of.pop(row))
        heapq.heappush(self._free, row)

    def drain_snapshots(self) -> tuple[tuple[int, int], ...]:
        """Return the queued slots of snapshots, and clear the queue."""
        queued, self.snapshots = tuple(self.snapshots), []
        return queued

    def drain(self) -> tuple[tuple[int, ...], tuple[RowStart, ...], tuple[RowPages, ...]]:
        """Return the queued releases, starts and pages, and clear the queues."""
        queued = tuple(self._releases), tuple(self._starts), tuple(self._pages)
        self._releases, self._starts, self._pages = [], [], []
        return queued
