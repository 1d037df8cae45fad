"""KV by the fastest road to each peer, and by several networks at once."""

import ctypes
import logging
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.contract.test_transport import Memory
from tests.support.kv_sources import CONNECT_S, registered
from tests.support.patience import until
from tests.support.pulls import FAILED, OK, ended
from worker.cache.layout import MemoryRegion
from worker.errors import Unreachable
from worker.transfer import sockets
from worker.transfer.base import Endpoint, KVTransport, Peer, Run
from worker.transfer.sockets import LANES, SocketLane, SocketPull, SocketTransport

ROW = ("mixed", "shm")
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
NUM_BYTES = 24 << 20
REPLACE = msgspec.structs.replace


@pytest.fixture
def sides() -> Iterator[tuple[KVTransport, Memory, Endpoint, Memory]]:
    """Ours, and an endpoint of this process, too."""
    memories = Memory(), Memory()
    ours, theirs = made = [registered(ROW, memory.regions) for memory in memories]
    yield ours, memories[0], theirs.endpoint(), memories[1]
    for each in made:
        each.close()


def elsewhere(endpoint: Endpoint) -> Endpoint:
    """The same process as if it ran on another host."""
    near, far = endpoint.parts
    return REPLACE(endpoint, parts=(REPLACE(near, host_key="of another boot"), far))


def unreadable(endpoint: Endpoint) -> Endpoint:
    """Of this host, with memory that cannot be mapped."""
    near, far = endpoint.parts
    return REPLACE(endpoint, parts=(REPLACE(near, start_ticks=1), far))


@pytest.mark.parametrize(
    ("seen", "road"),
    [(lambda it: it, "shm/shm"), (elsewhere, "sockets/tcp"), (unreadable, "sockets/tcp")],
    ids=["here", "elsewhere", "unreadable"],
)
def test_each_peer_is_reached_by_the_fastest_road(seen, road, sides, caplog) -> None:
    mixed, memory, endpoint, theirs = sides
    for array in theirs.arrays:
        array[:] = np.random.default_rng(3).integers(0, 256, len(array), np.uint8)
    with caplog.at_level(logging.WARNING):
        peer = mixed.connect(seen(endpoint), CONNECT_S)
    assert peer.transport == road
    assert ("reached by sockets" in caplog.text) is (seen is unreadable)
    runs = [Run(n, 0, 0, region.num_bytes) for n, region in enumerate(memory.regions)]
    assert ended(peer.pull(runs)) is OK
    assert memory.same(theirs.arrays)
    peer.close()


def test_a_peer_that_neither_road_reaches_is_unreachable(sides) -> None:
    mixed, _, endpoint, _ = sides
    near, far = unreadable(endpoint).parts
    with pytest.raises(Unreachable):
        mixed.connect(REPLACE(endpoint, parts=(near, REPLACE(far, secret=b"guessed"))), CONNECT_S)


class Ends:
    """Two transports of this process, with `HOSTS` as networks."""

    def __init__(self) -> None:
        self.memory = [(ctypes.c_uint8 * NUM_BYTES)() for _ in range(2)]
        self.here, self.there = (SocketTransport(",".join(HOSTS)) for _ in self.memory)
        for each, memory in zip((self.here, self.there), self.memory, strict=True):
            each.register([MemoryRegion("target", ctypes.addressof(memory), NUM_BYTES, 0)])

    def pulls(self, peer: Peer) -> bool:
        """Whether all bytes come; they are other ones each time."""
        ours, theirs = self.memory
        ctypes.memmove(theirs, os.urandom(1 << 20) * (NUM_BYTES >> 20), NUM_BYTES)
        is_well = ended(peer.pull([Run(0, 0, 0, NUM_BYTES)])) is OK
        assert not is_well or bytes(ours) == bytes(theirs)
        return is_well


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.here.close()
    made.there.close()


def test_every_network_has_connections_of_its_own(ends: Ends) -> None:
    peer = ends.here.connect(ends.there.endpoint(), CONNECT_S)
    assert len(peer.lanes) == LANES * len(HOSTS)
    assert len({lane.address for lane in peer.lanes[: len(HOSTS)]}) == len(HOSTS)
    assert ends.pulls(peer)


def test_a_network_that_fails_costs_no_pull(ends: Ends, caplog) -> None:
    """Others bring what it was to bring; a new peer does without it."""
    peer = ends.here.connect(ends.there.endpoint(), CONNECT_S)
    ends.there._doors[1].close()
    assert all(ends.pulls(peer) for _ in range(5))
    other = ends.here.connect(ends.there.endpoint(), CONNECT_S)
    assert len(other.lanes) == LANES * (len(HOSTS) - 1)
    assert "KV comes on other networks" in caplog.text
    assert ends.pulls(other)


@pytest.mark.parametrize("num_well", [0, 1, LANES])
def test_what_a_lane_leaves_others_do_that_were_through(
    num_well: int, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, move = ends.here.connect(ends.there.endpoint(), CONNECT_S), SocketLane._move
    well = peer.lanes[:num_well]

    def last(lane: SocketLane, pull: SocketPull) -> Any:
        if lane in well:
            return move(lane, pull)
        batch = pull.next(lane)
        until(lambda: not pull._inside & {*well} and not pull._num_awaited)
        return ("broken", [batch]) if batch else ("", [])

    monkeypatch.setattr(SocketLane, "_move", last)
    assert ends.pulls(peer) is bool(well)


@pytest.mark.parametrize(
    ("error", "brings", "num_tries"),
    [
        (ConnectionResetError, False, LANES * len(HOSTS)),
        (BlockingIOError, False, len(HOSTS)),
        (BlockingIOError, True, LANES * len(HOSTS)),  # one connection hung, and not the peer
    ],
)
def test_a_peer_that_hangs_is_waited_for_once_a_network(
    error: type[OSError], brings: bool, num_tries: int, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, tried = ends.here.connect(ends.there.endpoint(), CONNECT_S), list[str]()

    def receive(connection: socket.socket, *_: object) -> None:
        tried.append(connection.getpeername()[0])
        raise error("as if nothing came")

    for lane in peer.lanes if brings else ():
        lane.landed_at = time.monotonic()
    monkeypatch.setattr(sockets, "receive", receive)
    pull = peer.pull([Run(0, 0, 0, 1)])
    assert ended(pull) is FAILED
    assert len(tried) == num_tries
    assert set(tried) == {*HOSTS}


def test_a_lane_asks_for_nothing_where_another_has_just_hung(ends: Ends) -> None:
    peer = ends.here.connect(ends.there.endpoint(), CONNECT_S)
    first, second, *_ = (it for it in peer.lanes if it.address == peer.lanes[0].address)
    pull = SocketPull(peer, [Run(0, 0, 0, 1)])
    assert pull.enter(first, "")
    assert pull.enter(second, "")
    portion, first.timed_out = pull.next(first), True
    assert portion is not None
    pull.leave(first, "as if nothing came", [portion])
    assert pull.next(second) is None
