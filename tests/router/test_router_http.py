"""The OpenAI surface, served for real on 127.0.0.1 and asked by the official client and httpx."""

from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from router.openai.schema import NOT_BUILT
from router.text.tokenizer import Text
from tests.fault.router_doubles import (
    HELLO,
    KEEP,
    MAX_MODEL_LEN,
    DecodeDouble,
    Script,
    Served,
    events,
    speak,
)
from worker.api import FinishReason, Stop

ANSWER = "hello 😀 wörld, the end"


ROUTER = {"max_body_bytes": 20_000, "sse_ping_s": 0.05}


def script_of(text: Text) -> Script:
    return speak(text.encode(ANSWER, add_special_tokens=False), cached=4)


def test_chat_whole(client: openai.OpenAI, text: Text) -> None:
    answer = client.chat.completions.create(model="small", messages=HELLO)  # type: ignore[arg-type]
    ChatCompletion.model_validate(answer.model_dump())
    choice = answer.choices[0]
    assert choice.message.content == ANSWER
    assert choice.finish_reason == "stop"
    prompt = text.render(HELLO)
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens == len(text.encode(prompt, add_special_tokens=False))
    assert usage.completion_tokens == len(text.encode(ANSWER, add_special_tokens=False))
    assert usage.model_dump()["prompt_tokens_details"]["cached_tokens"] == 4


def test_whole_answers_hold_the_nulls_of_the_published_schema(served: Served) -> None:
    choice = served.post("chat/completions", messages=HELLO).json()["choices"][0]
    assert choice["message"]["refusal"] is choice["logprobs"] is None


def test_chat_stream(client: openai.OpenAI) -> None:
    found, reasons, usages = "", [], []
    stream = client.chat.completions.create(
        model="small",
        messages=HELLO,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            found += chunk.choices[0].delta.content or ""
            reasons.append(chunk.choices[0].finish_reason)
        usages.append(chunk.usage)
    assert found == ANSWER
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}
    assert usages[-1] is not None
    assert usages[-1].total_tokens == usages[-1].prompt_tokens + usages[-1].completion_tokens
    assert set(usages[:-1]) == {None}


def test_every_streamed_chunk_is_what_openai_declares(served: Served) -> None:
    options = {"include_usage": True}
    response = served.post("chat/completions", messages=HELLO, stream=True, stream_options=options)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=False)
        assert "usage" in chunk
        assert all("finish_reason" in choice for choice in chunk["choices"])
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "usage" not in events(served.post("chat/completions", messages=HELLO, stream=True))[0]
    for chunk in events(served.post("completions", prompt="a", stream=True)):
        assert chunk["object"] == "text_completion"
        assert chunk["choices"][0].keys() == {"index", "text", "logprobs", "finish_reason"}


def test_continuous_usage_is_in_every_chunk(served: Served) -> None:
    options = {"continuous_usage_stats": True}
    response = served.post("completions", prompt="a", stream=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in events(response)]
    assert counts == sorted(counts)
    assert counts[-1] > 0


@pytest.mark.parametrize(
    "prompt", ["hello", ["hello", "world"], [1, 2, 3], [[1, 2], [3, 4, 5]]], ids=str
)
def test_completions_take_every_form_of_prompt(
    client: openai.OpenAI, prompt: Any, streamed: bool
) -> None:
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    found = dict.fromkeys(range(len(prompt) if several else 1), "")
    if streamed:
        for chunk in client.completions.create(model="small", prompt=prompt, stream=True):
            for choice in chunk.choices:
                found[choice.index] += choice.text
    else:
        answer = client.completions.create(model="small", prompt=prompt)
        Completion.model_validate(answer.model_dump())
        found |= {choice.index: choice.text for choice in answer.choices}
    assert set(found.values()) == {ANSWER}


@pytest.mark.parametrize("sizes", [(), (3, 1, 5), (100,)], ids=str)
@pytest.mark.parametrize("stop", ["ld, th", ["zzz", "😀"]], ids=str)
def test_stop_string_across_tokens_ends_text_and_request(
    served: Served, double: DecodeDouble, text: Text, sizes: Any, stop: Any, streamed: bool
) -> None:
    tokens = text.encode(ANSWER, add_special_tokens=False)
    double.script = speak(tokens, sizes=sizes)
    response = served.post("completions", prompt="a", stop=stop, stream=streamed)
    chunks = events(response) if streamed else [response.json()]
    choices = [chunk["choices"][0] for chunk in chunks]
    cut = stop if isinstance(stop, str) else stop[-1]
    assert "".join(choice["text"] for choice in choices) == ANSWER[: ANSWER.index(cut)]
    assert choices[-1]["finish_reason"] == "stop"
    at_position = double.expect(Stop).at_position
    kept = text.decode(tokens[: at_position - 1])
    assert cut in kept
    assert cut not in text.decode(tokens[: at_position - 2])
    if not streamed:
        usage = response.json()["usage"]
        assert usage["completion_tokens"] == at_position - usage["prompt_tokens"]


def test_finish_reason_length_and_special_tokens(
    served: Served, double: DecodeDouble, text: Text
) -> None:
    tokens = text.encode("a<|im_end|>", add_special_tokens=False)
    double.script = speak(tokens, finish=FinishReason.LENGTH)
    choice = served.post("completions", prompt="a").json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("a", "length")
    shown = served.post("completions", prompt="a", skip_special_tokens=False).json()
    assert shown["choices"][0]["text"] == "a<|im_end|>"


def test_sampling_reaches_the_worker_and_unknown_fields_are_accepted(
    served: Served, double: DecodeDouble
) -> None:
    double.script = KEEP
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": "me"}],
        "temperature": 0,
        "top_p": 0.5,
        "top_k": -1,
        "min_p": 0.1,
        "seed": -3,
        "max_tokens": 99,
        "max_completion_tokens": 7,
        "ignore_eos": True,
        "min_tokens": 2,
        "stop": None,
        "stop_token_ids": [9, 3, 9],
        "user": "me",
        "unheard_of": {"a": [1]},
        "n": 1,
        "logit_bias": {},
        "logprobs": False,
        "tools": [{"type": "function"}],
        "tool_choice": "none",
        "response_format": {"type": "text"},
    }
    assert served.post("chat/completions", **body).status_code == 200
    peer, generate = double.take()
    assert peer.startswith("router-0/")
    assert generate.dispatch == 1
    sampling = generate.sampling
    assert sampling.max_tokens == 7
    assert (sampling.temperature, sampling.top_p) == (0, 0.5)
    assert (sampling.top_k, sampling.min_p) == (0, 0.1)
    assert sampling.seed == 2**63 - 3
    assert (sampling.ignore_eos, sampling.min_tokens, sampling.stop_ids) == (True, 2, (3, 9))


@pytest.mark.parametrize("num_left", [246, 16, 15, 1])
def test_a_completion_has_16_tokens_unless_asked(
    served: Served, double: DecodeDouble, num_left: int
) -> None:
    """As at OpenAI and vLLM; what a prompt leaves may be less, and null is as good as nothing."""
    double.script = KEEP
    prompt = [1] * (MAX_MODEL_LEN - num_left)
    for asked in ({}, {"max_tokens": None}):
        assert served.post("completions", prompt=prompt, **asked).status_code == 200
        _, generate = double.take()
        assert generate.sampling.max_tokens == min(16, num_left)
        assert 0 <= generate.sampling.seed < 2**63


def test_a_chat_has_what_is_left_unless_asked(served: Served, double: DecodeDouble) -> None:
    double.script = KEEP
    for asked in ({}, {"max_tokens": None}):
        assert served.post("chat/completions", messages=HELLO, **asked).status_code == 200
        _, generate = double.take()
        assert generate.sampling.max_tokens == MAX_MODEL_LEN - len(generate.tokens)


UNSUPPORTED: dict[str, Any] = {
    "use_beam_search": True, "allowed_token_ids": [1], "bad_words": ["a"], "prompt_logprobs": 1,
    "functions": [{"name": "f"}], "suffix": "b", "include_stop_str_in_output": True,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_is_not_built_is_refused_by_name(client: openai.OpenAI, name: str) -> None:
    assert name in NOT_BUILT
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="small", prompt="a", extra_body={name: UNSUPPORTED[name]})
    assert (caught.value.code, caught.value.param) == ("unsupported", name)


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "param"),
    [(MAX_MODEL_LEN, None, "prompt"), (MAX_MODEL_LEN + 9, 1, "prompt"), (200, 57, "max_tokens")],
)
def test_too_long_is_context_length_exceeded(
    client: openai.OpenAI, num_tokens: int, max_tokens: int | None, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="small", prompt=[1] * num_tokens, max_tokens=max_tokens)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)


ASKED = "max_completion_tokens"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "a " * 9000}, "prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a " * 300}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a " * 9000}]}, "messages"),
        ("chat/completions", {"messages": HELLO, ASKED: 256}, ASKED),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_too_long_is_named(served: Served, path: str, body: Any, param: str) -> None:
    error = served.post(path, **body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


def test_other_models_are_404(client: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="a")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")
    assert httpx.get(f"{served.url}/nothing").json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "raw", [b"{", b"", b"[]", b'"a"', b'{"prompt": "\xff"}', b"[" * 5000, b'{"prompt": "\\ud800"}']
)
def test_what_is_not_a_json_object_is_400(served: Served, raw: bytes) -> None:
    response = httpx.post(f"{served.url}/v1/completions", content=raw)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_value"


@pytest.mark.parametrize("chunked", [False, True])
def test_body_over_the_limit_is_413(served: Served, chunked: bool) -> None:
    raw = b" " * 20_001
    content = iter([raw[:10_000], raw[10_000:]]) if chunked else raw
    response = httpx.post(f"{served.url}/v1/completions", content=content)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def test_silent_streams_are_kept_alive_with_comments(
    served: Served, double: DecodeDouble, text: Text
) -> None:
    double.script = None
    seen = []
    body = {"prompt": "a", "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body) as r:
        peer, generate = double.take()
        for line in r.iter_lines():
            seen.append(line)
            if len(seen) == 1:
                double.chunk(peer, generate, [5], finish=FinishReason.LENGTH)
    assert seen[0] == ": ping"
    assert seen[-2] == "data: [DONE]"
