"""Anthropic's messages: what a chat is asked, and what its answers look like."""

import json
from typing import Any

import pytest

from router.text.tokenizer import Text
from tests.fault.router_doubles import QWEN, DecodeDouble, Served, speak

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "é"}}\n</tool_call>'
THOUGHT = "<think>\nI look.\n</think>\n\n"
TOOL = {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}
HELLO: Any = [{"role": "user", "content": "hello"}]
HEARD = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
UNTHOUGHT = "<think>\n\n</think>\n\n"
MODEL = (QWEN, (), 2048)  # it thinks, unless it is told not to


def told(served: Served, streamed: bool, **asked: Any) -> dict[str, Any]:
    """The message; of a stream, put together from its events, whose order is checked."""
    body = {"model": "small", "max_tokens": 99, "messages": HELLO, "stream": streamed, **asked}
    response = served.post("messages", **body)
    assert response.status_code == 200, response.text
    if not streamed:
        return response.json()
    message: dict[str, Any] = {}
    is_open, kinds = False, list[str]()
    for event in response.text.strip().split("\n\n"):
        name, data = event.split("\n")
        fields = json.loads(data.removeprefix("data: "))
        assert name == f"event: {fields['type']}"
        kinds.append(fields["type"])
        match fields["type"]:
            case "message_start":
                message = fields["message"]
            case "content_block_start":
                assert fields["index"] == len(message["content"])
                assert not is_open
                is_open = True
                message["content"].append({**fields["content_block"], "pieces": ""})
            case "content_block_delta":
                assert is_open
                delta, block = fields["delta"], message["content"][fields["index"]]
                assert fields["index"] == len(message["content"]) - 1
                names = {"text_delta": "text", "thinking_delta": "thinking"}
                if delta["type"] == "input_json_delta":
                    block["pieces"] += delta["partial_json"]
                else:
                    block[names[delta["type"]]] += delta[names[delta["type"]]]
            case "content_block_stop":
                is_open, block = False, message["content"][fields["index"]]
                pieces = block.pop("pieces")
                block |= {"input": json.loads(pieces)} if pieces else {}
            case "message_delta":
                message |= fields["delta"] | {"usage": fields["usage"]}
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    return message


def test_a_message(served: Served, double: DecodeDouble, text: Text, streamed: bool) -> None:
    double.says(text, "Hi there.")
    message = told(served, streamed, system="be good")
    assert message.pop("id").startswith("msg_")
    num = len(text.encode("Hi there.", add_special_tokens=False))
    generate = double.take()[1]
    assert generate.sampling.max_tokens == 99
    assert message == {
        "type": "message", "role": "assistant", "model": "small",
        "content": [{"type": "text", "text": "Hi there."}],
        "stop_reason": "end_turn", "stop_sequence": None,
        "usage": {
            "input_tokens": len(generate.tokens) - 4, "output_tokens": num,
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4,
        },
    }  # fmt: skip
    prompt = text.decode(generate.tokens, skip_special_tokens=False)
    assert prompt == f"<|im_start|>system\nbe good<|im_end|>\n{HEARD}{UNTHOUGHT}"


def test_reasoning_text_and_calls(
    served: Served, double: DecodeDouble, text: Text, streamed: bool
) -> None:
    double.says(text, f"{THOUGHT}So.\n{CALL}\n{CALL}")
    thinking = {"type": "enabled", "budget_tokens": 1024}
    message = told(served, streamed, tools=[TOOL], thinking=thinking)
    ids = [block.pop("id") for block in message["content"] if block["type"] == "tool_use"]
    call = {"type": "tool_use", "name": "weather", "input": {"city": "é"}}
    assert message["content"] == [
        {"type": "thinking", "thinking": "I look.", "signature": ""},
        {"type": "text", "text": "So."}, call, call,
    ]  # fmt: skip
    assert len(set(ids)) == 2
    assert message["stop_reason"] == "tool_use"
    prompt = double.prompt(text)
    assert prompt.endswith(HEARD)
    assert '"description": "of a city"' in prompt


def test_a_conversation_becomes_a_chat(served: Served, double: DecodeDouble, text: Text) -> None:
    double.says(text, "ok")
    used = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "x"}}
    result = {"type": "tool_result", "tool_use_id": "t1"}
    turns = [
        *HELLO,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "d"}, {"type": "text", "text": "look"}, used,
        ]},
        {"role": "user", "content": [
            {**result, "content": [{"type": "text", "text": "sun"}]},
            {**result, "content": "rain", "is_error": True},
            {"type": "text", "text": "and", "cache_control": {"type": "ephemeral"}},
        ]},
    ]  # fmt: skip
    told(served, False, messages=turns, tools=[TOOL], system=[{"type": "text", "text": "a"}])
    prompt = double.prompt(text).partition("<|im_start|>system\na")[2]
    assert prompt.endswith(f"""<|im_start|>user
hello<|im_end|>
<|im_start|>assistant
look<tool_call>
{{"name": "weather", "arguments": {{"city": "x"}}}}
</tool_call><|im_end|>
<|im_start|>tool
sun<|im_end|>
<|im_start|>tool
rain<|im_end|>
<|im_start|>user
and<|im_end|>
<|im_start|>assistant
{UNTHOUGHT}""")


def test_an_empty_last_message_of_the_assistant_is_none(
    served: Served, double: DecodeDouble, text: Text
) -> None:
    double.says(text, "ok")
    told(served, False, messages=[*HELLO, {"role": "assistant", "content": ""}])
    assert double.prompt(text).endswith(HEARD + UNTHOUGHT)


def test_an_answer_without_a_word_has_an_empty_block(
    served: Served, double: DecodeDouble, streamed: bool
) -> None:
    double.script = speak(())
    assert told(served, streamed)["content"] == [{"type": "text", "text": ""}]


@pytest.mark.parametrize(
    ("choice", "grammar", "parallel"),
    [
        ({"type": "any"}, True, True),
        ({"type": "tool", "name": "weather"}, True, False),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, False),
        ({"type": "none"}, False, None),
    ],
    ids=["any", "tool", "auto", "none"],
)
def test_which_tools_are_called(
    served: Served, double: DecodeDouble, text: Text,
    choice: dict[str, Any], grammar: bool, parallel: bool | None,
) -> None:  # fmt: skip
    double.says(text, f"{CALL}\n{CALL}")
    message = told(served, False, tools=[TOOL], tool_choice=choice)
    calls = [block for block in message["content"] if block["type"] == "tool_use"]
    assert len(calls) == {True: 2, False: 1, None: 0}[parallel]
    assert bool(double.take()[1].sampling.grammar) == grammar


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_structured_output(served: Served, double: DecodeDouble, text: Text, name: str) -> None:
    double.says(text, "{}")
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {}}}
    told(served, False, **{name: {"format": form} if name == "output_config" else form})
    assert "json_schema" in double.take()[1].sampling.grammar


@pytest.mark.parametrize(
    ("wrong", "says_so"),
    [
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"n": 2}, "n has no place"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": "true"}}, "tool_choice.dis"),
        ({"output_config": {"effort": 3}}, "output_config.effort: Input should be a valid string"),
        ({"tools": [TOOL | {"input_schema": {"type": "array"}}]}, "tools.0.input_schema: must be"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools.0.name"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"output_format": {"type": "xml"}}, "output_format"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_mistakes_are_told_in_anthropics_form(
    served: Served, wrong: dict[str, Any], says_so: str
) -> None:
    body = {"model": "small", "max_tokens": 9, "messages": HELLO, **wrong}
    response = served.post("messages", **body)
    assert response.status_code == 400
    error = response.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert says_so in error["error"]["message"]


def test_no_thread_is_kept_and_its_client_sends_all_again(served: Served) -> None:
    body: Any = {"max_tokens": 9, "messages": HELLO}
    thread = {"type": "continue", "previous_message_id": "msg_1"}
    assert served.post("messages", **body, model="x").json()["error"]["type"] == "not_found_error"
    response = served.post("messages", **body, thread=thread)
    assert response.status_code == 404
    assert response.json()["error"]["details"] == {"error_code": "thread_not_found"}
