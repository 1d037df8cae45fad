"""Clients of a router that do little more than count: what `benchmarks.router` measures with."""

from __future__ import annotations

import itertools
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

MARK = "@"  # the text of a marked stream's tokens: counting it counts tokens, in any chunks
REQUEST = "POST /v1/chat/completions HTTP/1.1\r\nhost: b\r\nx-request-id: {}\r\ncontent-length: {}"
END = b"0\r\n\r\n"


@dataclass(slots=True, eq=False)
class Stream:
    """A connection and what arrived on it of the present answer."""

    sock: socket.socket
    name: str  # u…: unmarked, m…: marked, f…: marked, of one token
    head: bytes | None = b""  # until the body's first byte
    tail: bytes = b""
    reads: list[tuple[float, int]] = field(default_factory=list)  # when, and how many marks


class Clients:
    """Connections, read by one thread that looks at nothing but counts."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("http://").rpartition(":")
        self._address = host, int(port)
        self._poll = select.epoll()
        self.idle: list[socket.socket] = []
        self._ids = itertools.count()
        self.open: dict[int, Stream] = {}
        self.ended: list[Stream] = []  # marked ones

    def ask(self, prompt: str, num_tokens: int, kind: str = "u") -> None:
        """Begin a stream of so many tokens."""
        sock = self.idle.pop() if self.idle else socket.create_connection(self._address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = f"{kind}{next(self._ids)}"
        body = {"messages": [{"role": "user", "content": prompt}], "stream": True}
        raw = msgspec.json.encode(body | {"max_tokens": num_tokens})
        sock.sendall(f"{REQUEST.format(name, len(raw))}\r\n\r\n".encode() + raw)
        self.open[sock.fileno()] = Stream(sock, name)
        self._poll.register(sock, select.EPOLLIN)

    def read(self, seconds: float, until: Callable[[], bool] = bool) -> None:
        """Read what comes for so long, or until something holds."""
        end = time.monotonic() + seconds
        while not until() and (left := end - time.monotonic()) > 0:
            for fd, _ in self._poll.poll(min(left, 0.05)):
                self._take(self.open[fd])

    def drain(self) -> None:
        """Read until no stream is open."""
        self.read(120, lambda: not self.open)

    def _take(self, stream: Stream) -> None:
        part, now = stream.sock.recv(1 << 16), time.monotonic()
        assert part, "the router has closed a connection"
        if stream.head is not None:
            stream.head += part
            head, end, body = stream.head.partition(b"\r\n\r\n")
            assert not end or head.startswith(b"HTTP/1.1 200"), stream.head
            if not body:
                return
            stream.head, part = None, body
        if stream.name[0] != "u":
            stream.reads.append((now, part.count(MARK.encode())))
        stream.tail = (stream.tail + part)[-len(END) :]
        if stream.tail == END:
            del self.open[stream.sock.fileno()]
            self._poll.unregister(stream.sock)
            self.idle.append(stream.sock)
            if stream.name[0] != "u":
                self.ended.append(stream)
