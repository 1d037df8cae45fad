"""litellm, by chats and by responses: `python litellm_checks.py URL`."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import litellm
from shared import ADD_NAMED, CHATS, QUESTION, USER, Solution, add, add_tool, main, text_of

TOOL = add_tool()
FUNCTION: Any = {"type": "function", **TOOL["function"]}
CALLED: Any = {"tools": [TOOL], "tool_choice": ADD_NAMED}


class Litellm:
    def __init__(self, url: str) -> None:
        self.given: Any = {"model": "openai/tiny", "api_base": url, "api_key": "none"}

    def chat(self, messages: Any = USER, **more: Any) -> Any:
        return litellm.completion(**self.given, messages=messages, **more)

    def texts(self) -> Iterator[str]:
        made = self.chat()
        assert made.choices[0].finish_reason == "stop"
        assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
        yield made.choices[0].message.content
        again: Any = asyncio.run(litellm.acompletion(**self.given, messages=USER))
        yield again.choices[0].message.content
        yield litellm.responses(**self.given, input=QUESTION).output_text

    def streams(self) -> Iterator[list[str]]:
        chunks = list(self.chat(stream=True, stream_options={"include_usage": True}))
        yield [text_of([chunk]) for chunk in chunks]
        assert litellm.stream_chunk_builder(chunks, messages=USER).usage.completion_tokens > 0
        events = litellm.responses(**self.given, input=QUESTION, stream=True)
        yield [each.delta for each in events if each.type == "response.output_text.delta"]

    def calls(self) -> Iterator[dict[str, Any]]:
        """A call, whole and streamed, whose result is sent back."""
        message = self.chat(**CALLED).choices[0].message
        (call,) = message.tool_calls
        chunks = list(self.chat(**CALLED, stream=True))
        (streamed,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
        assert streamed.function == call.function
        found = json.loads(call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": str(add(**found))}
        made = self.chat([*USER, message, result], tools=[TOOL])
        assert made.choices[0].message.content
        yield found
        asked: Any = {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "add"}}
        called = litellm.responses(**self.given, input=QUESTION, **asked)
        items = (item for item in called.output if item.type == "function_call")
        yield from (json.loads(item.arguments) for item in items)

    def solutions(self) -> Iterator[Any]:
        made = self.chat(response_format=Solution)
        yield Solution.model_validate_json(made.choices[0].message.content)


if __name__ == "__main__":
    main("litellm", *CHATS, connect=Litellm)
