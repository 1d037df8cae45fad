"""Logprobs of prompts, in OpenAI's form and in vLLM's, from what workers send of them."""

from typing import Any

import pytest

from router.text.tokenizer import Text
from tests.fault.router_doubles import HELLO, DecodeDouble, Served
from worker.api import FinishReason

PROMPT = "hello world"


@pytest.fixture
def asked(text: Text) -> tuple[int, ...]:
    return text.encode(PROMPT, add_special_tokens=True)


def test_echo_with_logprobs(
    served: Served, double: DecodeDouble, text: Text, asked: tuple[int, ...], streamed: bool
) -> None:
    """As lm-eval asks: the double gives each token -id / 8, the next ids are as likely."""
    double.says(text, " you", FinishReason.LENGTH)
    body: Any = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 1}
    (choice,), _ = served.told("completions", streamed, **body)
    answer = text.encode(" you", add_special_tokens=False)
    assert choice["text"] == f"{PROMPT} you"
    ids = [*asked, *answer]
    offsets, logprobs, tokens, tops = zip(*choice["logprobs"], strict=True)
    assert "".join(tokens) == choice["text"]
    assert logprobs == (None, *(-i / 8 for i in ids[1:]))
    assert offsets == tuple(len("".join(tokens[:i])) for i in range(len(tokens)))
    assert tops[0] is None
    assert all(max(top.values()) == -i / 8 for top, i in zip(tops[1:], ids[1:], strict=True))
    assert double.take()[1].sampling.prompt_logprobs == 1


@pytest.mark.parametrize("echo", [True, False])
def test_the_prompt_alone(
    served: Served, double: DecodeDouble, text: Text, asked: tuple[int, ...], echo: bool
) -> None:
    double.says(text, " you", FinishReason.LENGTH)
    body: Any = {"prompt": list(asked), "echo": echo, "logprobs": 0, "max_tokens": 0}
    answer = served.post("completions", **body).json()
    (choice,) = answer["choices"]
    assert choice["text"] == PROMPT * echo
    assert choice["finish_reason"] == "length"
    assert (choice["logprobs"] is None) == (not echo)
    if echo:
        assert choice["logprobs"]["token_logprobs"] == [None, *(-i / 8 for i in asked[1:])]
    assert answer["usage"]["completion_tokens"] == 0
    generate = double.take()[1]
    assert (generate.sampling.max_tokens, generate.sampling.prompt_logprobs) == (1, echo - 1)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_prompt_logprobs_as_vllm_has_them(
    served: Served, double: DecodeDouble, text: Text, path: str
) -> None:
    double.says(text, "ok", FinishReason.LENGTH)
    body: Any = {"prompt": PROMPT} if path == "completions" else {"messages": HELLO}
    answer = served.post(path, **body, prompt_logprobs=2, n=2).json()
    prompt = double.take()[1].tokens
    holders = answer["choices"] if path == "completions" else [answer]
    for holder in holders:
        first, *rest = holder["prompt_logprobs"]
        assert first is None
        assert len(rest) == len(prompt) - 1
        for token, entries in zip(prompt[1:], rest, strict=True):
            own = entries[str(token)]
            assert own["logprob"] == -token / 8
            assert own["decoded_token"] == text.token_bytes(token).decode("utf-8", "replace")
            assert {entry["rank"] for entry in entries.values()} == {1, 2}


def test_each_prompt_has_its_own(served: Served, double: DecodeDouble, text: Text) -> None:
    double.says(text, "ok", FinishReason.LENGTH)
    prompts = [[5, 6, 7, 8], [9], [10, 11]]
    body: Any = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 0}
    choices = served.post("completions", **body).json()["choices"]
    for prompt, choice in zip(prompts, choices, strict=True):
        assert choice["logprobs"]["token_logprobs"] == [None, *(-i / 8 for i in prompt[1:])]


def test_so_many_are_too_many(served: Served) -> None:
    error = served.refusal("completions", prompt=[[5] * 200] * 255, prompt_logprobs=20)
    assert error["param"] == "prompt_logprobs"
