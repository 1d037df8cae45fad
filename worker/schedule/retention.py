"""Retention: which pages of a decode worker's prefix tree are evicted last.

A session's turn leaves its pages in the tree. Until it is likely to come back they rank behind all
others: they go when nothing else can, those first whose time is over first. A rank is no lock:
whoever needs pages gets them. What one owner's sessions have beyond its share has no rank, so that
they crowd out one another, and not what others have found lately.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from worker.cache.book import Hold, PageBook
from worker.cache.prefix import Node

NUM_TURNS = 64  # that routers are told of: more in an interval of pings are not all known
PART = 0.75  # of a worker's pages may have a rank, alike for all owners


class _Kept(NamedTuple):
    nodes: list[Node]  # of its whole path; some may be others' too, or gone
    num_own: int  # of them, without what another session had kept before
    until: float


class Retention:
    """Ranks the pages that sessions have left. The engine loop's alone."""

    def __init__(self, book: PageBook, clock: Callable[[], float] = time.monotonic) -> None:
        self._book, self._clock = book, clock
        # By owner and session, the one that has ended last is last.
        self._kept: dict[str, OrderedDict[str, _Kept]] = {}
        self._num_own: dict[str, int] = {}  # pages, by owner
        self.turns: tuple[tuple[int, str], ...] = ()  # see WorkerStats.turns

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def begun(self, session: str) -> None:
        """A turn has come."""
        number = self.turns[-1][0] + 1 if self.turns else 1
        self.turns = (*self.turns[1 - NUM_TURNS :], (number, session))

    def ended(self, hold: Hold, session: str, keep_s: float) -> None:
        """A turn of `Generate.session` ends, whose pages are in the tree by now."""
        owner = session.partition("/")[0]
        self._drop(owner, session)
        nodes = hold.nodes[hold.num_trimmed :]
        if keep_s > 0 and nodes:
            num_own = sum(not node.kept_until for node in nodes)
            until = self._clock() + keep_s
            self._book.tree.keep([node for node in nodes if node.kept_until < until], until)
            of_owner = self._kept.setdefault(owner, OrderedDict())
            of_owner[session] = _Kept(nodes, num_own, until)
            self._num_own[owner] = self._num_own.get(owner, 0) + num_own
        most = PART * self._book.num_pages / max(1, len(self._kept))
        for name in list(self._kept):
            while self._num_own.get(name, 0) > most:
                self._drop(name, next(iter(self._kept[name])))

    def sweep(self) -> None:
        """Take the rank from what is older than was worth keeping."""
        now = self._clock()
        over = [
            (o, n) for o, of in self._kept.items() for n, kept in of.items() if kept.until <= now
        ]
        for owner, name in over:
            self._drop(owner, name)

    def _drop(self, owner: str, name: str) -> None:
        """A session's pages are as all others, but for those that another one keeps for longer."""
        kept = self._kept.get(owner, OrderedDict()).pop(name, None)
        if kept is None:
            return
        self._book.tree.keep([node for node in kept.nodes if node.kept_until == kept.until], 0.0)
        self._num_own[owner] -= kept.num_own
        if not self._kept[owner]:
            del self._kept[owner], self._num_own[owner]
