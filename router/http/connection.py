"""uvicorn's HTTP protocol, with what serving streams needs beside it.

- Limits on how long a request may take to arrive, and on the size of its head. uvicorn limits only
  how long a connection may be idle between two requests: a client that sends half a request, or a
  byte now and then, would keep its connection and our memory for ever.
- `Outlet`: the head leaves with the first part of the body, and further parts leave without ASGI.
- What is left of a refused request's body is read at the pace of REST_S: a crowd's held all up.
- One `Host` header, trailers apart from headers, and no 400 into the middle of an answer.
"""

import asyncio
import logging
import socket
import weakref
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.config import RouterConfig
from router.errors import ApiError
from router.http.raw import answer, lines, rest_of

log = logging.getLogger("kvlane.router")

GRACE_S = 1.0  # a route that reads the body answers 408 first, with the headers of all responses
# Limit for a head, for trailers, or for other bytes that bring a request no further. The segment in
# which they began does not count. As in h11.
MAX_HEAD_BYTES = 16 << 10
REST_S = 0.002  # a read (256 KiB) of what is left of refused bodies, of all connections together
INVALID = "Invalid HTTP request received."
UPGRADING = (b"upgrade", b"connection", b"http2-settings")


class Outlet:
    """Takes the place of one response's transport; uvicorn's `cycle` writes there. Loop only."""

    def __init__(self, cycle: RequestResponseCycle, connection: "LimitedProtocol") -> None:
        self._cycle: RequestResponseCycle = weakref.proxy(cycle)  # which owns this
        self._connection = connection
        self._transport = cycle.transport
        self._holds = False
        self._held = b""

    def hold(self) -> None:
        """Keep what is written next, which is the head, until something follows it."""
        self._holds = True

    def write(self, part: bytes) -> None:
        """What uvicorn's cycle writes."""
        if self._holds and not self._held:
            self._held = part
        else:
            # uvloop raises where asyncio drops what nobody will read.
            if not self._transport.is_closing():
                self._transport.write(self._held + part)
            self._holds, self._held = False, b""

    def close(self) -> None:
        """Close the connection, and drop what is held."""
        self._transport.close()

    def is_closing(self) -> bool:
        """As a transport's."""
        return self._transport.is_closing()

    @property
    def is_open(self) -> bool:
        """Whether a part of the body may leave now: its head has, and the client reads."""
        cycle = self._cycle
        is_to_begin = self._holds or not cycle.chunked_encoding
        is_full = cycle.flow.write_paused
        return not (is_to_begin or is_full or self.is_gone or cycle.response_complete)

    @property
    def is_full(self) -> bool:
        """Whether the next part waits for the client to read."""
        return self._cycle.flow.write_paused

    @property
    def is_gone(self) -> bool:
        """Whether the client has closed the connection."""
        return self._cycle.disconnected or self._transport.is_closing()

    def watch(self, leave: Callable[[], None] | None) -> None:
        """Call `leave` when the client closes the connection; None: no more."""
        self._connection.leave = leave
        # A large body may have left reading paused; then a client's close would go unnoticed. With
        # pipelined requests reading stays paused, as uvicorn wants it.
        if leave is not None and not self._connection.pipeline:
            self._cycle.flow.resume_reading()

    def write_now(self, part: bytes) -> None:
        """Write a part of the body, past ASGI; only if `is_open`."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))


class _Awaited(Enum):
    """What a client is to send next."""

    ANYTHING = auto()  # it has connected, and sent nothing
    HEAD = auto()
    BODY = auto()
    NOTHING = auto()  # a request is here; another one may come


class Pace:
    """At which all connections together read what is left of refused bodies. Loop only."""

    num_waiting = 0  # connections, before they read on

    def slow_down(self, connection: "LimitedProtocol") -> None:
        """Its next read waits for its turn."""
        if not connection.flow.read_paused:
            connection.flow.pause_reading()
            self.num_waiting += 1
            connection.loop.call_later(REST_S * self.num_waiting, self._read_on, connection)

    def _read_on(self, connection: "LimitedProtocol") -> None:
        self.num_waiting -= 1
        if not connection.pipeline:  # else uvicorn reads on
            connection.flow.resume_reading()


PACE = Pace()


class LimitedProtocol(HttpToolsProtocol):
    """One connection. refuses: answers a request by its head, or does not and says so."""

    leave: Callable[[], None] | None = None  # of the answer that is being written
    _is_refused = False  # the present request, by its head: nothing more of it matters
    _has_rest = False  # a body that nobody wants goes on
    _state = _Awaited.ANYTHING
    _moved = False  # what arrived last was a part of a body, or began or ended something
    _idle_bytes = 0  # that have arrived since, see MAX_HEAD_BYTES
    _refused = ""  # why what came after the last whole request is no request
    _timed: tuple[object, object] | None = None  # for what the timer runs
    _timer: asyncio.TimerHandle | None = None
    _cycles: "weakref.WeakSet[RequestResponseCycle]"  # of all requests that are not answered yet

    def __init__(
        self, limits: RouterConfig, refuses: Callable[["LimitedProtocol"], bool], **uvicorns: Any
    ) -> None:
        super().__init__(**uvicorns)
        self._limits, self._refuses = limits, refuses

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is here."""
        super().connection_made(transport)
        # asyncio does this only for sockets that name their protocol, which accepted ones do not.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._cycles = weakref.WeakSet()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone, or was cut."""
        self._watch()
        for cycle in self._cycles:  # uvicorn marks only the last of those that were sent ahead
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn keeps the timer if the client has reset it
        if self.leave is not None:
            self.leave()
        # These refer to the connection: in a circle it would wait for a collection of garbage.
        self.pipeline.clear()
        self.cycle = self.scope = self.leave = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """A part of a request, maybe the end of it and more."""
        self._moved, rest = False, data
        while rest and not self._refused and not self.transport.is_closing():
            try:
                self.parser.feed_data(rest)
                rest = b""
            except httptools.HttpParserUpgrade as upgrade:
                rest = self._declined(rest[cast("int", upgrade.args[0]) :])
            except httptools.HttpParserError:
                self.send_400_response(INVALID)
        self._idle_bytes = 0 if self._moved else self._idle_bytes + len(data)
        if self._idle_bytes > MAX_HEAD_BYTES and not self._refused:
            self.send_400_response(INVALID)
        if self._has_rest:
            PACE.slow_down(self)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, behind the answers to those before it."""
        log.debug("%s: %s", self.client, msg)
        begun = self._state is not _Awaited.BODY or self.cycle.response_started
        if self.pipeline or (self._is_answering and begun):
            self._refused = msg
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        """The first byte of a request is here."""
        self._state, self._moved, self._is_refused = _Awaited.HEAD, True, False
        self._unset_keepalive_if_required()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header is here. Trailers come behind the body, when its route has read the headers."""
        if self._state is _Awaited.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A request's head is here."""
        if self.parser.should_upgrade():
            return  # `_declined` sees to it
        version = self.parser.get_http_version()
        num_hosts = [name for name, _ in self.headers].count(b"host")
        if version != "1.0" and (version != "1.1" or num_hosts != 1):
            raise ValueError("another version, or not one Host")  # the parser makes it a 400
        self._unset_keepalive_if_required()  # an answer may have ended while the head arrived
        if not self._is_answering and self._refuses(self):
            self._state, self._moved, self._is_refused = _Awaited.NOTHING, True, True
            self.on_response_complete()
            return
        super().on_headers_complete()
        self._state, self._moved = _Awaited.BODY, True
        self._cycles.add(self.cycle)
        cycle: Any = self.cycle
        cycle.transport = cycle.scope["outlet"] = Outlet(self.cycle, self)

    def on_body(self, body: bytes) -> None:
        """A part of a body is here."""
        self._moved = True
        if not self._is_refused:
            super().on_body(body)
        self._has_rest = self._is_refused or self.cycle.response_complete

    def on_message_complete(self) -> None:
        """All of a request is here."""
        self._moved, self._has_rest = True, False
        if not self.parser.should_upgrade() and not self._is_refused:
            super().on_message_complete()
            self._state = _Awaited.NOTHING

    def on_response_complete(self) -> None:
        """The next request on this connection may be here already, or a part of it."""
        super().on_response_complete()
        if self._refused and not self._is_answering and not self.transport.is_closing():
            super().send_400_response(self._refused)
        self._watch()

    @property
    def _is_answering(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)  # none before the first request
        return bool(self.pipeline) or (cycle is not None and not cycle.response_complete)

    def _declined(self, rest: bytes) -> bytes:
        """Rewrite a request that asks for another protocol as one that does not: Java's client asks
        for h2c every time. The parser drops the body of such a request. So a new parser gets the
        head without the upgrade headers, and then `rest`.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response(INVALID)
            return b""
        version = self.parser.get_http_version().encode()
        kept = lines(header for header in self.headers if header[0] not in UPGRADING)
        self.parser = httptools.HttpRequestParser(self)
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, kept) + rest

    def _watch(self) -> None:
        """Start the timer of what is awaited now, if that is something else than before."""
        state = self._state
        # A head is not awaited behind a request that is being answered: reading may be paused.
        awaited = not self.pipeline and (
            state is _Awaited.BODY or (state is not _Awaited.NOTHING and not self._is_answering)
        )
        timed = (state, self.cycle) if awaited and not self.transport.is_closing() else None
        if timed == self._timed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timed, self._timer = timed, None
        if timed is not None:
            body, limits = state is _Awaited.BODY, self._limits
            limit_s = limits.body_timeout_s if body else limits.header_timeout_s
            self._timer = self.loop.call_later(limit_s, self._cut, GRACE_S if body else 0.0)

    def _cut(self, grace_s: float = 0.0) -> None:
        """Close the connection; a client that has sent a part of a head learns why."""
        if grace_s:  # counted from now and not from the first byte: the loop may have stood still
            self._timer = self.loop.call_later(grace_s, self._cut)
            return
        part = "body" if self._state is _Awaited.BODY else "head"
        log.debug("%s: cut, its %s took too long", self.client, part)
        if self._state is _Awaited.HEAD:
            limit_s = self._limits.header_timeout_s
            message = f"the request's head did not arrive within {limit_s:g} s"
            late = ApiError("request_timeout", message)
            headers = self.server_state.default_headers
            self.transport.write(answer(late.status, headers, rest_of(late.response_to())))
        self.transport.close()
        self.loop.call_later(GRACE_S, self.transport.abort)  # if the client reads nothing, either
