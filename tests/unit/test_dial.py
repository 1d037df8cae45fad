"""How a decode worker dials a prefill worker: what it refuses, and what it reads to measure."""

import queue
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from tests.support.patience import HANG_S
from tests.support.pulls import OK, ScriptedPull
from worker.api import Member
from worker.cache.layout import KVRegion, ModelLayout
from worker.errors import Incompatible
from worker.transfer.base import Endpoint, RemoteRegion, Run
from worker.transfer.peers import PrefillPeers
from worker.transfer.sources import NUM_READS, DialFailed, Link, LocalRank

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

    def pull(self, runs: Sequence[Run]) -> ScriptedPull:
        self.runs += runs
        return ScriptedPull(sum(run.num_bytes for run in runs), OK)


def dialled(
    transport: RecordingTransport, layout_hash: str = IDENTITY.layout_hash
) -> Link | DialFailed:
    """The event that a worker with THEIRS pages leads to."""
    memory = tuple(
        RemoteRegion(each.name, 0, THEIRS * each.page_bytes, None) for each in LAYOUT.regions
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
    transport = RecordingTransport()
    event = dialled(transport)
    target, draft = LAYOUT.regions
    size = target.group_bytes
    once = [Run(0, OURS * size * g, THEIRS * size * g, size) for g in range(4)]
    once += [Run(1, 0, 0, draft.group_bytes)]
    assert transport.runs == NUM_READS * once
    transport.runs.clear()
    event.source.pull([(2, 3), (3, 4)], range(1, 3))
    places = [(OURS * g + 2, THEIRS * g + 3) for g in (1, 2)]
    assert transport.runs == [Run(0, size * a, size * b, 2 * size) for a, b in places]


def test_a_peer_with_another_layout_is_not_contacted() -> None:
    """Sizes that do not fit: test_sources."""
    transport = RecordingTransport()
    event = dialled(transport, "another")
    assert isinstance(event.error, Incompatible)
    assert not transport.num_connected
