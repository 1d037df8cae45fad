"""The prefix tree: whole pages of KV by the tokens that lead to them.

One node is one page. A node's key is the page's own tokens; the path from the root is the prefix.
A prompt with a salt has it in the key of its first page, so prefixes of different salts, and those
without one, have no node in common. Locked nodes and all their ancestors stay. The others are
evicted, least recently used first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

Key = tuple[int | str, ...]


@dataclass(slots=True, eq=False)
class Node:
    """One page of one prefix. Filled by PrefixTree only.

    Invariant: num_locks >= the sum of the locks taken on its descendants.
    """

    page: int
    key: Key = ()
    parent: Node | None = None
    children: dict[Key, Node] = field(default_factory=dict)
    num_locks: int = 0
    used_at: int = 0
    is_offered: bool = False  # has an entry in the tree's queue of leaves

    def path(self) -> list[Node]:
        """Nodes from below the root down to this one."""
        nodes: list[Node] = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class PrefixTree:
    """Maps token prefixes to pages, `page_size` tokens a page."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = Node(page=0, num_locks=1)
        self.num_pages = 0
        self.num_evictable = 0  # pages of nodes without a lock
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []  # (used_at, id, node), some entries stale

    def match(self, tokens: Sequence[int], max_tokens: int, salt: str = "") -> Node:
        """The deepest node of `salt` whose prefix begins tokens[:max_tokens]."""
        node = self.root
        self._clock += 1
        for start in range(0, max_tokens - self.page_size + 1, self.page_size):
            key: Key = tuple(tokens[start : start + self.page_size])
            if salt:
                key, salt = (salt, *key), ""
            child = node.children.get(key)
            if child is None:
                break
            node = child
            node.used_at = self._clock
        return node

    def insert(
        self, tokens: Sequence[int], pages: Sequence[int], salt: str = ""
    ) -> tuple[Node, list[int], list[int]]:
        """Add len(pages) whole pages of `tokens` to `salt`; returns (node, refused, displaced).

        node: the deepest of that prefix. refused: those of `pages` whose prefix the tree already
        holds in a locked page; they stay the caller's. displaced: unlocked pages of the tree that
        the caller's replaced, to be freed. Kept in the tree, they would be locked with `node`, but
        reservations count on every page that can be evicted.
        """
        assert len(tokens) >= len(pages) * self.page_size
        node = self.root
        self._clock += 1
        refused: list[int] = []
        displaced: list[int] = []
        for index, page in enumerate(pages):
            key: Key = tuple(tokens[index * self.page_size : (index + 1) * self.page_size])
            if salt:
                key, salt = (salt, *key), ""
            child = node.children.get(key)
            if child is None:
                child = Node(page, key, node)
                node.children[key] = child
                self.num_pages += 1
                self.num_evictable += 1
            elif child.page != page and child.num_locks:
                refused.append(page)
            elif child.page != page:
                displaced.append(child.page)
                child.page = page
            node = child
            node.used_at = self._clock
        self._offer(node)
        return node, refused, displaced

    def lock(self, node: Node) -> None:
        """Keep `node` and all above it until `unlock`."""
        for locked in node.path():
            if locked.num_locks == 0:
                self.num_evictable -= 1
            locked.num_locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        for locked in node.path():
            locked.num_locks -= 1
            assert locked.num_locks >= 0
            if locked.num_locks == 0:
                self.num_evictable += 1
        self._offer(node)

    def evict(self, count: int) -> list[int]:
        """Drop up to `count` unlocked pages, least recently used leaves first; their ids."""
        pages: list[int] = []
        while len(pages) < count and self._leaves:
            used_at, _, node = heapq.heappop(self._leaves)
            node.is_offered = False
            if node.parent is None or node.children or node.num_locks:
                continue
            if node.used_at != used_at:
                self._offer(node)
                continue
            parent, node.parent = node.parent, None
            del parent.children[node.key]
            pages.append(node.page)
            self._offer(parent)
        self.num_pages -= len(pages)
        self.num_evictable -= len(pages)
        return pages

    def _offer(self, node: Node) -> None:
        """Make `node` known to eviction if it is an unlocked leaf."""
        if node.parent is None or node.children or node.num_locks:
            return
        if not node.is_offered:
            node.is_offered = True
            heapq.heappush(self._leaves, (node.used_at, id(node), node))
