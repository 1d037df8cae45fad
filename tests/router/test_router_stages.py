"""`return_stages`, where the time of a choice went, and `return_trace`, the windows of its steps.

Each stands next to the choice's finish reason, if it was asked for.
"""

import threading
from collections.abc import Sequence
from typing import Any, cast

import httpx
import msgspec
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from prometheus_client.openmetrics import parser as openmetrics

from router.dispatch import pool
from router.dispatch.mailbox import Delta
from router.dispatch.queue import Req
from router.http import answer as sse
from router.observe.stages import by_stage
from router.openai.body import Body
from router.text.tokenizer import Text
from tests.fault.router_doubles import (
    HANG_S,
    HELLO,
    TOLD_STAGES,
    DecodeDouble,
    Script,
    Served,
    events,
    letter_ids,
)
from worker.api import FinishReason, Generate, Sampling, Stages, TokenChunk, Window

WANTED = {
    "prefill_queue_s": 0.5, "prefill_s": 0.25, "transfer_s": 0.125, "decode_queue_s": 0.0625,
    "first_step_s": 0.03125, "prefilled_by": "prefill-3", "decoded_by": "decode-0",
}  # fmt: skip
WINDOWS = [(1, Window(2, 4, (-1, -1, -1), 0)), (3, Window(3, 4, (80, 81, 9), 2)),
           (2, Window(6, 2, (81,), 1)), (1, Window(8, 1, (), 0))]  # fmt: skip
TOLD = [msgspec.structs.asdict(window) | {"drafts": [*window.drafts]} for _, window in WINDOWS]
PATHS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HELLO},
    "completions": {"prompt": "a"},
}
PULLS = {"pull_s": 0.2, "pull_span_s": 0.3, "pulled_bytes": 4096}
BOTH = {"return_stages": True, "return_trace": True}


def script_of(text: Text) -> Script:
    """One token of a prefill worker, then what the windows yield; a final chunk without tokens."""
    letters = letter_ids(text.directory)

    def answer(double: DecodeDouble, peer: str, generate: Generate) -> None:
        at, key = 0, (generate.req_id, generate.dispatch)
        for num, window in [(1, None), *WINDOWS, (0, None)]:
            position, stages = generate.num_prompt_tokens + at, None if at else TOLD_STAGES
            reason = None if num else FinishReason.LENGTH
            asked = window if generate.sampling.return_trace else None
            tokens = letters[at : at + num]
            double.send(
                peer, TokenChunk(*key, position, tokens, reason, stages=stages, window=asked)
            )
            at += num

    return answer


def post(served: Served, path: str, **body: Any) -> httpx.Response:
    return served.post(path, **PATHS[path] | body)


def check(choice: dict[str, Any], windows: list[Any] = TOLD) -> None:
    assert choice["kvlane_trace"] == windows
    stages = choice["stages"]
    assert WANTED.items() <= stages.items()
    own = {"router_queue_s", "messages_s", "decode_s", "first_token_s", *PULLS}
    assert stages.keys() - WANTED.keys() == own | {"first_token_after"}
    assert stages["first_token_after"] == "first_step"
    assert all(stages[name] >= 0 for name in own)


FORMS = {
    "local": (Stages(0.5, 0.25, 0, 0, 0, "decode-0/x"), 0.0),
    "cached": (Stages(0.5, 0, 0, 0.25, 0.125, ""), 0.0),
    "pulled": (Stages(0.5, 0.25, 0.125, 0.25, 0.25, "prefill-0/x", **PULLS), 0.0),
    "early": (Stages(0.5, 0.25, 0.125, 0.25, 0.25, "prefill-0/x", late=True, **PULLS), 0.0),
    "early_and_at_once": (Stages(0.5, 0.25, 0.5, 0.5, 0.5, "prefill-0/x", late=True, **PULLS), 0.5),
}


@pytest.mark.parametrize("form", FORMS)
def test_stages_add_up_to_the_time_of_the_choice(form: str) -> None:
    """Also where the first token came so late that the row's first one was here with it, and
    after another wait in the queue; and a transfer is told."""
    stages, more_s = FORMS[form]
    req = Req(0, (1,), Sampling(8), cast("Any", None))
    req.stages, req.arrived_at = stages, 100.0
    req.queued_first_s, req.queued_s = 0.25, 7.0
    req.first_token_at, req.last_token_at = 101.75 + more_s, 103.0
    found = req.spent
    assert found is not None
    assert sum(by_stage(found).values()) == pytest.approx(3.0, abs=1e-9)
    assert min(by_stage(found).values()) >= 0
    assert (found.pull_s > 0) == (stages.prefilled_by == "prefill-0/x")
    assert found.router_queue_s == 0.25


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("limit", [256, 1])
def test_whole_answers(
    served: Served, path: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more steps than `limit` the pool writes them, in turn between clients."""
    monkeypatch.setattr(sse, "THREAD_SCORED", limit)
    whole, threads = Body.whole, list[str]()

    def noted(form: Body, answers: Sequence[Delta]) -> bytes:
        threads.append(threading.current_thread().name)
        return whole(form, answers)

    monkeypatch.setattr(Body, "whole", noted)
    found = post(served, path, n=2, **BOTH).json()
    assert [name.startswith(pool.NAME) for name in threads] == [limit == 1]
    (ChatCompletion if "messages" in PATHS[path] else Completion).model_validate(found)
    assert len(found["choices"]) == 2
    for choice in found["choices"]:
        check(choice)
    for name in BOTH:  # one is not in the answer because the other was asked for
        (choice,) = post(served, path, **{name: True}).json()["choices"]
        assert ("stages" in choice, "kvlane_trace" in choice) == (
            name == "return_stages", name == "return_trace",
        )  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("logprobs", [False, True])
def test_streams_say_it_once_a_choice_with_the_finish_reason(
    served: Served, path: str, logprobs: bool
) -> None:
    more = {"logprobs": True if path == "chat/completions" else 1} if logprobs else {}
    told = []
    for chunk in events(post(served, path, stream=True, n=2, **BOTH, **more)):
        if "messages" in PATHS[path]:
            ChatCompletionChunk.model_validate(chunk)
        for choice in chunk["choices"]:
            ends = choice["finish_reason"] is not None
            assert ("stages" in choice, "kvlane_trace" in choice) == (ends, ends)
            if ends:
                check(choice)
                told.append(choice["index"])
    assert sorted(told) == [0, 1]


def test_a_stop_string_ends_both_with_the_step_that_drew_the_string(served: Served) -> None:
    found = post(served, "completions", stop=["cd"], **BOTH).json()
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    assert found["usage"]["completion_tokens"] == 4
    check(choice, TOLD[:2])


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
