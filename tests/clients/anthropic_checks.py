"""Anthropic's own client: `python anthropic_checks.py URL`."""

import json
from typing import Any

import anthropic
from pydantic import BaseModel
from shared import ANSWER, QUESTION, USER, Add, add_tool, main

ASKED: Any = {"model": "tiny", "messages": USER, "max_tokens": 200}
GREEDY: Any = {**ASKED, "extra_body": {"temperature": 0}}  # newer clients have no such field
OPENAI: Any = add_tool(minimum=0, maximum=999)["function"]
TOOL: Any = {
    "name": "add", "description": OPENAI["description"], "input_schema": OPENAI["parameters"],
}  # fmt: skip
CALLED: Any = {**GREEDY, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "add"}}


class Sum(BaseModel):
    first: int
    second: int


def declared(message: Any) -> Any:
    """The message, which is what Anthropic's types say, without a cast of any value."""
    type(message).model_validate_json(message.model_dump_json(by_alias=True), strict=True)
    return message


def check_models(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").type == "model"


def check_whole_and_streamed(client: anthropic.Anthropic) -> None:
    made = declared(client.messages.create(**GREEDY))
    assert ANSWER in made.content[0].text
    assert made.stop_reason == "end_turn"
    count = client.messages.count_tokens(model="tiny", messages=USER).input_tokens
    usage = made.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == count
    with client.messages.stream(**GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = declared(stream.get_final_message())
    assert final.content[0].text == text == made.content[0].text
    assert final.usage.output_tokens == usage.output_tokens
    assert final.stop_reason == "end_turn"
    kinds = [event.type for event in client.messages.create(**GREEDY, stream=True)]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])


def check_tools(client: anthropic.Anthropic) -> None:
    made = declared(client.messages.create(**CALLED))
    (call,) = (block for block in made.content if block.type == "tool_use")
    assert (made.stop_reason, call.name) == ("tool_use", "add")
    Add.model_validate(call.input)
    pieces = ""
    with client.messages.stream(**CALLED) as stream:
        for event in stream:
            if event.type == "input_json":
                pieces += event.partial_json
        final = declared(stream.get_final_message())
    assert json.loads(pieces) == final.content[-1].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "70"}
    turns: Any = [
        *USER, {"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}
    ]  # fmt: skip
    more = client.messages.create(**{**GREEDY, "messages": turns, "tools": [TOOL]})
    assert declared(more).content
    tried = client.messages.create(**{**CALLED, "tool_choice": {"type": "any"}})
    assert tried.stop_reason in ("tool_use", "max_tokens")


def check_parse(client: anthropic.Anthropic) -> None:
    made = client.messages.parse(**ASKED, output_format=Sum)
    assert made.stop_reason == "max_tokens" or isinstance(made.parsed_output, Sum)


def check_the_runner_of_tools(client: anthropic.Anthropic) -> None:
    heard: list[tuple[int, int]] = []

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        heard.append((a, b))
        return str(a + b)

    asked = {**GREEDY, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    runner = client.beta.messages.tool_runner(**asked, tools=[add], max_iterations=2)
    assert len(list(runner)) >= 1
    assert heard


def mistake(client: anthropic.Anthropic, asked: dict[str, Any]) -> Any:
    try:
        client.messages.create(**asked)
    except anthropic.APIStatusError as error:
        return error
    return None


def check_mistakes(client: anthropic.Anthropic) -> None:
    for wrong, kind in (
        ({"model": "nobody"}, anthropic.NotFoundError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
        ({"messages": [{"role": "user", "content": QUESTION * 9000}]}, anthropic.BadRequestError),
    ):
        for asked in ({**GREEDY, **wrong}, {**GREEDY, **wrong, "stream": True}):
            error = mistake(client, asked)
            assert type(error) is kind, (str(wrong)[:200], error)
            assert error.body["type"] == "error"


if __name__ == "__main__":
    main(
        "anthropic", check_models, check_whole_and_streamed, check_tools, check_parse,
        check_the_runner_of_tools, check_mistakes,
        connect=lambda url: anthropic.Anthropic(
            base_url=url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=60
        ),
    )  # fmt: skip
