"""What a router's own spans say of requests that are refused, sent again, or fail."""

import uuid
from collections.abc import Iterator

import httpx
import pytest

from router.http.exchange import Exchange
from tests.fault.router_doubles import HANG_S, TOLD_STAGES, DecodeDouble, make_model, serving, speak
from tests.support.collector import Collector, Span, collecting
from tests.support.made_spans import Made
from tests.support.trace_laws import check_request, children, named
from worker.api import Error, FinishReason, Generate
from worker.config import TracingConfig
from worker.observe.tracing import tracer_of

PARENT = "b7ad6b7169203331"
SPEAK = speak([5, 6, 7], stages=TOLD_STAGES)


def moody(double: DecodeDouble, peer: str, generate: Generate) -> None:
    """Refuses a request once and then fails it, if its prompt has two tokens; else answers."""
    if generate.dispatch == 1:
        double.refuse(peer, generate)
    elif generate.num_prompt_tokens == 2:
        error = Error("worker_lost", "it has died")
        double.chunk(peer, generate, finish=FinishReason.ERROR, error=error)
    else:
        SPEAK(double, peer, generate)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Collector]]:
    directory = make_model(tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patch, collecting() as collector:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        tracer = tracer_of(TracingConfig(endpoint=collector.url), "router", "router-0")
        with serving(directory, DecodeDouble(script=moody), tracer=tracer) as (_, url):
            yield url, collector


def ask(
    traced: tuple[str, Collector], prompt: list[int] | list[list[int]], **body: int
) -> tuple[httpx.Response, list[Span]]:
    url, collector = traced
    trace_id = uuid.uuid4().hex
    response = httpx.post(
        f"{url}/v1/completions",
        json={"prompt": prompt, "max_tokens": 3, "temperature": 0.5} | body,
        headers={"traceparent": f"00-{trace_id}-{PARENT}-01"},
        timeout=HANG_S,
    )
    return response, collector.wait(trace_id, lambda spans: any(each.is_server for each in spans))


def test_a_request_that_was_refused_is_dispatched_again(traced: tuple[str, Collector]) -> None:
    _, spans = ask(traced, [9])
    root = check_request(spans, PARENT)
    assert [span.name for span in children(spans, root)] == [
        "prepare", "router_queue", "dispatch", "router_queue", "dispatch", "respond",
    ]  # fmt: skip
    first, second = named(spans, "dispatch")
    assert first.is_error
    assert first.attributes["error.type"] == second.attributes["kvlane.cause"] == "busy"
    assert [each.attributes["kvlane.attempt"] for each in (first, second)] == [1, 2]
    assert not second.is_error
    assert not root.is_error
    told = root.attributes
    assert told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.request.max_tokens"] == 3
    assert told["gen_ai.response.finish_reasons"] == ["stop"]
    assert told["gen_ai.latency.time_in_model_prefill"] == 0.25 + 0.125 + 0.03125
    assert told["gen_ai.latency.time_in_queue"] > 0.5 + 0.0625
    assert told["gen_ai.request.n"] == 1
    assert named(spans, "router_queue")[1].seconds > 0


def test_a_request_that_fails_says_how(traced: tuple[str, Collector]) -> None:
    response, spans = ask(traced, [9, 9])
    assert response.status_code >= 500
    root = check_request(spans, PARENT)
    assert root.is_error
    last = named(spans, "dispatch")[-1]
    assert last.is_error
    assert root.attributes["error.type"] == last.attributes["error.type"] == "worker_lost"
    assert root.attributes["http.response.status_code"] == response.status_code
    assert root.attributes["gen_ai.response.finish_reasons"] == ["worker_lost"]
    assert "gen_ai.latency.time_to_first_token" not in root.attributes


def test_an_answer_of_5xx_is_an_error_even_if_nobody_says_why() -> None:
    made = Made()
    headers = {b"traceparent": f"00-{'1' * 32}-{PARENT}-01".encode()}
    scope = {"path": "/v1/completions", "method": "POST", "scheme": "http"}
    for status, failure in ((500, ""), (503, "busy"), (404, ""), (200, "")):
        exchange = Exchange("id", "id", 0.0, status, failure=failure)
        exchange.begin_trace(made.tracer, scope, headers)
        exchange.end_trace("model", 1.0)
    made.tracer.close()
    spans = made.raw()
    assert [(each.attributes or {}).get("error.type") for each in spans] == [
        "500", "busy", None, None,
    ]  # fmt: skip
    assert [each.status.is_ok for each in spans] == [False, False, True, True]
