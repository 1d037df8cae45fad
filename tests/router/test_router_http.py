"""The OpenAI surface, served for real on 127.0.0.1 and asked by the official client and httpx."""

import httpx
import pytest

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
from worker.api import FinishReason

ANSWER = "hello 😀 wörld, the end"


ROUTER = {"sse_ping_s": 0.05}


def script_of(text: Text) -> Script:
    return speak(text.encode(ANSWER, add_special_tokens=False), cached=4)


def test_continuous_usage_is_in_every_chunk(served: Served) -> None:
    options = {"continuous_usage_stats": True}
    response = served.post("completions", prompt="a", stream=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in events(response)]
    assert counts == sorted(counts)
    assert counts[-1] > 0


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
        "temperature": 1e-9, "top_p": 0.5, "top_k": -1, "min_p": 0.1, "seed": -3,
        "max_tokens": 99, "max_completion_tokens": 7, "ignore_eos": True, "min_tokens": 2,
        "stop": None, "stop_token_ids": [9, 3, 9], "user": "me", "unheard_of": {"a": [1]}, "n": 1,
        "presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.5,
        "logit_bias": {"5": 3, "7": -100}, "logprobs": False, "tools": [{"type": "function"}],
        "tool_choice": "none", "response_format": {"type": "text"},
    }  # fmt: skip
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
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -1)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.5, ((5, 3.0), (7, -100.0)))
    assert sampling.logprobs == -1


@pytest.mark.parametrize("num_left", [246, 16, 15, 1])
def test_a_completion_has_16_tokens_and_a_chat_what_is_left_unless_asked(
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
        assert served.post("chat/completions", messages=HELLO, **asked).status_code == 200
        _, generate = double.take()
        assert generate.sampling.max_tokens == MAX_MODEL_LEN - len(generate.tokens)


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
