"""The prefix tree against a dictionary of prefixes."""

import random

import pytest

from worker.cache.prefix import Node, PrefixTree

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
            assert len(key) == SIZE
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
                tree.lock(node)
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
            tree.unlock(node)
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
        tree.lock(node)
        tree.unlock(node)
    assert len(tree._leaves) <= 10, "one entry for each request that ever came"
