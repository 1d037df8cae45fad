"""Invariants of a worker's page book."""

from collections import Counter
from collections.abc import Iterable

from worker.cache.book import Hold, PageBook
from worker.cache.prefix import Node


def check_book(book: PageBook, holds: Iterable[Hold]) -> None:
    """Assert the invariants against all holds that are open."""
    holds = list(holds)
    private = [page for hold in holds for page in hold.private]
    assert len(private) == len(set(private)) == book.num_private
    assert book.num_reserved == sum(hold.num_reserved for hold in holds)
    assert min(book.num_reserved, book.num_available) >= 0
    assert book.num_holds == len(holds)
    nodes = nodes_of(book.tree.root)
    pages = {node.page for node in nodes if node.page}
    assert len(pages) == sum(node.page > 0 for node in nodes) == book.tree.num_pages
    assert pages.isdisjoint(private)
    free = [node for node in nodes if node.page and not node.num_locks]
    assert len(free) == book.tree.num_evictable
    if book.span:
        locked = Counter(node for hold in holds for node in hold.nodes[hold.num_trimmed :])
        assert locked == {node: node.num_locks for node in nodes if node.num_locks}
        assert all(node.page for node in nodes if node.num_locks or not node.children)
        for hold in holds:
            assert not any(hold.pages[: hold.num_trimmed])
            assert len(hold.pages) * book.page_size == hold.num_slots


def nodes_of(root: Node) -> list[Node]:
    """All below `root`."""
    nodes = [*root.children.values()]
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes


def check_snapshots(book: PageBook, holds: Iterable[Hold]) -> None:
    """A slot of snapshots is free, promised to an open hold, or a node's, on the grid."""
    snapshots = book.snapshots
    kept = [node for node in nodes_of(book.tree.root) if node.state]
    assert set(kept) == set(snapshots.nodes)
    assert not any(node.depth * book.page_size % snapshots.grid for node in kept)
    promised = [slot for hold in holds for slot in hold.snapshots.values()]
    promised += [hold.row_snapshot for hold in holds if hold.row_snapshot]
    assert snapshots.num_used - len(snapshots.nodes) == len(promised)
    slots = snapshots._free + [node.state for node in kept] + promised
    assert snapshots._num_rows == sum(hold.row_snapshot > 0 for hold in holds)
    first = book.num_slots + 1
    assert sorted(slots) == [*range(first, first + snapshots.num_slots)]
