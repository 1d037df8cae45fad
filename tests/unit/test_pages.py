"""Pages, the prefix tree and the book of both, each against a model under random requests."""

import random

import pytest

from tests.support.books import check_book
from worker.cache.book import Hold, PageBook
from worker.cache.pages import FreeRuns, PageAllocator
from worker.cache.prefix import Node, PrefixTree
from worker.errors import OutOfPages


def runs_of(pages: set[int]) -> dict[int, int]:
    """Maximal runs of consecutive ids: first page -> length."""
    return {
        first: next(n for n in range(1, len(pages) + 2) if first + n not in pages)
        for first in pages
        if first - 1 not in pages
    }


@pytest.mark.parametrize("seed", range(3))
def test_runs_stay_maximal_and_the_choice_contiguous(seed: int) -> None:
    rnd = random.Random(seed)
    free, runs = set(range(1, 41)), FreeRuns(1, 40)
    held: list[int] = []
    split = whole = 0
    for _ in range(10_000):
        if free and rnd.random() < 0.4:
            count = rnd.randint(1, min(len(free), 9))
            lengths = runs_of(free)
            pages = runs.take(count)
            assert len(set(pages)) == len(pages) == count
            assert set(pages) <= free
            enough = [n for n in lengths.values() if n >= count]
            if enough and count > 1:  # the shortest run that suffices, from its start
                whole += 1
                assert pages == list(range(pages[0], pages[0] + count))
                assert lengths[pages[0]] == min(enough)
            elif count > 1:  # no more pieces than the longest runs need
                split += 1
                pieces = len(runs_of(set(pages)))
                longest, need = sorted(lengths.values(), reverse=True), 0
                while sum(longest[:need]) < count:
                    need += 1
                assert pieces <= need
            free -= set(pages)
            held += pages
        elif held:
            page = held.pop(rnd.randrange(len(held)))
            runs.add(page)
            free.add(page)
        assert runs.num_pages == len(free)
    assert split > 50
    assert whole > 50


class Model:
    """What the allocator must do, by sets and a step number for each freed page."""

    def __init__(self, num_pages: int) -> None:
        self.held: set[int] = set()
        self.freed_at: dict[int, int] = {page: 0 for page in range(1, num_pages)}
        self.launched = self.settled = 0

    @property
    def cooled(self) -> set[int]:
        return {page for page, step in self.freed_at.items() if step <= self.settled}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_no_page_is_in_two_places_and_none_is_pulled_to_while_it_cools(seed, depth) -> None:
    rnd = random.Random(f"{seed} {depth}")
    num_pages = rnd.choice((8, 33, 64))
    pages, model = PageAllocator(num_pages), Model(num_pages)
    refused_pulls = reused_while_cooling = 0
    for _ in range(10_000):
        action = rnd.random()
        if action < 0.25 and model.launched - model.settled < depth:
            model.launched += rnd.randint(1, 2)
            pages.launched(model.launched)
        elif action < 0.45 and model.settled < model.launched:
            model.settled = rnd.randint(model.settled + 1, model.launched)
            pages.settled(model.settled)
        elif action < 0.75:
            count, for_pull = rnd.randint(0, num_pages // 2), rnd.random() < 0.5
            allowed = model.cooled if for_pull else set(model.freed_at)
            cooling = set(model.freed_at) - model.cooled
            if count > len(allowed):
                with pytest.raises(OutOfPages):
                    pages.take(count, for_pull=for_pull)
                refused_pulls += for_pull and count <= len(model.freed_at)
            else:
                taken = pages.take(count, for_pull=for_pull)
                assert len(set(taken)) == len(taken) == count
                assert set(taken) <= allowed
                reused_while_cooling += len(set(taken) & cooling)
                model.held |= set(taken)
                for page in taken:
                    del model.freed_at[page]
        elif model.held:
            count = rnd.randint(1, len(model.held))
            given = rnd.sample(sorted(model.held), count)
            pages.free(given)
            model.held -= set(given)
            model.freed_at |= dict.fromkeys(given, model.launched)
        assert pages.num_free == len(model.freed_at)
        assert pages.num_pullable == len(model.cooled)
        assert pages.num_free + len(model.held) == num_pages - 1
    assert refused_pulls > 20
    assert reused_while_cooling > 20


SIZE = 3


class Oracle:
    """Whole-page prefixes, their pages, locks and last use."""

    def __init__(self) -> None:
        self.pages: dict[tuple[int, ...], int] = {}
        self.used_at: dict[tuple[int, ...], int] = {}
        self.locks: dict[tuple[int, ...], int] = {}
        self.clock = 0

    def prefixes(self, tokens: list[int], count: int) -> list[tuple[int, ...]]:
        return [tuple(tokens[: i * SIZE]) for i in range(1, count + 1)]

    def match(self, tokens: list[int], max_tokens: int) -> list[tuple[int, ...]]:
        found = []
        self.clock += 1
        for prefix in self.prefixes(tokens, max_tokens // SIZE):
            if prefix not in self.pages:
                break
            found.append(prefix)
            self.used_at[prefix] = self.clock
        return found

    def leaves(self) -> set[tuple[int, ...]]:
        inner = {prefix[:-SIZE] for prefix in self.pages}
        return {p for p in self.pages if p not in inner and not self.locks.get(p)}

    def evictable(self) -> int:
        return sum(not self.locks.get(prefix) for prefix in self.pages)


def all_nodes(tree: PrefixTree) -> list[tuple[tuple[int, ...], Node]]:
    found, todo = [], [((), tree.root)]
    while todo:
        prefix, node = todo.pop()
        for key, child in node.children.items():
            assert child.parent is node
            assert child.key == key
            assert len(key) == tree.page_size
            found.append((prefix + key, child))
            todo.append((prefix + key, child))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_tree_agrees_with_a_dictionary_of_prefixes(seed: int) -> None:
    rnd = random.Random(seed)
    tree, oracle = PrefixTree(SIZE), Oracle()
    locked: list[tuple[Node, list[tuple[int, ...]]]] = []
    next_page, num_evicted, num_duplicates = 1, 0, 0
    for turn in range(10_000):
        tokens = [rnd.randrange(2) for _ in range(rnd.randint(0, 14))]
        action = rnd.random()
        if action < 0.35:
            max_tokens = rnd.randint(0, len(tokens))
            node = tree.match(tokens, max_tokens)
            found = oracle.match(tokens, max_tokens)
            assert [each.page for each in node.path()] == [oracle.pages[p] for p in found]
            if rnd.random() < 0.4:
                tree.lock(node.path())
                locked.append((node, found))
                for prefix in found:
                    oracle.locks[prefix] = oracle.locks.get(prefix, 0) + 1
        elif action < 0.6:
            count = rnd.randint(0, len(tokens) // SIZE)
            prefixes = oracle.prefixes(tokens, count)
            pages = []
            for prefix in prefixes:  # as a request would: some matched pages, then its own
                page = oracle.pages.get(prefix)
                if page is None or rnd.random() < 0.3:
                    page, next_page = next_page, next_page + 1
                pages.append(page)
            node, *not_kept = tree.insert(tokens, pages)
            oracle.clock += 1
            known = dict(all_nodes(tree))
            given_back = {page for some in not_kept for page in some}
            for prefix, page in zip(prefixes, pages, strict=True):
                here = known[prefix].page
                before = oracle.pages.get(prefix)
                assert here in (page, before)
                assert before is None or here == before or not oracle.locks.get(prefix)
                if before is not None and before != page:  # exactly one of the two is left over
                    num_duplicates += 1
                    assert ({page, before} - {here}) <= given_back
                assert here not in given_back
                oracle.pages[prefix] = here
                oracle.used_at[prefix] = oracle.clock
            assert not not_kept or not_kept[0] == [p for p in not_kept[0] if p in pages]
            assert [each.page for each in node.path()] == [oracle.pages[p] for p in prefixes]
        elif action < 0.8 and locked:
            node, found = locked.pop(rnd.randrange(len(locked)))
            tree.unlock(node.path())
            for prefix in found:
                oracle.locks[prefix] -= 1
        elif action > 0.9:
            want = rnd.randint(0, 6)
            expected = []
            while len(expected) < want and oracle.leaves():
                oldest = min(oracle.used_at[prefix] for prefix in oracle.leaves())
                ties = [p for p in oracle.leaves() if oracle.used_at[p] == oldest]
                assert len(ties) == 1, "one path is used at a time"
                expected.append(oracle.pages.pop(ties[0]))
            assert tree.evict(want) == expected
            num_evicted += len(expected)
        nodes = all_nodes(tree)
        assert {prefix: node.page for prefix, node in nodes} == oracle.pages
        assert tree.num_pages == len(oracle.pages)
        assert tree.num_evictable == oracle.evictable()
        assert all(node.num_locks == oracle.locks.get(p, 0) for p, node in nodes), turn
    assert num_evicted > 100
    assert num_duplicates > 100


def test_a_hot_prefix_does_not_make_the_eviction_queue_grow() -> None:
    tree = PrefixTree(1)
    tree.insert([1, 2, 3], [1, 2, 3])
    for _ in range(1_000):
        node = tree.match([1, 2, 3], 3)
        tree.lock(node.path())
        tree.unlock(node.path())
    assert len(tree._queue) <= 10, "one entry for each request that ever came"


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
        nodes = all_nodes(self.book.tree)
        found = {node.page: prefix for prefix, node in nodes}
        assert len(found) == len(nodes)
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
        assert len(private) == len(set(private))
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
def test_pages_balance_and_promises_are_kept(seed, num_pages, page_size, prefix_cache) -> None:
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
    book.bind(first, 1)
    book.bind(second, 1)
    book.commit(first, [1])
    book.close(first)
    third = book.open([9, 9], 2, max_matched=1)  # the free page, and the one that may be evicted
    book.commit(second, [1])
    check_book(book, [second, third])
    assert len(book.bind(third, 2)) == 2
