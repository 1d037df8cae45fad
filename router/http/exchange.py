"""One HTTP request and its response: the id, the line in the access log, `Server-Timing`."""

from __future__ import annotations

import logging
import re
import secrets
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.dispatch.queue import Req, counted
from router.observe.stages import by_stage
from router.show import tracing

if TYPE_CHECKING:
    from worker.observe.spans import Trace, Tracer

log = logging.getLogger("kvlane.router")
access_log = logging.getLogger("kvlane.access")

REQUEST_ID, SERVER_TIMING = b"x-request-id", b"server-timing"
FIT_ID = re.compile(rb"[\x21-\x7e]{1,128}")  # no spaces: it stands in lines of logs
CLIENT_GONE = 499  # nginx's status for a client that has closed the connection
# Asked every few seconds by machines.
PROBES = ("/health", "/live", "/ready", "/metrics", "/dashboard/data", "/dashboard/own")


@dataclass(slots=True)
class Exchange:
    """What is known of one HTTP request. The loop's; routes get it by `of(scope)`.

    `request_id` is the client's `X-Request-Id`, or ours if it sends none that fits. A client may
    use an id again while the first request with it still runs. So our own tables use `unique_id`,
    which begins with `request_id`. Every `req_id` begins with `unique_id`.
    """

    request_id: str
    unique_id: str
    arrived_at: float = field(default_factory=time.monotonic)
    status: int = CLIENT_GONE
    reqs: list[Req] = field(default_factory=list[Req])  # the choices, of one that generates
    n: int = 1  # choices of each prompt that the client gets
    failure: str = ""  # how an answer ended that did not end well
    trace: Trace | None = None  # its present stage is the server's span
    trace_id: str = ""  # for exemplars: of our trace, or of the client's if we make none

    @classmethod
    def begin(cls, given: bytes) -> Exchange:
        """A request that has arrived now with this `X-Request-Id`."""
        if FIT_ID.fullmatch(given):
            request_id = given.decode("ascii")
            return cls(request_id, f"{request_id}-{secrets.token_hex(6)}")
        request_id = uuid.uuid4().hex
        return cls(request_id, request_id)

    @classmethod
    def of(cls, scope: Scope) -> Exchange:
        """The exchange that a scope belongs to."""
        return scope["exchange"]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Those of every response."""
        timing = ", ".join(f"{name};dur={1e3 * s:.1f}" for name, s in self.stages.items())
        return [(REQUEST_ID, self.request_id.encode()), (SERVER_TIMING, timing.encode())]

    @property
    def stages(self) -> dict[str, float]:
        """Seconds of the stages that the first choice is through with, and of all until now."""
        stages: dict[str, float] = {}
        if self.reqs:
            req = self.reqs[0]
            stages["prepare"] = req.arrived_at - self.arrived_at
            stages |= {} if req.spent is None else by_stage(req.spent)
            if not req.outcome:
                stages.pop("decode", None)  # a stream's has only begun
        return {**stages, "total": time.monotonic() - self.arrived_at}

    def write(self, scope: Scope, level: int) -> None:
        """Write the line of the access log."""
        parts = [f"{scope['method']} {scope['raw_path'].decode('ascii', 'replace')} {self.status}"]
        if self.reqs:
            num_prompt_tokens, num_tokens, _ = counted(self.reqs)
            parts.append(f"prompt_tokens={num_prompt_tokens} completion_tokens={num_tokens}")
        firsts = [req.first_token_at for req in self.reqs if req.first_token_at]
        if firsts:
            parts.append(f"first_token_ms={1e3 * (min(firsts) - self.arrived_at):.1f}")
        parts.append(f"total_ms={1e3 * (time.monotonic() - self.arrived_at):.1f}")
        if self.failure:
            parts.append(f"failure={self.failure}")
        access_log.log(level, "%s req_id=%s", " ".join(parts), self.request_id)


class Exchanges:
    """The outermost layer: gives every request its `Exchange`.

    HEAD is served wherever GET is (the server drops the body); a slash at a path's end is ignored.
    """

    def __init__(
        self, app: ASGIApp, level: int, *, model: str = "", tracer: Tracer | None = None
    ) -> None:
        self._app = app
        self._level = level  # of the access log
        self._model = model
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        exchange = Exchange.begin(headers.get(REQUEST_ID, b""))
        inner = {
            **scope,
            "exchange": exchange,
            "method": "GET" if scope["method"] == "HEAD" else scope["method"],
            "path": scope["path"].rstrip("/") or "/",
        }
        if tracing.TRACEPARENT in headers:
            exchange.trace_id = tracing.client_trace_id(headers)
        if self._tracer is not None:
            exchange.trace = tracing.begin(self._tracer, inner, headers, exchange.arrived_at)
            if exchange.trace is not None:
                exchange.trace_id = exchange.trace.trace_id

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message = {**message, "headers": [*message["headers"], *exchange.headers]}
            await send(message)

        try:
            await self._app(inner, receive, send_with_headers)
        except Exception:  # a route's: it was answered with 500; the server closes what is open
            log.exception("req_id=%s failed", exchange.request_id)
        finally:
            if exchange.trace is not None:
                self._end_trace(exchange, exchange.trace)
            level = logging.DEBUG if inner["path"] in PROBES else self._level
            if access_log.isEnabledFor(level):
                exchange.write(scope, level)

    def _end_trace(self, of: Exchange, trace: Trace) -> None:
        ended = tracing.Ended(of.request_id, self._model, of.reqs, of.n, of.status, of.failure)
        tracing.end(trace, ended, time.monotonic())
