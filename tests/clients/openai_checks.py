"""OpenAI's own client, of any major version: `python openai_checks.py URL`."""

import json
from collections import defaultdict
from typing import Any, Literal

import openai
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from pydantic import BaseModel
from shared import ADD_NAMED, QUESTION, USER, Add, Solution, add_tool, main

ASKED: Any = {"model": "tiny", "messages": USER}
GREEDY: Any = {**ASKED, "temperature": 0}
TOOL: Any = add_tool(minimum=0, maximum=999)
TOOL["function"]["strict"] = True
TOOL["function"]["parameters"]["additionalProperties"] = False
CALLED: Any = {
    **ASKED, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False,
    "max_tokens": 200, "seed": 1,
}  # fmt: skip


class Step(BaseModel):
    ok: bool
    kind: Literal["add", "take"]


class Sum(BaseModel):
    first: Step
    second: Step
    unit: Literal["apples", "bags"]


PARSED: Any = {**ASKED, "max_tokens": 200, "seed": 3, "response_format": Sum}


def whole(client: openai.OpenAI, **asked: Any) -> Any:
    made = client.chat.completions.create(**asked)
    ChatCompletion.model_validate_json(made.model_dump_json(), strict=True)
    return made


def declared(chunk: Any) -> Any:
    """The chunk, which is what OpenAI's types say, without a cast of any value."""
    raw = chunk.model_dump(mode="json")
    assert all("finish_reason" in choice for choice in raw["choices"])
    if chunk.object == "text_completion":
        for choice in raw["choices"]:  # null until the end, as from OpenAI; its type forgets that
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate_json(json.dumps(raw), strict=True)
    else:
        ChatCompletionChunk.model_validate_json(json.dumps(raw), strict=True)
    return chunk


def streamed(api: Any, **asked: Any) -> tuple[list[str], list[Any]]:
    chunks = [declared(chunk) for chunk in api.create(**asked, stream=True)]
    texts: dict[int, str] = defaultdict(str)
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        delta = choice.text if chunks[0].object == "text_completion" else choice.delta.content
        texts[choice.index] += delta or ""
    return [texts[index] for index in sorted(texts)], chunks


def events_of(client: openai.OpenAI, **asked: Any) -> tuple[dict[str, list[Any]], Any]:
    """What `.stream` tells: type -> events; and the final choice, None if it was cut off."""
    events: dict[str, list[Any]] = defaultdict(list)
    with client.chat.completions.stream(**asked) as stream:
        for event in stream:
            events[event.type].append(event)
        is_cut = stream.current_completion_snapshot.choices[0].finish_reason == "length"
        final = None if is_cut else stream.get_final_completion().choices[0]
    for event in events["chunk"]:
        declared(event.chunk)
    return events, final


def check_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"


def check_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    made = whole(client, **GREEDY)
    text = made.choices[0].message.content
    assert "####" in text
    assert made.choices[0].finish_reason == "stop"
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens

    options = {"include_usage": True}
    texts, chunks = streamed(client.chat.completions, **GREEDY, stream_options=options)
    assert texts == [text]
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert [reason for reason in reasons if reason] == ["stop"]
    totals = [chunk.usage.total_tokens for chunk in chunks if chunk.usage]
    assert totals == [made.usage.total_tokens]


def check_stream_helper(client: openai.OpenAI) -> None:
    text = whole(client, **GREEDY).choices[0].message.content
    events, final = events_of(client, **GREEDY)
    assert set(events) == {"chunk", "content.delta", "content.done"}
    so_far = ""
    for event in events["content.delta"]:
        so_far += event.delta
        assert event.snapshot == so_far
    assert so_far == text == final.message.content
    assert len(events["content.done"]) == 1


def check_completions(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "prompt": [QUESTION, "Tom has"], "max_tokens": 12, "seed": 5}
    made = client.completions.create(**asked, temperature=0, logprobs=2)
    Completion.model_validate_json(made.model_dump_json(), strict=True)
    assert [choice.index for choice in made.choices] == [0, 1]
    assert (
        sum(len(choice.logprobs.tokens) for choice in made.choices) == made.usage.completion_tokens
    )
    texts, _ = streamed(client.completions, **asked, temperature=0)
    assert texts == [choice.text for choice in made.choices]


def check_logprobs(client: openai.OpenAI) -> None:
    asked: Any = {**GREEDY, "max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    content = whole(client, **asked).choices[0].logprobs.content
    assert len(content) == 5
    assert all(len(each.top_logprobs) == 2 and each.logprob <= 0 for each in content)
    assert all(each.top_logprobs[0].token == each.token for each in content)  # greedy
    events, _ = events_of(client, **asked)
    assert events["logprobs.content.done"]
    deltas = [one for event in events["logprobs.content.delta"] for one in event.content]
    assert [one.token for one in deltas] == [each.token for each in content]
    for one, other in zip(deltas, content, strict=True):  # rounded as their batches are
        assert abs(one.logprob - other.logprob) < 1e-4


def check_tools(client: openai.OpenAI) -> None:
    choice = whole(client, **CALLED).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.id
    assert (call.type, call.function.name) == ("function", "add")
    assert set(json.loads(call.function.arguments)) == {"a", "b"}

    events, final = events_of(client, **CALLED)
    deltas = events["tool_calls.function.arguments.delta"]
    assert len(deltas) > 1
    pieces = ""
    for event in deltas:
        assert (event.name, event.index) == ("add", 0)
        pieces += event.arguments_delta
        assert event.arguments == pieces
    assert pieces == call.function.arguments
    (done,) = events["tool_calls.function.arguments.done"]
    assert (done.name, done.arguments, done.index) == ("add", pieces, 0)
    assert done.parsed_arguments == json.loads(pieces)
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.arguments == pieces

    for choice, is_called in ((ADD_NAMED, True), ("none", False)):
        message = whole(client, **{**CALLED, "tool_choice": choice}).choices[0].message
        assert bool(message.tool_calls) == is_called


def check_parse(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(**PARSED).choices[0]
    assert made.finish_reason == "stop"
    assert isinstance(made.message.parsed, Sum)
    assert Sum.model_validate_json(made.message.content) == made.message.parsed
    events, final = events_of(client, **PARSED)
    for parsed in (*(event.parsed for event in events["content.done"]), final.message.parsed):
        assert parsed == made.message.parsed

    natural = client.chat.completions.parse(**ASKED, response_format=Solution).choices[0]
    assert isinstance(natural.message.parsed, Solution)
    tool = openai.pydantic_function_tool(Add)
    called = client.chat.completions.parse(**{**CALLED, "tools": [tool]}).choices[0].message
    (call,) = called.tool_calls
    assert isinstance(call.function.parsed_arguments, Add)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "70"}
    more: Any = {"messages": [*USER, called, result], "tools": [tool], "max_tokens": 60}
    message = client.chat.completions.create(model="tiny", **more).choices[0].message
    assert message.content or message.tool_calls
    more = {"max_tokens": 60, "seed": 1, "response_format": {"type": "json_object"}}
    plain = client.chat.completions.create(**ASKED, **more).choices[0]
    assert plain.finish_reason == "length" or isinstance(json.loads(plain.message.content), dict)


INPUT: Any = {"model": "tiny", "input": QUESTION, "temperature": 0}
FUNCTION: Any = {"type": "function", **TOOL["function"]}
CALLS: Any = {
    **INPUT, "tools": [FUNCTION], "tool_choice": {"type": "function", "name": "add"},
    "max_output_tokens": 200,
}  # fmt: skip


def of_response(client: openai.OpenAI, **asked: Any) -> tuple[Any, list[Any]]:
    """The response that `.stream` ends with, and its events."""
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        return stream.get_final_response(), events


def check_responses(client: openai.OpenAI) -> None:
    text = whole(client, **GREEDY).choices[0].message.content
    made = client.responses.create(**INPUT)
    Response.model_validate_json(made.model_dump_json(by_alias=True), strict=True)
    assert (made.output_text, made.status) == (text, "completed")
    final, events = of_response(client, **INPUT)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 5
    assert "".join(deltas) == final.output_text == text
    assert client.responses.retrieve(made.id).output_text == text
    again = client.responses.create(**INPUT, previous_response_id=made.id)
    assert again.usage.input_tokens > made.usage.input_tokens + made.usage.output_tokens
    client.responses.delete(made.id)
    parsed = client.responses.parse(model="tiny", input=QUESTION, text_format=Solution)
    assert isinstance(parsed.output_parsed, Solution)


def check_responses_with_tools(client: openai.OpenAI) -> None:
    made = client.responses.create(**CALLS)
    (call,) = (item for item in made.output if item.type == "function_call")
    assert set(json.loads(call.arguments)) == {"a", "b"}
    final, events = of_response(client, **CALLS)
    assert final.output[-1].arguments == call.arguments
    kind = "response.function_call_arguments.delta"
    assert "".join(event.delta for event in events if event.type == kind) == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "70"}
    for before in ({"previous_response_id": made.id}, {}):
        items = [result] if before else [{"role": "user", "content": QUESTION}, call, result]
        more = client.responses.create(**{**INPUT, "input": items, "tools": [FUNCTION]}, **before)
        assert more.output


def said(text: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


MISTAKES: tuple[tuple[dict[str, Any], str, str], ...] = (  # what is asked, code, param
    ({"model": "nobody"}, "model_not_found", "model"),
    ({"max_tokens": -1}, "invalid_value", "max_tokens"),
    ({"messages": said("apples " * 90_000)}, "context_length_exceeded", "messages"),
)


def mistake(client: openai.OpenAI, asked: dict[str, Any]) -> Any:
    try:
        client.chat.completions.create(**asked)
    except openai.APIStatusError as error:
        return error
    return None


def check_mistakes(client: openai.OpenAI) -> None:
    for wrong, code, param in MISTAKES:
        kind = openai.NotFoundError if code == "model_not_found" else openai.BadRequestError
        for stream in (False, True):
            error = mistake(client, {**ASKED, **wrong, "stream": stream})
            assert type(error) is kind, (str(wrong)[:200], error)
            got = (error.code, error.type, error.param)
            assert got == (code, "invalid_request_error", param), str(wrong)[:200]
            assert error.body["message"], str(wrong)[:200]


if __name__ == "__main__":
    main(
        "openai", check_models, check_chat_whole_and_streamed, check_stream_helper,
        check_completions, check_logprobs, check_tools,
        check_parse, check_mistakes, check_responses, check_responses_with_tools, at_once=True,
        connect=lambda url: openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60),
    )  # fmt: skip
