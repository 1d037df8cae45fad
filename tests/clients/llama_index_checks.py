"""llama-index-llms-openai-like against a running cluster: `python llama_index_checks.py URL`."""

from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from shared import ANSWER, QUESTION, Solution, add, main

ADD = FunctionTool.from_defaults(add)
MESSAGES = [ChatMessage(role="user", content=QUESTION)]


def model(url: str, **more: Any) -> OpenAILike:
    return OpenAILike(
        model="tiny", api_base=url, api_key="none", context_window=2048, temperature=0,
        is_chat_model=True, is_function_calling_model=True, max_retries=0, **more,
    )  # fmt: skip


def chat(url: str) -> None:
    made = model(url).chat(MESSAGES)
    assert made.message.content.endswith(ANSWER)
    assert made.raw.usage.completion_tokens > 0
    assert model(url).complete(QUESTION).text == made.message.content
    by_text = model(url)
    by_text.is_chat_model = False  # /v1/completions
    assert by_text.complete(f"{QUESTION}\n", max_tokens=8).text


def stream(url: str) -> None:
    pieces = [each.delta or "" for each in model(url).stream_chat(MESSAGES)]
    assert len(pieces) > 5
    assert "".join(pieces).endswith(ANSWER)
    again = [each.delta or "" for each in model(url).stream_complete(QUESTION)]
    assert "".join(again) == "".join(pieces)


def tools(url: str) -> None:
    """A call that is demanded, whole and streamed; then llama-index makes it."""
    asked: Any = {"tools": [ADD], "user_msg": QUESTION, "tool_required": True}
    made = model(url).chat_with_tools(**asked)
    calls = model(url).get_tool_calls_from_response(made)
    assert {call.tool_name for call in calls} == {"add"}
    *_, last = model(url).stream_chat_with_tools(**asked)
    streamed = model(url).get_tool_calls_from_response(last)
    assert [each.tool_kwargs for each in streamed] == [each.tool_kwargs for each in calls]
    done = model(url).predict_and_call([ADD], QUESTION, tool_required=True)
    results = [add(**call.tool_kwargs) for call in calls]
    assert [source.raw_output for source in done.sources] == results
    messages = [*MESSAGES, made.message]
    for result, call in zip(results, calls, strict=True):
        more = {"tool_call_id": call.tool_id}
        messages.append(ChatMessage(role="tool", content=str(result), additional_kwargs=more))
    assert model(url).chat(messages).message.content


def structured_output(url: str) -> None:
    """By its own way, a function; and by response_format."""
    made = model(url).as_structured_llm(Solution).chat(MESSAGES)
    assert isinstance(made.raw, Solution)
    program = FunctionCallingProgram.from_defaults(
        output_cls=Solution, prompt_template_str="{question}", llm=model(url)
    )
    assert isinstance(program(question=QUESTION), Solution)
    prompt = PromptTemplate("{question}")
    assert isinstance(model(url).structured_predict(Solution, prompt, question=QUESTION), Solution)
    by_schema = model(url, should_use_structured_outputs=True)
    assert isinstance(by_schema.structured_predict(Solution, prompt, question=QUESTION), Solution)


if __name__ == "__main__":
    main("llama-index-llms-openai-like", chat, stream, tools, structured_output)
