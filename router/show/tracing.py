"""Traces of HTTP requests: the server's span, and what a client says of its own.

POST /v1/chat/completions                    one a request, until its last byte has left
  prepare ─▶ router_queue ─▶ dispatch ─▶ respond
                  ▲   refused   │
                  '-- or lost --'            a choice's `dispatch` holds its worker's stages
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.types import Scope

from router.dispatch.queue import Req, counted
from router.observe.stages import vllm_times

if TYPE_CHECKING:
    from worker.observe.spans import Trace, Tracer

TRACED = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
SAMPLED_PARENT = re.compile(rb"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f][13579bdf]")
CLIENT_GONE = "client_gone"


def client_trace_id(headers: Mapping[bytes, bytes]) -> str:
    """The id of the trace that the client has sampled, in hexadecimal; "" if there is none.

    Exemplars name it even where tracing is off: whoever follows it finds the client's spans.
    """
    parent = SAMPLED_PARENT.fullmatch(headers.get(TRACEPARENT, b""))
    return parent[1].decode() if parent else ""


def begin(
    tracer: Tracer, scope: Scope, headers: Mapping[bytes, bytes], arrived_at: float
) -> Trace | None:
    """Begin the server's span of a request; None if it is not traced.

    Requests that generate nothing are not traced, nor are those that the sampler leaves out.
    `arrived_at` is monotonic.
    """
    path, method = scope["path"], scope["method"]
    if path not in TRACED or method != "POST":
        return None
    given = {
        name.decode(): headers[name].decode("latin-1")
        for name in (TRACEPARENT, TRACESTATE)
        if name in headers
    }
    trace = tracer.of_headers(given, arrived_at)
    about = {
        "http.request.method": method,
        "http.route": path,
        "url.path": path,
        "url.scheme": scope["scheme"],
        "user_agent.original": headers.get(b"user-agent", b"").decode("latin-1"),
        "gen_ai.operation.name": TRACED[path],
    }
    trace.enter(f"{method} {path}", arrived_at, about)
    return trace if trace.is_recorded else None


class Ended(NamedTuple):
    """An HTTP request whose answer has left, or whose client is gone."""

    request_id: str  # that the client knows
    model: str  # the served one
    reqs: Sequence[Req]  # the choices, of all prompts; none if the request was refused
    n: int  # choices of each prompt that the client gets
    status: int  # of HTTP
    failure: str  # how the answer ended if it did not end well


def end(trace: Trace, ended: Ended, now: float) -> None:
    """End the server's span, which `begin` made; `now` is monotonic."""
    reqs, status, failure = ended.reqs, ended.status, ended.failure
    attributes: dict[str, Any] = {
        "http.response.status_code": status,
        "gen_ai.request.id": ended.request_id,
    }
    if reqs:
        stages = trace.below(trace.at)
        stages.enter("prepare", trace.at)
        stages.leave(reqs[0].arrived_at)
        attributes |= _generated(ended, trace.at, now)
        ended_at = max(req.trace.at for req in reqs if req.trace is not None)
        stages = trace.below(ended_at)
        stages.enter("respond", ended_at)
        stages.leave(now)
    if status >= 500:
        failure = failure or str(status)
    if failure:
        attributes["error.type"] = failure
    # By OpenTelemetry's rules a client's mistake is no error of the server's span.
    failed = status >= 500 or (bool(failure) and status < 400 and failure != CLIENT_GONE)
    trace.leave(now, attributes, failure if failed else "")


def _generated(ended: Ended, arrived_at: float, now: float) -> dict[str, Any]:
    """Attributes `gen_ai.*`, those of vLLM and SGLang; latencies are the first choice's."""
    reqs = ended.reqs
    first, sampling = reqs[0], reqs[0].sampling
    num_prompt_tokens, num_tokens, num_cached_tokens = counted(reqs)
    attributes: dict[str, Any] = {
        "gen_ai.request.model": ended.model,
        "gen_ai.response.model": ended.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.n": ended.n,
        "gen_ai.usage.prompt_tokens": num_prompt_tokens,
        "gen_ai.usage.completion_tokens": num_tokens,
        "gen_ai.usage.cached_tokens": num_cached_tokens,
        "gen_ai.response.finish_reasons": [req.outcome for req in reqs],
        "gen_ai.latency.e2e": now - arrived_at,
    }
    if first.first_token_at:
        attributes["gen_ai.latency.time_to_first_token"] = first.first_token_at - arrived_at
    if first.spent is None:
        return attributes
    queue_s, prefill_s, decode_s = vllm_times(first.spent)
    return attributes | {
        "gen_ai.latency.time_in_queue": queue_s,
        "gen_ai.latency.time_in_model_prefill": prefill_s,
        "gen_ai.latency.time_in_model_decode": decode_s,
        "gen_ai.latency.time_in_model_inference": prefill_s + decode_s,
    }
