"""What a member may take of a worker, so that one gone bad leaves something for the others."""

from collections.abc import Iterable
from dataclasses import dataclass

from worker.api import Member, PeerId, Role
from worker.cache.book import Hold, PageBook
from worker.config import EngineConfig
from worker.schedule.req import Phase, Req

# One of so many parts of a worker's requests, rows and pages is divided into shares, a share for a
# member that may ask. The rest is for whoever comes first, so that a worker that only one of two
# members uses runs as full as 15 of 16.
PARTS = 8

Taken = Iterable[tuple[PeerId, int]]  # by whom how much, in any number of pieces


@dataclass(slots=True)
class Shares:
    """What a worker divides among the members of a `role`, who ask; a single one has it all."""

    role: Role
    members: frozenset[PeerId] = frozenset()

    def update(self, members: Iterable[Member]) -> None:
        """Take the controller's whole list."""
        self.members = frozenset(member.peer for member in members if member.role == self.role)

    def allow(self, peer: PeerId, total: int, left: int, taken: Taken) -> bool:
        """Whether `peer` may take what it asks for, if so much of a total is left then.

        taken: without what is asked for; not looked at while there is enough for all.
        """
        own = self.own(total)
        if left < 0 or left >= own * (len(self.members) - 1):
            return left >= 0
        has = _sums(taken)
        if has.get(peer, 0) < own:
            return True
        return left >= sum(max(0, own - has.get(other, 0)) for other in self.members - {peer})

    def own(self, total: int) -> int:
        """The share of a total that a member has for itself."""
        return total // (PARTS * len(self.members)) if self.members else 0


def num_pages(hold: Hold | None) -> int:
    """Pages that a request has brought with it: bound or promised, and not found in the tree."""
    if hold is None:
        return 0
    found = hold.num_matched * len(hold.pages) // hold.num_slots if hold.num_slots else 0
    bound = hold.pages[max(found, hold.num_trimmed) :]
    return len(bound) - bound.count(0) + hold.num_reserved


def _sums(taken: Taken) -> dict[PeerId, int]:
    sums: dict[PeerId, int] = {}
    for peer, num in taken:
        sums[peer] = sums.get(peer, 0) + num
    return sums


class RouterShares(Shares):
    """Of a decode worker."""

    def __init__(self, book: PageBook, engine: EngineConfig) -> None:
        super().__init__("router")
        self.holders: set[Req] = set()  # requests with a hold, some of them with a row
        self._book, self._num_rows = book, int(engine.max_num_reqs)

    def allow_row(self, router: PeerId) -> bool:
        """Whether one more of its requests may have a row, of those that are free."""
        if len(self.members) < 2:
            return True
        rows = [(req.router, 1) for req in self.holders if req.row]
        return self.allow(router, self._num_rows, self._num_rows - len(rows) - 1, rows)

    def allow_pages(self, router: PeerId) -> bool:
        """Whether it may have the pages that a new hold has just taken."""
        book = self._book
        pages = ((req.router, num_pages(req.hold)) for req in self.holders)
        return self.allow(router, book.num_pages, book.num_available, pages)

    def is_short(self, router: PeerId) -> bool:
        """Whether there are others, and it has less than its share of pages."""
        own = self.own(self._book.num_pages)
        return len(self.members) > 1 and self._pages().get(router, 0) < own

    def victim_for(self, router: PeerId) -> Req | None:
        """If `router` is short: the youngest running request of the router with most pages."""
        if not self.is_short(router):
            return None
        pages = self._pages()
        running = [req for req in self.holders if req.phase is Phase.RUNNING]
        youngest = max(running, key=lambda req: (pages[req.router], req.arrival), default=None)
        return None if youngest is None or youngest.router == router else youngest

    def _pages(self) -> dict[PeerId, int]:
        return _sums((req.router, num_pages(req.hold)) for req in self.holders)
