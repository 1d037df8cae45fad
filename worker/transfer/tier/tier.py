"""A worker's tier, as its engine thread has it: what is copied out, and what is looked for there.

    in the pool ── settled ──> copied ahead ──> in the pool and a row ── evicted ──> in a row
         ▲                                                                              │
         └── verified <── loading: private pages of a hold <── a prompt begins alike ───┘

Nothing is copied when pages are needed: they are there already, or dropped. A load that is late or
fails is cut off where it stands, and the rest of the prompt is computed. One process decides, the
leader of a worker's ranks: they copy what it names, and a page is here once it is at all of them.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from worker.api import FinishReason
from worker.cache.hold import Hold
from worker.cache.snapshots import give_back
from worker.errors import OutOfPages
from worker.transfer.tier.ahead import CopyAhead
from worker.transfer.tier.objects import Source, first_key, key_of, next_key, part_key
from worker.transfer.tier.ranks import Cancel, Forget, Loaded, LoadPages
from worker.transfer.tier.rows import Load

MIN_S = 0.25  # that a load may take at least; else as long as computing its tokens
UNMEASURED_S = 2.0
POLL_S = 5e-3  # the end of a load wakes the loop; this is for what never ends
PAUSING = ("late", "failed", "corrupt")

Request = TypeVar("Request")
Found = tuple[int, bytes, tuple[int, ...]]  # number of a row, key and tokens


@dataclass(slots=True, eq=False)
class Loading(Generic[Request]):
    """A request whose prompt goes on in a tier."""

    req: Request
    hold: Hold
    tokens: Sequence[int]
    pages: list[Found]  # behind those in `hold`
    state: list[Found]  # parts of the snapshot behind them, where layers are recurrent
    depth: int  # pages, of that snapshot
    slot: int  # for it
    after_step: int  # before it has settled, the slot is another's
    load: Load
    number: int = 0  # as ranks know it
    ranks: set[int] = field(default_factory=set[int])  # that have not answered
    least: int = 1 << 60  # objects that they have loaded
    ending: FinishReason | None = None  # why the request ends; None: it goes on

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is written any more."""
        return self.load.is_over and not self.ranks


@dataclass(eq=False)
class Tier(Generic[Request]):
    """Rows below a pool, the nearest first; `ahead` fills them."""

    ahead: CopyAhead
    s_per_token: Callable[[], float]  # of prefill; 0: not measured yet

    def __post_init__(self) -> None:
        """Begin with nothing."""
        self.loads: dict[Request, Loading[Request]] = {}
        ahead = self.ahead
        self.book, self.rows, self._metrics = ahead.book, ahead.rows, ahead.metrics
        self._form, self._tell, self._num_settled = ahead.form, ahead.tell, ahead.num_settled
        self._numbers = itertools.count(1)

    def wakes(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, by other threads, when a load has ended."""
        for row in self.rows:
            row.wake = wake

    @property
    def idle(self) -> bool:
        """Whether nothing is copied, in either direction."""
        return self.ahead.idle and not self.loads and all(row.idle for row in self.rows)

    def begin(self, request: Request, hold: Hold, tokens: Sequence[int], max_tokens: int) -> bool:
        """Load what follows the pages that `hold` has matched; False: no tier has that.

        Until `poll` returns it the hold is left alone; max_tokens: as of `PageBook.open`, and where
        layers are recurrent, as of `Snapshots.resumable`.
        """
        assert not hold.private
        size, num_matched = self.book.page_size, len(hold.nodes)
        pages = list(self._pages(hold, tokens, max_tokens))
        state, depth = list[Found](), 0
        if hold.slot:
            resumable = self.book.snapshots.resumable(hold, max_tokens) // size
            depth, state = self._state(hold, tokens, pages, resumable)
            pages = pages[: max(0, depth - num_matched)]
        if not pages and not state:
            return False
        slot = self.book.snapshots.take() if state else 0
        if state and not slot:
            return False
        computed_s = (len(pages) + bool(state)) * size * self.s_per_token()
        allowed_s = max(MIN_S, computed_s) if computed_s else UNMEASURED_S
        snapshots = self.book.snapshots
        # The next plan may still read the slot; see `Snapshots.resume`.
        after = snapshots.last_launched + (slot in snapshots.copies.values())
        load = Load(allowed_s=allowed_s)
        self.loads[request] = Loading(request, hold, tokens, pages, state, depth, slot, after, load)
        return True

    def cancel(self, request: Request, ending: FinishReason = FinishReason.ABORT) -> bool:
        """Whether something is loaded for a request that ends; `poll` returns that as any other."""
        if (loading := self.loads.get(request)) is None:
            return False
        loading.ending, loading.load.allowed_s = loading.ending or ending, -math.inf
        return True

    def poll(self, now: float) -> list[Loading[Request]]:
        """Move loads on; those that have ended. What they have brought is in the prefix tree."""
        ended: list[Loading[Request]] = []
        for loading in list(self.loads.values()):
            load = loading.load
            if not load.parts:
                self._bind(loading)
            if not loading.is_over and load.is_late(now):
                blames_row = load.parts and loading.ending is None
                load.cut("late" if blames_row else "unwanted")
                load.allowed_s = math.inf
                if loading.ranks:
                    self._tell(Cancel(loading.number))
            if loading.is_over:
                self._end(loading)
                ended.append(loading)
        return ended

    def on(self, answer: Loaded) -> None:
        """Another rank's part of a load is over."""
        (loading,) = (x for x in self.loads.values() if x.number == answer.number)
        loading.ranks.discard(answer.rank)
        loading.least = min(loading.least, answer.num_loaded)

    def tend(self) -> float:
        """Have copied what has settled lately; how long the loop may wait, s."""
        self.ahead.offer()
        return math.inf if self.ahead.idle and not self.loads else POLL_S * self.ahead.idle

    def forget(self) -> None:
        """Delete all that the rows have."""
        self.ahead.fresh.clear()
        self._tell(Forget())
        for row in self.rows:
            row.forget()

    def close(self) -> None:
        """End all rows; the pool is not touched any more."""
        self.ahead.end()
        for loading in self.loads.values():
            loading.load.cut("closed")
        for row in self.rows:
            row.close()

    def _pages(self, hold: Hold, tokens: Sequence[int], max_tokens: int) -> Iterator[Found]:
        size, key = self.book.page_size, first_key(self._form.layout_hash, hold.salt)
        if hold.nodes:
            key = key_of(hold.nodes[-1], self._form.layout_hash)
        for start in range(len(hold.nodes) * size, max_tokens - size + 1, size):
            text = tuple(tokens[start : start + size])
            key = next_key(key, text)
            row = self.ahead.row_of(key)
            if row is None:
                self._metrics.tier_early.inc(key in self.ahead.dropped)
                return
            yield row, key, text

    def _state(
        self, hold: Hold, tokens: Sequence[int], pages: Sequence[Found], resumable: int
    ) -> tuple[int, list[Found]]:
        """The deepest snapshot behind more than `resumable` pages that is there: depth, parts."""
        size, num_nodes = self.book.page_size, len(hold.nodes)
        grid = self.book.snapshots.grid // size
        for depth in range((num_nodes + len(pages)) // grid * grid, resumable, -grid):
            text = tuple(tokens[(depth - 1) * size : depth * size])
            if depth > num_nodes:
                key = pages[depth - num_nodes - 1][1]
            else:
                key = key_of(hold.nodes[depth - 1], self._form.layout_hash)
            keys = [part_key(key, part) for part in range(self._form.num_parts)]
            rows = [self.ahead.row_of(of) for of in keys]
            if None not in rows:
                return depth, [(row, of, text) for row, of in zip(rows, keys, strict=True)
                               if row is not None]  # fmt: skip
        return 0, []

    def _bind(self, loading: Loading[Request]) -> None:
        """Give a load its pages, once so many have cooled, and begin it."""
        hold, size = loading.hold, self.book.page_size
        first = len(hold.nodes)
        if loading.slot and self.book.snapshots.last_settled < loading.after_step:
            return
        try:
            self.book.bind(hold, (first + len(loading.pages)) * size, for_pull=True)
        except OutOfPages:
            return
        parts = [
            (row, Source(key, text, hold.pages[number]))
            for number, (row, key, text) in enumerate(loading.pages, first)
        ]
        parts += [
            (row, Source(key, text, loading.slot, part))
            for part, (row, key, text) in enumerate(loading.state)
        ]
        loading.load.parts = [(self.rows[row], source) for row, source in parts]
        loading.number = next(self._numbers)
        loading.ranks = set(range(1, self._form.tp_size))
        self._tell(LoadPages(loading.number, tuple(parts), self._num_settled()))
        self.rows[parts[0][0]].load(loading.load)

    def _end(self, loading: Loading[Request]) -> None:
        """Give the tree what has come, and the request's hold its place behind that."""
        del self.loads[loading.req]
        load, hold, book = loading.load, loading.hold, self.book
        num_objects = min(load.num_loaded, loading.least)
        num_pages = min(num_objects, len(loading.pages))
        for row, _ in load.parts[:num_pages]:
            self._metrics.tier_tokens(row.name).inc(book.page_size)
        wanted = len(loading.pages) + len(loading.state)
        row = next((row for row in self.rows if row.name == load.row), self.rows[0])
        cause = load.cause or ("absent" if num_objects < wanted else "")  # at another rank
        if not cause:
            row.worked()
        elif cause != "unwanted":
            row.failed(cause, f"{num_objects} of {wanted} pages came", pauses=cause in PAUSING)
        num_pages += len(hold.nodes)
        book.cut(hold, num_pages)
        if loading.slot and cause:
            give_back(book.snapshots, loading.slot)
        elif loading.slot:
            hold.snapshots[loading.depth * book.page_size] = loading.slot
        book.commit(hold, loading.tokens[: num_pages * book.page_size], found=True)
