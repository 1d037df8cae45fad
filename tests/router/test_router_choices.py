"""Logprobs of answers and prompts, several choices, echo: as clients ask and workers see them."""

import threading
from typing import Any

import httpx
import msgspec
import openai
import pytest
from pydantic import ValidationError

from router.openai.schema import ChatBody, CompletionBody, GenerationBody, seed_of
from router.text.tokenizer import Text
from tests.fault.router_doubles import (
    HANG_S,
    HELLO,
    DecodeDouble,
    Script,
    Serve,
    Served,
    speak,
    wait_until,
)
from worker.api import FinishReason, Generate

ANSWER = "hello 😀 there"


def script_of(text: Text) -> Script:
    return speak(text.encode(ANSWER, add_special_tokens=False), sizes=(2, 3), kept=True)


def test_many_logprobs_are_written_off_the_loop(
    served: Served, double: DecodeDouble, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    threads: set[str] = set()

    def to_json(body: object) -> bytes:
        threads.add(threading.current_thread().name)
        return msgspec.json.encode(body)

    monkeypatch.setattr("router.openai.body.to_json", to_json)
    for size in (100, 300):
        double.script = speak([64] * size, sizes=[size])
        threads.clear()
        response = served.post("completions", prompt="a", logprobs=1, stream=streamed)
        assert response.text.count('"stop"') == 1
        assert any(name != "kvlane-router" for name in threads) is (size == 300)


def test_choices_share_a_prompt_and_have_seeds_of_their_own(
    served: Served, double: DecodeDouble, streamed: bool
) -> None:
    body: Any = {"messages": HELLO, "n": 4, "seed": 11, "logprobs": True}
    found, usage = served.told("chat/completions", streamed, **body)
    assert usage["completion_tokens"] % 4 == 0
    assert usage["prompt_tokens"] < 40
    assert [choice["text"] for choice in found] == [ANSWER] * 4
    pieces = [bytes(each["bytes"]) for each in found[0]["logprobs"]]
    assert b"".join(pieces).decode() == ANSWER
    taken = [double.take()[1] for _ in range(4)]
    assert taken[0].after == ""
    assert [each.sampling.seed for each in taken] == [seed_of(11, i) for i in range(4)]
    assert taken[0].sampling.seed == 11
    assert len({each.sampling.seed for each in taken}) == 4


def test_followers_go_to_their_leader_and_on_their_own_when_it_refuses(serve: Serve) -> None:
    first, second = DecodeDouble("decode-0"), DecodeDouble("decode-1")
    _, url, _ = serve(first, second, sse_ping_s=0.05)
    body = {"prompt": "hello", "n": 3, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=HANG_S) as response:
        wait_until(lambda: not (first.taken.empty() and second.taken.empty()))
        busy = second if first.taken.empty() else first
        found = [busy.take() for _ in range(3)]  # all come to the worker that has the first
        leader = found[0][1]
        assert [each.after for _, each in found] == ["", leader.req_id, leader.req_id]
        other = second if busy is first else first
        busy.refuse(*found[1], retry_after_s=5.0)
        peer, again = other.take()
        assert (again.req_id, again.after, again.dispatch) == (found[1][1].req_id, "", 2)
        other.chunk(peer, again, [5], finish=FinishReason.LENGTH)
        for peer, generate in (found[0], found[2]):
            busy.chunk(peer, generate, [5], finish=FinishReason.LENGTH)
        assert response.read().count(b'"length"') == 3


def test_best_of_gives_the_likeliest_back(
    client: openai.OpenAI, double: DecodeDouble, text: Text
) -> None:
    answers = iter(["zzz", "a", "k", "d"] * 2)

    def script(double: DecodeDouble, peer: str, generate: Generate) -> None:
        assert generate.sampling.logprobs == 0
        tokens = text.encode(next(answers), add_special_tokens=False)
        double.chunk(peer, generate, tokens, finish=FinishReason.STOP)

    double.script = script
    for prompt in ("x", ["x"]):
        answer = client.completions.create(model="small", prompt=prompt, n=2, best_of=4)
        assert [choice.text for choice in answer.choices] == ["a", "d"]
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.choices[0].logprobs is None
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 1


FLOODS: list[tuple[type[GenerationBody], bytes, bytes]] = [
    (ChatBody, b'"messages": [%s]', b"1"),
    (ChatBody, b'"messages": [{"role": "user", "content": [%s]}]', b"1"),
    (ChatBody, b'"messages": [{"role": "user", "tool_calls": [%s]}]', b"1"),
    (ChatBody, b'"messages": [{"role": "user"}], "tools": [%s]', b"1"),
    (CompletionBody, b'"prompt": "a", "guided_choice": [%s]', b"1"),
    (CompletionBody, b'"prompt": "a", "stop": [%s]', b"1"),
    (CompletionBody, b'"prompt": "a", "stop_token_ids": [%s]', b'"a"'),
    (CompletionBody, b'"prompt": "a", "logit_bias": {%s}', b'"%d": "a"'),
]


@pytest.mark.parametrize(("model", "form", "item"), FLOODS, ids=str)
def test_the_first_of_many_wrong_values_is_enough(
    model: type[GenerationBody], form: bytes, item: bytes
) -> None:
    items = [item % i if b"%d" in item else item for i in range(5000)]
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(b"{%s}" % (form % b",".join(items)))
    assert caught.value.error_count() <= 2  # content has two forms


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
def test_prompts_alone(
    served: Served, double: DecodeDouble, text: Text, asked: tuple[int, ...], echo: bool
) -> None:
    double.says(text, " you", FinishReason.LENGTH)
    prompts = [list(asked), [9], [10, 11]]
    body: Any = {"prompt": prompts, "echo": echo, "logprobs": 0, "max_tokens": 0}
    answer = served.post("completions", **body).json()
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        assert choice["text"] == text.decode(prompt) * echo
        assert choice["finish_reason"] == "length"
        assert (choice["logprobs"] is None) == (not echo)
        if echo:
            assert choice["logprobs"]["token_logprobs"] == [None, *(-i / 8 for i in prompt[1:])]
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
