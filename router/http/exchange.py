"""One HTTP request and its response: the id, the line in the access log, `Server-Timing`, the span.

POST /v1/chat/completions                    one a request, until its last byte has left
  prepare ─▶ router_queue ─▶ dispatch ─▶ respond
                  ▲   refused   │
                  '-- or lost --'            a choice's `dispatch` holds its worker's stages
"""

import logging
import re
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.dispatch.queue import Req, counted
from router.http.table import GENERATING, PROBES
from router.observe.stages import by_stage, vllm_times
from router.openai.fields import listed

if TYPE_CHECKING:
    from router.http.arrivals import Arrival
    from worker.observe.spans import Trace, Tracer

log = logging.getLogger("kvlane.router")
access_log = logging.getLogger("kvlane.access")

REQUEST_ID, SERVER_TIMING = b"x-request-id", b"server-timing"
UNKNOWN_FIELDS = b"x-kvlane-unknown-fields"
FIT_ID = re.compile(rb"[\x21-\x7e]{1,128}")  # no spaces: it stands in lines of logs
REPLAYED = (b"idempotent-replayed", b"true")  # Stripe's: it was asked before
CLIENT_GONE = 499  # nginx's status for a client that has closed the connection
TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
SAMPLED_PARENT = re.compile(rb"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f][13579bdf]")


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
    n: int = 1  # choices of a prompt that the client gets
    client: str = ""  # the name of its API key; "": none is needed
    source: str = ""  # whom it counts for where others wait: `Sources`
    arrival: "Arrival | None" = None  # while its body is on its way
    unheeded: Sequence[str] = ()  # fields of its body that have no effect
    own_salt: str = ""  # `Key.own_salt`
    failure: str = ""  # how an answer ended that did not end well
    trace: "Trace | None" = None  # its present stage is the server's span
    trace_id: str = ""  # for exemplars: of our trace, or of the client's if we make none

    @classmethod
    def begin(cls, given: bytes) -> "Exchange":
        """A request that has arrived now with this `X-Request-Id`."""
        if FIT_ID.fullmatch(given):
            request_id = given.decode("ascii")
            return cls(request_id, f"{request_id}-{secrets.token_hex(6)}")
        request_id = uuid.uuid4().hex
        return cls(request_id, request_id)

    @classmethod
    def of(cls, scope: Scope) -> "Exchange":
        """The exchange that a scope belongs to."""
        return scope["exchange"]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Those of every response."""
        timing = ", ".join(f"{name};dur={1e3 * s:.1f}" for name, s in self.stages.items())
        headers = [(REQUEST_ID, self.request_id.encode()), (SERVER_TIMING, timing.encode())]
        if self.unheeded:
            headers.append((UNKNOWN_FIELDS, listed(self.unheeded).encode()))
        return headers + [REPLAYED] * any(req.was_claimed for req in self.reqs)

    @property
    def stages(self) -> dict[str, float]:
        """Seconds of what the first choice is through with, and of all until now.

        Its stages add up; `pull` lies beside them.
        """
        stages: dict[str, float] = {}
        if self.reqs:
            req = self.reqs[0]
            stages["prepare"] = req.arrived_at - self.arrived_at
            if (spent := req.spent) is not None:
                stages |= {name: s for name, s in by_stage(spent).items() if s}
                stages |= {"pull": spent.pull_s} if spent.pull_s else {}
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
        if self.client:
            parts.append(f"client={self.client}")
        if self.failure:
            parts.append(f"failure={self.failure}")
        access_log.log(level, "%s req_id=%s", " ".join(parts), self.request_id)

    def begin_trace(self, tracer: "Tracer", scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Begin the server's span, unless the request generates nothing or is not sampled."""
        path, method = scope["path"], scope["method"]
        if path not in GENERATING or method != "POST":
            return
        sent = [name for name in (TRACEPARENT, TRACESTATE) if name in headers]
        given = {name.decode(): headers[name].decode("latin-1") for name in sent}
        trace = tracer.of_headers(given, self.arrived_at)
        about = {
            "http.request.method": method,
            "http.route": path,
            "url.path": path,
            "url.scheme": scope["scheme"],
            "user_agent.original": headers.get(b"user-agent", b"").decode("latin-1"),
            "gen_ai.operation.name": GENERATING[path],
        }
        trace.enter(f"{method} {path}", self.arrived_at, about)
        if trace.is_recorded:
            self.trace, self.trace_id = trace, trace.trace_id

    def end_trace(self, model: str, now: float) -> None:
        """End the server's span, if there is one; `now` is monotonic."""
        trace, reqs, failure = self.trace, self.reqs, self.failure
        if trace is None:
            return
        attributes: dict[str, Any] = {
            "http.response.status_code": self.status,
            "gen_ai.request.id": self.request_id,
        }
        if reqs:
            ended_at = max(req.trace.at for req in reqs if req.trace is not None)
            attributes |= self._generated(model, trace.at, now)
            for name, begin, end in (
                ("prepare", trace.at, reqs[0].arrived_at), ("respond", ended_at, now)
            ):  # fmt: skip
                stage = trace.below(begin)
                stage.enter(name, begin)
                stage.leave(end)
        if self.status >= 500:
            failure = failure or str(self.status)
        if failure:
            attributes["error.type"] = failure
        # By OpenTelemetry's rules a client's mistake is no error of the server's span.
        is_ours = failure not in ("", "client_gone")
        failed = self.status >= 500 or (self.status < 400 and is_ours)
        trace.leave(now, attributes, failure if failed else "")

    def _generated(self, model: str, arrived_at: float, now: float) -> dict[str, Any]:
        """Attributes `gen_ai.*`, those of vLLM and SGLang; latencies are the first choice's."""
        first, sampling = self.reqs[0], self.reqs[0].sampling
        num_prompt_tokens, num_tokens, num_cached_tokens = counted(self.reqs)
        attributes: dict[str, Any] = {
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.n": self.n,
            "gen_ai.usage.prompt_tokens": num_prompt_tokens,
            "gen_ai.usage.completion_tokens": num_tokens,
            "gen_ai.usage.cached_tokens": num_cached_tokens,
            "gen_ai.response.finish_reasons": [req.outcome for req in self.reqs],
            "gen_ai.latency.e2e": now - arrived_at,
        }
        if first.first_token_at:
            attributes["gen_ai.latency.time_to_first_token"] = first.first_token_at - arrived_at
        if first.spent is not None:
            queue_s, prefill_s, decode_s = vllm_times(first.spent)
            attributes |= {
                "gen_ai.latency.time_in_queue": queue_s,
                "gen_ai.latency.time_in_model_prefill": prefill_s,
                "gen_ai.latency.time_in_model_decode": decode_s,
                "gen_ai.latency.time_in_model_inference": prefill_s + decode_s,
            }
        return attributes


class Exchanges:
    """The outermost layer: gives every request its `Exchange`.

    HEAD is served wherever GET is (the server drops the body); a slash at a path's end is ignored.
    """

    def __init__(
        self, app: ASGIApp, level: int, *, model: str = "", tracer: "Tracer | None" = None
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
        exchange.trace_id = client_trace_id(headers)
        if self._tracer is not None:
            exchange.begin_trace(self._tracer, inner, headers)

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
            exchange.end_trace(self._model, time.monotonic())
            level = logging.DEBUG if inner["path"] in PROBES else self._level
            if access_log.isEnabledFor(level):
                exchange.write(scope, level)


def client_trace_id(headers: Mapping[bytes, bytes]) -> str:
    """The id of the trace that the client has sampled, in hexadecimal; "" if there is none.

    Exemplars name it even where tracing is off: whoever follows it finds the client's spans.
    """
    parent = SAMPLED_PARENT.fullmatch(headers.get(TRACEPARENT, b""))
    return parent[1].decode() if parent else ""
