"""dspy against a running cluster: `python dspy_checks.py URL`."""

import asyncio
import warnings
from typing import Any

import dspy
from dspy.lm15 import (
    AccessPolicy,
    ModelSupport,
    OpenAIChatCompat,
    ProviderDefinition,
    register_provider,
)
from shared import ADD_NAMED, ANSWER, QUESTION, Item, Unit, add, main

ADD = dspy.Tool(add)


class Solve(dspy.Signature):
    """Solve the word problem."""

    question: str = dspy.InputField()
    reasoning: str = dspy.OutputField()
    items: list[Item] = dspy.OutputField()
    unit: Unit = dspy.OutputField()
    total: int = dspy.OutputField()


class Call(dspy.Signature):
    """Solve the word problem with the tools."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


def model(url: str) -> dspy.LM:
    """kvlane as a provider of its own: dspy thinks that unknown models take no schema, no tool."""
    provider = ProviderDefinition.chat(
        AccessPolicy(provider="kvlane", base_url=url), compat=OpenAIChatCompat()
    )
    register_provider(provider, supports=ModelSupport(function_calling=True, response_schema=True))
    return named("kvlane/tiny", url)


def named(name: str, url: str) -> dspy.LM:
    return dspy.LM(name, api_base=url, api_key="none", cache=False, num_retries=0)


def chat(url: str) -> None:
    for lm in (model(url), named("openai/tiny", url)):  # the latter goes through litellm
        assert lm(QUESTION)[0].endswith(ANSWER)


def stream(url: str) -> None:
    async def pieces() -> list[Any]:
        listener = dspy.streaming.StreamListener(signature_field_name="reasoning")
        solve = dspy.streamify(dspy.Predict(Solve), stream_listeners=[listener])
        return [each async for each in solve(question=QUESTION)]

    with dspy.context(lm=model(url), adapter=dspy.JSONAdapter()):
        *parts, made = asyncio.run(pieces())
    assert len(parts) > 5
    assert isinstance(made, dspy.Prediction)
    assert made.reasoning in "".join(part.chunk for part in parts)  # dspy leaves JSON's quotes in


def tools(url: str) -> None:
    adapter = dspy.JSONAdapter(use_native_function_calling=True)
    with dspy.context(lm=model(url), adapter=adapter):
        made = dspy.Predict(Call)(question=QUESTION, tools=[ADD], config={"tool_choice": ADD_NAMED})
        (call,) = made.calls.tool_calls
        assert ADD(**call.args) == add(**call.args)


def structured_output(url: str) -> None:
    with dspy.context(lm=model(url), adapter=dspy.JSONAdapter()):
        for program in (dspy.Predict(Solve), dspy.ChainOfThought(Solve)):
            made = program(question=QUESTION)
            assert isinstance(made.unit, Unit)
            assert isinstance(made.total, int)
            assert all(isinstance(item, Item) for item in made["items"])


def chat_adapter_is_the_models_text(url: str) -> None:
    """Its default adapter asks for marks in the text, which tiny cannot write: it falls back."""
    with dspy.context(lm=model(url), adapter=dspy.ChatAdapter()):
        assert isinstance(dspy.Predict("question -> total: int")(question=QUESTION).total, int)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    main("dspy", chat, stream, tools, structured_output, chat_adapter_is_the_models_text)
