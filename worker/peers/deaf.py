"""Sockets on which libraries listen to whoever comes, and members alone are to be heard.

gloo keeps a descriptor for every connection that a stranger opens, until the process has none left.
mooncake takes orders of whoever connects.
"""

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from ipaddress import ip_address
from typing import TypeVar

import psutil

Made = TypeVar("Made")

SO_ATTACH_FILTER = 26  # Linux
# Of BPF programs: loads from a packet, a mask, a comparison that else jumps on, and an end, with
# how much is kept of the packet. Ports are where a packet begins, its IP header is at NETWORK.
LOAD_WORD, LOAD_HALF, LOAD_BYTE, AND, EQUALS, RETURN = 0x20, 0x28, 0x30, 0x54, 0x15, 0x06
NETWORK, WHOLE, VERSION, SENDER = 0xFFF00000, 0xFFFFFFFF, 0xF0, {4: 12, 6: 8}
MAX_HEARD = 64
MAPPED = "::ffff:"  # before an IPv4 address, of a socket for both
_LOCK = threading.Lock()  # of two that are made at a time nobody would know which listener is whose


def with_listener(make: Callable[[], Made]) -> tuple[Made, int | None]:
    """The result of `make`, and the socket on which it listens; None: not known."""
    with _LOCK:
        before = listening()
        made = make()
        new = listening() - before
    return made, new.pop() if len(new) == 1 else None


def deafen(listener: int, but: Iterable[tuple[str, int]] = ()) -> None:
    """Connections that stand go on; packets that would begin one are dropped by the kernel.

    but: addresses, and ports there that may connect, 0: all; the last MAX_HEARD of them.
    """
    places = list(dict.fromkeys(but))[-MAX_HEARD:]
    program = b"".join(_hears(*place) for place in places) + _step(RETURN, 0)
    kept = ctypes.create_string_buffer(program)
    with socket.socket(fileno=os.dup(listener)) as own:
        of = struct.pack("HP", len(program) // 8, ctypes.addressof(kept))
        own.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, of)


def hear_only(port: int, places: Collection[tuple[str, int]]) -> None:
    """Deafen this process's listener at a port, and cut its connections that are of nobody here."""
    at_port = [one for one in psutil.Process().net_connections("tcp") if one.laddr.port == port]
    for one in sorted(at_port, key=lambda one: bool(one.raddr)):  # the listener first
        if not one.raddr:
            deafen(one.fd)
        elif (one.raddr.ip.removeprefix(MAPPED), one.raddr.port) not in places:
            with socket.socket(fileno=os.dup(one.fd)) as own, suppress(OSError):
                own.shutdown(socket.SHUT_RDWR)


def _hears(host: str, port: int) -> bytes:
    """Keep a packet from there; else go on behind this."""
    address = ip_address(host)
    words = struct.unpack(f"!{len(address.packed) // 4}I", address.packed)
    at = NETWORK + SENDER[address.version]
    tests = [((LOAD_BYTE, NETWORK), (AND, VERSION), (EQUALS, address.version << 4))]
    tests += [((LOAD_WORD, at + 4 * i), (EQUALS, word)) for i, word in enumerate(words)]
    tests += [((LOAD_HALF, 0), (EQUALS, port))] if port else []
    steps = [*(step for test in tests for step in test), (RETURN, WHOLE)]
    return b"".join(
        _step(code, value, len(steps) - number - 1 if code == EQUALS else 0)
        for number, (code, value) in enumerate(steps)
    )


def _step(code: int, value: int, otherwise: int = 0) -> bytes:
    return struct.pack("=HBBI", code, 0, otherwise, value)


def listening() -> set[int]:
    """Descriptors of this process's sockets that listen."""
    sockets = psutil.Process().net_connections("tcp")
    return {one.fd for one in sockets if one.status == psutil.CONN_LISTEN}
