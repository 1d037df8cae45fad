"""langchain-openai against a running cluster: `python langchain_openai_checks.py URL`."""

import asyncio
import functools
import operator
from typing import Any

from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from shared import ANSWER, QUESTION, Solution, add, main

ADD = tool(add)


def model(url: str, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(model="tiny", base_url=url, api_key="none", max_retries=0, **more)


def chat(url: str) -> None:
    made = model(url).invoke([("system", "You solve word problems."), ("human", QUESTION)])
    assert made.content
    made = model(url).invoke(QUESTION)
    assert made.content.endswith(ANSWER)
    assert made.response_metadata["finish_reason"] == "stop"
    assert made.usage_metadata["output_tokens"] > 0
    assert [each.content for each in model(url).batch([QUESTION] * 2)] == [made.content] * 2


def stream(url: str) -> None:
    chunks = list(model(url, stream_usage=True).stream(QUESTION))
    assert len(chunks) > 5
    whole = functools.reduce(operator.add, chunks)
    assert isinstance(whole, AIMessageChunk)
    assert whole.content.endswith(ANSWER)
    assert whole.usage_metadata["output_tokens"] > 0

    async def pieces() -> list[Any]:
        return [chunk.content async for chunk in model(url).astream(QUESTION)]

    assert "".join(asyncio.run(pieces())) == whole.content


def tools(url: str) -> None:
    """A call, whole and streamed, then its result sent back."""
    bound = model(url).bind_tools([ADD], tool_choice="add")
    made = bound.invoke(QUESTION)
    (call,) = made.tool_calls
    assert not made.invalid_tool_calls
    assert call["name"] == "add"
    result = ADD.invoke(call)
    assert isinstance(result, ToolMessage)
    assert int(result.content) == add(**call["args"])
    (streamed,) = functools.reduce(operator.add, bound.stream(QUESTION)).tool_calls
    assert streamed["args"] == call["args"]
    answer = model(url).bind_tools([ADD]).invoke([HumanMessage(QUESTION), made, result])
    assert answer.content or answer.tool_calls


def any_tool(url: str) -> None:
    """`any` demands a call, of which there may be several."""
    made = model(url).bind_tools([ADD], tool_choice="any").invoke(QUESTION)
    assert made.response_metadata["finish_reason"] == "tool_calls"
    assert {call["name"] for call in made.tool_calls} == {"add"}


def structured_output(url: str) -> None:
    """In its own method, json_schema, whole and streamed; by a function, and of a dictionary."""
    asked = model(url).with_structured_output(Solution)
    made = asked.invoke(QUESTION)
    assert isinstance(made, Solution)
    assert list(asked.stream(QUESTION))[-1] == made
    raw = model(url).with_structured_output(Solution, include_raw=True).invoke(QUESTION)
    assert raw["parsed"] == made
    assert raw["parsing_error"] is None
    called = model(url).with_structured_output(Solution, method="function_calling")
    assert isinstance(called.invoke(QUESTION), Solution)
    plain = model(url).with_structured_output(Solution.model_json_schema()).invoke(QUESTION)
    Solution.model_validate(plain)


def responses(url: str) -> None:
    """The same by `use_responses_api`."""
    model_of = model(url, use_responses_api=True)
    made = model_of.invoke(QUESTION)
    assert made.text.endswith(ANSWER)
    assert made.usage_metadata["output_tokens"] > 0
    whole = functools.reduce(operator.add, model_of.stream(QUESTION))
    assert whole.text == made.text
    called = model_of.bind_tools([ADD], tool_choice="add").invoke(QUESTION)
    (call,) = called.tool_calls
    answer = model_of.bind_tools([ADD]).invoke([HumanMessage(QUESTION), called, ADD.invoke(call)])
    assert answer.text or answer.tool_calls
    assert isinstance(model_of.with_structured_output(Solution).invoke(QUESTION), Solution)


if __name__ == "__main__":
    main("langchain-openai", chat, stream, tools, any_tool, structured_output, responses)
