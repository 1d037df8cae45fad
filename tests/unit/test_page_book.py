"""Pages, tree and reservations together: random requests against a model of who holds what."""

import random

import pytest

from tests.support.books import check_book
from worker.cache.book import Hold, PageBook
from worker.errors import OutOfPages


class Requests:
    """Random requests on one book. Tokens come from {0, 1}, so that prefixes often meet."""

    def __init__(self, seed: int, *, num_pages: int, page_size: int, prefix_cache: bool) -> None:
        self.random = random.Random(seed)
        self.book = PageBook(num_pages, page_size, prefix_cache=prefix_cache)
        self.page_size = page_size
        self.open: list[tuple[Hold, list[int], list[int]]] = []  # hold, tokens, [computed]
        self.content: dict[int, tuple[int, ...]] = {}  # page -> tokens that lead to it, if final
        self.freed_at: dict[int, int] = {}
        self.launched = self.settled = 0
        self.num_waits = self.num_shared = self.num_refused = 0

    def in_tree(self) -> dict[int, tuple[int, ...]]:
        found, todo = {}, [((), self.book.tree.root)]
        while todo:
            prefix, node = todo.pop()
            for key, child in node.children.items():
                assert child.page not in found
                found[child.page] = prefix + key
                todo.append((prefix + key, child))
        return found

    def turn(self) -> None:
        rnd = self.random
        before = self.owned()
        action = rnd.random()
        if action < 0.15 and self.launched - self.settled < 2:
            self.launched += 1
            self.book.launched(self.launched)
        elif action < 0.3 and self.settled < self.launched:
            self.settled += 1
            self.book.settled(self.settled)
        elif action < 0.5:
            self.enter()
        elif action < 0.8 and self.open:
            self.grow(*rnd.choice(self.open))
        elif action < 0.9 and self.open:
            self.compute(*rnd.choice(self.open))
        elif self.open:
            hold, tokens, computed = self.open.pop(rnd.randrange(len(self.open)))
            if rnd.random() < 0.7:
                self.book.commit(hold, tokens[: computed[0]])
            self.book.close(hold)
        after = self.owned()
        for page in before - after:
            self.freed_at[page] = self.launched
        self.check()

    def owned(self) -> set[int]:
        """Pages of holds and of the tree."""
        return {page for hold, *_ in self.open for page in hold.private} | set(self.in_tree())

    def enter(self) -> None:
        rnd = self.random
        tokens = [rnd.randrange(2) for _ in range(rnd.randint(1, 5 * self.page_size))]
        num_slots = len(tokens) + rnd.randint(0, 8)
        max_matched = len(tokens) - 1
        figures = self.figures()
        hold = self.book.open(tokens, num_slots, max_matched=max_matched)
        if hold is None:
            self.num_refused += 1
            assert self.figures() == figures
            return
        assert hold.num_matched <= max_matched
        assert hold.num_matched == len(hold.pages) * self.page_size
        assert len(hold.pages) + hold.num_reserved >= self.book.num_pages_for(num_slots)
        for index, page in enumerate(hold.pages):
            assert self.in_tree()[page] == tuple(tokens[: (index + 1) * self.page_size])
        self.num_shared += bool(hold.pages)
        self.open.append((hold, tokens, [hold.num_matched]))

    def figures(self) -> tuple[int, ...]:
        book = self.book
        return book.num_available, book.num_reserved, book.num_holds, book.num_private

    def grow(self, hold: Hold, tokens: list[int], computed: list[int]) -> None:
        rnd, book = self.random, self.book
        num_slots = rnd.randint(0, len(tokens) + 10)
        count = max(0, book.num_pages_for(num_slots) - len(hold.pages))
        promised = count <= hold.num_reserved
        room = count - min(count, hold.num_reserved) <= book.num_available
        for_pull = rnd.random() < 0.4
        in_tree = set(self.in_tree())
        in_use = {page for each, *_ in self.open for page in each.pages}
        state = list(hold.pages), set(hold.private), hold.num_reserved
        try:
            pages = book.bind(hold, num_slots, for_pull=for_pull)
        except OutOfPages:
            self.num_waits += 1
            assert for_pull or not promised, "a reserved page was not there"
            assert for_pull or not room
            assert not room or self.launched > self.settled, "nothing is in flight"
            assert (hold.pages, hold.private, hold.num_reserved) == state
            return
        assert room
        assert len(pages) == count == len(set(pages))
        assert hold.pages == state[0] + pages
        assert not set(pages) & in_use, "a page of a request was given away"
        for page in pages:
            freed_at = self.launched if page in in_tree else self.freed_at.get(page, 0)
            if for_pull:
                assert freed_at <= self.settled, "a pull into a page that a step may still write"

    def compute(self, hold: Hold, tokens: list[int], computed: list[int]) -> None:
        most = min(len(tokens), len(hold.pages) * self.page_size)
        computed[0] = self.random.randint(computed[0], max(computed[0], most))
        pages = list(hold.pages)
        self.book.commit(hold, tokens[: computed[0]])
        assert hold.pages == pages, "tables of running rows are never rewritten"
        tree = self.in_tree()
        for index in range(computed[0] // self.page_size):
            prefix = tuple(tokens[: (index + 1) * self.page_size])
            if self.book._prefix_cache:
                assert prefix in tree.values()
            assert tree.get(hold.pages[index], prefix) == prefix

    def check(self) -> None:
        book = self.book
        tree = self.in_tree()
        check_book(book, [hold for hold, *_ in self.open])
        private = [page for hold, *_ in self.open for page in hold.private]
        assert not set(private) & set(tree)
        assert 0 not in tree
        assert 0 not in private
        assert (len(private), len(tree)) == (book.num_private, book.tree.num_pages)
        for hold, *_ in self.open:
            assert len(set(hold.pages)) == len(hold.pages)
            assert set(hold.pages) <= hold.private | set(tree), "a page was taken from a request"
        assert book.num_available >= 0, "more was promised than there is"


CASES = [
    (0, 12, 2, True), (1, 20, 3, True), (2, 40, 1, True), (3, 16, 4, True), (4, 12, 2, False),
]  # fmt: skip


@pytest.mark.parametrize(("seed", "num_pages", "page_size", "prefix_cache"), CASES)
def test_pages_balance_and_promises_are_kept(
    seed: int, num_pages: int, page_size: int, prefix_cache: bool
) -> None:
    requests = Requests(seed, num_pages=num_pages, page_size=page_size, prefix_cache=prefix_cache)
    for _ in range(10_000):
        requests.turn()
    assert requests.num_waits > 20
    assert requests.num_refused > 20
    assert requests.num_shared > 20 or not prefix_cache
    while requests.open:
        hold, *_ = requests.open.pop()
        requests.book.close(hold)
        requests.check()
    book = requests.book
    assert (book.num_holds, book.num_reserved, book.num_private) == (0, 0, 0)
    assert book.num_available == book.num_pages


def test_committing_a_prefix_that_another_request_left_keeps_promises() -> None:
    """The tree's copy was promised to a third request; locking it must not break that promise."""
    book = PageBook(4, 1)
    first = book.open([1, 2], 1, max_matched=1)
    second = book.open([1, 2], 1, max_matched=1)
    assert first is not None
    assert second is not None
    book.bind(first, 1)
    book.bind(second, 1)
    book.commit(first, [1])
    book.close(first)
    third = book.open([9, 9], 2, max_matched=1)  # the free page, and the one that may be evicted
    assert third is not None
    book.commit(second, [1])
    check_book(book, [second, third])
    assert len(book.bind(third, 2)) == 2


def test_an_evicted_page_cools_like_any_other() -> None:
    book = PageBook(3, 1)
    first = book.open([1, 2], 2, max_matched=1)
    assert first is not None
    book.bind(first, 2)
    book.launched(1)  # reads both pages
    book.commit(first, [1, 2])
    book.close(first)
    second = book.open([3, 4], 2, max_matched=1)
    assert second is not None
    with pytest.raises(OutOfPages):
        book.bind(second, 2, for_pull=True)
    book.settled(1)
    assert len(book.bind(second, 2, for_pull=True)) == 2


def test_growth_beyond_the_reservation_never_takes_what_others_were_promised() -> None:
    book = PageBook(5, 1)
    small = book.open([1], 1, max_matched=0)
    large = book.open([2], 3, max_matched=0)
    assert small is not None
    assert large is not None
    assert len(book.bind(small, 1)) == 1
    with pytest.raises(OutOfPages):
        book.bind(small, 2)
    assert len(book.bind(large, 3)) == 3


def test_a_full_pool_refuses_and_changes_nothing() -> None:
    book = PageBook(4, 2)
    assert book.open(range(8), 8, max_matched=7) is None
    assert (book.num_available, book.num_holds) == (3, 0)
