"""KV over plain TCP sockets: several connections a peer, received straight into the pool.

Each connection has a thread, on both ends; reading and writing release the GIL. A pull's runs are
asked for in batches, by all connections at once, the next ones before the last ones have come. Only
the puller's threads write its memory, and none of them is in a pull that has ended. Bytes are not
encrypted; see `doors` for who may read.
"""

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
    POLL_BUDGET_S,
    Endpoint,
    KVTransport,
    Peer,
    Pull,
    PullState,
    Run,
    check_peer,
    check_runs,
    describe,
    pieces,
)
from worker.transfer.doors import (
    GREETING,
    MAC_BYTES,
    MAX_PIECES,
    NONCE_BYTES,
    Door,
    asked,
    proof,
    receive,
    received,
)
from worker.transfer.memory import BATCH_BYTES, Lane, Piece, lanes_of

LANES = 4  # connections to a peer; two are as fast between two cores
AHEAD = 2  # batches that a connection has asked for and not received
SECRET_BYTES = 32
REDIAL_S = 2.0  # for a connection in place of one that broke
PROGRESS = struct.pack("ll", 3, 0)  # seconds without a byte after which a peer counts as hung


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


class SocketPull(Pull):
    """A pull that its peer's lanes share; each takes batches until there are none left."""

    def __init__(self, peer: "SocketPeer", runs: Sequence[Run]) -> None:
        self.num_bytes = sum(run.num_bytes for run in runs)
        self.error: str | None = None
        self.state = PullState.RUNNING
        self._peer = peer
        self._batches = deque(batches(runs))  # not asked for
        self._lock = threading.Lock()  # of what follows
        self._inside = set[SocketLane]()  # lanes that may write
        self._why = ""  # it can no longer be well
        self._is_begun = False

    def poll(self) -> PullState:
        if self.state is not PullState.RUNNING:
            return self.state
        if not self._is_begun and not self._why:
            self._is_begun = True
            self._peer.share(self, len(self._batches))
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

    def enter(self, lane: "SocketLane") -> bool:
        """Whether the lane may write from now on until it leaves."""
        with self._lock:
            if self.state is not PullState.RUNNING or self._why:
                return False
            self._inside.add(lane)
            return True

    def next(self) -> Batch | None:
        """To be asked for; None: there is nothing more to do."""
        with self._lock:
            return self._batches.popleft() if self._batches and not self._why else None

    def leave(self, lane: "SocketLane", why: str) -> None:
        """why: it has failed; "" if not."""
        with self._lock:
            self._inside.remove(lane)
            self._why = self._why or why


class SocketLane:
    """One connection to a peer, and the thread that reads from it."""

    def __init__(self, lane: Callable[[], Lane], endpoint: Endpoint, deadline: float) -> None:
        """Raises Unreachable without a connection at the deadline, of time.monotonic."""
        self._lane, self._endpoint = lane, endpoint
        self.pulls = queue.SimpleQueue[SocketPull | None]()
        self._connection: socket.socket | None = dial(endpoint, deadline)
        self._is_cut = False
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
            if pull.enter(self):
                why = "it ended in an error of ours"
                try:
                    why = self._move(pull)
                finally:
                    pull.leave(self, why)
        self._drop()

    def _move(self, pull: SocketPull) -> str:
        """Batches of the pull, until there are none; "" or why there are some left."""
        waiting = deque[Batch]()
        try:
            if self._is_cut:
                self._drop()
            if self._connection is None:
                self._connection = dial(self._endpoint, time.monotonic() + REDIAL_S)
            while True:
                while len(waiting) < AHEAD and (batch := pull.next()) is not None:
                    self._connection.sendall(asked(batch.there))
                    waiting.append(batch)
                if not waiting:
                    return ""
                here = waiting.popleft().here
                receive(self._connection, self._memory.incoming(here))
                self._memory.landed(here)
        except (OSError, Unreachable) as e:
            self._drop()
            return f"reading from {self._endpoint.name} failed: {e}"

    def _drop(self) -> None:
        connection, self._connection, self._is_cut = self._connection, None, False
        if connection is not None:
            connection.close()


def dial(endpoint: Endpoint, deadline: float) -> socket.socket:
    """A connection on which both ends have shown that they know the secret.

    Raises Unreachable if they have not at the deadline, of time.monotonic.
    """
    host, _, port = endpoint.name.rpartition(":")
    connection = None
    try:
        left_s = max(1e-3, deadline - time.monotonic())
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=left_s)
        greeting = received(connection, len(GREETING) + NONCE_BYTES, deadline)
        if not greeting.startswith(GREETING):
            raise ConnectionError("it speaks otherwise")
        nonce = os.urandom(NONCE_BYTES)
        nonces = greeting.removeprefix(GREETING) + nonce
        connection.sendall(nonce + proof(endpoint.secret, b"reads", nonces))
        if received(connection, MAC_BYTES, deadline) != proof(endpoint.secret, b"serves", nonces):
            raise ConnectionError("another process answers there")
    except (OSError, OverflowError, ValueError) as e:  # or its name is no address
        if connection is not None:
            connection.close()
        said = "did not answer in time" if isinstance(e, TimeoutError) else f"refuses: {e}"
        raise Unreachable(f"{endpoint.name} {said}") from e
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, PROGRESS)
    return connection


class SocketPeer(Peer):
    """One incarnation of one process."""

    def __init__(
        self, transport: "SocketTransport", endpoint: Endpoint, lanes: list[SocketLane]
    ) -> None:
        self._transport, self._endpoint, self._lanes = transport, endpoint, lanes
        self._pulls = list[SocketPull]()

    def share(self, pull: SocketPull, num_batches: int) -> None:
        """Hand a pull to as many lanes as it has work for."""
        for each in self._lanes[:num_batches]:
            each.pulls.put(pull)

    def pull(self, runs: Sequence[Run]) -> SocketPull:
        assert self._lanes, "pull on a closed peer"
        check_runs(runs, self._transport.endpoint(), self._endpoint)
        pull = SocketPull(self, runs)
        self._pulls = [*(p for p in self._pulls if p.state is PullState.RUNNING), pull]
        return pull

    def close(self) -> None:
        for pull in self._pulls:
            pull.cancel()
        while [pull for pull in self._pulls if pull.poll() is PullState.RUNNING]:
            time.sleep(POLL_BUDGET_S)
        lanes, self._lanes = self._lanes, []
        for each in lanes:
            each.end()
        self._transport.forget(self)


class SocketTransport(KVTransport):
    """Pull over TCP, bound to `host` alone; see KVTransport."""

    name = "sockets"

    def __init__(self, host: str, kind: str = "tcp") -> None:
        if kind != "tcp":
            raise Unsupported(f"transport sockets has no kind {kind!r}, only 'tcp'")
        self.kind, self._host = kind, host
        self._endpoint = None
        self._door: Door | None = None
        self._lock = threading.Lock()  # connect runs in threads; guards the set
        self._peers = set[SocketPeer]()

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        assert self._endpoint is None, "register is called once"
        secret, self._lane = secrets.token_bytes(SECRET_BYTES), lanes_of(regions)
        try:
            self._door = Door(self._host, secret, regions)
        except OSError as e:
            raise Unsupported(f"transport sockets cannot listen at {self._host}: {e}") from e
        name = f"{self._host}:{self._door.port}"
        self._endpoint = describe(self.name, self.kind, name, regions, secret)

    def connect(self, endpoint: Endpoint, timeout_s: float) -> SocketPeer:
        check_peer(self.endpoint(), endpoint, same_host=False)
        deadline, lanes = time.monotonic() + timeout_s, list[SocketLane]()
        try:
            for _ in range(LANES):
                lanes.append(SocketLane(self._lane, endpoint, deadline))
        except Unreachable:
            for each in lanes:
                each.end()
            raise
        peer = SocketPeer(self, endpoint, lanes)
        with self._lock:
            self._peers.add(peer)
        return peer

    def forget(self, peer: SocketPeer) -> None:
        """It was closed."""
        with self._lock:
            self._peers.discard(peer)

    def close(self) -> None:
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            peer.close()
        door, self._door = self._door, None
        if door is not None:
            door.close()
