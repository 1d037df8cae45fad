"""uvicorn's HTTP protocol with limits on how long a request may take to arrive.

uvicorn limits only how long a connection may be idle between two requests. Without more a client
that sends half a request, or a byte now and then, keeps its connection and our memory for ever.
"""

from __future__ import annotations

import asyncio
import logging

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from router.config import RouterConfig
from router.errors import ApiError

log = logging.getLogger("kvlane.router")

GRACE_S = 1.0  # a route that reads the body answers 408 first, with the headers of all responses


class LimitedProtocol(H11Protocol):
    """One connection. `limited` makes the subclass whose limits are those of a configuration."""

    header_timeout_s: float
    body_timeout_s: float
    _awaited: tuple[object, object] = (None, None)  # h11's state, and the request before or now
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone, or was cut."""
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """A part of a request, maybe the end of it and more."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """The next request on this connection may be here already, or a part of it."""
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Start the timer of what is awaited now, if that is something else than before."""
        state = self.conn.their_state
        # Between two requests nothing is awaited: uvicorn has a timer for that.
        idle = self.timeout_keep_alive_task is not None and not self.conn.trailing_data[0]
        awaited = state is h11.SEND_BODY or (state is h11.IDLE and not idle)
        if not awaited or self.transport.is_closing():
            self._stop()
        elif self._awaited != (state, self.cycle):
            self._stop()
            self._awaited = state, self.cycle
            head = state is h11.IDLE
            limit_s = self.header_timeout_s if head else self.body_timeout_s + GRACE_S
            self._timer = self.loop.call_later(limit_s, self._cut, head)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._awaited = None, (None, None)

    def _cut(self, head: bool) -> None:
        """Close the connection; a client that has sent a part of a head learns why."""
        log.debug("%s: cut, its %s took too long", self.client, "head" if head else "body")
        if head and self.conn.trailing_data[0] and self.conn.our_state is h11.IDLE:
            message = f"the request's head did not arrive within {self.header_timeout_s:g} s"
            response = ApiError(408, "timeout", message).response
            reply = h11.Response(status_code=408, headers=response.raw_headers)
            for event in (reply, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()
        self.loop.call_later(GRACE_S, self.transport.abort)  # if the client reads nothing, either


def limited(config: RouterConfig) -> type[LimitedProtocol]:
    """The protocol with the limits of `config`."""

    class Protocol(LimitedProtocol):
        header_timeout_s = config.header_timeout_s
        body_timeout_s = config.body_timeout_s

    return Protocol
