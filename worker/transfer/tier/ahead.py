"""What settles in the pool is copied to the rows of a tier, before anybody needs its pages."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from worker.cache.book import PageBook
from worker.cache.prefix import Node, Watcher
from worker.observe.metrics import WorkerMetrics
from worker.transfer.tier.objects import Form, Source, key_of, part_key, tokens_of
from worker.transfer.tier.ranks import Keep, TierOrder
from worker.transfer.tier.rows import Copy, Row

OFFERED = 64  # pages of a turn; hashing them must not delay a step


@dataclass(eq=False)
class CopyAhead(Watcher):
    """Watches a book, and has rows copy what is new."""

    book: PageBook
    form: Form
    rows: Sequence[Row]
    metrics: WorkerMetrics
    tell: Callable[[TierOrder], None]  # to the other ranks
    num_settled: Callable[[], int]  # steps

    def __post_init__(self) -> None:
        """Begin to watch."""
        self.fresh: dict[Node, None] = {}  # in order
        self.dropped: OrderedDict[bytes, None] = OrderedDict()  # keys of pages, lately
        self.book.tree.watcher = self.book.snapshots.watcher = self

    @property
    def idle(self) -> bool:
        """Whether `offer` would do nothing."""
        return not self.fresh

    def entered(self, node: Node) -> None:
        self.fresh[node] = None

    def evicted(self, node: Node) -> None:
        key = key_of(node, self.form.layout_hash)
        is_kept = self.row_of(key) is not None
        self.metrics.tier_evicted("kept" if is_kept else "dropped").inc()
        if not is_kept:
            self.dropped[key] = None
            if len(self.dropped) > 2 * self.book.num_pages:
                self.dropped.popitem(last=False)

    def row_of(self, key: bytes) -> int | None:
        """The first row that has an object."""
        return next((i for i, row in enumerate(self.rows) if row.has(key)), None)

    def offer(self) -> None:
        """Have pages and snapshots copied that are new."""
        for node in list(islice(self.fresh, OFFERED)):
            if node.page:
                self._offer_node(node)
            del self.fresh[node]  # last: a thread that asks `idle` finds it here or with the rows

    def _offer_node(self, node: Node) -> None:
        key, tokens = key_of(node, self.form.layout_hash), tokens_of(node)
        self._offer([Source(key, tokens, node.page)], self.book.watched)
        if node.state:
            parts = (part_key(key, i) for i in range(self.form.num_parts))
            sources = [Source(of, tokens, node.state, i) for i, of in enumerate(parts)]
            self._offer(sources, self.book.snapshots.watched)

    def end(self) -> None:
        """Watch no more."""
        self.book.tree.watcher = self.book.snapshots.watcher = None

    def _offer(self, sources: Sequence[Source], watched: dict[int, object]) -> None:
        """Have objects of one place copied by the rows that lack them."""
        mark = object()
        for source in sources:
            lacking = [i for i, row in enumerate(self.rows) if not row.has(source.key)]
            if lacking:
                watched[source.place] = mark
                for number in lacking:
                    self.rows[number].offer(Copy(source, watched, mark))
                self.tell(Keep(tuple(lacking), source, self.num_settled()))
