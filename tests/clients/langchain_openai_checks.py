"""langchain-openai, by chats and by responses: `python langchain_openai_checks.py URL`."""

import asyncio
import functools
import operator
from collections.abc import Iterator
from typing import Any

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from shared import CHATS, QUESTION, Solution, add, main

ADD = tool(add)


class Langchain:
    def __init__(self, url: str) -> None:
        given: Any = {"model": "tiny", "base_url": url, "api_key": "none", "max_retries": 0}
        self.chat = ChatOpenAI(**given, stream_usage=True)
        self.both = self.chat, ChatOpenAI(**given, use_responses_api=True)

    def texts(self) -> Iterator[str]:
        assert self.chat.invoke([("system", "You solve problems."), ("human", QUESTION)]).content
        yield from (each.text for each in self.chat.batch([QUESTION] * 2))
        for model in self.both:
            made: Any = model.invoke(QUESTION)
            assert made.usage_metadata["output_tokens"] > 0
            yield made.text

    def streams(self) -> Iterator[list[str]]:
        async def pieces() -> list[str]:
            return [chunk.text async for chunk in self.chat.astream(QUESTION)]

        yield asyncio.run(pieces())
        for model in self.both:
            chunks: list[Any] = list(model.stream(QUESTION))
            assert functools.reduce(operator.add, chunks).usage_metadata["output_tokens"] > 0
            yield [chunk.text for chunk in chunks]

    def calls(self) -> Iterator[dict[str, Any]]:
        """A call, whole and streamed, whose result is sent back; `any` may be several."""
        for model in self.both:
            bound = model.bind_tools([ADD], tool_choice="add")
            made: Any = bound.invoke(QUESTION)
            (call,) = made.tool_calls
            (streamed,) = functools.reduce(operator.add, bound.stream(QUESTION)).tool_calls
            assert (call["name"], call["args"]) == ("add", streamed["args"])
            sent = [HumanMessage(QUESTION), made, ADD.invoke(call)]
            answer: Any = model.bind_tools([ADD]).invoke(sent)
            assert answer.text or answer.tool_calls
            yield call["args"]
        some: Any = self.chat.bind_tools([ADD], tool_choice="any").invoke(QUESTION)
        yield from (call["args"] for call in some.tool_calls)

    def solutions(self) -> Iterator[Any]:
        """By json_schema, its own way, whole and streamed; by a function; and of a dictionary."""
        for model in self.both:
            yield model.with_structured_output(Solution).invoke(QUESTION)
        asked = self.chat.with_structured_output(Solution)
        assert list(asked.stream(QUESTION))[-1] == asked.invoke(QUESTION)
        raw = self.chat.with_structured_output(Solution, include_raw=True).invoke(QUESTION)
        assert raw["parsing_error"] is None
        yield self.chat.with_structured_output(Solution, method="function_calling").invoke(QUESTION)
        plain = self.chat.with_structured_output(Solution.model_json_schema()).invoke(QUESTION)
        yield Solution.model_validate(plain)


if __name__ == "__main__":
    main("langchain-openai", *CHATS, connect=Langchain)
