"""OpenAI's responses: what a chat is asked, what answers look like, and what is kept of them."""

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from router.text.tokenizer import Text
from tests.fault.router_doubles import QWEN, DecodeDouble, Serve, Served, speak
from tests.support.patience import HANG_S, until
from worker.api import Abort, Error, FinishReason

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "é"}}\n</tool_call>'
THOUGHT = "<think>\nI look.\n</think>\n\n"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
TIME = {**TOOL, "name": "time", "description": "what time it is"}
MODEL = (QWEN, ("<tool_call>", "</tool_call>", "<think>", "</think>"), 2048)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def told(client: openai.OpenAI, streamed: bool, **asked: Any) -> Response:
    """The response; of a stream the last event's, when all others have said the same."""
    asked = {"model": "small", "input": "hello", **asked}
    if not streamed:
        made = client.responses.create(**asked)
        return Response.model_validate_json(made.model_dump_json(by_alias=True), strict=True)
    events: list[Any] = list(client.responses.create(**asked, stream=True))
    for event in events:
        EVENT.validate_json(event.model_dump_json(by_alias=True), strict=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    response = events[-1].response
    pieces: dict[tuple[int, str], str] = {}
    for event in events:
        kind = event.type
        if kind.endswith(".delta"):
            key = event.output_index, kind.removesuffix(".delta")
            pieces[key] = pieces.get(key, "") + event.delta
        elif kind.endswith(("_text.done", "arguments.done")):
            whole = event.arguments if kind.endswith("arguments.done") else event.text
            assert pieces[event.output_index, kind.removesuffix(".done")] == whole
        elif kind == "response.output_item.done":
            assert event.item.id == response.output[event.output_index].id
    for kind in ("output_item", "content_part"):
        assert kinds.count(f"response.{kind}.added") == kinds.count(f"response.{kind}.done")
    assert kinds.count("response.output_item.done") == len(response.output)
    return response


def test_a_response(
    client: openai.OpenAI, double: DecodeDouble, text: Text, streamed: bool
) -> None:
    double.says(text, "Hi there.")
    asked: Any = {"instructions": "be good", "max_output_tokens": 9, "metadata": {"a": "b"}}
    response = told(client, streamed, **asked)
    generate = double.take()[1]
    assert response.output_text == "Hi there."
    assert (response.status, response.error) == ("completed", None)
    assert (response.instructions, response.metadata) == ("be good", {"a": "b"})
    num = len(text.encode("Hi there.", add_special_tokens=False))
    assert response.usage is not None
    usage = response.usage.model_dump()
    assert (usage["input_tokens"], usage["output_tokens"]) == (len(generate.tokens), num)
    assert usage["input_tokens_details"]["cached_tokens"] == 4
    assert generate.sampling.max_tokens == 9
    prompt = text.decode(generate.tokens, skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>system\nbe good<|im_end|>\n<|im_start|>user\nhello<")


def test_reasoning_text_and_calls(
    client: openai.OpenAI, double: DecodeDouble, text: Text, streamed: bool
) -> None:
    double.says(text, f"{THOUGHT}So.\n{CALL}\n{CALL}")
    response: Any = told(client, streamed, tools=[TOOL])
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item.type for item in response.output] == kinds
    reasoning, message, *calls = response.output
    assert reasoning.content[0].text == "I look."
    assert message.content[0].text == "So."
    assert {(call.name, call.arguments) for call in calls} == {("weather", '{"city": "é"}')}
    assert len({call.call_id for call in calls}) == len({call.id for call in calls}) == 2
    thought = len(text.encode(THOUGHT.rstrip(), add_special_tokens=False))
    assert response.usage.output_tokens_details.reasoning_tokens == thought


def test_items_become_a_chat(client: openai.OpenAI, double: DecodeDouble, text: Text) -> None:
    double.says(text, "ok")
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    items: Any = [
        {"role": "developer", "content": "be good"},
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant",
         "content": [{"type": "output_text", "text": "look"}]},
        call, {"type": "function_call_output", "call_id": "c", "output": "sun"},
        {"role": "assistant", "content": "Sun."}, {"role": "user", "content": "And?"},
    ]  # fmt: skip
    told(client, False, input=items)
    assert double.prompt(text) == (
        "<|im_start|>system\nbe good<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        '<|im_start|>assistant\nlook<tool_call>\n{"name": "weather", "arguments": {}}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>tool\nsun<|im_end|>\n<|im_start|>assistant\nSun.<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_response_goes_on_with_the_one_before(
    client: openai.OpenAI, double: DecodeDouble, text: Text, streamed: bool
) -> None:
    double.says(text, CALL)
    first: Any = told(client, streamed, instructions="be good", tools=[TOOL])
    double.prompt(text)
    output: Any = {
        "type": "function_call_output", "call_id": first.output[0].call_id, "output": "7"
    }  # fmt: skip
    double.says(text, "It is 7.")
    more = {"input": [output], "previous_response_id": first.id}
    second = told(client, streamed, **more)
    assert second.previous_response_id == first.id
    assert double.prompt(text) == (
        "<|im_start|>user\nhello<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "é"}}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    )
    assert client.responses.retrieve(second.id).output_text == "It is 7."
    told(client, streamed, previous_response_id=second.id)
    assert double.prompt(text).endswith(
        "tool\n7<|im_end|>\n<|im_start|>assistant\nIt is 7.<|im_end|>\n"
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_is_kept_can_be_read_and_deleted(
    client: openai.OpenAI, double: DecodeDouble, text: Text
) -> None:
    double.says(text, "ok")
    made = told(client, False, instructions="a")
    assert client.responses.retrieve(made.id).model_dump() == made.model_dump()
    (item,) = client.responses.input_items.list(made.id).data
    assert (item.type, item.role) == ("message", "user")  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(made.id)
    client.responses.delete(made.id)
    unkept = told(client, False, store=False).id
    for name in (made.id, unkept, "resp_x"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(name)
        with pytest.raises(openai.NotFoundError) as caught:
            told(client, False, previous_response_id=name)
        assert caught.value.param == "previous_response_id"


def test_a_cut_answer_is_incomplete(
    client: openai.OpenAI, double: DecodeDouble, text: Text, streamed: bool
) -> None:
    double.says(text, "one", FinishReason.LENGTH)
    response: Any = told(client, streamed)
    assert (response.status, response.output[0].status) == ("incomplete", "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"


def test_logprobs(client: openai.OpenAI, double: DecodeDouble, text: Text, streamed: bool) -> None:
    double.says(text, "one two")
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response: Any = told(client, streamed, **asked)
    scored = response.output[0].content[0].logprobs
    assert "".join(each.token for each in scored) == "one two"
    assert {len(each.top_logprobs) for each in scored} == {2}


def test_structured_output_and_effort(
    client: openai.OpenAI, double: DecodeDouble, text: Text
) -> None:
    double.says(text, "{}")
    schema = {"type": "object", "properties": {}}
    form = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    told(client, False, text={"format": form}, reasoning={"effort": "none"})
    generate = double.take()[1]
    assert "json_schema" in generate.sampling.grammar
    assert text.decode(generate.tokens, skip_special_tokens=False).endswith("</think>\n\n")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(client: openai.OpenAI, double: DecodeDouble, text: Text, mode: str) -> None:
    double.says(text, CALL)
    choice = {
        "type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "weather"}],
    }  # fmt: skip
    response: Any = told(client, False, tools=[TOOL, TIME], tool_choice=choice)
    assert response.output[0].name == "weather"
    generate = double.take()[1]
    assert bool(generate.sampling.grammar) == (mode == "required")
    assert "what time" not in text.decode(generate.tokens) + generate.sampling.grammar


@pytest.mark.parametrize("way", ["done", "cancel", "delete", "fail"])
def test_a_background_response_is_asked_for_until_it_ends(
    client: openai.OpenAI, double: DecodeDouble, text: Text, way: str
) -> None:
    double.script = None
    made = told(client, False, background=True)
    assert (made.status, made.output) == ("in_progress", [])
    peer, generate = double.take()
    assert client.responses.retrieve(made.id).status == "in_progress"
    if way == "done":
        tokens = text.encode("done", add_special_tokens=False)
        double.chunk(peer, generate, tokens, finish=FinishReason.STOP)
        until(lambda: client.responses.retrieve(made.id).status == "completed")
        assert client.responses.retrieve(made.id).output_text == "done"
    elif way == "fail":
        error = Error("internal_error", "broken")
        double.chunk(peer, generate, finish=FinishReason.ERROR, error=error)
        until(lambda: client.responses.retrieve(made.id).status == "failed")
        found: Any = client.responses.retrieve(made.id).error
        assert found.message == "broken"
    elif way == "cancel":
        assert client.responses.cancel(made.id).status == "cancelled"
        assert double.expect(Abort).req_id == generate.req_id
        assert client.responses.cancel(made.id).status == "cancelled"
    else:
        client.responses.delete(made.id)
        assert double.expect(Abort).req_id == generate.req_id
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.0"),
        ({"conversation": "c"}, "conversation"),
        ({"n": 2}, "n"),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": "json_object"}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": 3}}}, "text.format"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"tools": [TOOL | {"parameters": {"type": "array"}}]}, "tools.0.parameters"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, "tool_choice.allowed_tools"),
        ({"input": []}, "input"),
        ({"max_output_tokens": 10**9}, "max_output_tokens"),
    ],
)  # fmt: skip
def test_mistakes_name_the_field(served: Served, wrong: dict[str, Any], param: str) -> None:
    assert served.refusal("responses", **{"input": "a", **wrong})["param"] == param


def test_nobody_reads_what_another_key_has_stored(serve: Serve, text: Text, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-1\nsk-2\n")
    double = DecodeDouble(script=speak([5]))
    _, url, _ = serve(double, directory=text.directory, api_key_file=str(tmp_path / "keys"))
    headers = [{"authorization": f"Bearer sk-{i}"} for i in (1, 2)]
    asked = {"json": {"input": "a"}, "timeout": HANG_S}
    name = httpx.post(f"{url}/v1/responses", **asked, headers=headers[0]).json()["id"]
    found = [httpx.get(f"{url}/v1/responses/{name}", headers=each) for each in headers]
    assert [response.status_code for response in found] == [200, 404]
