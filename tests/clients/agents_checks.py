"""openai-agents, by responses (its default) and by chats: `python agents_checks.py URL`."""

import asyncio
from collections.abc import Iterator
from typing import Any

import agents
import openai
from shared import CHATS, QUESTION, USER, Solution, add, main

KINDS: tuple[type[Any], ...] = (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel)
DEMANDED = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False)


class Agents:
    def __init__(self, url: str) -> None:
        self.url = url

    def made(self, **more: Any) -> Iterator[agents.Agent]:
        for kind in KINDS:
            client = openai.AsyncOpenAI(base_url=self.url, api_key="none", max_retries=0)
            yield agents.Agent(name="solver", model=kind("tiny", openai_client=client), **more)

    def texts(self) -> Iterator[str]:
        for agent in self.made():
            made = agents.Runner.run_sync(agent, QUESTION)
            yield made.final_output
            assert agents.Runner.run_sync(agent, [*made.to_input_list(), *USER]).final_output

    def streams(self) -> Iterator[list[str]]:
        async def pieces(agent: agents.Agent) -> list[str]:
            run = agents.Runner.run_streamed(agent, QUESTION)
            raw = [e.data async for e in run.stream_events() if e.type == "raw_response_event"]
            return [each.delta for each in raw if each.type == "response.output_text.delta"]

        for agent in self.made():
            yield asyncio.run(pieces(agent))

    def calls(self) -> Iterator[dict[str, int]]:
        """The runner makes the call that the first step demands, and sends the result."""
        calls: list[dict[str, int]] = []

        @agents.function_tool
        def noted(a: int, b: int) -> int:
            """Add two numbers."""
            calls.append({"a": a, "b": b})
            return add(a, b)

        for agent in self.made(tools=[noted], model_settings=DEMANDED):
            before = len(calls)
            assert agents.Runner.run_sync(agent, QUESTION).final_output is not None
            assert len(calls) > before
        yield from calls

    def solutions(self) -> Iterator[Any]:
        for agent in self.made(output_type=Solution):
            yield agents.Runner.run_sync(agent, QUESTION).final_output


if __name__ == "__main__":
    agents.set_tracing_disabled(True)
    main("openai-agents", *CHATS, connect=Agents)
