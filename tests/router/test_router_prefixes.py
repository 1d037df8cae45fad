"""The estimate of which worker holds which prompt."""

from router.dispatch.prefixes import BLOCK, Prefixes, blocks_of


def test_blocks_tell_whole_beginnings() -> None:
    tokens = tuple(range(3 * BLOCK + 5))
    blocks = blocks_of(tokens)
    assert len(blocks) == 3
    assert blocks_of((*tokens[: 2 * BLOCK], *tokens[:BLOCK]))[:2] == blocks[:2]
    assert blocks_of(tokens[1:])[0] != blocks[0]
    assert blocks_of(tokens[BLOCK:])[0] != blocks[1], "the same tokens elsewhere are another block"
    assert blocks_of(tokens[: BLOCK - 1]) == []


def test_what_was_sent_is_held_and_the_oldest_is_forgotten_from_its_end() -> None:
    prefixes = Prefixes(capacity=4)
    first, second = blocks_of(range(3 * BLOCK)), blocks_of(range(1000, 1000 + 2 * BLOCK))
    prefixes.sent(first, "a/1")
    assert prefixes.held(first, "a/1") == 3 * BLOCK
    assert prefixes.held(first, "b/1") == 0
    prefixes.sent(second, "b/1")
    assert prefixes.held(first, "a/1") == 2 * BLOCK
    assert prefixes.held(second, "b/1") == 2 * BLOCK


def test_trust_follows_reports_down_and_up_again() -> None:
    prefixes, blocks = Prefixes(), blocks_of(range(4 * BLOCK))
    prefixes.sent(blocks, "a/1")
    whole = prefixes.held(blocks, "a/1")
    for _ in range(20):
        prefixes.found("a/1", prefixes.held(blocks, "a/1"), 0)
    low = prefixes.held(blocks, "a/1")
    assert low < whole / 20
    for _ in range(40):
        prefixes.found("a/1", prefixes.held(blocks, "a/1"), 4 * BLOCK)
    assert prefixes.held(blocks, "a/1") > 0.9 * whole
