"""Sockets of libraries that go on listening when nobody is to connect any more.

gloo keeps a descriptor for every connection that a stranger opens, until the process has none left.
"""

import ctypes
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

Made = TypeVar("Made")

SO_ATTACH_FILTER = 26  # Linux
RETURN = 0x06  # of a BPF program; with 0: the packet is dropped
_LOCK = threading.Lock()  # of two that are made at a time nobody would know which listener is whose


def with_listener(make: Callable[[], Made]) -> tuple[Made, int | None]:
    """The result of `make`, and the socket on which it listens; None: not known."""
    with _LOCK:
        before = listening()
        made = make()
        new = listening() - before
    return made, new.pop() if len(new) == 1 else None


def deafen(listener: int) -> None:
    """Connections that stand go on; packets that would begin one are dropped by the kernel."""
    with socket.socket(fileno=os.dup(listener)) as own:
        program = ctypes.create_string_buffer(struct.pack("HBBI", RETURN, 0, 0, 0))
        own.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program))
        )


def listening() -> set[int]:
    """Descriptors of this process's sockets that listen."""
    return {fd for fd, own in own_sockets() if listens(own)}


def own_sockets() -> Iterator[tuple[int, socket.socket]]:
    """This process's sockets: the descriptor and a duplicate, which is open for one turn."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            # Only sockets: closing a duplicate of a file would drop the process's locks on it.
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as duplicate:
                    yield int(name), duplicate


def listens(own: socket.socket) -> bool:
    """Whether it accepts connections."""
    return own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
