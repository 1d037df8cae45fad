"""Sampling fields, logprobs, several choices and echo, as clients ask and workers see them."""

import threading
from operator import contains
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
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


def test_logprobs_of_a_chat(client: openai.OpenAI, text: Text) -> None:
    asked: Any = {"model": "small", "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**asked)
    ChatCompletion.model_validate(answer.model_dump())
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    content = logprobs.content or []
    tokens = text.encode(ANSWER, add_special_tokens=False)
    assert [each.logprob for each in content] == [-token / 8 for token in tokens]
    assert b"".join(bytes(each.bytes or []) for each in content).decode() == ANSWER
    assert all(len(each.top_logprobs) == 2 for each in content)
    assert all(each.top_logprobs[0].token == each.token for each in content)


def test_streamed_logprobs_are_those_of_the_whole_answer(
    served: Served, double: DecodeDouble
) -> None:
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 1}
    whole, streamed = (served.told("chat/completions", way, **body) for way in (False, True))
    assert streamed == whole
    assert whole[0][0]["logprobs"]


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


def test_logprobs_of_a_completion(
    served: Served, double: DecodeDouble, text: Text, streamed: bool
) -> None:
    asked: dict[str, Any] = {"prompt": "a", "logprobs": 2}
    Completion.model_validate(served.post("completions", **asked).json())
    (choice,), _ = served.told("completions", streamed, **asked)
    offsets, logprobs, tokens, tops = zip(*choice["logprobs"], strict=True)
    ids = text.encode(ANSWER, add_special_tokens=False)
    assert offsets == tuple(sum(map(len, tokens[:i])) for i in range(len(tokens)))
    assert logprobs == tuple(-i / 8 for i in ids)
    assert all(map(contains, tops, tokens))


def test_choices_share_a_prompt_and_have_seeds_of_their_own(
    served: Served, double: DecodeDouble, streamed: bool
) -> None:
    found, usage = served.told("chat/completions", streamed, messages=HELLO, n=4, seed=11)
    assert usage["completion_tokens"] % 4 == 0
    assert usage["prompt_tokens"] < 40
    assert [choice["text"] for choice in found] == [ANSWER] * 4
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


def test_echo_repeats_the_prompt(
    served: Served, double: DecodeDouble, text: Text, streamed: bool
) -> None:
    ids = text.encode("again", add_special_tokens=False)
    for prompt, said in (("hello ", "hello "), ([list(ids)], "again")):
        (choice,), _ = served.told("completions", streamed, prompt=prompt, echo=True)
        assert choice["text"] == said + ANSWER


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
