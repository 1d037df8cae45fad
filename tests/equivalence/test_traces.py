"""A request's trace through a router and both workers, as a collector gets it."""

import uuid
from collections.abc import Iterator, Sequence

import httpx
import pytest

from tests.fault.router_doubles import routed
from tests.support.collector import Collector, Span, collecting
from tests.support.engines import Running, running
from tests.support.laws import sections
from tests.support.patience import HANG_S
from tests.support.prompts import problem_ids
from tests.support.shallow import shallow
from tests.support.trace_laws import check_nesting, check_request, children, named
from worker.api import Sampling
from worker.config import TracingConfig
from worker.observe.tracing import tracer_of

PARENT = "b7ad6b7169203331"  # the client's span
GREEDY = Sampling(12, temperature=0)
CHUNK = 32
Cluster = tuple[Running, str, Collector]


def new_trace() -> str:
    return uuid.uuid4().hex


def traceparent(trace_id: str, flags: str = "01") -> str:
    return f"00-{trace_id}-{PARENT}-{flags}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two prefill workers, one decode worker and a router, and the collector of their spans."""
    with pytest.MonkeyPatch.context() as patch, collecting() as collector:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        tracing = {"endpoint": collector.url, "sample_ratio": 0.0}
        config = sections("always", max_prefill_tokens=CHUNK, prefix_cache=False)
        tracer = tracer_of(TracingConfig(**tracing), "router", "router-0")
        with (
            running(config | {"tracing": tracing}, num_prefill=2) as made,
            routed(shallow(), made.members, tracer=tracer) as (_, url),
        ):
            yield made, url, collector


def complete(ends: str, number: int = 1):
    """When the last span of a trace has come, and with it those before of the same process."""
    return lambda spans: (
        len(named(spans, ends)) == number and "prefill_chunk" in {span.name for span in spans}
    )


def ask(url: str, headers: dict[str, str], **body: object) -> httpx.Response:
    body = {"prompt": problem_ids(1)[0], "max_tokens": 12, "temperature": 0} | body
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=HANG_S)


def test_a_pulled_request(cluster: Cluster) -> None:
    _, url, collector = cluster
    trace_id = new_trace()
    headers = {"traceparent": traceparent(trace_id), "tracestate": "a=b"}
    usage = ask(url, headers | {"x-request-id": "mine"}).json()["usage"]

    def came(spans: Sequence[Span]) -> bool:
        asked = complete("decode")(spans) and bool(named(spans, "respond"))
        return asked and any(span.parent_id == PARENT for span in spans)

    spans = collector.wait(trace_id, came)
    root = check_request(spans, PARENT)
    assert root.name == "POST /v1/completions"
    dispatch = named(spans, "dispatch")[0]
    assert [span.name for span in children(spans, root)] == [
        "prepare", "router_queue", "dispatch", "respond",
    ]  # fmt: skip
    stages = children(spans, dispatch)
    assert [span.name for span in stages] == [
        "prefill", "pull", "decode_queue", "first_step", "decode",
    ]  # fmt: skip
    assert {span.instance for span in stages} == {"decode-0"}
    assert {span.service for span in stages} == {"kvlane-decode"}
    prefill, pull = stages[:2]
    inner = children(spans, prefill)
    assert {span.service for span in inner} == {"kvlane-prefill"}
    assert inner[0].name == "prefill_queue"
    sizes = [span.attributes["kvlane.prompt_tokens"] for span in inner[1:]]
    assert sum(sizes) == usage["prompt_tokens"]
    assert max(sizes) <= CHUNK
    assert prefill.attributes["kvlane.worker"].startswith(inner[0].instance)
    assert pull.attributes["kvlane.bytes"] > 0
    assert pull.attributes["kvlane.transport"] == "shm/shm"
    told = root.attributes
    assert told["gen_ai.usage.completion_tokens"] == usage["completion_tokens"]
    assert told["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.request.id"] == "mine"
    assert told["gen_ai.response.finish_reasons"] in (["length"], ["stop"])
    assert told["http.response.status_code"] == 200
    # All but the first token's time comes from the stages that histograms have.
    latency = {name.rpartition(".")[2]: told[name] for name in told if ".latency." in name}
    assert latency["time_to_first_token"] <= latency["e2e"]
    assert latency["e2e"] == pytest.approx(root.seconds, abs=1e-5)
    assert latency["time_in_model_inference"] == pytest.approx(
        latency["time_in_model_prefill"] + latency["time_in_model_decode"]
    )
    assert not any(span.is_error for span in spans)
    assert collector.paths == {"/v1/traces"}


def test_a_prompt_that_decode_computes_itself(cluster: Cluster) -> None:
    made, _, collector = cluster
    trace_id = new_trace()
    prompt = problem_ids(2)[1]
    made.client.wait([made.client.submit(prompt, GREEDY, prefills=[], trace=traceparent(trace_id))])
    spans = collector.wait(trace_id, complete("decode"))
    stages = [span for span in spans if span.parent_id == PARENT]
    assert [span.name for span in stages] == ["prefill", "decode"]
    assert stages[0].attributes["kvlane.placed"] == "alone"
    inner = children(spans, stages[0])
    assert sum(span.attributes.get("kvlane.prompt_tokens", 0) for span in inner) == len(prompt)
    assert {span.instance for span in spans} == {"decode-0"}


def test_who_is_not_sampled_is_not_traced(cluster: Cluster) -> None:
    """Not by its caller nor, with a ratio of 0, without one. A later trace shows that none came."""
    _, url, collector = cluster
    unsampled, later = new_trace(), new_trace()
    num_before = len({span.trace_id for span in collector.spans})
    ask(url, {"traceparent": traceparent(unsampled, "00")})
    ask(url, {})
    ask(url, {"traceparent": "nonsense"})
    httpx.get(f"{url}/metrics", headers={"traceparent": traceparent(new_trace())})
    ask(url, {"traceparent": traceparent(later)}, max_tokens=-1)
    spans = collector.wait(later, bool)
    assert [span.name for span in spans] == ["POST /v1/completions"]
    assert spans[0].attributes["http.response.status_code"] == 400
    assert spans[0].attributes["error.type"] == "invalid_value"
    assert not spans[0].is_error, "a client's mistake"
    check_nesting(spans, PARENT)
    assert len({span.trace_id for span in collector.spans}) == num_before + 1
