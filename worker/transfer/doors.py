"""The serving end of KV over sockets: who has the secret reads registered memory, nobody else.

A connection begins with a greeting and a challenge. Both ends then show that they know the secret,
which is in the owner's `Endpoint` and travels on the control channel alone. After that a request
names pieces, and their bytes follow one behind the other. Nothing can be written here.
"""

import hmac
import logging
import os
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress

from worker.cache.layout import MemoryRegion
from worker.seldom import Seldom
from worker.transfer.memory import PORTION_BYTES, Lane, Piece, lanes_of

log = logging.getLogger("kvlane.transfer")

GREETING = b"kvlane KV 1\n"
NONCE_BYTES, MAC_BYTES = 16, 32
COUNT, PIECE = struct.Struct("<I"), struct.Struct("<IQQ")
MAX_PIECES = 256  # of a request
GREETING_S = 5.0  # for whoever has connected to say who it is
STALLED = struct.pack("ll", 30, 0)  # seconds after which a peer that takes nothing is let go
MAX_STRANGERS = 16  # connections that have not shown that they know the secret; the oldest goes
MAX_CONNECTIONS, MAX_OF_ADDRESS = 1024, 256  # so a member gone bad leaves room for others
BACKLOG = 128


def proof(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    """That a side of a connection with these nonces knows the secret."""
    return hmac.digest(secret, side + nonces, "sha256")


def receive(
    connection: socket.socket, buffers: list[memoryview], deadline: float | None = None
) -> None:
    """Fill the buffers; ConnectionError if the other end goes before that.

    TimeoutError at the deadline, of time.monotonic, however little comes now and then.
    """
    while buffers:
        if deadline is not None:
            if (left_s := deadline - time.monotonic()) <= 0:
                raise TimeoutError("too slow")
            connection.settimeout(left_s)
        count = connection.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
        if count == 0:
            raise ConnectionError("the other end has closed the connection")
        _drop(buffers, count)


def received(connection: socket.socket, num_bytes: int, deadline: float | None = None) -> bytes:
    """So many bytes; raises as `receive` does."""
    made = bytearray(num_bytes)
    receive(connection, [memoryview(made)], deadline)
    return bytes(made)


def send(connection: socket.socket, buffers: list[memoryview]) -> None:
    """All bytes of the buffers."""
    while buffers:
        _drop(buffers, connection.sendmsg(buffers))


def _drop(buffers: list[memoryview], count: int) -> None:
    """So many bytes from the front."""
    number = 0
    while number < len(buffers) and count >= len(buffers[number]):
        count -= len(buffers[number])
        number += 1
    del buffers[:number]
    if count:
        buffers[0] = buffers[0][count:]


def asked(pieces: Sequence[Piece]) -> bytes:
    """The request for them."""
    return COUNT.pack(len(pieces)) + b"".join(PIECE.pack(*piece) for piece in pieces)


class KVDoor:
    """Serves registered memory at one address, a thread a connection, until it is closed."""

    def __init__(self, host: str, secret: bytes, regions: Sequence[MemoryRegion]) -> None:
        """Raises OSError if the address cannot be had."""
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._secret, self._regions, self._lane = secret, regions, lanes_of(regions)
        self._listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._log = Seldom()
        self._strangers = deque[socket.socket]()
        self._threads = dict[socket.socket, threading.Thread]()
        self._held = Counter[str]()  # connections by address
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name="kv-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No memory is read any more when this returns."""
        with self._lock:
            self._closing = True
            threads = dict(self._threads)
        for connection in (self._listener, *threads):
            cut(connection)
        for thread in (self._thread, *threads.values()):
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, (address, *_) = self._listener.accept()
            except OSError:  # it was closed, or there are no descriptors left
                if self._closing:
                    return
                threading.Event().wait(0.1)
                continue
            thread = threading.Thread(
                target=self._greet_and_serve,
                args=(connection, address),
                name="kv-door-peer",
                daemon=True,
            )
            with self._lock:
                is_full = len(self._threads) >= MAX_CONNECTIONS
                if self._closing or is_full or self._held[address] >= MAX_OF_ADDRESS:
                    connection.close()
                    continue
                self._held[address] += 1
                self._threads[connection] = thread
                self._strangers.append(connection)
                thread.start()  # before `close` may join it
                oldest = self._strangers[0] if len(self._strangers) > MAX_STRANGERS else None
            if oldest is not None:
                cut(oldest)

    def _greet_and_serve(self, connection: socket.socket, address: str) -> None:
        try:
            with suppress(OSError):
                if self._is_member(connection):
                    self._serve(connection, self._lane())
        finally:
            with self._lock:
                del self._threads[connection]
                self._held[address] -= 1
                if not self._held[address]:
                    del self._held[address]
                if connection in self._strangers:
                    self._strangers.remove(connection)
            connection.close()

    def _is_member(self, connection: socket.socket) -> bool:
        """Whether the other end knows the secret; it is shown that we do."""
        deadline = time.monotonic() + GREETING_S
        challenge = os.urandom(NONCE_BYTES)
        connection.sendall(GREETING + challenge)
        answer = received(connection, NONCE_BYTES + MAC_BYTES, deadline)
        nonces = challenge + answer[:NONCE_BYTES]
        if not hmac.compare_digest(answer[NONCE_BYTES:], proof(self._secret, b"reads", nonces)):
            self._warn(connection, "asked for KV without the secret")
            return False
        connection.sendall(proof(self._secret, b"serves", nonces))
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, STALLED)
        with self._lock:
            self._strangers.remove(connection)
        return True

    def _serve(self, connection: socket.socket, lane: Lane) -> None:
        while True:
            (count,) = COUNT.unpack(received(connection, COUNT.size))
            if not 0 < count <= MAX_PIECES:
                break
            named = received(connection, count * PIECE.size)
            pieces = [Piece(*numbers) for numbers in PIECE.iter_unpack(named)]
            if not self._holds(pieces):
                break
            send(connection, lane.outgoing(pieces))
        self._warn(connection, "asked for KV that is not here")

    def _warn(self, connection: socket.socket, act: str) -> None:
        address = connection.getpeername()[0]
        if num := self._log.news(address, act):
            log.warning("%s %s (%d times)", address, act, num)

    def _holds(self, pieces: Sequence[Piece]) -> bool:
        if sum(piece.num_bytes for piece in pieces) > PORTION_BYTES:
            return False
        sizes = [region.num_bytes for region in self._regions]
        return all(n < len(sizes) and 0 < size <= sizes[n] - at for n, at, size in pieces)


def cut(connection: socket.socket) -> None:
    """End a connection; a thread that waits for it finds the end."""
    with suppress(OSError):  # it has ended meanwhile
        connection.shutdown(socket.SHUT_RDWR)
