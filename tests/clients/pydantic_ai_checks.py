"""pydantic-ai against a running cluster, by chats and by responses, which are its default:
`python pydantic_ai_checks.py URL`."""

import asyncio
from typing import Any

from pydantic_ai import Agent, ModelSettings, NativeOutput, RunContext, ToolOutput
from pydantic_ai.messages import ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from shared import ANSWER, QUESTION, Solution, add, main

MODELS: list[type[Any]] = [OpenAIResponsesModel, OpenAIChatModel]


def agent(url: str, **more: Any) -> Agent[None, Any]:
    provider = OpenAIProvider(base_url=url, api_key="none")
    return Agent(MODELS[0]("tiny", provider=provider), **more)


def first_demands_a_call(context: RunContext[None]) -> ModelSettings:
    return {"tool_choice": ["add_two"]} if context.run_step == 1 else {}


def chat(url: str) -> None:
    made = agent(url).run_sync(QUESTION)
    assert made.output.endswith(ANSWER)
    assert made.usage.output_tokens > 0


def stream(url: str) -> None:
    async def pieces() -> list[str]:
        async with agent(url).run_stream(QUESTION) as result:
            return [each async for each in result.stream_text(delta=True, debounce_by=None)]

    async def outputs(kind: Any) -> list[Any]:
        async with agent(url, output_type=kind).run_stream(QUESTION) as result:
            return [each async for each in result.stream_output(debounce_by=None)]

    text = asyncio.run(pieces())
    assert len(text) > 5
    assert "".join(text).endswith(ANSWER)
    for kind in (ToolOutput(Solution), NativeOutput(Solution)):
        assert isinstance(asyncio.run(outputs(kind))[-1], Solution)


def tools(url: str) -> None:
    """The first step demands a call; pydantic-ai makes it, sends the result, and gets an answer."""
    asked = agent(url, model_settings=first_demands_a_call)
    calls = []

    @asked.tool_plain
    def add_two(a: int, b: int) -> int:
        """Add two numbers."""
        calls.append((a, b))
        return add(a, b)

    made = asked.run_sync(QUESTION)
    assert calls
    parts = [part for message in made.all_messages() for part in message.parts]
    results = [part.content for part in parts if isinstance(part, ToolReturnPart)]
    assert sorted(results) == sorted(add(*call) for call in calls)  # made in threads
    assert isinstance(made.output, str)


def structured_output(url: str) -> None:
    for kind in (Solution, ToolOutput(Solution), NativeOutput(Solution)):
        made = agent(url, output_type=kind).run_sync(QUESTION)
        assert isinstance(made.output, Solution)


def by_chats(url: str) -> None:
    """All of it once more."""
    MODELS.reverse()
    for check in (chat, stream, tools, structured_output):
        check(url)


if __name__ == "__main__":
    main("pydantic-ai-slim", chat, stream, tools, structured_output, by_chats)
