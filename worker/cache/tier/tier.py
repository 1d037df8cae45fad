"""A worker's tier, as its engine thread has it: what is copied out, and what is looked for there.

    in the pool ── settled ──> copied ahead ──> in the pool and a row ── evicted ──> in a row
         ▲                                                                              │
         └── verified <── loading: private pages of a hold <── a prompt begins alike ───┘

Nothing is copied when pages are needed: they are there already, or dropped. A load that is late or
fails is cut off where it stands, and the rest of the prompt is computed.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from worker.cache.book import PageBook
from worker.cache.hold import Hold
from worker.cache.prefix import Node, Watcher
from worker.cache.tier.objects import Form, first_key, key_of, next_key, tokens_of
from worker.cache.tier.rows import Copy, Load, Row, Source
from worker.errors import OutOfPages
from worker.observe.metrics import WorkerMetrics

MIN_S = 0.25  # that a load may take at least; else as long as computing its tokens
UNMEASURED_S = 2.0
POLL_S = 5e-3  # the end of a load wakes the loop; this is for what never ends
OFFERED = 64  # pages of a turn; hashing them must not delay a step
PAUSING = ("late", "failed", "corrupt")

Request = TypeVar("Request")


@dataclass(slots=True, eq=False)
class Loading(Generic[Request]):
    """A request whose prompt goes on in a tier."""

    request: Request
    hold: Hold
    tokens: Sequence[int]
    found: list[tuple[Row, bytes]]  # of the pages behind those in `hold`
    until: float  # monotonic
    load: Load | None = None  # None: its pages still cool
    ending: object = None  # why the request ends; None: it goes on


class Tier(Watcher, Generic[Request]):
    """Rows below a pool, the nearest first. s_per_token: of prefill, 0: not measured yet."""

    def __init__(
        self,
        book: PageBook,
        form: Form,
        rows: Sequence[Row],
        metrics: WorkerMetrics,
        s_per_token: Callable[[], float],
    ) -> None:
        self.loads: dict[Request, Loading[Request]] = {}
        self._book, self._form, self._rows = book, form, rows
        self._metrics, self._s_per_token = metrics, s_per_token
        self._fresh: deque[Node] = deque()
        self._dropped: OrderedDict[bytes, None] = OrderedDict()  # keys of pages, lately
        book.tree.watcher = self

    def wakes(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, by other threads, when a load has ended."""
        for row in self._rows:
            row.wake = wake

    @property
    def idle(self) -> bool:
        """Whether nothing is copied, in either direction."""
        return not self._fresh and not self.loads and all(row.idle for row in self._rows)

    def begin(
        self, request: Request, hold: Hold, tokens: Sequence[int], max_tokens: int, now: float
    ) -> bool:
        """Load what follows the pages that `hold` has matched; False: no tier has that.

        Until `poll` returns it the hold is left alone; max_tokens: as of `PageBook.open`.
        """
        assert not hold.private
        size, at = self._book.page_size, hold.num_matched
        key = first_key(self._form.owner, hold.salt)
        if hold.nodes:
            key = key_of(hold.nodes[-1], self._form.owner)
        found: list[tuple[Row, bytes]] = []
        for start in range(at, max_tokens - size + 1, size):
            key = next_key(key, tokens[start : start + size])
            row = next((row for row in self._rows if row.has(key)), None)
            if row is None:
                self._metrics.tier_early.inc(key in self._dropped)
                break
            found.append((row, key))
        if found:
            computed_s = len(found) * size * self._s_per_token()
            until = now + (max(MIN_S, computed_s) if computed_s else UNMEASURED_S)
            self.loads[request] = Loading(request, hold, tokens, found, until)
        return bool(found)

    def cancel(self, request: Request, ending: object = True) -> bool:
        """Whether something is loaded for a request, which ends; `poll` returns that as any other."""
        if (loading := self.loads.get(request)) is None:
            return False
        loading.ending, loading.until = loading.ending or ending, 0.0
        return True

    def poll(self, now: float) -> list[Loading[Request]]:
        """Move loads on; those that have ended. What they have brought is in the prefix tree."""
        ended: list[Loading[Request]] = []
        for loading in list(self.loads.values()):
            if loading.load is None:
                self._bind(loading)
            load = loading.load
            if now >= loading.until and not (load is not None and load.is_over):
                if load is None:
                    loading.load = load = Load(())
                load.cancel("late" if loading.ending is None else "unwanted")
            if load is not None and load.is_over:
                self._end(loading, load)
                ended.append(loading)
        return ended

    def tend(self) -> float:
        """Have pages copied that have settled lately; how long the loop may wait, s."""
        for _ in range(min(OFFERED, len(self._fresh))):
            node = self._fresh.popleft()
            if not node.page:
                continue
            key = key_of(node, self._form.owner)
            rows = [row for row in self._rows if not row.has(key)]
            if not rows:
                continue
            copy = Copy(Source(key, tokens_of(node), node.page), self._book.watched)
            self._book.watched[node.page] = copy
            for row in rows:
                row.offer(copy)
        return 0.0 if self._fresh else POLL_S if self.loads else math.inf

    def entered(self, node: Node) -> None:
        self._fresh.append(node)

    def evicted(self, node: Node) -> None:
        key = key_of(node, self._form.owner)
        is_kept = any(row.has(key) for row in self._rows)
        self._metrics.tier_evicted("kept" if is_kept else "dropped").inc()
        if not is_kept:
            self._dropped[key] = None
            if len(self._dropped) > 2 * self._book.num_pages:
                self._dropped.popitem(last=False)

    def forget(self) -> int:
        """Delete all that the rows have; how many objects."""
        self._fresh.clear()
        return sum(row.forget() for row in self._rows)

    def close(self) -> None:
        """End all rows; the pool is not touched any more."""
        self._book.tree.watcher = None
        for loading in self.loads.values():
            if loading.load is not None:
                loading.load.cancel("closed")
        for row in self._rows:
            row.close()

    def _bind(self, loading: Loading[Request]) -> None:
        """Give a load its pages, once so many have cooled, and begin it."""
        hold, size = loading.hold, self._book.page_size
        first = hold.num_matched // size
        try:
            self._book.bind(hold, (first + len(loading.found)) * size, for_pull=True)
        except OutOfPages:
            return
        parts: list[tuple[Row, Source]] = []
        for number, (row, key) in enumerate(loading.found, first):
            page_tokens = tuple(loading.tokens[number * size : (number + 1) * size])
            parts.append((row, Source(key, page_tokens, hold.pages[number])))
        loading.load = Load(parts)
        parts[0][0].load(loading.load)

    def _end(self, loading: Loading[Request], load: Load) -> None:
        del self.loads[loading.request]
        hold, book = loading.hold, self._book
        for row, _ in load.parts[: load.num_loaded]:
            self._metrics.tier_tokens(row.name).inc(book.page_size)
        row = next((row for row in self._rows if row.name == load.row), loading.found[0][0])
        if load.cause not in ("", "unwanted"):
            row.failed(load.cause, f"{load.num_loaded} of {len(loading.found)} pages have come",
                       pauses=load.cause in PAUSING)  # fmt: skip
        elif not load.cause:
            row.worked()
        num_pages = hold.num_matched // book.page_size + load.num_loaded
        book.cut(hold, num_pages)
        book.commit(hold, loading.tokens[: num_pages * book.page_size], found=True)
