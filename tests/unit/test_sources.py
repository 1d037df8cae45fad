"""One rank's pulls from the ranks of a peer: every byte, every pair of sizes, and what may fail."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from tests.support.patience import HANG_S
from tests.support.ranks import NUM_GROUPS, Ranks, content, memory, model_layout, share
from worker.errors import Incompatible, Unreachable
from worker.transfer.base import Endpoint, Pull, PullState
from worker.transfer.sources import JoinedPull, LocalRank

OURS, THEIRS = 9, 12  # pages
SIZES = (1, 2, 4, 8)
OK, FAILED, RUNNING = PullState.OK, PullState.FAILED, PullState.RUNNING


def to_its_end(pull: Pull) -> PullState:
    limit = time.monotonic() + HANG_S
    while (state := pull.poll()) is RUNNING:
        assert time.monotonic() < limit, "hangs"
    return state


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
def test_every_rank_gets_exactly_its_bytes(
    local_tp: int, remote_tp: int, num_kv_heads: int
) -> None:
    """In any order of groups, of all three regions; no other byte of its pool changes."""
    rng = random.Random(f"{local_tp} {remote_tp} {num_kv_heads}")
    layout = model_layout(num_kv_heads)
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
            assert [to_its_end(pull) for pull in pulls] == [OK, OK]
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


def test_all_groups_at_once() -> None:
    layout = model_layout(4)
    theirs = content(layout, THEIRS, 1)
    prefill, decode = Ranks(layout, 4, theirs), Ranks(layout, 2, content(layout, OURS, 2))
    sources = decode.local(1).connect(prefill.member)
    pull = sources.pull([(2, 3)])
    assert to_its_end(pull) is OK
    assert pull.num_bytes == decode.pools[1].layout.page_bytes
    for held, right in zip(memory(decode.pools[1]), share(theirs, 2, 1), strict=True):
        assert np.array_equal(held[:, 2], right[:, 3])
    assert to_its_end(sources.pull([], range(NUM_GROUPS))) is OK
    assert to_its_end(sources.pull([(1, 1)], range(2, 2))) is OK
    sources.close()
    sources.close()
    with pytest.raises(AssertionError, match="closed peer"):
        sources.pull([(2, 3)])
    prefill.close()
    decode.close()


def test_sources_are_measured_on_page_0() -> None:
    layout = model_layout(4)
    theirs, ours = content(layout, THEIRS, 1), content(layout, OURS, 2)
    prefill, decode = Ranks(layout, 4, theirs), Ranks(layout, 1, ours)
    sources = decode.local(0).connect(prefill.member)
    assert sources.page_s() > 0
    assert sources.small_pull_s() > 0
    for held, old, new in zip(memory(decode.pools[0]), ours, theirs, strict=True):
        assert np.array_equal(held[:, 1:], old[:, 1:])
        assert np.array_equal(held[:, 0], new[:, 0])
    sources.close()
    prefill.close()
    decode.close()


class Scripted:
    """A transport and its peers: who answers, and what has been closed."""

    def __init__(self, unreachable: int = -1) -> None:
        self.unreachable = unreachable
        self.open: list[str] = []

    def connect(self, endpoint: Endpoint, timeout_s: float) -> object:
        if len(self.open) == self.unreachable:
            raise Unreachable(f"{endpoint.name} is gone")
        self.open.append(endpoint.name)
        return SimpleNamespace(
            close=lambda: self.open.remove(endpoint.name),
            pull=lambda _: SimpleNamespace(
                poll=lambda: FAILED, cancel=lambda: None, error="gone", num_bytes=1
            ),
        )


def answers(prefill: Ranks, change: Sequence[bytes] | None, transport: Scripted) -> Exception:
    """Why a single rank cannot connect to `prefill`, whose endpoints are changed."""
    member = prefill.member
    if change is not None:
        member = msgspec.structs.replace(member, endpoints=tuple(change))
    local = LocalRank(cast("Any", transport), prefill.layout, OURS, 1.0)
    with pytest.raises((Incompatible, Unreachable)) as caught:
        local.connect(member)
    return caught.value


def test_peers_that_no_rank_can_pull_from_are_not_contacted() -> None:
    layout = model_layout(4)
    prefill = Ranks(layout, 4, content(layout, THEIRS, 1))
    ends, transport = prefill.member.endpoints, Scripted()
    error = answers(prefill, ends[:3], transport)
    assert isinstance(error, Incompatible)
    assert "has 3 ranks: 4 kv heads cannot be shared" in str(error)
    assert isinstance(answers(prefill, (), transport), Incompatible)
    # Two ranks of four heads say that they are two of two: they hold half of what they should.
    assert "not the same number of pages" in str(answers(prefill, ends[:2], transport))
    error = answers(prefill, (*ends[:3], b"?"), transport)
    assert isinstance(error, Incompatible)
    assert "rank 3" in str(error)
    assert not transport.open
    prefill.close()


def test_connections_are_closed_when_one_rank_cannot_be_reached() -> None:
    layout = model_layout(4)
    prefill = Ranks(layout, 4, content(layout, THEIRS, 1))
    transport = Scripted(unreachable=3)
    assert isinstance(answers(prefill, None, transport), Unreachable)
    assert not transport.open
    transport.unreachable = -1
    sources = LocalRank(cast("Any", transport), layout, OURS, 1.0).connect(prefill.member)
    assert len(transport.open) == 4
    with pytest.raises(Unreachable, match="gone"):
        sources.page_s()
    assert not transport.open
    prefill.close()


class Part:
    """A pull whose states the test chooses."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.state = num_bytes, RUNNING
        self.error: str | None = None
        self.num_cancels = 0

    def poll(self) -> PullState:
        return self.state

    def cancel(self) -> None:
        self.num_cancels += 1

    def fail(self, error: str) -> None:
        self.state, self.error = FAILED, error


def test_a_joined_pull_is_over_when_all_its_parts_are() -> None:
    for order in itertools.permutations(range(3)):
        parts = [Part(1), Part(10), Part(100)]
        pull = JoinedPull(parts)
        assert pull.num_bytes == 111
        for number in order:
            assert pull.poll() is RUNNING
            parts[number].state = OK
        assert pull.poll() is OK
        assert pull.error is None
        pull.cancel()
        assert pull.poll() is OK
        assert not sum(part.num_cancels for part in parts)


def test_a_joined_pull_that_fails_runs_until_no_part_does() -> None:
    parts = [Part(1), Part(1), Part(1)]
    pull = JoinedPull(parts)
    parts[0].state = OK
    parts[1].fail("it broke")
    for _ in range(3):
        assert pull.poll() is RUNNING
        assert pull.error is None
    assert [part.num_cancels for part in parts] == [0, 0, 1]
    parts[2].fail("cancelled")
    assert pull.poll() is FAILED
    assert pull.error == "it broke"


def test_a_joined_pull_that_is_cancelled_cancels_what_runs() -> None:
    parts = [Part(1), Part(1)]
    pull = JoinedPull(parts)
    parts[0].state = OK
    assert pull.poll() is RUNNING
    pull.cancel()
    assert [part.num_cancels for part in parts] == [0, 1]
    assert pull.poll() is RUNNING
    parts[1].fail("cancelled")
    assert (pull.poll(), pull.error) == (FAILED, "cancelled")
