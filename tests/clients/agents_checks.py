"""openai-agents, by responses (its default) and by chats: `python agents_checks.py URL`."""

import asyncio
from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from shared import ANSWER, QUESTION, Solution, main

KINDS: tuple[type[Any], ...] = (OpenAIResponsesModel, OpenAIChatCompletionsModel)


def agent(url: str, kind: type[Any], **more: Any) -> Agent:
    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    return Agent(name="solver", model=kind("tiny", openai_client=client), **more)


def chat(url: str) -> None:
    for kind in KINDS:
        made = Runner.run_sync(agent(url, kind), QUESTION)
        assert made.final_output.endswith(ANSWER)
        again = [*made.to_input_list(), {"role": "user", "content": QUESTION}]
        assert Runner.run_sync(agent(url, kind), again).final_output


def stream(url: str) -> None:
    async def pieces(kind: type[Any]) -> str:
        run = Runner.run_streamed(agent(url, kind), QUESTION)
        raw = [each.data async for each in run.stream_events() if each.type == "raw_response_event"]
        return "".join(each.delta for each in raw if each.type == "response.output_text.delta")

    for kind in KINDS:
        assert asyncio.run(pieces(kind)).endswith(ANSWER)


def tools(url: str) -> None:
    """The first step demands a call; the runner makes it and sends the result."""
    calls = []

    @function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        calls.append((a, b))
        return a + b

    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False)
    for kind in KINDS:
        calls.clear()
        made = Runner.run_sync(agent(url, kind, tools=[add], model_settings=settings), QUESTION)
        assert calls
        assert made.final_output is not None


def structured_output(url: str) -> None:
    for kind in KINDS:
        made = Runner.run_sync(agent(url, kind, output_type=Solution), QUESTION)
        assert isinstance(made.final_output, Solution)


if __name__ == "__main__":
    set_tracing_disabled(True)
    main("openai-agents", chat, stream, tools, structured_output)
