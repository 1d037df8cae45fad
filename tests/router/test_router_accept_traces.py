"""`return_trace`: each choice brings the windows of its decode steps, if it is asked to."""

from typing import Any

import httpx
import msgspec
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from router.http import answer as sse
from router.text.tokenizer import Text
from tests.fault.router_doubles import DecodeDouble, Script, Served, events, letter_ids
from worker.api import FinishReason, Generate, TokenChunk, Window

WINDOWS = [(1, Window(2, 4, (-1, -1, -1), 0)), (3, Window(3, 4, (80, 81, 9), 2)),
           (2, Window(6, 2, (81,), 1)), (1, Window(8, 1, (), 0))]  # fmt: skip
TOLD = [msgspec.structs.asdict(window) | {"drafts": [*window.drafts]} for _, window in WINDOWS]
PATHS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "completions": {"prompt": "a"},
}


def script_of(text: Text) -> Script:
    """One token of a prefill worker, then what the windows yield; a final chunk without tokens."""
    letters = letter_ids(text.directory)

    def answer(double: DecodeDouble, peer: str, generate: Generate) -> None:
        def chunk(at: int, num: int, reason: FinishReason | None, window: Window | None) -> None:
            key = generate.req_id, generate.dispatch, generate.num_prompt_tokens + at
            asked = window if generate.sampling.return_trace else None
            made = TokenChunk(*key, letters[at : at + num], reason, window=asked)
            double.send(peer, made)

        chunk(0, 1, None, None)
        at = 1
        for num, window in WINDOWS:
            chunk(at, num, None, window)
            at += num
        chunk(at, 0, FinishReason.LENGTH, None)

    return answer


def post(served: Served, path: str, **body: Any) -> httpx.Response:
    return served.post(path, **PATHS[path] | body)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("limit", [256, 1])
def test_whole_answers(
    served: Served, path: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more steps than `limit` a thread writes them."""
    monkeypatch.setattr(sse, "THREAD_SCORED", limit)
    found = post(served, path, n=2, return_trace=True).json()
    (ChatCompletion if "messages" in PATHS[path] else Completion).model_validate(found)
    assert [choice["kvlane_trace"] for choice in found["choices"]] == [TOLD, TOLD]
    plain = post(served, path).json()
    assert "kvlane_trace" not in plain["choices"][0]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("more", [{}, {"return_stages": True}, {"logprobs": 1}], ids=str)
def test_streams_say_it_once_a_choice_with_the_finish_reason(
    served: Served, path: str, more: dict[str, Any]
) -> None:
    if path == "chat/completions" and "logprobs" in more:
        more = {"logprobs": True}
    told = []
    for chunk in events(post(served, path, stream=True, n=2, return_trace=True, **more)):
        if "messages" in PATHS[path]:
            ChatCompletionChunk.model_validate(chunk)
        for choice in chunk["choices"]:
            assert ("kvlane_trace" in choice) == (choice["finish_reason"] is not None)
            if "kvlane_trace" in choice:
                assert choice["kvlane_trace"] == TOLD
                told.append(choice["index"])
    assert sorted(told) == [0, 1]


def test_a_stop_string_ends_it_with_the_step_that_drew_the_string(served: Served) -> None:
    found = post(served, "completions", stop=["cd"], return_trace=True).json()
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    assert found["usage"]["completion_tokens"] == 4
    assert choice["kvlane_trace"] == TOLD[:2]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wrong", [3, "maybe", [True], {"drafts": True}])
def test_other_types_are_refused_by_name(served: Served, path: str, wrong: Any) -> None:
    refused = post(served, path, return_trace=wrong)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "return_trace"
