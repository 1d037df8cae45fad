"""openai 2, litellm and langchain-openai against a running cluster: `python openai2.py URL`.

Runs in the virtual environment of requirements.txt, so it imports nothing of kvlane.
"""

from __future__ import annotations

import json
import sys

import litellm
import openai
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel

QUESTION = "Tom has 34 apples and buys 3 bags of 12 apples. How many apples does Tom have?"
USER = [{"role": "user", "content": QUESTION}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
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


class Sum(BaseModel):
    """What `.parse` is asked for."""

    ok: bool
    kind: str


def check_openai(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    made = client.chat.completions.create(model="tiny", messages=USER, temperature=0)
    text = made.choices[0].message.content
    assert "####" in (text or "")
    assert made.choices[0].finish_reason == "stop"

    pieces = []
    for chunk in client.chat.completions.create(
        model="tiny", messages=USER, temperature=0, stream=True
    ):
        ChatCompletionChunk.model_validate(chunk.model_dump())
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(pieces) == text

    with client.chat.completions.stream(model="tiny", messages=USER, temperature=0) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.content == text
    assert {"chunk", "content.delta", "content.done"} <= kinds

    four = client.chat.completions.create(
        model="tiny", messages=USER, n=4, seed=7, temperature=1.0, max_tokens=20
    )
    again = client.chat.completions.create(
        model="tiny", messages=USER, n=4, seed=7, temperature=1.0, max_tokens=20
    )
    assert [c.index for c in four.choices] == [0, 1, 2, 3]
    assert [c.message.content for c in four.choices] == [c.message.content for c in again.choices]

    scored = client.chat.completions.create(
        model="tiny", messages=USER, temperature=0, max_tokens=5, logprobs=True, top_logprobs=2
    )
    content = scored.choices[0].logprobs.content
    assert len(content) == 5
    assert all(len(each.top_logprobs) == 2 and each.logprob <= 0 for each in content)

    stopped = client.chat.completions.create(
        model="tiny", messages=USER, temperature=0, stop=["####"]
    )
    assert "####" not in stopped.choices[0].message.content
    check_tools_and_schemas(client)
    code = None
    try:
        client.chat.completions.create(model="nobody", messages=USER)
    except openai.NotFoundError as error:
        code = error.code
    assert code == "model_not_found"


def check_tools_and_schemas(client: openai.OpenAI) -> None:
    called = client.chat.completions.create(
        model="tiny", messages=USER, tools=[TOOL], tool_choice="required", max_tokens=200, seed=1
    )
    call = called.choices[0].message.tool_calls[0]
    assert called.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "add"
    assert set(json.loads(call.function.arguments)) == {"a", "b"}
    parsed = client.chat.completions.parse(
        model="tiny",
        messages=USER,
        max_tokens=200,
        seed=3,
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "sum",
                "strict": True,
                "schema": {
                    "type": "object",
                    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
                    "required": ["ok", "kind"],
                    "additionalProperties": False,
                },
            },
        },
    )
    Sum.model_validate_json(parsed.choices[0].message.content)


def check_litellm(url: str) -> None:
    made = litellm.completion(
        model="openai/tiny", api_base=f"{url}/v1", api_key="none", messages=USER, temperature=0
    )
    text = made.choices[0].message.content
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in litellm.completion(
            model="openai/tiny", api_base=f"{url}/v1", api_key="none", messages=USER,
            temperature=0, stream=True, stream_options={"include_usage": True},
        )
        if chunk.choices
    ]  # fmt: skip
    assert "".join(pieces) == text
    assert made.usage.prompt_tokens > 0


def check_langchain(url: str) -> None:
    model = ChatOpenAI(
        model="tiny", base_url=f"{url}/v1", api_key="none", temperature=0, stream_usage=True
    )
    text = model.invoke([HumanMessage(QUESTION)]).content
    assert "".join(chunk.content for chunk in model.stream([HumanMessage(QUESTION)])) == text


if __name__ == "__main__":
    for check in (check_openai, check_litellm, check_langchain):
        check(sys.argv[1])
        print("passed", check.__name__)
