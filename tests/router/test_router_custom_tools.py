"""Custom tools, which take a text: by chats and by responses, whole and streamed."""

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from router.openai.custom_calls import Input
from router.text.tokenizer import Text
from tests.fault.router_doubles import HELLO, QWEN, DecodeDouble, Served
from tests.router.test_router_tools import grammar_accepts

TEXTS = ['print("é 😀")\n\\d', "", 'a"}', "\\ud83d", "\x7f\u2028"]
SAID = TEXTS[0]
MODEL = (QWEN, (), 2048)
CUSTOM = {"name": "code", "description": "Run it."}
DIGITS = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}
OF_CHAT: list[Any] = [{"type": "custom", "custom": CUSTOM}]
OF_RESPONSES: list[Any] = [{"type": "custom", **CUSTOM}]


def call(text: str) -> str:
    body = json.dumps({"name": "code", "arguments": {"input": text}})
    return f"<tool_call>\n{body}\n</tool_call>"


@pytest.fixture
def says(double: DecodeDouble, text: Text) -> DecodeDouble:
    double.says(text, call(SAID), sizes=(3, 1, 2))
    return double


@pytest.mark.parametrize("said", TEXTS, ids=ascii)
@pytest.mark.parametrize("plain", [True, False])
def test_an_input_is_the_same_at_every_cut(said: str, plain: bool) -> None:
    written = json.dumps({"input": said}, ensure_ascii=plain)
    for cut in range(len(written) + 1):
        whole = Input()
        assert whole.feed(written[:cut]) + whole.feed(written[cut:]) == said
    singly = Input()
    assert "".join(map(singly.feed, written)) == said


def test_half_a_character_and_what_is_no_input_are_told_as_they_are() -> None:
    assert Input().feed('{"input": "\\ud83d"}') == "?"
    other = Input()
    assert "".join(map(other.feed, '{"code": "x"}')) == '{"code": "x"}'


def test_a_chat_calls_a_tool_that_takes_a_text(
    client: openai.OpenAI, says: DecodeDouble, text: Text, served: Served
) -> None:
    answer = client.chat.completions.create(model="small", messages=HELLO, tools=OF_CHAT)
    ChatCompletion.model_validate(answer.model_dump())
    (made,), message = answer.choices[0].message.tool_calls or (), answer.choices[0].message
    assert (made.type, answer.choices[0].finish_reason) == ("custom", "tool_calls")
    assert made.custom.model_dump() == {"name": "code", "input": SAID}
    assert "function" not in made.model_dump(exclude_unset=True)
    prompt = says.prompt(text)
    assert '"input": {"type": "string"}' in prompt
    body = {"messages": HELLO, "tools": OF_CHAT, "stream": True}
    lines = served.post("chat/completions", **body).text.split("\n")
    data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [each["choices"][0]["delta"] for each in data]  # the client's types lack these
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert "".join(part["custom"]["input"] for part in parts) == SAID
    assert all(part["custom"]["input"] for part in parts if "id" not in part)
    assert [part["custom"]["name"] for part in parts if part.get("type") == "custom"] == ["code"]
    result = {"role": "tool", "tool_call_id": made.id, "content": "7"}
    says.take()
    again: Any = [*HELLO, message, result]
    client.chat.completions.create(model="small", messages=again, tools=OF_CHAT)
    prompt = says.prompt(text)
    assert f'"code", "arguments": {json.dumps({"input": SAID}, ensure_ascii=False)}' in prompt


@pytest.mark.parametrize("streamed", [False, True])
def test_a_response_calls_a_tool_that_takes_a_text(
    client: openai.OpenAI, says: DecodeDouble, text: Text, streamed: bool
) -> None:
    asked: Any = {"model": "small", "input": "hello", "tools": OF_RESPONSES}
    if streamed:
        events: list[Any] = list(client.responses.create(**asked, stream=True))
        name = "response.custom_tool_call_input"
        pieces = [event.delta for event in events if event.type == f"{name}.delta"]
        assert "".join(pieces) == SAID
        assert [event.input for event in events if event.type == f"{name}.done"] == [SAID]
        response = events[-1].response
    else:
        response = client.responses.create(**asked)
        Response.model_validate_json(response.model_dump_json(by_alias=True), strict=True)
    (made,) = response.output
    assert (made.type, made.name, made.input) == ("custom_tool_call", "code", SAID)
    result = {"type": "custom_tool_call_output", "call_id": made.call_id, "output": "7"}
    says.take()
    asked |= {"input": [result], "previous_response_id": response.id}
    client.responses.create(**asked)
    prompt = says.prompt(text)
    assert f'"code", "arguments": {json.dumps({"input": SAID}, ensure_ascii=False)}' in prompt


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_a_demanded_text_follows_its_regular_expression(
    served: Served, says: DecodeDouble, text: Text, path: str
) -> None:
    tool, choice = {"type": "custom", **CUSTOM, "format": DIGITS}, {"type": "custom"}
    if path == "responses":
        body = {"input": "hello", "tools": [tool], "tool_choice": choice | {"name": "code"}}
    else:
        grammar = {key: DIGITS[key] for key in ("syntax", "definition")}
        custom = CUSTOM | {"format": {"type": "grammar", "grammar": grammar}}
        body = {"messages": HELLO, "tools": [{"type": "custom", "custom": custom}]}
        body["tool_choice"] = choice | {"custom": {"name": "code"}}
    assert served.post(path, **body).status_code == 200
    made = says.take()[1].sampling.grammar
    compact = call("12").replace('": "12', '":"12')
    assert grammar_accepts(text, made, compact)
    assert not grammar_accepts(text, made, compact.replace("12", "1a"))


def test_other_grammars_are_refused_by_name(served: Served) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    body = {"input": "hello", "tools": [{"type": "custom", **CUSTOM, "format": form}]}
    error = served.post("responses", **body)
    assert (error.status_code, error.json()["error"]["param"]) == (400, "tools.0.format")
