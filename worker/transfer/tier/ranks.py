"""A tier at the ranks of a worker but the leader: rows of their own, which do what that orders.

    leader -> ranks    Keep, LoadPages, Cancel, Forget
    rank -> leader     Loaded

A rank has no page book. Its orders come one after the other: whatever names a page in a later one
may write to it, so what was copied of that page until then is torn.
"""

from collections.abc import Callable, Iterable, Sequence

from worker.api import Message
from worker.plan import Plan
from worker.transfer.tier.objects import Source
from worker.transfer.tier.rows import Copy, Load, Row


class Keep(Message, frozen=True):
    """Copy an object to these rows, once so many steps have ended."""

    rows: tuple[int, ...]
    source: Source
    after_steps: int


class LoadPages(Message, frozen=True):
    """Load these objects, by number of a row, in their order; answer with Loaded."""

    number: int
    parts: tuple[tuple[int, Source], ...]
    after_steps: int


class Cancel(Message, frozen=True):
    """End a load soon, if it still runs; its Loaded comes as ever."""

    number: int


class Forget(Message, frozen=True):
    """Delete all objects."""


class Loaded(Message, frozen=True):
    """A rank's part of a load is over: nothing of it is written any more."""

    rank: int
    number: int
    num_loaded: int


TierOrder = Keep | LoadPages | Cancel | Forget


class RankTier:
    """Rows of one rank. Belongs to its loop; tell: sends an answer to the leader."""

    def __init__(
        self,
        rank: int,
        rows: Sequence[Row],
        tell: Callable[[Loaded], None],
        wake: Callable[[], None],
    ) -> None:
        """wake: begins a turn of the loop, from any thread."""
        self._rank, self._rows, self._tell = rank, rows, tell
        for row in rows:
            row.wake = wake
        self._marks: dict[int, dict[int, object]] = {-1: {}, 0: {}}  # of pages; of slots
        self._loads: dict[int, Load] = {}

    def on(self, order: TierOrder) -> None:
        """Do what the leader has ordered."""
        match order:
            case Keep(rows, source, _):
                marks = self._marks[min(source.part, 0)]
                mark = marks.setdefault(source.place, object())
                for number in rows:
                    self._rows[number].offer(Copy(source, marks, mark))
            case LoadPages(number, parts, _):
                for _, source in parts:
                    self._marks[min(source.part, 0)].pop(source.place, None)
                load = Load([(self._rows[row], source) for row, source in parts])
                self._loads[number] = load
                load.parts[0][0].load(load)
            case Cancel(number):
                if (load := self._loads.get(number)) is not None:
                    load.cut("cancelled")
            case Forget():
                for row in self._rows:
                    row.forget()

    def launches(self, plan: Plan) -> None:
        """The next step may write to the pages and slots that its plan names."""
        if self._rows:
            self.written(page for of_row in plan.pages for page in of_row.pages)
            self.written((chunk.snapshot[1] for chunk in plan.chunks), 0)
            self.written((slot for _, slot in plan.snapshots), 0)

    def written(self, places: Iterable[int], kind: int = -1) -> None:
        """Others may write to these pages, or, of kind 0, slots."""
        for place in places:
            self._marks[kind].pop(place, None)

    def poll(self) -> None:
        """Answer for the loads that have ended."""
        for number, load in list(self._loads.items()):
            if load.is_over:
                del self._loads[number]
                self._tell(Loaded(self._rank, number, load.num_loaded))

    def close(self) -> None:
        """End all rows."""
        for load in self._loads.values():
            load.cut("closed")
        for row in self._rows:
            row.close()
