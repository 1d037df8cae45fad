"""Tools and reasoning through the HTTP front, with the templates of both formats."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from llguidance import LLTokenizer
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from router.openai.tools import detected
from router.text.tokenizer import Text
from tests.fault.router_doubles import (
    HELLO,
    QWEN,
    DecodeDouble,
    Script,
    Serve,
    Served,
    accepts,
    make_model,
    speak,
)
from tests.support.mutants import TOOLS
from worker.api import FinishReason, Generate, Stop

LLAMA = "{# ipython #}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ARGUMENTS = '{"city": "é 😀"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
CALL2 = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
SAID = [("weather", ARGUMENTS), ("time", "{}")]


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "text"])
def text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Text:
    """Models to which the tags are tokens of their own, and models that spell them."""
    words = ("<tool_call>", "</tool_call>", "<think>", "</think>") if request.param else ()
    return Text(make_model(tmp_path_factory.mktemp("model"), QWEN, words, 2048))


def slowly(tokens: Sequence[int], pause_s: float, finish: FinishReason) -> Script:
    def script(double: DecodeDouble, peer: str, generate: Generate) -> None:
        for i, token in enumerate(tokens):
            double.chunk(peer, generate, [token], at=i)
            time.sleep(pause_s)
        double.chunk(peer, generate, at=len(tokens), finish=finish)

    return script


def asked(double: DecodeDouble, text: Text) -> tuple[str, str]:
    """Prompt and grammar of what the worker was asked."""
    generate = double.take()[1]
    return text.decode(generate.tokens, skip_special_tokens=False), generate.sampling.grammar


def test_calls_of_a_whole_answer(client: openai.OpenAI, double: DecodeDouble, text: Text) -> None:
    double.says(text, f"I look.\n{CALL}\n{CALL2}", sizes=(3, 1, 2))
    answer = client.chat.completions.create(model="small", messages=HELLO, tools=TOOLS)
    ChatCompletion.model_validate(answer.model_dump())
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    calls: Any = choice.message.tool_calls
    assert [(each.function.name, each.function.arguments) for each in calls] == SAID
    prompt, grammar = asked(double, text)
    assert json.dumps(TOOLS[0]) in prompt
    assert grammar == ""
    again = [*HELLO, choice.message, {"role": "tool", "tool_call_id": calls[0].id, "content": "7"}]
    double.says(text, "It is 7.", sizes=(3, 1, 2))
    answer = client.chat.completions.create(model="small", messages=again, tools=TOOLS)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("It is 7.", "stop")
    assert f"<tool_call>\nweather {ARGUMENTS}\n</tool_call>" in asked(double, text)[0]


def test_calls_of_a_stream(double: DecodeDouble, text: Text, served: Served) -> None:
    tokens = text.encode(f"{CALL}\n{CALL2}", add_special_tokens=False)
    double.script = slowly(tokens, 0.003, FinishReason.STOP)
    body = {"messages": HELLO, "tools": TOOLS, "stream": True}
    response = served.post("chat/completions", **body)
    data = [line[6:] for line in response.text.split("\n") if line.startswith("data: {")]
    deltas = [ChatCompletionChunk.model_validate_json(item).choices[0].delta for item in data]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert sum(call.index == 0 for call in calls) > 3
    names = [call.function.name for call in calls if call.id and call.function]
    assert names == ["weather", "time"]
    assert json.loads(data[-1])["choices"][0]["finish_reason"] == "tool_calls"
    assert not any(delta.content for delta in deltas)
    assert "".join(call.function.arguments for call in calls if call.index == 0) == ARGUMENTS


def grammar_accepts(text: Text, grammar: str, output: str) -> bool:
    described = (text.directory / "tokenizer.json").read_text()
    return accepts(LLTokenizer(described, n_vocab=text.vocab_size), grammar, output)


COMPACT = CALL.replace(ARGUMENTS, '{"city":"é 😀"}')
NAMED = {"type": "function", "function": {"name": "time"}}


@pytest.mark.parametrize(
    ("more", "good", "bad"),
    [
        (
            {"tool_choice": "required"},
            [COMPACT, CALL2, f"{COMPACT}\n{CALL2}", f"<think>\nhm\n</think>\n\n{CALL2}"],
            ["hello", CALL2[:-3], CALL2.replace("time", "weather")],
        ),
        # of a context of 2048 tokens
        ({"tool_choice": "required"}, ["\n".join([CALL2] * 8)], ["\n".join([CALL2] * 9)]),
        ({"tool_choice": NAMED}, [CALL2], [COMPACT, "a", f"{CALL2}\n{CALL2}"]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [CALL2], [f"{CALL2}\n{CALL2}"]),
        (
            {"response_format": {"type": "json_object"}},
            ["{}", CALL2, "<think>a</think>\n\n{}"],
            ["hello"],
        ),
        (
            {"tool_choice": NAMED, "chat_template_kwargs": {"enable_thinking": False}},
            [CALL2],
            [f"<think>a</think>{CALL2}"],
        ),
    ],
    ids=str,
)
def test_demanded_calls_are_constrained(
    served: Served, text: Text, more: Any, good: list[str], bad: list[str]
) -> None:
    served.double.says(text, CALL2, sizes=(3, 1, 2))
    body = {"messages": HELLO, "tools": TOOLS} | more
    response = served.post("chat/completions", **body)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    grammar = asked(served.double, text)[1]
    assert [output for output in good if not grammar_accepts(text, grammar, output)] == []
    assert [output for output in bad if grammar_accepts(text, grammar, output)] == []


def test_one_call_only_and_none_at_all(
    client: openai.OpenAI, double: DecodeDouble, text: Text
) -> None:
    double.says(text, f"{CALL}\n{CALL2}", sizes=(3, 1, 2))
    asks: Any = {"model": "small", "messages": HELLO, "tools": TOOLS}
    answer = client.chat.completions.create(**asks, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls or []) == 1
    double.take()
    answer = client.chat.completions.create(**asks, tool_choice="none")
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    assert "<tools>" not in asked(double, text)[0]


def test_reasoning_is_told_apart(
    served: Served, double: DecodeDouble, text: Text, streamed: bool
) -> None:
    double.says(text, "<think>\nhm, 😀\n</think>\n\nhello", sizes=(3, 1, 2))
    (choice,), _ = served.told("chat/completions", streamed, messages=HELLO)
    assert (choice["text"], choice["reasoning"]) == ("hello", "hm, 😀")
    wish = {"chat_template_kwargs": {"enable_thinking": False}}
    served.post("chat/completions", messages=HELLO, **wish)
    double.take()
    assert asked(double, text)[0].endswith("<think>\n\n</think>\n\n")


def test_llama3_and_configuration(serve: Serve, tmp_path: Path) -> None:
    text = Text(make_model(tmp_path, LLAMA))
    assert [detected(each) for each in (QWEN, LLAMA, "x")] == ["hermes", "llama3", "hermes"]
    call = '{"name": "time", "parameters": {}}'
    double, url, _ = serve(DecodeDouble(), directory=text.directory)
    double.says(text, call, sizes=(3, 1, 2))
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required"}
    found = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]
    assert found["message"]["tool_calls"][0]["function"] == {"name": "time", "arguments": "{}"}
    assert found["message"]["content"] is None
    grammar = asked(double, text)[1]
    assert grammar_accepts(text, grammar, call)
    assert not grammar_accepts(text, grammar, "a")
    more = call.replace("{}", '{"a":1}')
    assert not grammar_accepts(text, grammar, more), "it has no parameters"
    script = speak(text.encode(call, add_special_tokens=False))
    model = text.directory
    _, url, _ = serve(DecodeDouble(script=script), tool_parser="none", directory=model)
    response = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tool_choice"
    del body["tool_choice"]
    found = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]
    assert found["message"]["content"] == call


def test_a_stop_by_length_is_not_a_call(served: Served, text: Text) -> None:
    tokens = text.encode(CALL[:-20], add_special_tokens=False)
    served.double.script = speak(tokens, finish=FinishReason.LENGTH)
    body = {"messages": HELLO, "tools": TOOLS}
    found = served.post("chat/completions", **body).json()["choices"][0]
    assert found["finish_reason"] == "length"
    assert found["message"]["tool_calls"][0]["function"]["name"] == "weather"


def test_no_limit_of_tokens_lets_markup_into_the_content(
    served: Served, text: Text, streamed: bool
) -> None:
    tokens = text.encode(f"I look.\n{CALL}", add_special_tokens=False)
    first = len(text.encode("I look.", add_special_tokens=False))
    for num in range(first, len(tokens), 3):
        served.double.script = speak(tokens[:num], finish=FinishReason.LENGTH)
        (choice,), _ = served.told("chat/completions", streamed, messages=HELLO, tools=TOOLS)
        assert (choice["text"].strip(), choice["reason"]) == ("I look.", "length")


def test_an_answer_of_one_call_ends_with_the_call(
    served: Served, text: Text, streamed: bool
) -> None:
    double = served.double
    double.says(text, f"<think>a</think>\nI look.\n{CALL}\n{CALL2} and so on", sizes=(3, 1, 2))
    body: Any = {"messages": HELLO, "tools": TOOLS, "parallel_tool_calls": False}
    (choice,), usage = served.told("chat/completions", streamed, **body)
    assert (choice["text"], choice["reason"]) == ("I look.", "tool_calls")
    assert "".join(call["function"]["arguments"] for call in choice["calls"]) == ARGUMENTS
    assert {call.get("index", 0) for call in choice["calls"]} == {0}
    generate = double.take()[1]
    stop = double.expect(Stop)
    assert stop.req_id == generate.req_id
    num_tokens = stop.at_position - generate.num_prompt_tokens
    assert usage["completion_tokens"] == num_tokens
    kept = text.encode(f"<think>a</think>\nI look.\n{CALL}\n{CALL2}", add_special_tokens=False)
    assert CALL in text.decode(kept[:num_tokens], skip_special_tokens=False)
    assert CALL not in text.decode(kept[: num_tokens - 1], skip_special_tokens=False)


def test_a_stream_that_says_nothing_yet_is_kept_alive(serve: Serve, text: Text) -> None:
    tokens = text.encode('<tool_call>\n{"arguments": {"a": "' + "b" * 30, add_special_tokens=False)
    body = {"messages": HELLO, "tools": TOOLS, "stream": True}
    double = DecodeDouble(script=slowly(tokens, 0.02, FinishReason.LENGTH))
    _, url, _ = serve(double, sse_ping_s=0.1, directory=text.directory)
    response = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert response.text.count(": ping\n\n") >= 2
