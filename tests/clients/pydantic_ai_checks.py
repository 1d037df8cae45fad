"""pydantic-ai, by responses (its default) and by chats: `python pydantic_ai_checks.py URL`."""

import asyncio
from collections.abc import Iterator
from typing import Any

from pydantic_ai import Agent, ModelSettings, NativeOutput, RunContext, ToolOutput
from pydantic_ai.messages import ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from shared import CHATS, QUESTION, Solution, add, main

OUTPUTS: tuple[Any, ...] = (ToolOutput(Solution), NativeOutput(Solution))


def first_demands_a_call(context: RunContext[None]) -> ModelSettings:
    return {"tool_choice": ["add_two"]} if context.run_step == 1 else {}


def called(agent: Agent[None, Any]) -> list[dict[str, int]]:
    """The first step demands a call; pydantic-ai makes it, sends the result, and gets an answer."""
    calls = []

    @agent.tool_plain
    def add_two(a: int, b: int) -> int:
        """Add two numbers."""
        calls.append({"a": a, "b": b})
        return add(a, b)

    made = agent.run_sync(QUESTION)
    parts = [part for message in made.all_messages() for part in message.parts]
    results = [part.content for part in parts if isinstance(part, ToolReturnPart)]
    assert sorted(results) == sorted(add(**call) for call in calls)  # made in threads
    assert isinstance(made.output, str)
    assert calls
    return calls


class PydanticAI:
    def __init__(self, url: str) -> None:
        self.url = url

    def agents(self, **more: Any) -> Iterator[Agent[None, Any]]:
        for kind in (OpenAIResponsesModel, OpenAIChatModel):
            provider = OpenAIProvider(base_url=self.url, api_key="none")
            yield Agent(kind("tiny", provider=provider), **more)

    def texts(self) -> Iterator[str]:
        for agent in self.agents():
            made = agent.run_sync(QUESTION)
            assert made.usage.output_tokens > 0
            yield made.output

    def streams(self) -> Iterator[list[str]]:
        async def pieces(agent: Any, kind: str, **more: Any) -> list[Any]:
            async with agent.run_stream(QUESTION) as result:
                return [e async for e in getattr(result, kind)(debounce_by=None, **more)]

        for agent in self.agents():
            yield asyncio.run(pieces(agent, "stream_text", delta=True))
        for output in OUTPUTS:
            for agent in self.agents(output_type=output):
                assert isinstance(asyncio.run(pieces(agent, "stream_output"))[-1], Solution)

    def calls(self) -> Iterator[dict[str, int]]:
        for agent in self.agents(model_settings=first_demands_a_call):
            yield from called(agent)

    def solutions(self) -> Iterator[Any]:
        for output in (Solution, *OUTPUTS):
            yield from (a.run_sync(QUESTION).output for a in self.agents(output_type=output))


if __name__ == "__main__":
    main("pydantic-ai-slim", *CHATS, connect=PydanticAI)
