"""litellm against a running cluster: `python litellm_checks.py URL`."""

import asyncio
import json
from typing import Any

import litellm
from shared import ADD_NAMED, ANSWER, QUESTION, USER, Solution, add, add_tool, main, text_of

TOOL = add_tool()


def asked(url: str, **more: Any) -> dict[str, Any]:
    return {"model": "openai/tiny", "api_base": url, "api_key": "none", "messages": USER, **more}


def chat(url: str) -> None:
    made = litellm.completion(**asked(url))
    assert made.choices[0].message.content.endswith(ANSWER)
    assert made.choices[0].finish_reason == "stop"
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    again = asyncio.run(litellm.acompletion(**asked(url)))
    assert again.choices[0].message.content == made.choices[0].message.content


def stream(url: str) -> None:
    more = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(**asked(url, **more)))
    text = text_of(chunks)
    assert text.endswith(ANSWER)
    assert len(chunks) > 5
    whole = litellm.stream_chunk_builder(chunks, messages=USER)
    assert whole.choices[0].message.content == text
    assert whole.usage.completion_tokens > 0


def tools(url: str) -> None:
    """A call, whole and streamed, then its result sent back."""
    more = {"tools": [TOOL], "tool_choice": ADD_NAMED}
    message = litellm.completion(**asked(url, **more)).choices[0].message
    (call,) = message.tool_calls
    result = add(**json.loads(call.function.arguments))
    chunks = list(litellm.completion(**asked(url, **more, stream=True)))
    (streamed,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert streamed.function == call.function
    result_message = {"role": "tool", "tool_call_id": call.id, "content": str(result)}
    made = litellm.completion(**asked(url, messages=[*USER, message, result_message], tools=[TOOL]))
    assert made.choices[0].message.content


def structured_output(url: str) -> None:
    made = litellm.completion(**asked(url, response_format=Solution))
    assert made.choices[0].finish_reason == "stop"
    Solution.model_validate_json(made.choices[0].message.content)


def responses(url: str) -> None:
    """Whole and streamed, and a function's call."""
    own = {name: value for name, value in asked(url).items() if name != "messages"}
    made = litellm.responses(**own, input=QUESTION)
    assert made.output_text.endswith(ANSWER)
    events = list(litellm.responses(**own, input=QUESTION, stream=True))
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == made.output_text
    function = {"type": "function", **TOOL["function"]}
    choice = {"type": "function", "name": "add"}
    called = litellm.responses(**own, input=QUESTION, tools=[function], tool_choice=choice)
    assert [item.name for item in called.output if item.type == "function_call"] == ["add"]


if __name__ == "__main__":
    main("litellm", chat, stream, tools, structured_output, responses)
