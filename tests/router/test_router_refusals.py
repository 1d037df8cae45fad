"""Bodies that are wrong: 400, with the field that is."""

from typing import Any

import pytest

from router.openai import prepare
from router.text.grammar import MAX_GRAMMAR_CHARS
from tests.fault.router_doubles import HELLO, KEEP, MAX_MODEL_LEN, DecodeDouble, Served
from tests.support.mutants import TOOLS

CHAT, TEXT = "chat/completions", "completions"
FULL = {CHAT: {"messages": HELLO}, TEXT: {"prompt": "a"}}  # what a body below is added to
Row = tuple[dict[str, Any], str]  # a body, and the field that the error names
IMPOSSIBLE = {"type": "integer", "minimum": 5, "maximum": 3}
UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}


def wrong(**values: Any) -> list[Row]:
    """One body a field, with a value that it cannot have."""
    return [({name: value}, name) for name, value in values.items()]


def tool(**function: Any) -> Any:
    return [{"type": "function", "function": function}]


def said(content: Any) -> Any:
    return {"messages": [{"role": "user", "content": content}]}


def earlier(call: Any) -> Any:
    return {"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]}


WRONG_SCHEMA = tool(name="a", parameters={"type": "strin"})
OF_CHATS: list[Row] = [
    *wrong(messages=[], top_logprobs=2, logprobs=3, max_completion_tokens=-1, tools=3,
           tool_choice="required", chat_template_kwargs=3, cache_salt=""),
    *wrong(cache_salt="a" * 257),
    *wrong(cache_salt={}),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages.0.role"),
    (said(3), "messages.0.content"),
    (said([{"type": "image_url"}]), "messages.0.content"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "x", "function": {"name": "a"}}]}, "tools.0.type"),
    ({"tools": tool(name="a b")}, "tools.0.function.name"),
    ({"tools": tool(name="a", strict=[])}, "tools.0.function.strict"),
    ({"tools": tool(name="a", parameters={"type": "array"})}, "tools.0.function.parameters"),
    ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": tool(name="x")[0]}, "tool_choice"),
    ({"tools": WRONG_SCHEMA, "tool_choice": "required"}, "tools"),
    ({"tools": WRONG_SCHEMA, "response_format": {"type": "json_object"}}, "tools"),
    ({"tools": TOOLS, "tool_choice": "required", "min_tokens": 2}, "min_tokens"),
    (earlier({}), "messages.1.tool_calls.0.function.name"),
    # Wishes for a grammar that nothing can satisfy, or that contradict each other.
    *wrong(guided_json=IMPOSSIBLE, response_format="json_object", guided_choice=[],
           guided_regex="a(", guided_grammar="no grammar"),
    *wrong(guided_regex="a" * (MAX_GRAMMAR_CHARS + 1)),
    *wrong(guided_json="{", guided_regex="(?=a)b"),
    *wrong(guided_json={"type": "strin"}),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": IMPOSSIBLE}}},
     "response_format"),
    *(({"response_format": {"type": "json_schema", "json_schema": {"schema": {
        "anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": UNIQUE}}, "strict": strict}}},
        "response_format") for strict in (False, True)),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"guided_choice": [1]}, "guided_choice.0"),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
]  # fmt: skip
OF_TEXTS: list[Row] = [
    *wrong(prompt="", temperature=-1, top_p=1.1, min_p=1.1, max_tokens=-1, stop=["a", ""],
           stop_token_ids=[-1], stream_options={"include_usage": True}, logprobs=21, n=0,
           presence_penalty=2.1, repetition_penalty=0, logit_bias={"512": 1}),
    *wrong(prompt=[], n=129, return_trace=3),
    *wrong(prompt=[1, "a"], return_trace="maybe"),
    *wrong(prompt=[100_000], return_trace=[True]),
    *wrong(return_trace={"drafts": True}, cache_salt=""),
    *wrong(cache_salt="a" * 257),
    *wrong(cache_salt=5),
    *wrong(cache_salt=["a"]),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    *wrong(truncate_prompt_tokens=0, json_schema="{", regex="a(", ebnf='root ::= "a'),
    *wrong(truncate_prompt_tokens=MAX_MODEL_LEN + 1, ebnf="root ::= ." * 257),
    *wrong(truncate_prompt_tokens=-2, ebnf='root ::= "' + "a" * 16384 + '"'),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
    ({"best_of": 3, "n": 2, "stream": True}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt": [[5] * 200] * 255, "prompt_logprobs": 20}, "prompt_logprobs"),
    ({"logit_bias": {"a": 1}}, "logit_bias.a"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"prompt": ["a"] * 5000, "n": 2}, "prompt"),
    ({"stop": ["a" * 8192, "b" * 8193]}, "stop"),
    ({"prompt": ["a"] * 1100, "logit_bias": {str(i): 1 for i in range(500)}, "n": 2},
     "logit_bias"),
    ({"prompt": ["a"] * 2000, "guided_regex": "a" * 20_000}, "guided_regex"),
]  # fmt: skip


OTHERS: list[tuple[str, str, dict[str, Any], str]] = [
    ("unsupported", TEXT, {"structured_outputs": {"structural_tag": "{}"}},
     "structured_outputs.structural_tag"),
    *(("context_length_exceeded", TEXT, *row) for row in (
        ({"prompt": [1] * MAX_MODEL_LEN}, "prompt"),
        ({"prompt": [1] * (MAX_MODEL_LEN + 9), "max_tokens": 1}, "prompt"),
        ({"prompt": [1] * 200, "max_tokens": 57}, "max_tokens"),
        ({"prompt": "a " * 9000}, "prompt"),
    )),
    *(("context_length_exceeded", CHAT, *row) for row in (
        (said("a " * 300), "messages"),
        (said("a " * 9000), "messages"),
        ({"max_completion_tokens": 256}, "max_completion_tokens"),
    )),
]  # fmt: skip
REFUSED = [
    *(("invalid_value", CHAT, *row) for row in OF_CHATS),
    *(("invalid_value", TEXT, *row) for row in OF_TEXTS),
    *OTHERS,
]


@pytest.mark.parametrize(
    ("code", "path", "body", "param"), REFUSED, ids=lambda value: str(value)[:60]
)
def test_what_is_wrong_is_named(
    served: Served, code: str, path: str, body: dict[str, Any], param: str
) -> None:
    error = served.refusal(path, **FULL[path] | body)
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (error["code"], error["param"]) == (code, param)


def test_prompts_times_choices_are_bounded(
    served: Served, double: DecodeDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    double.script = KEEP
    monkeypatch.setitem(prepare.MAX_SUMS, "prompt tokens", 1000)
    asked: dict[str, Any] = {"prompt": [[1] * 100], "n": 11}
    assert served.refusal(TEXT, **asked)["param"] == "prompt"
    assert served.post(TEXT, **asked | {"n": 10, "stop": "a" * 16384}).status_code == 200
    said = {"messages": [{"role": "user", "content": "a " * 20}], "n": 128}
    assert served.refusal(CHAT, **said)["param"] == "messages"
