"""Who reaches mooncake's engines: members, who announce their connections at a door of ours.

What an engine listens on is deaf before it hears anybody. Who knows the secret of its endpoint says
by which port it will come, and is heard from there: before mooncake connects to a peer of ours, it
is said at that one's door.
"""

import ctypes
import errno
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import TypeVar

from worker.errors import Unreachable
from worker.peers.deaf import MAPPED, deafen
from worker.transfer.base import Endpoint
from worker.transfer.doors import KVDoor, cut, received
from worker.transfer.memory import Lane
from worker.transfer.mooncake_calls import LIBC, divert
from worker.transfer.sockets import dial

Made = TypeVar("Made")
Place = tuple[str, int]

ASK = struct.Struct("<HH")  # a port that the other end listens at, and the one to come by
TOLD = struct.Struct("<HH")  # ports of an engine, of handshakes and of data over TCP; 0: none
ANSWER_S = 2.0  # for a door, and for a connection to stand

_opened: list[int] = []  # descriptors that listen since the last call of `opening`
_doors: dict[Place, Endpoint] = {}  # by what its engine listens at
_connecting: set[int] = set()  # descriptors, in calls of ours


class Gate(KVDoor):
    """Has the listeners of an engine hear whoever knows the secret, at its word, and nobody else.

    A word holds as long as the connection that it came on; a connection that stands needs none.
    """

    def __init__(self, host: str, secret: bytes, listeners: Sequence[int]) -> None:
        """Raises OSError if the address cannot be had."""
        self._listeners = {port_of(fd): fd for fd in listeners}
        self._heard: dict[socket.socket, tuple[int, Place]] = {}
        self._hearing = threading.Lock()
        super().__init__(host, secret, ())

    def _serve(self, connection: socket.socket, lane: Lane) -> None:
        del lane
        to, port = ASK.unpack(received(connection, ASK.size))
        try:
            if port:
                self._hear(connection, (to, (connection.getpeername()[0], port)))
            connection.sendall(TOLD.pack(*[*self._listeners, 0][:2]))
            connection.recv(1)
        finally:
            self._hear(connection, None)

    def _hear(self, connection: socket.socket, said: tuple[int, Place] | None) -> None:
        with self._hearing:
            self._heard.pop(connection, None)
            if said:
                self._heard[connection] = said
            for port, listener in self._listeners.items():
                deafen(listener, [place for to, place in self._heard.values() if to == port])


class Way:
    """To a peer's engine, while mooncake may connect to it by `name`."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        """Raises Unreachable."""
        with dial(endpoint.name, endpoint.secret, time.monotonic() + timeout_s) as said:
            self._endpoint, self.host = endpoint, str(said.getpeername()[0])
            self._ports = _asked(said, 0, 0)
        for port in filter(None, self._ports):
            _doors[self.host, port] = endpoint
        self.name = f"{self.host}:{self._ports[0]}"

    def close(self) -> None:
        """mooncake connects no more."""
        for port in self._ports:
            if _doors.get((self.host, port)) is self._endpoint:
                del _doors[self.host, port]

    def cut(self) -> None:
        """End handshakes that are under way; mooncake itself would wait for 60 s."""
        for one in own_sockets():
            with suppress(OSError):
                if one.getpeername() == (self.host, self._ports[0]):
                    cut(one)


def _asked(said: socket.socket, to: int, port: int) -> tuple[int, int]:
    """Have a peer's listener hear a port of ours; all its ports. Raises Unreachable."""
    try:
        said.sendall(ASK.pack(to, port))
        handshake, data = TOLD.unpack(received(said, TOLD.size))
        return handshake, data
    except OSError as e:
        raise Unreachable(f"the door of a mooncake engine does not answer: {e}") from e


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, use_errno=True)
def _listen(fd: int, backlog: int) -> int:
    deafen(fd)
    _opened.append(fd)
    return LIBC.listen(fd, backlog)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True)
def _connect(fd: int, address: int, length: int) -> int:
    """connect(2), after the other end was told by which port; waits until the connection stands."""
    connect = partial(LIBC.connect, fd, ctypes.c_void_p(address), ctypes.c_uint32(length))
    to = _place(ctypes.string_at(address, length))
    endpoint = _doors.get(to) if to else None
    if to is None or endpoint is None:
        return connect()
    _connecting.add(fd)
    try:
        with (
            dial(endpoint.name, endpoint.secret, time.monotonic() + ANSWER_S) as said,
            socket.socket(fileno=os.dup(fd)) as own,
        ):
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # nobody else has the port
            own.bind((said.getsockname()[0], 0))
            _asked(said, to[1], own.getsockname()[1])
            done, error = connect(), ctypes.get_errno()
            if done and error == errno.EINPROGRESS:
                stands = select.poll()
                stands.register(own, select.POLLOUT)
                stands.poll(ANSWER_S * 1000)
    except (OSError, Unreachable):
        done, error = -1, errno.ECONNREFUSED
    finally:
        _connecting.discard(fd)
    ctypes.set_errno(error)
    return done


def _place(address: bytes) -> Place | None:
    """Of a struct sockaddr; None: it is of no host."""
    family, port = struct.unpack_from("=H", address)[0], struct.unpack_from("!H", address, 2)[0]
    if family == socket.AF_INET:
        return socket.inet_ntop(family, address[4:8]), port
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, address[8:24]).removeprefix(MAPPED), port
    return None


def opening(make: Callable[[], Made]) -> tuple[Made, list[int]]:
    """What `make` makes, and the descriptors on which that listens, deaf. One call at a time."""
    _divert()
    _opened.clear()
    return make(), list(_opened)


@cache
def _divert() -> None:
    divert({"listen": _listen, "connect": _connect})


def is_connecting() -> bool:
    """Whether mooncake is in a call of ours, which needs the interpreter's lock."""
    return bool(_connecting)


def port_of(fd: int) -> int:
    """At which a socket is."""
    with socket.socket(fileno=os.dup(fd)) as own:
        return own.getsockname()[1]


def own_sockets() -> Iterator[socket.socket]:
    """This process's TCP sockets, as duplicates, open for one turn."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            # Only sockets: closing a duplicate of a file would drop the process's locks on it.
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            sock = socket.fromfd(int(fd), socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            continue  # closed meanwhile
        with sock:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL) == socket.IPPROTO_TCP:
                yield sock


def sockets_at(port: int) -> Iterator[socket.socket]:
    """Those with this local port."""
    return (sock for sock in own_sockets() if sock.getsockname()[1] == port)


def listens(sock: socket.socket) -> bool:
    """Whether it is a listener."""
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
