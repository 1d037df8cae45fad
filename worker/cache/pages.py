"""Which KV pages are free, and which of the free ones may be the target of a pull.

A freed page may still be read or written by a step that is in flight. Compute that reuses it is
ordered behind that step by the device's stream; a pull is not. So a freed page *cools* until the
last step launched before it was freed has settled, and only then may a pull write into it.
"""

from collections import deque
from collections.abc import Iterable

from worker.errors import OutOfPages


class FreeRuns:
    """Free pages as maximal runs of consecutive ids, so that allocations stay contiguous.

    Invariant: runs never touch; `_length[s] == n` iff `_start[s + n] == s`.
    """

    def __init__(self, first: int, count: int) -> None:
        self._length: dict[int, int] = {first: count} if count else {}
        self._start: dict[int, int] = {first + count: first} if count else {}
        self.num_pages = count

    def add(self, page: int) -> None:
        """Give one page back; it joins its neighbours."""
        first, count = page, 1
        if page in self._start:  # a run ends just before it
            first = self._start.pop(page)
            count += self._length.pop(first)
        if page + 1 in self._length:  # a run begins just after it
            count += self._length.pop(page + 1)
        self._length[first] = count
        self._start[first + count] = first
        self.num_pages += 1

    def take(self, count: int) -> list[int]:
        """`count` pages: the shortest run that is long enough, else the longest ones first."""
        assert count <= self.num_pages
        taken: list[int] = []
        while len(taken) < count:
            first, length = self._choose(count - len(taken))
            used = min(length, count - len(taken))
            del self._length[first]
            if used == length:
                del self._start[first + length]
            else:
                self._length[first + used] = length - used
                self._start[first + length] = first + used
            taken.extend(range(first, first + used))
        self.num_pages -= count
        return taken

    def _choose(self, count: int) -> tuple[int, int]:
        if count == 1:  # growth of a running row: any page will do, and it has to be quick
            return next(iter(self._length.items()))
        enough = [run for run in self._length.items() if run[1] >= count]
        if enough:
            return min(enough, key=lambda run: run[1])
        return max(self._length.items(), key=lambda run: run[1])


class PageAllocator:
    """Hands out pages 1 .. num_pages - 1; page 0 is the sink of padded rows.

    Invariant: a page is in exactly one of: settled runs, cooling, handed out.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, "a pool needs the sink and at least one page"
        self.num_pages = num_pages
        self._settled = FreeRuns(1, num_pages - 1)
        self._cooling: deque[tuple[int, int]] = deque()  # (step, page), step ascending
        self._last_launched = 0
        self._last_settled = 0
        # By page, who copies it for a tier; a page that is freed is nobody's.
        self.watched: dict[int, object] = {}

    @property
    def num_free(self) -> int:
        """Free pages, cooling ones included."""
        return self._settled.num_pages + len(self._cooling)

    @property
    def num_pullable(self) -> int:
        """Free pages that a pull may write into now."""
        return self._settled.num_pages

    def launched(self, step: int) -> None:
        """Step numbers ascend; pages freed from now on wait for this one."""
        assert step > self._last_launched
        self._last_launched = step

    def settled(self, step: int) -> None:
        """Step `step` and all before it have finished on the device."""
        assert self._last_settled < step <= self._last_launched
        self._last_settled = step
        while self._cooling and self._cooling[0][0] <= step:
            self._settled.add(self._cooling.popleft()[1])

    def take(self, count: int, *, for_pull: bool) -> list[int]:
        """`count` pages, contiguous where possible; `for_pull`: cooled ones.

        Raises OutOfPages if fewer are free.
        """
        if count > (self.num_pullable if for_pull else self.num_free):
            raise OutOfPages(f"{count} pages wanted, {self.num_pullable} + {len(self._cooling)}")
        if count == 1 and self._cooling and not for_pull:  # growth: leave cooled pages to pulls
            return [self._cooling.popleft()[1]]
        pages = self._settled.take(min(count, self._settled.num_pages))
        while len(pages) < count:
            pages.append(self._cooling.popleft()[1])
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give back pages that `take` has handed out and nobody has freed since."""
        for page in pages:
            assert 0 < page < self.num_pages
            self.watched.pop(page, None)
            if self._last_launched == self._last_settled:
                self._settled.add(page)
            else:
                self._cooling.append((self._last_launched, page))
