"""Row numbers of the device-resident step state, and what a plan must say about them."""

from __future__ import annotations

import heapq

from worker.api import Sampling
from worker.plan import RowPages, RowStart
from worker.schedule.req import PrefillReq, Req

OwnsRow = Req | PrefillReq


class RowTable:
    """Free rows, and the row changes that the next plan has to carry.

    Row 0 is never given out. A row given back may be taken again in the same plan: releases are
    applied before starts, and both are ordered on the device's stream behind steps in flight.
    """

    def __init__(self, num_rows: int, num_penalty_slots: int = 0) -> None:
        self._free = list(range(1, num_rows + 1))
        self._free_slots = list(range(num_penalty_slots, 0, -1))
        self._slot_of: dict[int, int] = {}  # row -> penalty slot
        self._releases: list[int] = []
        self._starts: list[RowStart] = []
        self._pages: list[RowPages] = []

    @property
    def num_free(self) -> int:
        """Rows that can be taken now."""
        return len(self._free)

    def can_take(self, sampling: Sampling) -> bool:
        """Whether a row is free, and a penalty slot if the request needs one."""
        return bool(self._free) and (not sampling.changes_logits or bool(self._free_slots))

    def take(self) -> int:
        """The lowest free row."""
        return heapq.heappop(self._free)

    def take_penalty_slot(self, row: int) -> int:
        """A penalty slot, which is the row's until the row is released."""
        self._slot_of[row] = slot = self._free_slots.pop()
        return slot

    def start(self, start: RowStart) -> None:
        """Say in the next plan how the row begins."""
        self._starts.append(start)

    def tell_pages(self, req: OwnsRow) -> None:
        """Say in the next plan which pages of `req` the device does not know yet."""
        assert req.hold is not None
        new = req.hold.pages[req.num_table_pages :]
        if new:
            self._pages.append(RowPages(req.row, req.num_table_pages, tuple(new)))
            req.num_table_pages += len(new)

    def release(self, row: int) -> None:
        """Give a row back; whatever was to be said about it is void."""
        self._starts = [start for start in self._starts if start.row != row]
        self._pages = [pages for pages in self._pages if pages.row != row]
        self._releases.append(row)
        if row in self._slot_of:
            self._free_slots.append(self._slot_of.pop(row))
        heapq.heappush(self._free, row)

    def drain(self) -> tuple[tuple[int, ...], tuple[RowStart, ...], tuple[RowPages, ...]]:
        """What the plan under construction says about rows; each is said once."""
        said = tuple(self._releases), tuple(self._starts), tuple(self._pages)
        self._releases, self._starts, self._pages = [], [], []
        return said
