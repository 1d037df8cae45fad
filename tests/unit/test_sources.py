"""One rank's pulls from the ranks of a peer: every byte, for every pair of sizes."""

import random

import msgspec
import numpy as np
import pytest

from tests.support.pulls import FAILED, OK, ended
from tests.support.ranks import NUM_GROUPS, Ranks, content, memory, model_layout, share
from worker.errors import Incompatible

OURS, THEIRS = 9, 12  # pages
SIZES = (1, 2, 4, 8)


def random_pairs(rng: random.Random) -> list[tuple[int, int]]:
    """Pages of both sides, among them some that follow each other on both."""
    local = rng.sample(range(1, OURS), 6)
    remote = rng.sample(range(1, THEIRS), 6)
    begin, there = rng.randrange(1, OURS - 2), rng.randrange(1, THEIRS - 2)
    pairs = [(begin + i, there + i) for i in range(2)]
    pairs += [each for each in zip(local, remote, strict=True) if each[0] not in (begin, begin + 1)]
    return pairs


@pytest.mark.parametrize("num_kv_heads", SIZES)
@pytest.mark.parametrize("remote_tp", SIZES)
@pytest.mark.parametrize("local_tp", SIZES)
def test_every_rank_gets_exactly_its_bytes(local_tp, remote_tp, num_kv_heads) -> None:
    """In any order of groups, of all three regions; no other byte of its pool changes."""
    rng = random.Random(f"{local_tp} {remote_tp} {num_kv_heads}")
    layout = model_layout(num_kv_heads, draft_heads=rng.choice((1, 2, 4)))
    theirs, before = content(layout, THEIRS, 1), content(layout, OURS, 2)
    prefill, decode = Ranks(layout, remote_tp, theirs), Ranks(layout, local_tp, before)
    pairs = random_pairs(rng)
    here, there = (list(pages) for pages in zip(*pairs, strict=True))
    for rank, pool in enumerate(decode.pools):
        sources = decode.local(rank).connect(prefill.member)
        expected = share(before, local_tp, rank)
        wanted, num_bytes = share(theirs, local_tp, rank), 0
        for group in rng.sample(range(NUM_GROUPS), NUM_GROUPS):
            cut = rng.randrange(len(pairs) + 1)
            pulls = [
                sources.pull(part, range(group, group + 1)) for part in (pairs[cut:], pairs[:cut])
            ]
            assert [ended(pull) for pull in pulls] == [OK, OK]
            num_bytes += sum(pull.num_bytes for pull in pulls)
            expected[0][group, here] = wanted[0][group, there]
            if group == NUM_GROUPS - 1:
                for region in (1, 2):
                    expected[region][:, here] = wanted[region][:, there]
            for held, right in zip(memory(pool), expected, strict=True):
                assert np.array_equal(held, right), (rank, group)
        assert num_bytes == len(pairs) * pool.layout.page_bytes, "a head came twice"
        sources.close()
    prefill.close()
    decode.close()


@pytest.mark.parametrize("remote", [-1, THEIRS, 2**40])
def test_a_page_that_the_peer_does_not_have_fails_the_pull(remote: int) -> None:
    """Who announces it has gone bad: nothing is read, and nothing raised."""
    layout = model_layout(4)
    ours = content(layout, OURS, 2)
    prefill, decode = Ranks(layout, 2, content(layout, THEIRS, 1)), Ranks(layout, 1, ours)
    sources = decode.local(0).connect(prefill.member)
    pull = sources.pull([(2, 3), (3, remote)])
    assert (pull.poll(), pull.error) == (FAILED, "the peer has no such page or slot")
    for held, old in zip(memory(decode.pools[0]), ours, strict=True):
        assert np.array_equal(held, old)
    sources.close()
    prefill.close()
    decode.close()


@pytest.mark.parametrize(
    ("endpoints", "reason"),
    [
        (lambda ends: ends[:3], "has 3 ranks: 4 kv heads cannot be shared"),
        (lambda ends: (), "does not say how to reach it"),
        # Two ranks of four heads say that they are two of two: they hold half of what they should.
        (lambda ends: ends[:2], "not the same number of pages"),
        (lambda ends: (*ends[:3], b"?"), "rank 3"),
    ],
)
def test_peers_that_no_rank_can_pull_from_are_incompatible(endpoints, reason) -> None:
    layout = model_layout(4)
    prefill, decode = (Ranks(layout, tp, content(layout, OURS, 1)) for tp in (4, 1))
    changed = msgspec.structs.replace(prefill.member, endpoints=endpoints(prefill.member.endpoints))
    with pytest.raises(Incompatible, match=reason):
        decode.local(0).connect(changed)
    prefill.close()
    decode.close()
