"""KV over plain TCP sockets: several connections a peer, received straight into the pool.

A connection has a thread, on both ends; reading and writing release the GIL. A pull's runs are
asked for in portions, by all connections at once, the next ones before the last ones have come.
Only the puller's threads write its memory, and none is in a pull that has ended. Bytes travel
plain.
"""

import logging
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from worker.cache.layout import MemoryRegion
from worker.errors import Unreachable, Unsupported
from worker.transfer.base import Endpoint, OpenPeer, OpenTransport, PullState, Run, RunsPull, pieces
from worker.transfer.doors import (
    GREETING,
    MAC_BYTES,
    MAX_PIECES,
    NONCE_BYTES,
    KVDoor,
    asked,
    cut,
    proof,
    receive,
    received,
)
from worker.transfer.memory import PORTION_BYTES, Lane, Piece, lanes_of

log = logging.getLogger("kvlane.transfer")

LANES = 4  # connections to a peer and network; two are as fast between two cores
AHEAD = 2  # portions that a connection has asked for and not received
SECRET_BYTES = 32
REDIAL_S = 2.0  # for a connection in place of one that broke
PROGRESS_S = 3  # without a byte, after which a connection counts as hung


class Portion(NamedTuple):
    """The pieces that one request names: in our memory, and in the peer's."""

    here: list[Piece]
    there: list[Piece]


def portions(runs: Sequence[Run]) -> Iterator[Portion]:
    """The bytes of `runs`, of one region or several, cut for requests."""
    here, there, left = list[Piece](), list[Piece](), PORTION_BYTES
    for region, local, remote, size in pieces(runs, PORTION_BYTES):
        if size > left or len(here) == MAX_PIECES:
            yield Portion(here, there)
            here, there, left = [], [], PORTION_BYTES
        here.append(Piece(region, local, size))
        there.append(Piece(region, remote, size))
        left -= size
    if here:
        yield Portion(here, there)


class SocketPull(RunsPull):
    """A pull that its peer's lanes share: they take portions until none is left."""

    def __init__(self, peer: "SocketPeer", runs: Sequence[Run]) -> None:
        super().__init__(runs)
        self._peer = peer
        self._portions = deque(portions(runs))  # not asked for
        self._lock = threading.Lock()  # of all below
        self._inside = set[SocketLane]()  # lanes that may write
        self._num_awaited = 0  # lanes that have the pull in their queues
        self._failed = dict[SocketLane, str]()  # lanes that take no more portions, and why
        self._hung = dict[str, str]()  # networks on which nothing comes any more, and why
        self._failure = ""  # why the pull fails; "": it may succeed
        self._is_begun = False

    def poll(self) -> PullState:
        if self.state is not PullState.RUNNING:
            return self.state
        if not self._is_begun and not self._failure:
            self._is_begun = True
            self._num_awaited = min(len(self._peer.lanes), len(self._portions))
            for lane in self._peer.lanes[: self._num_awaited]:
                lane.pulls.put(self)
        with self._lock:
            if not self._inside and self._failure:
                self.state, self.error = PullState.FAILED, self._failure
            elif not self._inside and not self._portions:
                self.state = PullState.OK
        return self.state

    def cancel(self) -> None:
        with self._lock:
            self._failure = self._failure or "cancelled"
            for lane in self._inside:
                lane.cut()

    def enter(self, lane: "SocketLane", why: str) -> bool:
        """Whether the lane may write, from now on until it leaves.

        why: why the lane has no connection; "" if it has. Other lanes take its portions.
        """
        with self._lock:
            self._num_awaited -= 1
            if self.state is not PullState.RUNNING or self._failure:
                return False
            if why := why or self._hung.get(lane.address, ""):
                self._failed[lane] = why
                self._ask_again()
                return False
            self._inside.add(lane)
            return True

    def next(self, lane: "SocketLane") -> Portion | None:
        """The portion that the lane is to ask for; None: no portion is left for it."""
        with self._lock:
            if not self._portions or self._failure or lane.address in self._hung:
                return None
            return self._portions.popleft()

    def leave(self, lane: "SocketLane", why: str, undone: Sequence[Portion]) -> None:
        """why: why the lane has failed, "" if it has not. undone: portions for other lanes."""
        with self._lock:
            self._inside.remove(lane)
            self._portions.extend(undone)
            if undone:
                self._failed[lane] = why
                if lane.timed_out and not self._peer.lands(lane.address, PROGRESS_S):
                    self._hung[lane.address] = why  # another lane there would wait as long again
            else:  # after an error of ours nobody knows which bytes have come
                self._failure = self._failure or why
            self._ask_again()

    def _ask_again(self) -> None:
        """Give the portions of a lane that failed to lanes that have finished. Needs the lock."""
        if not self._portions or self._inside or self._num_awaited or self._failure:
            return
        others = [
            lane
            for lane in self._peer.lanes
            if lane not in self._failed and lane.address not in self._hung
        ]
        self._num_awaited = len(others)
        for lane in others:
            lane.pulls.put(self)
        if not others:
            self._failure = next(reversed(self._failed.values()))


class SocketLane:
    """One connection to a peer, and the thread that reads from it."""

    def __init__(
        self, lane: Callable[[], Lane], address: str, secret: bytes, deadline: float
    ) -> None:
        """Raises Unreachable if there is no connection at the deadline, of time.monotonic."""
        self._lane, self.address, self._secret = lane, address, secret
        self.pulls = queue.SimpleQueue[SocketPull | None]()
        self._connection: socket.socket | None = dial(address, secret, deadline)
        self._is_cut = False
        self.timed_out = False  # the last connection ended because nothing came any more
        self.landed_at = float("-inf")  # when a portion was last in its place, of time.monotonic
        self._thread = threading.Thread(target=self._run, name="kv-lane", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """End the connection; the next pull makes a new one."""
        connection, self._is_cut = self._connection, True
        if connection is not None:
            cut(connection)

    def end(self) -> None:
        """End the thread; the lane has no pulls."""
        self.pulls.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._memory = self._lane()
        while (pull := self.pulls.get()) is not None:
            if pull.enter(self, self._connected(pull)):
                why, undone = "it ended in an error of ours", list[Portion]()
                try:
                    why, undone = self._move(pull)
                finally:
                    pull.leave(self, why, undone)
        self._drop()

    def _connected(self, pull: SocketPull) -> str:
        """Make a connection for a pull that runs, if there is none; "" or why that failed."""
        try:
            if self._is_cut:
                self._drop()
            if self._connection is None and pull.state is PullState.RUNNING:
                self._connection = dial(self.address, self._secret, time.monotonic() + REDIAL_S)
        except Unreachable as e:
            return str(e)
        return ""

    def _move(self, pull: SocketPull) -> tuple[str, list[Portion]]:
        """Bring portions until none is left; why that failed, "" if not, and portions undone."""
        waiting, self.timed_out = deque[Portion](), False
        assert self._connection is not None
        try:
            while True:
                while len(waiting) < AHEAD and (portion := pull.next(self)) is not None:
                    waiting.append(portion)
                    self._connection.sendall(asked(portion.there))
                if not waiting:
                    return "", []
                here = waiting[0].here
                receive(self._connection, self._memory.incoming(here))
                self._memory.landed(here)
                self.landed_at = time.monotonic()
                waiting.popleft()
        except OSError as e:
            self._drop()
            self.timed_out = isinstance(e, BlockingIOError)
            return f"reading from {self.address} failed: {e}", list(waiting)

    def _drop(self) -> None:
        connection, self._connection, self._is_cut = self._connection, None, False
        if connection is not None:
            connection.close()


def dial(address: str, secret: bytes, deadline: float) -> socket.socket:
    """A connection on which both ends have shown that they know the secret.

    Raises Unreachable if they have not at the deadline, of time.monotonic.
    """
    host, _, port = address.rpartition(":")
    connection = None
    try:
        left_s = max(1e-3, deadline - time.monotonic())
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=left_s)
        greeting = received(connection, len(GREETING) + NONCE_BYTES, deadline)
        if not greeting.startswith(GREETING):
            raise ConnectionError("it speaks otherwise")
        nonce = os.urandom(NONCE_BYTES)
        nonces = greeting.removeprefix(GREETING) + nonce
        connection.sendall(nonce + proof(secret, b"reads", nonces))
        if received(connection, MAC_BYTES, deadline) != proof(secret, b"serves", nonces):
            raise ConnectionError("another process answers there")
    except (OSError, OverflowError, ValueError) as e:  # or its name is no address
        if connection is not None:
            connection.close()
        said = "did not answer in time" if isinstance(e, TimeoutError) else f"refuses: {e}"
        raise Unreachable(f"{address} {said}") from e
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", PROGRESS_S, 0))
    return connection


class SocketPeer(OpenPeer):
    """One incarnation of one process."""

    def __init__(
        self, transport: "SocketTransport", endpoint: Endpoint, lanes: list[SocketLane]
    ) -> None:
        super().__init__(transport, endpoint)
        self.lanes = lanes

    def _begin(self, runs: Sequence[Run]) -> SocketPull:
        return SocketPull(self, runs)

    def _let_go(self) -> None:
        lanes, self.lanes = self.lanes, []
        for lane in lanes:
            lane.end()

    def lands(self, address: str, seconds: float) -> bool:
        """Whether a portion has come on this network in the last `seconds`."""
        since = time.monotonic() - seconds
        return any(lane.landed_at > since for lane in self.lanes if lane.address == address)


class SocketTransport(OpenTransport):
    """Pull over TCP, bound to the addresses of `host` alone; see KVTransport."""

    name = "sockets"

    def __init__(self, host: str, kind: str = "tcp") -> None:
        super().__init__(kind)
        self._hosts = host.split(",")
        self._doors = list[KVDoor]()

    def _serve(self, regions: Sequence[MemoryRegion]) -> tuple[str, bytes]:
        secret, self._lane = secrets.token_bytes(SECRET_BYTES), lanes_of(regions)
        for host in self._hosts:
            try:
                self._doors.append(KVDoor(host, secret, regions))
            except OSError as e:
                self.close()
                raise Unsupported(f"transport sockets cannot listen at {host}: {e}") from e
        doors = zip(self._hosts, self._doors, strict=True)
        return ",".join(f"{host}:{door.port}" for host, door in doors), secret

    def _reach(self, endpoint: Endpoint, timeout_s: float) -> SocketPeer:
        deadline, addresses = time.monotonic() + timeout_s, endpoint.name.split(",")
        lanes, failed = list[SocketLane](), dict[str, Unreachable]()
        for address in addresses * LANES:  # in this order, as short pulls take the first lanes
            if address not in failed:
                limit = min(deadline, time.monotonic() + timeout_s / len(addresses))
                try:
                    lanes.append(SocketLane(self._lane, address, endpoint.secret, limit))
                except Unreachable as e:
                    failed[address] = e
        if not lanes:
            raise next(iter(failed.values()))
        for e in failed.values():
            log.warning("%s; KV comes on other networks", e)
        return SocketPeer(self, endpoint, lanes)

    def close(self) -> None:
        super().close()
        while self._doors:
            self._doors.pop().close()
