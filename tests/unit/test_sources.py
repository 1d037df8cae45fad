"""One rank's pulls from the ranks of a peer: every byte, every pair of sizes, and what may fail."""

import queue
import random
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from tests.support.patience import HANG_S, until
from tests.support.pulls import FAILED, OK, RUNNING, ScriptedPull, ended
from tests.support.ranks import NOBODY, NUM_GROUPS, Ranks, content, memory, model_layout, share
from worker.api import Member
from worker.cache.layout import KVRegion, MemoryRegion, ModelLayout
from worker.errors import Incompatible, Unreachable
from worker.transfer.base import Endpoint, PullState, Run
from worker.transfer.peers import PrefillPeers
from worker.transfer.ranked import RankPulls
from worker.transfer.sources import (
    DIALLED_BYTES,
    NUM_READS,
    DialFailed,
    JoinedPull,
    Link,
    LocalRank,
)

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


def local(transport: "Scripted", peer: Ranks) -> LocalRank:
    """A worker of one rank that pulls the model of `peer`."""
    return LocalRank(cast("Any", transport), peer.layout, NOBODY, OURS, 1.0)


class Scripted:
    """A transport and its peers: who answers, what is read, and what has been closed."""

    name, kind = "a", "b"

    def __init__(self, unreachable: int = -1, state: PullState = OK) -> None:
        self.unreachable, self.state = unreachable, state
        self.open: list[str] = []
        self.runs: list[Run] = []

    def connect(self, endpoint: Endpoint, timeout_s: float) -> object:
        if len(self.open) == self.unreachable:
            raise Unreachable(f"{endpoint.name} is gone")
        self.open.append(endpoint.name)
        remove = lambda: self.open.remove(endpoint.name)  # noqa: E731
        return SimpleNamespace(close=remove, pull=self.pull, transport="a/b")

    def pull(self, runs: Sequence[Run]) -> ScriptedPull:
        self.runs += runs
        made = ScriptedPull(sum(run.num_bytes for run in runs), self.state)
        made.error = None if self.state is OK else "gone"
        return made


@pytest.fixture
def prefill() -> Iterator[Ranks]:
    made = Ranks(model_layout(4), 4, content(model_layout(4), THEIRS, 1))
    yield made
    made.close()


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
def test_peers_that_no_rank_can_pull_from_are_not_contacted(endpoints, reason, prefill) -> None:
    transport = Scripted()
    changed = msgspec.structs.replace(prefill.member, endpoints=endpoints(prefill.member.endpoints))
    with pytest.raises(Incompatible, match=reason):
        local(transport, prefill).connect(changed)
    assert not transport.open


def test_connections_are_closed_when_one_rank_cannot_be_reached(prefill: Ranks) -> None:
    transport = Scripted(unreachable=3, state=FAILED)
    with pytest.raises(Unreachable):
        local(transport, prefill).connect(prefill.member)
    assert not transport.open
    transport.unreachable = -1
    answer: queue.SimpleQueue[Link | DialFailed] = queue.SimpleQueue()
    local(transport, prefill).dial(prefill.member, answer.put)
    event = answer.get(timeout=HANG_S)  # all ranks are reached, and the first read fails
    assert "a first read failed: gone" in str(event.error)
    assert not transport.open


class Slow(Scripted):
    """Reads last until the test ends them; a cancelled one fails then."""

    def __init__(self) -> None:
        super().__init__(state=RUNNING)
        self.reads: list[ScriptedPull] = []

    def pull(self, runs: Sequence[Run]) -> ScriptedPull:
        self.reads.append(super().pull(runs))
        return self.reads[-1]


def closing(rank: LocalRank, *, leads: bool) -> threading.Thread:
    """A thread that closes what a leader's or another rank's loop has of `rank`."""
    peers = PrefillPeers(rank, lambda _: None, lambda *_: None, lambda *_: None)
    pulls = RankPulls(rank, lambda _: None, lambda _: None)
    made = threading.Thread(target=peers.close if leads else pulls.close)
    made.start()
    return made


@pytest.mark.parametrize(("measures", "leads"), [(False, True), (True, True), (False, False)])
def test_a_worker_that_ends_cancels_reads_whose_bytes_come_to_its_memory(
    measures: bool, leads: bool, prefill: Ranks
) -> None:
    transport, answer = Slow(), queue.SimpleQueue[Any]()
    rank = local(transport, prefill)
    if measures:
        threading.Thread(target=lambda: answer.put(rank.measure(prefill.member))).start()
    else:
        rank.dial(prefill.member, answer.put)
    until(lambda: bool(transport.reads))
    ends = closing(rank, leads=leads)
    until(lambda: all(each.num_cancels for each in transport.reads))
    assert ends.is_alive(), "reads may still write"
    for each in transport.reads:
        each.fail("cancelled")
    ends.join(HANG_S)
    assert "cancelled" in str(answer.get(timeout=HANG_S).error)
    assert not transport.open


def test_a_joined_pull_that_fails_runs_until_no_part_does() -> None:
    parts = [ScriptedPull(1), ScriptedPull(1), ScriptedPull(1)]
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


WHOLE = ModelLayout(
    (KVRegion("target", 12, 2, 8, 4, 16, "float32"), KVRegion("draft", 1, 2, 8, 1, 16, "float32"))
)
LAYOUT, IDENTITY = WHOLE.share(1, 0), WHOLE.identity("tiny", "d")


def dialled(transport: "Scripted", layout_hash: str = IDENTITY.layout_hash) -> Link | DialFailed:
    """The event that a worker with THEIRS pages leads to."""
    memory = tuple(
        MemoryRegion(each.name, 0, THEIRS * each.page_bytes, None) for each in LAYOUT.regions
    )
    endpoint = msgspec.msgpack.encode(Endpoint("shm", "shm", "", "", 1, 1, memory))
    member = Member(
        "prefill-0", "prefill", "p", "tcp://", model="tiny", layout_hash=layout_hash,
        endpoints=(endpoint,), digest="d",
    )  # fmt: skip
    events: queue.SimpleQueue[Link | DialFailed] = queue.SimpleQueue()
    rank = LocalRank(cast("Any", transport), WHOLE, IDENTITY, OURS, 1.0)
    dial = partial(rank.dial, answer=events.put)
    peers = PrefillPeers(rank, dial, lambda *_: None, lambda *_: None)
    peers.update([member])
    peers.tend(1.0, lambda _: False)
    return events.get(timeout=HANG_S)


def test_a_link_is_measured_between_the_sinks_of_both_sides() -> None:
    """Page 0 in every group: where it lies depends on how many pages each side has."""
    transport = Scripted()
    event = dialled(transport)
    target, draft = LAYOUT.regions
    size = target.group_bytes
    once = [Run(0, OURS * size * g, THEIRS * size * g, size) for g in range(4)]
    once += [Run(1, 0, 0, draft.group_bytes)]
    assert transport.runs[: len(once)] == once
    assert set(transport.runs) == set(once)
    page_bytes, num_bytes = LAYOUT.page_bytes, sum(run.num_bytes for run in transport.runs)
    assert num_bytes - page_bytes >= NUM_READS * min(DIALLED_BYTES, 100 * page_bytes)
    transport.runs.clear()
    event.source.pull([(2, 3), (3, 4)], range(1, 3))
    places = [(OURS * g + 2, THEIRS * g + 3) for g in (1, 2)]
    assert transport.runs == [Run(0, size * a, size * b, 2 * size) for a, b in places]
