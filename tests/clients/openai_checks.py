"""OpenAI's own client, of any major version: `python openai_checks.py URL`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

import openai
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel
from shared import QUESTION, USER, Solution, main

ASKED: Any = {"model": "tiny", "messages": USER}
GREEDY: Any = {**ASKED, "temperature": 0}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 999},
                "b": {"type": "integer", "minimum": 0, "maximum": 999},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
CALLED: Any = {
    **ASKED,
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 200,
    "seed": 1,
}


class Add(BaseModel):
    """Add two numbers."""

    a: int
    b: int


class Step(BaseModel):
    """A part of what `.parse` is asked for."""

    ok: bool
    kind: Literal["add", "take"]


class Sum(BaseModel):
    """What `.parse` is asked for."""

    first: Step
    second: Step
    unit: Literal["apples", "bags"]


PARSED: Any = {**ASKED, "max_tokens": 200, "seed": 3, "response_format": Sum}


def declared(chunk: Any) -> None:
    """The chunk is what OpenAI's types say, without a cast of any value."""
    raw = chunk.model_dump(mode="json")
    assert all("finish_reason" in choice for choice in raw["choices"])
    if chunk.object == "text_completion":
        for choice in raw["choices"]:  # null until the end, as from OpenAI; its type forgets that
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate_json(json.dumps(raw), strict=True)
    else:
        ChatCompletionChunk.model_validate_json(json.dumps(raw), strict=True)


def check_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"


def check_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(**GREEDY)
    ChatCompletion.model_validate_json(made.model_dump_json(), strict=True)
    text = made.choices[0].message.content
    assert "####" in text
    assert made.choices[0].finish_reason == "stop"
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens

    pieces, reasons, usages = [], [], []
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(**GREEDY, stream=True, stream_options=options):
        declared(chunk)
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        usages += [chunk.usage] if chunk.usage else []
    assert "".join(pieces) == text
    assert reasons == ["stop"]
    assert [usage.total_tokens for usage in usages] == [made.usage.total_tokens]


def check_stream_helper(client: openai.OpenAI) -> None:
    text = client.chat.completions.create(**GREEDY).choices[0].message.content
    kinds, found = [], ""
    with client.chat.completions.stream(**GREEDY) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "chunk":
                declared(event.chunk)
            elif event.type == "content.delta":
                found += event.delta
                assert event.snapshot == found
        assert stream.get_final_completion().choices[0].message.content == text
    assert found == text
    assert set(kinds) == {"chunk", "content.delta", "content.done"}
    assert kinds.count("content.done") == 1


def check_completions(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "prompt": [QUESTION, "Tom has"], "max_tokens": 12, "seed": 5}
    made = client.completions.create(**asked, temperature=0, logprobs=2)
    Completion.model_validate_json(made.model_dump_json(), strict=True)
    assert [choice.index for choice in made.choices] == [0, 1]
    assert all(len(choice.logprobs.tokens) == 12 for choice in made.choices)
    found = {0: "", 1: ""}
    for chunk in client.completions.create(**asked, temperature=0, stream=True):
        declared(chunk)
        for choice in chunk.choices:
            found[choice.index] += choice.text
    assert found == {choice.index: choice.text for choice in made.choices}


def check_four_choices_and_seed(client: openai.OpenAI) -> None:
    asked: Any = {**ASKED, "n": 4, "temperature": 1.0, "max_tokens": 20}
    texts = []
    for seed in (7, 7, 8):
        made = client.chat.completions.create(**asked, seed=seed)
        assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
        texts.append([choice.message.content for choice in made.choices])
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    assert len(set(texts[0])) > 1
    found = ["", "", "", ""]
    for chunk in client.chat.completions.create(**asked, seed=7, stream=True):
        declared(chunk)
        for choice in chunk.choices:
            found[choice.index] += choice.delta.content or ""
    assert found == texts[0]


def check_logprobs(client: openai.OpenAI) -> None:
    asked: Any = {**GREEDY, "max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    content = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert len(content) == 5
    assert all(len(each.top_logprobs) == 2 and each.logprob <= 0 for each in content)
    assert all(each.top_logprobs[0].token == each.token for each in content)  # greedy
    kinds, streamed = [], []
    with client.chat.completions.stream(**asked) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "chunk":
                declared(event.chunk)
            elif event.type == "logprobs.content.delta":
                streamed += event.content
    assert {"logprobs.content.delta", "logprobs.content.done"} <= set(kinds)
    assert [each.token for each in streamed] == [each.token for each in content]
    for one, other in zip(streamed, content, strict=True):  # rounded as their batches are
        assert abs(one.logprob - other.logprob) < 1e-4


def check_stop(client: openai.OpenAI) -> None:
    text = client.chat.completions.create(**GREEDY).choices[0].message.content
    for stop in ("####", ["no such text", "####"]):
        made = client.chat.completions.create(**GREEDY, stop=stop).choices[0]
        assert (made.message.content, made.finish_reason) == (text.split("####")[0], "stop")
    pieces = []
    for chunk in client.chat.completions.create(**GREEDY, stop="####", stream=True):
        declared(chunk)
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(pieces) == text.split("####")[0]
    made = client.chat.completions.create(**GREEDY, max_completion_tokens=3).choices[0]
    assert made.finish_reason == "length"


def check_tools(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(**CALLED)
    ChatCompletion.model_validate_json(made.model_dump_json(), strict=True)
    choice = made.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.id
    assert (call.type, call.function.name) == ("function", "add")
    assert set(json.loads(call.function.arguments)) == {"a", "b"}

    kinds, pieces, done = [], "", None
    with client.chat.completions.stream(**CALLED) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "chunk":
                declared(event.chunk)
            elif event.type == "tool_calls.function.arguments.delta":
                assert (event.name, event.index) == ("add", 0)
                pieces += event.arguments_delta
                assert event.arguments == pieces
            elif event.type == "tool_calls.function.arguments.done":
                done = event
        final = stream.get_final_completion().choices[0]
    assert pieces == call.function.arguments
    assert kinds.count("tool_calls.function.arguments.delta") > 1
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert (done.name, done.arguments, done.index) == ("add", pieces, 0)
    assert done.parsed_arguments == json.loads(pieces)
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.arguments == pieces

    named: Any = {**CALLED, "tool_choice": {"type": "function", "function": {"name": "add"}}}
    assert client.chat.completions.create(**named).choices[0].message.tool_calls
    none = client.chat.completions.create(**{**CALLED, "tool_choice": "none"}).choices[0]
    assert not none.message.tool_calls


def check_parse(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(**PARSED).choices[0]
    assert made.finish_reason == "stop"
    assert isinstance(made.message.parsed, Sum)
    assert Sum.model_validate_json(made.message.content) == made.message.parsed
    with client.chat.completions.stream(**PARSED) as stream:
        for event in stream:
            if event.type == "chunk":
                declared(event.chunk)
            elif event.type == "content.done":
                assert event.parsed == made.message.parsed
        assert stream.get_final_completion().choices[0].message.parsed == made.message.parsed

    natural = client.chat.completions.parse(**ASKED, response_format=Solution).choices[0]
    assert isinstance(natural.message.parsed, Solution)
    tool = openai.pydantic_function_tool(Add)
    called = client.chat.completions.parse(**{**CALLED, "tools": [tool]}).choices[0].message
    (call,) = called.tool_calls
    assert isinstance(call.function.parsed_arguments, Add)
    told: Any = {"role": "tool", "tool_call_id": call.id, "content": "70"}
    messages = [*USER, called, told]
    made = client.chat.completions.create(
        model="tiny", messages=messages, tools=[tool], max_tokens=60
    )
    assert made.choices[0].message.content or made.choices[0].message.tool_calls
    plain = client.chat.completions.create(
        **ASKED, max_tokens=60, seed=1, response_format={"type": "json_object"}
    ).choices[0]
    assert plain.finish_reason == "length" or isinstance(json.loads(plain.message.content), dict)


MISTAKES: Sequence[tuple[dict[str, Any], type[openai.APIStatusError], str, str]] = [
    ({"model": "nobody"}, openai.NotFoundError, "model_not_found", "model"),
    ({"max_tokens": -1}, openai.BadRequestError, "invalid_value", "max_tokens"),
    ({"temperature": "hot"}, openai.BadRequestError, "invalid_value", "temperature"),
    ({"top_logprobs": 2}, openai.BadRequestError, "invalid_value", "top_logprobs"),
    ({"messages": []}, openai.BadRequestError, "invalid_value", "messages"),
    (
        {"messages": [{"role": "wizard", "content": "a"}]},
        openai.BadRequestError,
        "invalid_value",
        "messages.0.role",
    ),
    ({"max_tokens": 100_000}, openai.BadRequestError, "context_length_exceeded", "max_tokens"),
    (
        {"messages": [{"role": "user", "content": "apples " * 9000}]},
        openai.BadRequestError,
        "context_length_exceeded",
        "messages",
    ),
    (
        {"response_format": {"type": "xml"}},
        openai.BadRequestError,
        "invalid_value",
        "response_format.type",
    ),
    ({"tool_choice": "required"}, openai.BadRequestError, "invalid_value", "tool_choice"),
]


def mistake(client: openai.OpenAI, asked: dict[str, Any]) -> openai.APIStatusError | None:
    """What the client raises."""
    try:
        client.chat.completions.create(**asked)
    except openai.APIStatusError as error:
        return error
    return None


def check_mistakes(client: openai.OpenAI) -> None:
    for wrong, kind, code, param in MISTAKES:
        for stream in (False, True):
            found = mistake(client, {**ASKED, **wrong, "stream": stream})
            assert type(found) is kind, (str(wrong)[:200], found)
            assert (found.code, found.type) == (code, "invalid_request_error"), str(wrong)[:200]
            assert found.param == param, (str(wrong)[:200], found.param)
            assert found.body["message"], str(wrong)[:200]


def with_client(check: Callable[[openai.OpenAI], None]) -> Callable[[str], None]:
    """The check, of an address."""

    def checked(url: str) -> None:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            check(client)

    checked.__name__ = check.__name__
    return checked


CHECKS: Sequence[Callable[[openai.OpenAI], None]] = (
    check_models,
    check_chat_whole_and_streamed,
    check_stream_helper,
    check_completions,
    check_four_choices_and_seed,
    check_logprobs,
    check_stop,
    check_tools,
    check_parse,
    check_mistakes,
)


if __name__ == "__main__":
    main("openai", [with_client(check) for check in CHECKS], at_once=True)
