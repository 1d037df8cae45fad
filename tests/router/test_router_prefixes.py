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
    prefixes.turned(first, "a/1")
    prefixes.sent(first, "a/1")
    assert prefixes.held(first, "a/1") == 3 * BLOCK
    assert prefixes.held(first, "b/1") == 0
    assert prefixes.num_at == {"a/1": 1}
    prefixes.turned(second, "b/1")
    prefixes.sent(second, "b/1")
    assert prefixes.num_at == {"a/1": 0, "b/1": 1}
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


def test_a_state_is_expected_where_a_prompt_ended_or_branched_off() -> None:
    """Its pages alone spare a worker with recurrent layers nothing."""
    grid, prefixes = 2 * BLOCK, Prefixes()
    first = tuple(range(9 * BLOCK))
    other = (*first[: 7 * BLOCK], *range(1000, 1000 + 5 * BLOCK))
    third = (*first[: 7 * BLOCK], *range(2000, 2000 + 4 * BLOCK))

    def held(tokens: tuple[int, ...]) -> float:
        return prefixes.held(blocks_of(tokens), "a/1", grid)

    prefixes.sent(blocks_of(first), "a/1", grid)
    assert held((*first, 5)) == 8 * BLOCK
    assert held(first[: 8 * BLOCK]) == 8 * BLOCK
    assert held(first[: 7 * BLOCK]) == held(other) == 0
    prefixes.sent(blocks_of(other), "a/1", grid)
    assert held(other) == 12 * BLOCK
    assert held(third) == 6 * BLOCK, "the second text that begins so has left a state there"
    assert prefixes.held(blocks_of(third), "b/1", grid) == 0
    assert prefixes.held(blocks_of(third), "a/1") == 7 * BLOCK
