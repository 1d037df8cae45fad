"""Who holds which page: allocator, prefix tree and reservations, kept consistent in one place.

Invariants (tests.support.books asserts them):
    every page but 0 is in exactly one of: free, some Hold's private pages, the tree;
    num_reserved <= free + evictable, so a reserved page can always be bound for compute;
    every slot but 0 is free, or some Hold's; see Snapshots of those behind them.
"""

from collections.abc import Sequence

from worker.cache.hold import Hold as Hold
from worker.cache.pages import PageAllocator
from worker.cache.prefix import MANY, PrefixTree
from worker.cache.snapshots import Snapshots
from worker.config.checkpoint.delta_shape import snapshot_grid
from worker.errors import OutOfPages


class PageBook:
    """The pages of one worker, and its slots of state, if there are."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        prefix_cache: bool = True,
        num_slots: int = 0,
        num_snapshots: int = 0,
        span: int = 0,
        step_tokens: int = 0,
    ) -> None:
        """span: see PrefixTree. step_tokens: of a prompt, in a step at most; with a span only.

        num_snapshots: slots of theirs, behind the num_slots of requests and slot 0.
        """
        self.page_size, self.span = page_size, span
        # That can be handed out at all: all but the first.
        self.num_pages, self.num_slots = num_pages - 1, max(0, num_slots - 1)
        # Pages that a prompt has at once: read by a step in flight, or stored by it or the next.
        self._most_bound = self.num_pages_for(span + 2 * step_tokens) + 3 if span else MANY
        self.num_reserved = 0
        self.num_holds = 0
        self._prefix_cache = prefix_cache
        self._allocator = PageAllocator(num_pages)
        self.watched = self._allocator.watched
        # A freed slot cools as a page does: a pull may be what fills it next.
        self._slots = PageAllocator(num_slots) if num_slots else None
        slots = range(num_slots, num_slots + num_snapshots * (prefix_cache and not span))
        self.snapshots = Snapshots(slots, snapshot_grid(page_size), page_size)
        self.tree = PrefixTree(page_size, span, self.snapshots.drop)  # changed by the book alone

    def launched(self, step: int) -> None:
        """See PageAllocator.launched."""
        self._allocator.launched(step)
        self.snapshots.last_launched = step
        if self._slots is not None:
            self._slots.launched(step)

    def settled(self, step: int) -> None:
        """See PageAllocator.settled."""
        self._allocator.settled(step)
        self.snapshots.last_settled = step
        if self._slots is not None:
            self._slots.settled(step)
        if self.snapshots.closing:
            self.close(self.snapshots.closing.pop())

    @property
    def num_free_slots(self) -> int:
        """Slots of state that can be handed out, also to be pulled into."""
        return 0 if self._slots is None else self._slots.num_pullable

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

    def first_read(self, num_tokens: int) -> int:
        """Index of the first page that is read of a text once KV of `num_tokens` tokens is there.

        Or by a text that shares the whole pages of these tokens. Without a span 0.
        """
        return self.tree.first_read(num_tokens // self.page_size)

    def open(
        self,
        tokens: Sequence[int],
        num_slots: int,
        *,
        max_matched: int,
        salt: str = "",
        keep_from: int = MANY,
    ) -> Hold | None:
        """Match `tokens`, lock what matched, and reserve pages up to `num_slots` tokens.

        With a slot of state, where layers are recurrent. At most max_matched <= len(tokens) - 1
        tokens come from the tree. None: there is no room, and nothing has changed. With a span
        only so many pages are reserved as the hold has at once, if `trim` is called after the steps
        of its prompt; see Hold.keep_from.
        """
        tree = self.tree
        caches = self._prefix_cache
        node = tree.match(tokens, max_matched, salt, keep_from) if caches else tree.root
        nodes = node.path()
        first = min(keep_from, tree.first_read(len(nodes)))
        tree.lock(nodes[first:])
        pages = [0] * first + [node.page for node in nodes[first:]]
        num_wanted = self.num_pages_for(num_slots)
        most = max(self._most_bound, num_wanted - keep_from)
        wanted = min(most, max(0, num_wanted - len(pages)))
        if wanted > self.num_available or (self._slots is not None and not self.num_free_slots):
            tree.unlock(nodes[first:])
            return None
        self.num_reserved += wanted
        self.num_holds += 1
        num_slots = len(pages) * self.page_size
        slot = 0 if self._slots is None else self._slots.take(1, for_pull=True)[0]
        rest = pages, set[int](), wanted, slot, salt, first, keep_from, num_wanted
        return Hold(nodes, num_slots, num_slots, *rest)

    def bind(
        self, hold: Hold, num_slots: int, *, for_pull: bool = False, first: int = 0
    ) -> list[int]:
        """Give `hold` page ids until it can store `num_slots` tokens; returns the new ids.

        No pages below index `first` are bound: nobody will read them. `trim` or `cut` follows.

        Reserved pages are used first, then unpromised ones. Raises OutOfPages, with `hold` as it
        was, if there is no room; with `for_pull` also while free pages still cool, which ends when
        the step in flight settles.
        """
        num_skipped = max(0, first - len(hold.pages))
        count = self.num_pages_for(num_slots) - len(hold.pages) - num_skipped
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
        hold.pages += [0] * num_skipped + pages
        hold.num_slots += (num_skipped + count) * self.page_size
        hold.private.update(pages)
        return pages

    def commit(self, hold: Hold, tokens: Sequence[int], *, found: bool = False) -> None:
        """Enter the whole pages of `tokens` into the tree; their KV is final.

        Pages whose prefix the tree already holds stay private to `hold`. found: in a tier; they
        count as matched.
        """
        num = len(tokens) // self.page_size
        if found:
            hold.num_matched = num * self.page_size
        first = hold.num_trimmed
        if not self._prefix_cache or num <= first:
            return
        pages = hold.pages[:num]
        node, refused, displaced = self.tree.insert(tokens, pages, hold.salt)
        self._allocator.free(displaced)
        nodes = node.path()
        self.tree.lock(nodes[first:])
        self.tree.unlock(hold.nodes[first:])
        hold.nodes = nodes
        hold.private -= set(pages) - set(refused)
        self.snapshots.keep(hold)

    def trim(self, hold: Hold, num_tokens: int, tokens: Sequence[int] = ()) -> None:
        """Give back the pages that nobody reads once KV of `num_tokens` tokens is there and final.

        Neither steps in flight nor later ones do. tokens: all that the hold is for. With them the
        pages go into the tree, without them private pages are free. The hold is promised as many
        pages again as it had bound of these, if it still wants them.
        """
        if not self.span:
            return  # all of a text is read
        first, last = hold.num_trimmed, min(self.first_read(num_tokens), hold.keep_from)
        if last <= first:
            return
        bound = hold.private.intersection(hold.pages[first:last])
        if last > len(hold.nodes):  # else all of them were found in the tree
            self.commit(hold, tokens[: last * self.page_size])
        private = bound & hold.private
        hold.private -= private
        self._allocator.free(private)
        self.tree.unlock(hold.nodes[first:last])
        hold.pages[first:last] = [0] * (last - first)
        hold.num_trimmed = last
        promised = min(hold.num_reserved + len(bound), max(0, hold.num_wanted - len(hold.pages)))
        self.num_reserved += promised - hold.num_reserved
        hold.num_reserved = promised

    def cut(self, hold: Hold, num_pages: int) -> None:
        """Give back the pages from index `num_pages` on, which `bind` can bind anew.

        No pull into them may be running.
        """
        bound = hold.private.intersection(hold.pages[num_pages:])
        hold.private -= bound
        self._allocator.free(bound)
        hold.num_reserved += len(bound)
        self.num_reserved += len(bound)
        del hold.pages[num_pages:]
        hold.num_slots = num_pages * self.page_size

    def forget(self) -> None:
        """Drop from the tree what no hold has matched."""
        self._allocator.free(self.tree.evict(self.tree.num_pages))

    def close(self, hold: Hold) -> None:
        """Give everything back. No pull into its pages may be running.

        If a copy that is queued reads what it holds, that goes when a later step settles.
        """
        if hold.slot and hold.slot in self.snapshots.copies.values():
            self.snapshots.closing.append(hold)
            return
        self.tree.unlock(hold.nodes[hold.num_trimmed :])
        self._allocator.free(hold.private)
        self.snapshots.close(hold)
        if self._slots is not None and hold.slot:
            self._slots.free([hold.slot])
        self.num_reserved -= hold.num_reserved
        self.num_holds -= 1
        hold.nodes, hold.num_reserved, hold.slot = [], 0, 0
        hold.pages, hold.num_slots, hold.private, hold.num_trimmed = [], 0, set(), 0
        waiting, self.snapshots.closing = self.snapshots.closing, []
        for other in waiting:
            self.close(other)
