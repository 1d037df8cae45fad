"""Sockets of libraries that go on listening when nobody is to connect any more.

gloo keeps a descriptor for every connection that a stranger opens, until the process has none left.
"""

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import TypeVar

import psutil

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
    sockets = psutil.Process().net_connections("tcp")
    return {one.fd for one in sockets if one.status == psutil.CONN_LISTEN}
