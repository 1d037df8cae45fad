"""The prefix tree: whole pages of KV by the tokens that lead to them.

One node is one page. A node's key is the page's own tokens; the path from the root is the prefix.
A prompt with a salt has it in the key of its first page, so prefixes of different salts, and those
without one, have no node in common. Locked nodes stay, and so do all above them. The pages of the
others are evicted, least recently used first.

Where all layers have a window, a text is read back to the page of index `first_read` only. So a
page may go although nodes below it stay: its node is *empty*, and is passed through.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Key = tuple[int | str, ...]
MANY = 1 << 60  # more than there are pages


@dataclass(slots=True, eq=False)
class Node:
    """One page of one prefix. Filled by PrefixTree only.

    Invariants: a locked node has a page. So has a leaf.
    """

    page: int  # 0: it is empty, or the root
    key: Key = ()
    parent: Node | None = None
    depth: int = 0  # pages of its prefix
    children: dict[Key, Node] = field(default_factory=dict)
    num_locks: int = 0
    kept_until: float = 0.0  # evicted behind all that have less
    used_at: int = 0
    state: int = 0  # slot of the snapshot of its prefix, where layers are recurrent; 0: none
    is_offered: bool = False  # has an entry in the tree's queue
    digest: bytes = b""  # `tier.objects.key_of`, once it is asked for

    def path(self) -> list[Node]:
        """Nodes from below the root down to this one."""
        nodes: list[Node] = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class Watcher(Protocol):
    """Is told of pages that come and go."""

    def entered(self, node: Node) -> None:
        """A node has a page, or another one."""
        ...

    def evicted(self, node: Node) -> None:
        """The page of a node was evicted."""
        ...


class PrefixTree:
    """Maps token prefixes to pages, `page_size` tokens a page.

    span: so many tokens before its end are read of a text, the newest one included; 0: all.
    """

    def __init__(
        self, page_size: int, span: int = 0, gone: Callable[[Node], None] = lambda node: None
    ) -> None:
        """gone: called with a node whose page was evicted."""
        assert span != 1, "an empty leaf would match"
        self.page_size, self.span, self._gone = page_size, span, gone
        self.watcher: Watcher | None = None
        self.root = Node(page=0, num_locks=1)
        self.num_pages = 0
        self.num_evictable = 0  # pages of nodes without a lock
        self._clock = 0
        self.num_kept = 0  # pages with a `kept_until`
        self.num_kept_evicted = 0
        # What can be evicted: (kept_until, used_at, -depth, id, node), some entries stale.
        self._queue: list[tuple[float, int, int, int, Node]] = []

    def first_read(self, num_pages: int) -> int:
        """Index of the first page that is read of a text which goes on behind `num_pages` pages."""
        size = self.page_size
        return max(0, num_pages * size + 1 - self.span) // size if self.span else 0

    def match(
        self, tokens: Sequence[int], max_tokens: int, salt: str = "", keep_from: int = MANY
    ) -> Node:
        """The deepest node of `salt` whose prefix begins tokens[:max_tokens].

        All pages that are read behind it are there, and those from index `keep_from` on.
        """
        node = found = self.root
        num_passed = 0  # pages up to the last empty node
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
            if not node.page:
                num_passed = node.depth
            if num_passed <= min(keep_from, self.first_read(node.depth)):
                found = node
        return found

    def insert(
        self, tokens: Sequence[int], pages: Sequence[int], salt: str = ""
    ) -> tuple[Node, list[int], list[int]]:
        """Add len(pages) whole pages of `tokens` to `salt`; returns (node, refused, displaced).

        Of 0 in `pages` the node is made, empty, if there is none; the last one is not 0.
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
                child = Node(0, key, node, index + 1)
                node.children[key] = child
            if page in (0, child.page):
                pass
            elif child.page and child.num_locks:
                refused.append(page)
            else:
                if child.page:
                    displaced.append(child.page)
                else:
                    self.num_pages += 1
                    self.num_evictable += 1
                child.page = page
                if self.watcher is not None:
                    self.watcher.entered(child)
            node = child
            node.used_at = self._clock
        self._offer(node)
        return node, refused, displaced

    def lock(self, nodes: Iterable[Node]) -> None:
        """Keep the pages of `nodes`, and all nodes above them, until `unlock`.

        Without a span: of all nodes on the path to the last one.
        """
        for node in nodes:
            if node.num_locks == 0:
                self.num_evictable -= 1
            node.num_locks += 1

    def unlock(self, nodes: Iterable[Node]) -> None:
        """Undo one `lock`."""
        for node in nodes:
            node.num_locks -= 1
            assert node.num_locks >= 0
            if node.num_locks == 0:
                self.num_evictable += 1
                self._offer(node)

    def keep(self, nodes: Iterable[Node], until: float) -> None:
        """Evict pages of `nodes` behind all that have less of `until`; 0: as all others."""
        for node in nodes:
            if not node.page or node.kept_until == until:
                continue
            self.num_kept += (until > 0) - (node.kept_until > 0)
            goes_sooner, node.kept_until = until < node.kept_until, until
            if goes_sooner:  # its entry in the queue stands too far behind
                node.is_offered = False
                self._offer(node)

    def evict(self, count: int) -> list[int]:
        """Drop up to `count` unlocked pages; their ids.

        Those that `keep` has named are last; else the least recently used first, of a prefix the
        last ones first. Without a span only leaves are dropped.
        """
        pages: list[int] = []
        while len(pages) < count and self._queue:
            until, used_at, _, _, node = heapq.heappop(self._queue)
            node.is_offered = False
            if not self._can_go(node):
                continue
            if (node.kept_until, node.used_at) != (until, used_at):
                self._offer(node)
                continue
            if until:
                node.kept_until = 0.0
                self.num_kept -= 1
                self.num_kept_evicted += 1
            pages.append(node.page)
            node.page = 0
            self._gone(node)
            if self.watcher is not None:
                self.watcher.evicted(node)
            while node.parent is not None and not node.page and not node.children:
                parent, node.parent = node.parent, None
                del parent.children[node.key]
                node = parent
            self._offer(node)
        self.num_pages -= len(pages)
        self.num_evictable -= len(pages)
        return pages

    def _can_go(self, node: Node) -> bool:
        return bool(node.page and not node.num_locks and (self.span or not node.children))

    def _offer(self, node: Node) -> None:
        """Make `node` known to eviction if it can go."""
        if not node.is_offered and self._can_go(node):
            node.is_offered = True
            entry = node.kept_until, node.used_at, -node.depth, id(node), node
            heapq.heappush(self._queue, entry)
