"""Who reaches mooncake's engines: members, whose connections are announced at a door of ours.

An engine's listeners are deaf (mooncake_listen). Who knows the secret of its endpoint announces an
address and port, and is heard from there. What mooncake connects to lies with us: a `Relay` finds
out that the connection is of our own process, announces one in its place, and moves the bytes on.
"""

import fcntl
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from worker.errors import Unreachable
from worker.peers.deaf import deafen
from worker.transfer.base import Endpoint
from worker.transfer.doors import KVDoor, cut, received
from worker.transfer.memory import Lane
from worker.transfer.sockets import dial

LOCAL = "127.0.0.1"
HANDSHAKE, DATA = range(2)  # listeners of an engine, in the order in which it opens them
ASK, TOLD = struct.Struct("<BH"), struct.Struct("<H")
LENGTH = struct.Struct("<Q")
METADATA = 1  # first byte of the message that says where data is
MAX_MESSAGE_BYTES = 128 << 20  # as mooncake
ANSWER_S = 2.0  # for a peer's door, and for its engine
PIPE_BYTES = 1 << 20


class Gate(KVDoor):
    """Has the listeners of an engine hear whoever knows the secret, at its word, and nobody else.

    A word holds as long as the connection that it came on; a connection that stands needs none.
    """

    def __init__(self, host: str, secret: bytes, listeners: Sequence[int]) -> None:
        """Raises OSError if the address cannot be had."""
        self._listeners = listeners
        self._heard: dict[socket.socket, tuple[int, tuple[str, int]]] = {}
        self._hearing = threading.Lock()
        super().__init__(host, secret, ())

    def _serve(self, connection: socket.socket, lane: Lane) -> None:
        del lane
        which, port = ASK.unpack(received(connection, ASK.size))
        if which < len(self._listeners):
            try:
                self._hear(connection, (which, (connection.getpeername()[0], port)))
                connection.sendall(TOLD.pack(port_of(self._listeners[which])))
                connection.recv(1)
            finally:
                self._hear(connection, None)

    def _hear(self, connection: socket.socket, said: tuple[int, tuple[str, int]] | None) -> None:
        with self._hearing:
            self._heard.pop(connection, None)
            if said:
                self._heard[connection] = said
            for number, listener in enumerate(self._listeners):
                deafen(
                    listener, [place for which, place in self._heard.values() if which == number]
                )


class Relay:
    """Where an engine of ours finds a peer's, by the name that this has."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._closed = endpoint, False
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._data_port = self._listen(DATA)
        self.name = f"{LOCAL}:{self._listen(HANDSHAKE)}"

    def close(self) -> None:
        """End all connections; further ones are refused. A second call does nothing."""
        with self._lock:
            self._closed = True
            for connection in self._open:
                cut(connection)

    def _listen(self, which: int) -> int:
        listener = socket.create_server((LOCAL, 0))
        _start(self._accept, listener, which)
        return port_of(listener.fileno())

    def _accept(self, listener: socket.socket, which: int) -> None:
        with self._kept(listener), suppress(OSError):
            while True:
                _start(self._bring, listener.accept()[0], which)

    def _bring(self, ours: socket.socket, which: int) -> None:
        """A connection of our own engine's on to the peer's; another's is closed."""
        with self._kept(ours), suppress(OSError, Unreachable):
            if is_own(ours):
                with self._kept(reached(self._endpoint, which)) as theirs:
                    if which == HANDSHAKE:
                        self._converse(ours, theirs)
                    else:
                        other = _start(_move, theirs, ours)
                        _move(ours, theirs)
                        other.join()

    def _converse(self, ours: socket.socket, theirs: socket.socket) -> None:
        """Questions of ours and their answers, until one of both goes: ConnectionError."""
        while True:
            theirs.sendall(_message(ours))
            ours.sendall(self._told(_message(theirs, time.monotonic() + ANSWER_S)))

    def _told(self, message: bytes) -> bytes:
        """An answer, in which the peer's data is to be had here."""
        if message[LENGTH.size] != METADATA:
            return message
        said = json.loads(message[LENGTH.size + 1 :])
        if said.get("tcp_data_port"):
            said |= {"tcp_data_host": LOCAL, "tcp_data_port": self._data_port}
        body = bytes([METADATA]) + json.dumps(said).encode()
        return LENGTH.pack(len(body)) + body

    @contextmanager
    def _kept(self, connection: socket.socket) -> Iterator[socket.socket]:
        with connection:
            with self._lock:
                self._open.add(connection)
                if self._closed:
                    cut(connection)
            try:
                yield connection
            finally:
                with self._lock:
                    self._open.discard(connection)


class Pass:
    """As Relay, where an engine has to see a peer's own address: it hears all of this machine."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Raises Unreachable."""
        self._said = dial(endpoint.name, endpoint.secret, time.monotonic() + ANSWER_S)
        self.host: str = self._said.getpeername()[0]
        self.name = f"{self.host}:{_announced(self._said, HANDSHAKE, 0)}"
        self.close = self._said.close


def reached(endpoint: Endpoint, which: int) -> socket.socket:
    """A connection to a listener of a peer's engine. Raises Unreachable or OSError."""
    with (
        dial(endpoint.name, endpoint.secret, time.monotonic() + ANSWER_S) as said,
        ExitStack() as failed,
    ):
        connection = failed.enter_context(socket.socket(said.family))
        connection.settimeout(ANSWER_S)
        connection.bind((said.getsockname()[0], 0))  # nobody else has this port meanwhile
        port = _announced(said, which, port_of(connection.fileno()))
        connection.connect((said.getpeername()[0], port))
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        failed.pop_all()
    return connection


def _announced(said: socket.socket, which: int, port: int) -> int:
    """Have a peer's listener hear a port of ours, 0: all; its port. Raises Unreachable."""
    try:
        said.sendall(ASK.pack(which, port))
        return TOLD.unpack(received(said, TOLD.size))[0]
    except OSError as e:
        raise Unreachable(f"{said} does not let us in: {e}") from e


def _message(connection: socket.socket, deadline: float | None = None) -> bytes:
    """The next one of mooncake's handshake, whole. Raises OSError."""
    head = received(connection, LENGTH.size, deadline)
    (length,) = LENGTH.unpack(head)
    if not 0 < length <= MAX_MESSAGE_BYTES:
        raise ConnectionError(f"a message of {length} bytes")
    return head + received(connection, length, deadline)


def _move(source: socket.socket, target: socket.socket) -> None:
    """Bytes from one to the other, without a copy, until one ends; then both do."""
    reads, writes = os.pipe()
    try:
        with suppress(OSError):  # no more room for pipes: it stays small
            fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        with suppress(OSError):
            while left := os.splice(source.fileno(), writes, PIPE_BYTES):
                while left:
                    left -= os.splice(reads, target.fileno(), left)
    finally:
        os.close(reads)
        os.close(writes)
        cut(source)
        cut(target)


def _start(run: Callable[..., object], *given: object) -> threading.Thread:
    thread = threading.Thread(target=run, args=given, name="mooncake-relay", daemon=True)
    thread.start()
    return thread


def port_of(fd: int) -> int:
    """At which a socket is."""
    with socket.socket(fileno=os.dup(fd)) as own:
        return own.getsockname()[1]


def is_own(connection: socket.socket) -> bool:
    """Whether its other end is of this process, too."""
    here, there = connection.getsockname(), connection.getpeername()
    return any(not listens(one) and one.getpeername() == here for one in sockets_at(there[1]))


def sockets_at(port: int) -> Iterator[socket.socket]:
    """This process's TCP sockets with this local port, as duplicates, open for one turn."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            # Only sockets: closing a duplicate of a file would drop the process's locks on it.
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            sock = socket.fromfd(int(fd), socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            continue  # closed meanwhile
        with sock:
            protocol = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL)
            if protocol == socket.IPPROTO_TCP and sock.getsockname()[1] == port:
                yield sock


def listens(sock: socket.socket) -> bool:
    """Whether it is a listener."""
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
