"""`return_stages`: where the time of a choice went, next to its finish reason, if asked for."""

from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletionChunk
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from router.observe.stages import STAGES
from router.text.tokenizer import Text
from tests.fault.router_doubles import HANG_S, HELLO, TOLD_STAGES, Script, Served, events, speak

WANTED = {
    "prefill_queue_s": 0.5, "prefill_s": 0.25, "transfer_s": 0.125, "decode_queue_s": 0.0625,
    "first_step_s": 0.03125, "prefilled_by": "prefill-3", "decoded_by": "decode-0",
}  # fmt: skip


def script_of(text: Text) -> Script:
    return speak([5, 6, 7], stages=TOLD_STAGES)


def check(stages: dict[str, Any]) -> None:
    assert WANTED.items() <= stages.items()
    own = {"router_queue_s", "decode_s", "first_token_s"}
    assert stages.keys() - WANTED.keys() == own
    assert all(stages[name] >= 0 for name in own)


@pytest.mark.parametrize(
    ("path", "ask"), [("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "a"})]
)
def test_whole_answers(served: Served, path: str, ask: dict[str, Any]) -> None:
    found = served.post(path, **ask, n=2, return_stages=True).json()
    assert len(found["choices"]) == 2
    for choice in found["choices"]:
        check(choice["stages"])
    plain = served.post(path, **ask).json()
    assert "stages" not in plain["choices"][0]


def test_streams_say_it_once_a_choice_with_the_finish_reason(served: Served) -> None:
    body = {"messages": HELLO, "stream": True, "n": 2, "return_stages": True}
    told = []
    for chunk in events(served.post("chat/completions", **body)):
        ChatCompletionChunk.model_validate(chunk)
        for choice in chunk["choices"]:
            assert ("stages" in choice) == (choice["finish_reason"] is not None)
            told += [choice["index"]] if "stages" in choice else []
    assert sorted(told) == [0, 1]


def test_a_stop_string_does_not_lose_them(served: Served) -> None:
    text = served.post("completions", prompt="a", max_tokens=3).json()["choices"][0]["text"]
    found = served.post("completions", prompt="a", stop=[text[-1]], return_stages=True).json()
    assert found["choices"][0]["finish_reason"] == "stop"
    check(found["choices"][0]["stages"])


def test_a_client_s_trace_is_named_by_exemplars_though_nothing_is_traced_here(
    served: Served,
) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    body = {"prompt": "a", "max_tokens": 3}
    httpx.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=HANG_S)
    accept = {"accept": "application/openmetrics-text"}
    page = httpx.get(f"{served.url}/metrics", headers=accept).text
    named = {
        family.name.removeprefix("kvlane_")
        for family in openmetrics.text_string_to_metric_families(page)
        for sample in family.samples
        if sample.exemplar and sample.exemplar.labels == {"trace_id": trace_id}
    }
    assert named == {
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_stage_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds",
    }  # fmt: skip


def test_every_stage_is_a_histogram(served: Served) -> None:
    served.post("completions", prompt="a")
    counts = {}
    for family in text_string_to_metric_families(httpx.get(f"{served.url}/metrics").text):
        if family.name == "kvlane_request_stage_seconds":
            for sample in family.samples:
                if sample.name.endswith("_count"):
                    counts[sample.labels["stage"]] = sample.value
    assert set(counts) == set(STAGES)
    assert min(counts.values()) == max(counts.values()) > 0
