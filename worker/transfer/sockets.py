"""KV over plain TCP sockets: several connections a peer, received straight into the pool.

Each connection has a thread, on both ends; reading and writing release the GIL. A pull's runs are
asked for in batches, by all connections at once, the next ones before the last ones have come. Only
the puller's threads write its memory, and none of them is in a pull that has ended. Bytes are not
encrypted; see `doors` for who may read.
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
from contextlib import suppress
from typing import NamedTuple

from worker.cache.layout import MemoryRegion
from worker.errors import Unreachable, Unsupported
from worker.transfer.base import (
    Endpoint,
    OpenPeer,
    OpenTransport,
    PullState,
    Run,
    RunsPull,
    pieces,
)
from worker.transfer.doors import (
    GREETING,
    MAC_BYTES,
    MAX_PIECES,
    NONCE_BYTES,
    KVDoor,
    asked,
    proof,
    receive,
    received,
)
from worker.transfer.memory import BATCH_BYTES, Lane, Piece, lanes_of

log = logging.getLogger("kvlane.transfer")

LANES = 4  # connections to a peer on each network; two are as fast between two cores
AHEAD = 2  # batches that a connection has asked for and not received
SECRET_BYTES = 32
REDIAL_S = 2.0  # for a connection in place of one that broke
PROGRESS_S = 3  # without a byte, after which a connection counts as hung


class Batch(NamedTuple):
    """What is asked for at once."""

    here: list[Piece]
    there: list[Piece]


def batches(runs: Sequence[Run]) -> Iterator[Batch]:
    """The bytes of `runs`, of one region or several, so many at a time as one request may name."""
    here, there, room = list[Piece](), list[Piece](), BATCH_BYTES
    for region, local, remote, size in pieces(runs, BATCH_BYTES):
        if size > room or len(here) == MAX_PIECES:
            yield Batch(here, there)
            here, there, room = [], [], BATCH_BYTES
        here.append(Piece(region, local, size))
        there.append(Piece(region, remote, size))
        room -= size
    if here:
        yield Batch(here, there)


class SocketPull(RunsPull):
    """A pull that its peer's lanes share; each takes batches until there are none left."""

    def __init__(self, peer: "SocketPeer", runs: Sequence[Run]) -> None:
        super().__init__(runs)
        self._peer = peer
        self._batches = deque(batches(runs))  # not asked for
        self._lock = threading.Lock()  # of what follows
        self._inside = set[SocketLane]()  # lanes that may write
        self._num_awaited = 0  # lanes that have it in their queues
        self._failed = dict[SocketLane, str]()  # lanes that do no more of it, and why
        self._hung = dict[str, str]()  # networks on which nothing comes any more, and why
        self._why = ""  # it can no longer be well
        self._is_begun = False

    def poll(self) -> PullState:
        if self.state is not PullState.RUNNING:
            return self.state
        if not self._is_begun and not self._why:
            self._is_begun = True
            self._num_awaited = min(len(self._peer.lanes), len(self._batches))
            for each in self._peer.lanes[: self._num_awaited]:
                each.pulls.put(self)
        with self._lock:
            if not self._inside and self._why:
                self.state, self.error = PullState.FAILED, self._why
            elif not self._inside and not self._batches:
                self.state = PullState.OK
        return self.state

    def cancel(self) -> None:
        with self._lock:
            self._why = self._why or "cancelled"
            for each in self._inside:
                each.cut()

    def enter(self, lane: "SocketLane", why: str) -> bool:
        """Whether the lane may write from now on until it leaves.

        why: it has no connection; "" if it has. Other lanes do its part.
        """
        with self._lock:
            self._num_awaited -= 1
            if self.state is not PullState.RUNNING or self._why:
                return False
            if why := why or self._hung.get(lane.address, ""):
                self._failed[lane] = why
                self._ask_again()
                return False
            self._inside.add(lane)
            return True

    def next(self) -> Batch | None:
        """To be asked for; None: there is nothing more to do."""
        with self._lock:
            return self._batches.popleft() if self._batches and not self._why else None

    def leave(self, lane: "SocketLane", why: str, undone: Sequence[Batch]) -> None:
        """why: it has failed, "" if not. undone: what it took, which other lanes may do."""
        with self._lock:
            self._inside.remove(lane)
            self._batches.extend(undone)
            if undone:
                self._failed[lane] = why
                if lane.timed_out and not self._peer.lands(lane.address, PROGRESS_S):
                    self._hung[lane.address] = why  # another lane there would wait as long again
            else:  # with an error of ours nobody knows what it has not done
                self._why = self._why or why
            self._ask_again()

    def _ask_again(self) -> None:
        """With the lock: lanes that were through before another failed do what that one left."""
        if not self._batches or self._inside or self._num_awaited or self._why:
            return
        others = [
            each
            for each in self._peer.lanes
            if each not in self._failed and each.address not in self._hung
        ]
        self._num_awaited = len(others)
        for each in others:
            each.pulls.put(self)
        if not others:
            self._why = next(reversed(self._failed.values()))


class SocketLane:
    """One connection to a peer, and the thread that reads from it."""

    def __init__(
        self, lane: Callable[[], Lane], address: str, secret: bytes, deadline: float
    ) -> None:
        """Raises Unreachable without a connection at the deadline, of time.monotonic."""
        self._lane, self.address, self._secret = lane, address, secret
        self.pulls = queue.SimpleQueue[SocketPull | None]()
        self._connection: socket.socket | None = dial(address, secret, deadline)
        self._is_cut = False
        self.timed_out = False  # its last connection ended because nothing came any more
        self.landed_at = float("-inf")  # when a batch was last in its place, of time.monotonic
        self._thread = threading.Thread(target=self._run, name="kv-lane", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """End the connection; the thread meets its end. The next pull has a new one."""
        connection, self._is_cut = self._connection, True
        if connection is not None:
            with suppress(OSError):  # it has ended meanwhile
                connection.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Of a lane without pulls."""
        self.pulls.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._memory = self._lane()
        while (pull := self.pulls.get()) is not None:
            if pull.enter(self, self._connected(pull)):
                why, undone = "it ended in an error of ours", list[Batch]()
                try:
                    why, undone = self._move(pull)
                finally:
                    pull.leave(self, why, undone)
        self._drop()

    def _connected(self, pull: SocketPull) -> str:
        """See to a connection for a pull that runs; "" or why there is none."""
        try:
            if self._is_cut:
                self._drop()
            if self._connection is None and pull.state is PullState.RUNNING:
                self._connection = dial(self.address, self._secret, time.monotonic() + REDIAL_S)
        except Unreachable as e:
            return str(e)
        return ""

    def _move(self, pull: SocketPull) -> tuple[str, list[Batch]]:
        """Batches of the pull, until there are none; "" or why it ends before, and with which."""
        waiting, self.timed_out = deque[Batch](), False
        assert self._connection is not None
        try:
            while True:
                while len(waiting) < AHEAD and (batch := pull.next()) is not None:
                    waiting.append(batch)
                    self._connection.sendall(asked(batch.there))
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
        """Whether any connection on this network has brought something within so long."""
        since = time.monotonic() - seconds
        return any(each.landed_at > since for each in self.lanes if each.address == address)


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
