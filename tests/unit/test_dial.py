"""How a decode worker dials a prefill worker: what it refuses, and what it reads to measure."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tests.support.patience import HANG_S
from worker.api import Member
from worker.cache.layout import KVRegion, ModelLayout
from worker.errors import Incompatible
from worker.transfer.base import Endpoint, PullState, RemoteRegion, Run
from worker.transfer.peers import DialFailed, Link, PrefillPeers
from worker.transfer.ranked import LeaderPulls, OwnDialled
from worker.transfer.sources import NUM_READS, LocalRank

WHOLE = ModelLayout(
    (KVRegion("target", 12, 2, 8, 4, 16, "float32"), KVRegion("draft", 1, 2, 8, 1, 16, "float32"))
)
LAYOUT, IDENTITY = WHOLE.share(1, 0), WHOLE.identity("tiny", "d")
OURS, THEIRS = 8, 11  # pages


class RecordingTransport:
    """Reaches everybody; keeps what is read."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.num_connected = 0

    def connect(self, endpoint: Endpoint, timeout_s: float) -> object:
        self.num_connected += 1
        return SimpleNamespace(endpoint=endpoint, pull=self.pull, close=lambda: None)

    def pull(self, runs: Sequence[Run]) -> object:
        self.runs += runs
        num_bytes = sum(run.num_bytes for run in runs)
        return SimpleNamespace(poll=lambda: PullState.OK, num_bytes=num_bytes, error=None)


def dialled(
    transport: RecordingTransport, num_bytes: Sequence[int], layout_hash: str = IDENTITY.layout_hash
) -> object:
    """The event that a worker with regions of so many bytes leads to."""
    regions = zip(LAYOUT.regions, num_bytes, strict=True)
    held = tuple(RemoteRegion(region.name, 0, size, None) for region, size in regions)
    endpoint = msgspec.msgpack.encode(Endpoint("shm", "shm", "", "", 1, 1, held))
    member = Member(
        "prefill-0",
        "prefill",
        "p",
        "tcp://",
        model="tiny",
        layout_hash=layout_hash,
        endpoints=(endpoint,),
        digest="d",
    )
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    rank = LocalRank(cast("Any", transport), WHOLE, OURS, 1.0)
    leader = LeaderPulls(rank, lambda _: None, events.put)
    peers = PrefillPeers(rank, IDENTITY, leader.dial, lambda *_: None, lambda *_: None)
    peers.failed = events.put
    peers.update([member])
    peers.tend(1.0, lambda _: False)
    event = events.get(timeout=HANG_S)
    if isinstance(event, OwnDialled):
        leader.on(event)
        event = events.get(timeout=HANG_S)
    return event


def test_a_link_is_measured_between_the_sinks_of_both_sides() -> None:
    """Page 0 in every group: where it lies depends on how many pages each side has."""
    transport = RecordingTransport()
    event = dialled(transport, [THEIRS * region.page_bytes for region in LAYOUT.regions])
    assert isinstance(event, Link)
    target, draft = LAYOUT.regions
    size = target.group_bytes
    once = [Run(0, OURS * size * g, THEIRS * size * g, size) for g in range(4)]
    once += [Run(1, 0, 0, draft.group_bytes)]
    assert transport.runs == NUM_READS * once
    transport.runs.clear()
    event.pull([(2, 3), (3, 4)], range(1, 3))
    places = [(OURS * g + 2, THEIRS * g + 3) for g in (1, 2)]
    assert transport.runs == [Run(0, size * a, size * b, 2 * size) for a, b in places]


@pytest.mark.parametrize("change", ["layout", "pages"])
def test_a_peer_with_another_layout_is_not_contacted(change: str) -> None:
    num_bytes = [THEIRS * region.page_bytes for region in LAYOUT.regions]
    num_bytes[1] += LAYOUT.regions[1].page_bytes * (change == "pages")
    transport = RecordingTransport()
    layout_hash = "another" if change == "layout" else IDENTITY.layout_hash
    event = dialled(transport, num_bytes, layout_hash)
    assert isinstance(event, DialFailed)
    assert isinstance(event.error, Incompatible)
    assert not transport.num_connected
