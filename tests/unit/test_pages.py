"""Pages and the prefix tree, each against a model under random requests.

The book of both: test_decode_scheduler and test_prefill_scheduler.
"""

import random

import pytest

from tests.support.books import check_book
from worker.cache.book import PageBook
from worker.cache.pages import FreeRuns, PageAllocator
from worker.cache.prefix import Key, Node, PrefixTree
from worker.errors import OutOfPages


@pytest.mark.parametrize("seed", range(3))
def test_free_pages_join_to_runs_and_few_pieces_are_taken(seed: int) -> None:
    """The shortest run that suffices, from its start; of none such the longest first."""
    back = [3, 4, *range(10, 14), 20, *range(30, 33)]
    random.Random(seed).shuffle(back)
    for wanted, left in (
        ([3, 4], [30, 31]),
        ([30, 31, 32], [3, 4]),
        ([10, 11, 12, 13], [3, 4]),
        ([10, 11, 12, 13, 3, 4], [30, 31]),
        ([10, 11, 12, 13, 30, 31, 32, 3, 4, 20], []),
    ):
        runs = FreeRuns(1, 40)
        assert runs.take(40) == [*range(1, 41)]
        for page in back:
            runs.add(page)
        assert runs.take(len(wanted)) == wanted
        assert runs.num_pages == len(back) - len(wanted)
        assert runs.take(len(left)) == left


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


SALTS = ("", "a", "b", "")  # no salt is drawn most


class Oracle:
    """Whole-page prefixes, behind their salt if they have one; their pages, locks and last use."""

    def __init__(self) -> None:
        self.pages: dict[Key, int] = {}
        self.used_at: dict[Key, int] = {}
        self.locks: dict[Key, int] = {}
        self.clock = 0

    def prefixes(self, salt: str, tokens: list[int], count: int) -> list[Key]:
        return [(*[salt] * bool(salt), *tokens[: i * SIZE]) for i in range(1, count + 1)]

    def match(self, salt: str, tokens: list[int], max_tokens: int) -> list[Key]:
        found = []
        self.clock += 1
        for prefix in self.prefixes(salt, tokens, max_tokens // SIZE):
            if prefix not in self.pages:
                break
            found.append(prefix)
            self.used_at[prefix] = self.clock
        return found

    def leaves(self) -> set[Key]:
        inner = {prefix[:-SIZE] for prefix in self.pages}
        return {p for p in self.pages if p not in inner and not self.locks.get(p)}

    def evictable(self) -> int:
        return sum(not self.locks.get(prefix) for prefix in self.pages)


def all_nodes(tree: PrefixTree) -> list[tuple[Key, Node]]:
    found, todo = [], [((), tree.root)]
    while todo:
        prefix, node = todo.pop()
        for key, child in node.children.items():
            assert child.parent is node
            assert child.key == key
            assert len(key) == tree.page_size + isinstance(key[0], str)
            found.append((prefix + key, child))
            todo.append((prefix + key, child))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_tree_agrees_with_a_dictionary_of_prefixes(seed: int) -> None:
    rnd = random.Random(seed)
    tree, oracle = PrefixTree(SIZE), Oracle()
    locked: list[tuple[Node, list[Key]]] = []
    next_page, num_evicted, num_duplicates = 1, 0, 0
    for turn in range(10_000):
        salt, tokens = rnd.choice(SALTS), [rnd.randrange(2) for _ in range(rnd.randint(0, 14))]
        action = rnd.random()
        if action < 0.35:
            max_tokens = rnd.randint(0, len(tokens))
            node = tree.match(tokens, max_tokens, salt)
            found = oracle.match(salt, tokens, max_tokens)
            assert [each.page for each in node.path()] == [oracle.pages[p] for p in found]
            if rnd.random() < 0.4:
                tree.lock(node.path())
                locked.append((node, found))
                for prefix in found:
                    oracle.locks[prefix] = oracle.locks.get(prefix, 0) + 1
        elif action < 0.6:
            count = rnd.randint(0, len(tokens) // SIZE)
            prefixes = oracle.prefixes(salt, tokens, count)
            pages = []
            for prefix in prefixes:  # as a request would: some matched pages, then its own
                page = oracle.pages.get(prefix)
                if page is None or rnd.random() < 0.3:
                    page, next_page = next_page, next_page + 1
                pages.append(page)
            node, *not_kept = tree.insert(tokens, pages, salt)
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
    assert num_duplicates > 50
    for node, _ in locked:
        tree.unlock(node.path())
    num = tree.num_pages
    assert len(set(tree.evict(num + 1))) == num
    assert not tree.root.children, "nothing is left of a salt that nobody uses"


def test_a_hot_prefix_does_not_make_the_eviction_queue_grow() -> None:
    tree = PrefixTree(1)
    tree.insert([1, 2, 3], [1, 2, 3])
    for _ in range(1_000):
        node = tree.match([1, 2, 3], 3)
        tree.lock(node.path())
        tree.unlock(node.path())
    assert len(tree._queue) <= 10, "one entry for each request that ever came"


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
