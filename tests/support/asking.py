"""Many concurrent requests through the official `openai` client."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from tests.support.reference import body_of

CUT = "connection"


@dataclass
class Outcome:
    """How one request ended: a finish_reason or an error, never both, never neither."""

    text: str = ""
    finish_reason: str | None = None
    error: str | None = None  # the error's code; CUT: the connection was lost
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_chunks: int = 0

    def count(self, usage: Any) -> None:
        if usage is not None:
            self.num_prompt_tokens = usage.prompt_tokens
            self.num_cached_tokens = usage.prompt_tokens_details.cached_tokens


async def ask(
    client: openai.AsyncOpenAI, question: str, body: dict, *, stream: bool, outcome: Outcome
) -> None:
    """One chat request; fills `outcome` as it goes, so that a hang shows how far it came."""
    messages = [{"role": "user", "content": question}]
    try:
        if not stream:
            made = await client.chat.completions.create(model="tiny", messages=messages, **body)
            outcome.text = made.choices[0].message.content
            outcome.finish_reason = made.choices[0].finish_reason
            outcome.count(made.usage)
            return
        chunks = await client.chat.completions.create(
            model="tiny", messages=messages, stream=True,
            stream_options={"include_usage": True}, **body,
        )  # fmt: skip
        async for chunk in chunks:
            for choice in chunk.choices:
                outcome.text += choice.delta.content or ""
                outcome.num_chunks += bool(choice.delta.content)
                outcome.finish_reason = choice.finish_reason or outcome.finish_reason
            outcome.count(chunk.usage)
    except (openai.APIConnectionError, httpx.TransportError):  # before the answer, and within it
        outcome.error = CUT
    except openai.APIError as error:
        outcome.error = str(error.code)


async def ask_all(
    base_url: str,
    questions: Sequence[str],
    *,
    max_tokens: int,
    timeout_s: float = 150.0,
    outcomes: Sequence[Outcome] | None = None,
) -> list[Outcome]:
    """All at once, every third one not streamed; raises TimeoutError if any hangs.

    `outcomes`, one a question, are filled as the answers come, for those who want to look on.
    """
    outcomes = [Outcome() for _ in questions] if outcomes is None else list(outcomes)
    async with openai.AsyncOpenAI(
        base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=timeout_s
    ) as client:
        tasks = [
            ask(client, question, body_of(i, max_tokens), stream=i % 3 != 0, outcome=outcomes[i])
            for i, question in enumerate(questions)
        ]
        await asyncio.wait_for(asyncio.gather(*tasks), timeout_s)
    return outcomes
