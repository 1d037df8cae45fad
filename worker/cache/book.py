"""Who holds which page: allocator, prefix tree and reservations, kept consistent in one place.

Invariants (tests.support.books asserts them):
    every page but 0 is in exactly one of: free, some Hold's private pages, the tree;
    num_reserved <= free + evictable, so a reserved page can always be bound for compute;
    every slot but 0 is free, or some Hold's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from worker.cache.pages import PageAllocator
from worker.cache.prefix import Node, PrefixTree
from worker.errors import OutOfPages


@dataclass(slots=True, eq=False)
class Hold:
    """What one request holds. Filled by PageBook only.

    pages[i] holds tokens [i * page_size, (i + 1) * page_size) of the request's sequence; entries
    never change while the request runs, because device tables are never rewritten. But those of
    pages that were given back as nobody reads them again are 0; see PageBook.trim.
    """

    node: Node  # deepest tree node that is locked for this request
    num_matched: int  # tokens found in the tree when the hold was opened
    num_slots: int  # tokens that `pages` can store
    pages: list[int] = field(default_factory=list)
    private: set[int] = field(default_factory=set)
    num_reserved: int = 0  # pages promised, not bound yet
    slot: int = 0  # of its state, where layers are recurrent; 0 = none
    salt: str = ""  # of the prefixes that it matches and leaves behind
    num_trimmed: int = 0  # pages that `trim` has looked at


class PageBook:
    """The pages of one worker, and its slots of state, if there are."""

    def __init__(
        self, num_pages: int, page_size: int, *, prefix_cache: bool = True, num_slots: int = 0
    ) -> None:
        self.page_size = page_size
        self.num_reserved = 0
        self.num_holds = 0
        self._prefix_cache = prefix_cache
        self._allocator = PageAllocator(num_pages)
        # A freed slot cools as a page does: a pull may be what fills it next.
        self._slots = PageAllocator(num_slots) if num_slots else None
        self.tree = PrefixTree(page_size)  # changed by the book alone

    def launched(self, step: int) -> None:
        """See PageAllocator.launched."""
        self._allocator.launched(step)
        if self._slots is not None:
            self._slots.launched(step)

    def settled(self, step: int) -> None:
        """See PageAllocator.settled."""
        self._allocator.settled(step)
        if self._slots is not None:
            self._slots.settled(step)

    @property
    def num_slots(self) -> int:
        """Slots of state that can be handed out at all."""
        return 0 if self._slots is None else self._slots.num_pages - 1

    @property
    def num_free_slots(self) -> int:
        """Slots of state that can be handed out, also to be pulled into."""
        return 0 if self._slots is None else self._slots.num_pullable

    @property
    def num_pages(self) -> int:
        """Pages that can be handed out at all."""
        return self._allocator.num_pages - 1

    @property
    def num_available(self) -> int:
        """Pages that can still be promised."""
        return self._allocator.num_free + self.tree.num_evictable - self.num_reserved

    @property
    def num_private(self) -> int:
        """Pages bound to requests and not in the tree."""
        return self.num_pages - self._allocator.num_free - self.tree.num_pages

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens fill."""
        return -(-num_tokens // self.page_size)

    def open(
        self, tokens: Sequence[int], num_slots: int, *, max_matched: int, salt: str = ""
    ) -> Hold | None:
        """Match `tokens`, lock what matched, and reserve pages up to `num_slots` tokens.

        With a slot of state, where layers are recurrent. At most max_matched <= len(tokens) - 1
        tokens come from the tree. None: there is no room, and nothing has changed.
        """
        tree = self.tree
        node = tree.match(tokens, max_matched, salt) if self._prefix_cache else tree.root
        self.tree.lock(node)
        pages = [ancestor.page for ancestor in node.path()]
        wanted = max(0, self.num_pages_for(num_slots) - len(pages))
        if wanted > self.num_available or (self._slots is not None and not self.num_free_slots):
            self.tree.unlock(node)
            return None
        self.num_reserved += wanted
        self.num_holds += 1
        num_slots = len(pages) * self.page_size
        slot = 0 if self._slots is None else self._slots.take(1, for_pull=True)[0]
        return Hold(node, num_slots, num_slots, pages, set(), wanted, slot, salt)

    def bind(self, hold: Hold, num_slots: int, *, for_pull: bool = False) -> list[int]:
        """Give `hold` page ids until it can store `num_slots` tokens; returns the new ids.

        Reserved pages are used first, then unpromised ones. Raises OutOfPages, with `hold` as it
        was, if there is no room; with `for_pull` also while free pages still cool, which ends when
        the step in flight settles.
        """
        count = self.num_pages_for(num_slots) - len(hold.pages)
        if count <= 0:
            return []
        reserved = min(count, hold.num_reserved)
        if count - reserved > self.num_available:
            raise OutOfPages(f"{count - reserved} pages beyond the reservation")
        short = count - self._allocator.num_free
        if short > 0:
            self._allocator.free(self.tree.evict(short))
        pages = self._allocator.take(count, for_pull=for_pull)
        hold.num_reserved -= reserved
        self.num_reserved -= reserved
        hold.pages.extend(pages)
        hold.num_slots += count * self.page_size
        hold.private.update(pages)
        return pages

    def commit(self, hold: Hold, tokens: Sequence[int]) -> None:
        """Enter the whole pages of `tokens` into the tree; their KV is final.

        Pages whose prefix the tree already holds stay private to `hold`.
        """
        if not self._prefix_cache:
            return
        pages = hold.pages[: len(tokens) // self.page_size]
        if hold.num_trimmed and 0 in pages:
            pages = pages[: pages.index(0)]
        node, refused, displaced = self.tree.insert(tokens, pages, hold.salt)
        self._allocator.free(displaced)
        self.tree.lock(node)
        self.tree.unlock(hold.node)
        hold.node = node
        hold.private -= set(pages) - set(refused)

    def trim(self, hold: Hold, num_tokens: int) -> None:
        """Give back private pages of tokens before `num_tokens`.

        No step that is in flight or comes reads them. What lies behind them never enters the tree.
        """
        last = num_tokens // self.page_size
        for index in range(hold.num_trimmed, last):
            page = hold.pages[index]
            if page in hold.private:
                hold.private.remove(page)
                hold.pages[index] = 0
                self._allocator.free([page])
        hold.num_trimmed = max(hold.num_trimmed, last)

    def forget(self) -> None:
        """Drop from the tree what no hold has matched."""
        self._allocator.free(self.tree.evict(self.tree.num_pages))

    def close(self, hold: Hold) -> None:
        """Give everything back. No pull into its pages may be running."""
        self.tree.unlock(hold.node)
        self._allocator.free(hold.private)
        if self._slots is not None and hold.slot:
            self._slots.free([hold.slot])
        self.num_reserved -= hold.num_reserved
        self.num_holds -= 1
        hold.node, hold.num_reserved, hold.slot = self.tree.root, 0, 0
        hold.pages, hold.num_slots, hold.private, hold.num_trimmed = [], 0, set(), 0
