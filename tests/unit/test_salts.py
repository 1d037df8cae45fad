"""Prompts of different salts share nothing, wherever something is kept of them."""

import random

import pytest

from router.openai.schema import Salted
from router.text import encoder
from tests.support.tokenizer_kinds import START, made
from worker.cache.prefix import Node, PrefixTree

SIZE = 3
SALTS = ("", "a", "b", "")  # no salt is drawn most


def path(node: Node) -> list[int]:
    return [each.page for each in node.path()]


@pytest.mark.parametrize("seed", range(3))
def test_a_tree_with_salts_is_as_many_trees(seed: int) -> None:
    """By what is matched, inserted, refused and displaced; those without one are a tree as ever."""
    rnd = random.Random(seed)
    tree, alone = PrefixTree(SIZE), {salt: PrefixTree(SIZE) for salt in SALTS}
    locked: list[tuple[str, Node, Node]] = []
    next_page, num_matched = 1, 0
    for _ in range(5_000):
        salt, tokens = rnd.choice(SALTS), [rnd.randrange(2) for _ in range(rnd.randint(0, 14))]
        own, action = alone[salt], rnd.random()
        if action < 0.5:
            most = rnd.randint(0, len(tokens))
            found, wanted = tree.match(tokens, most, salt), own.match(tokens, most)
            assert path(found) == path(wanted)
            num_matched += len(path(found))
            if rnd.random() < 0.3:
                tree.lock(found.path())
                own.lock(wanted.path())
                locked.append((salt, found, wanted))
        elif action < 0.8:
            pages = list(range(next_page, next_page + len(tokens) // SIZE))
            next_page += len(pages)
            node, *left = tree.insert(tokens, pages, salt)
            other, *wanted_left = own.insert(tokens, pages)
            assert (path(node), left) == (path(other), wanted_left)
        elif locked:
            of, node, other = locked.pop(rnd.randrange(len(locked)))
            tree.unlock(node.path())
            alone[of].unlock(other.path())
        assert tree.num_pages == sum(each.num_pages for each in alone.values())
        assert tree.num_evictable == sum(each.num_evictable for each in alone.values())
    assert num_matched > 1_000
    for _, node, _ in locked:
        tree.unlock(node.path())
    num = tree.num_pages
    assert len(set(tree.evict(num + 1))) == num
    assert not tree.root.children, "nothing is left of a salt that nobody uses"


def test_a_piece_that_was_encoded_for_one_salt_is_not_known_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoder, "MIN_CHARS", 1)
    monkeypatch.setattr(encoder, "PIECE_CHARS", 1)
    tokenizer, known = made("bytes")
    text = f"{START}the cat{START}sat on mats"
    wanted = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
    for salt in ("", "a", "b"):
        for times in (0, 1):
            before = known.num_known
            assert known.encode(text, add_special_tokens=False, salt=salt) == wanted
            assert known.num_known - before == times * len(text), salt


def test_a_salt_is_a_digest_of_the_key_and_the_body() -> None:
    asked = (None, "a", "b", "a/b", "0" * 32)
    salts = [
        Salted(cache_salt=each).salt(own) for own in ("", "0" * 32, "1" * 32) for each in asked
    ]
    assert salts[0] == ""
    assert len(set(salts)) == len(salts)
    assert {len(salt) for salt in salts[1:]} == {32}
    assert salts[1] == Salted(cache_salt="a").salt("")
