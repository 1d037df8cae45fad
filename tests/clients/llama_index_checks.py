"""llama-index-llms-openai-like against a running cluster: `python llama_index_checks.py URL`."""

from collections.abc import Iterator
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from shared import CHATS, QUESTION, Solution, add, main

ADD = FunctionTool.from_defaults(add)
ASKED: Any = {"tools": [ADD], "user_msg": QUESTION, "tool_required": True}
MESSAGES = [ChatMessage(role="user", content=QUESTION)]


class LlamaIndex:
    def __init__(self, url: str) -> None:
        self.given: Any = {
            "model": "tiny", "api_base": url, "api_key": "none", "context_window": 2048,
            "temperature": 0, "is_function_calling_model": True, "max_retries": 0,
        }  # fmt: skip
        self.llm = OpenAILike(**self.given, is_chat_model=True)

    def texts(self) -> Iterator[Any]:
        yield self.llm.chat(MESSAGES).message.content
        yield self.llm.complete(QUESTION).text
        by_text = OpenAILike(**self.given, is_chat_model=False)  # /v1/completions
        assert by_text.complete(f"{QUESTION}\n", max_tokens=8).text

    def streams(self) -> Iterator[list[str]]:
        yield [each.delta or "" for each in self.llm.stream_chat(MESSAGES)]
        yield [each.delta or "" for each in self.llm.stream_complete(QUESTION)]

    def calls(self) -> Iterator[dict[str, Any]]:
        """A call that is demanded, whole and streamed; then llama-index makes it."""
        made = self.llm.chat_with_tools(**ASKED)
        calls = self.llm.get_tool_calls_from_response(made)
        *_, last = self.llm.stream_chat_with_tools(**ASKED)
        streamed = self.llm.get_tool_calls_from_response(last)
        assert [each.tool_kwargs for each in streamed] == [each.tool_kwargs for each in calls]
        done: Any = self.llm.predict_and_call([ADD], QUESTION, tool_required=True)
        assert [source.raw_output for source in done.sources] == [
            add(**call.tool_kwargs) for call in calls
        ]
        messages = [*MESSAGES, made.message]
        for call in calls:
            text, of = str(add(**call.tool_kwargs)), {"tool_call_id": call.tool_id}
            messages.append(ChatMessage(role="tool", content=text, additional_kwargs=of))
            yield call.tool_kwargs
        assert self.llm.chat(messages).message.content

    def solutions(self) -> Iterator[Any]:
        """By its own way, a function; and by response_format."""
        yield self.llm.as_structured_llm(Solution).chat(MESSAGES).raw
        schema = {"should_use_structured_outputs": True}
        prompt = PromptTemplate("{question}")
        for llm in (self.llm, OpenAILike(**self.given, is_chat_model=True, **schema)):
            yield llm.structured_predict(Solution, prompt, question=QUESTION)


if __name__ == "__main__":
    main("llama-index-llms-openai-like", *CHATS, connect=LlamaIndex)
