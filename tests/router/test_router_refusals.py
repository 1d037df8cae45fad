"""Bodies that are wrong: 400, with the field that is."""

from typing import Any

import pytest

from router.text.grammar import MAX_GRAMMAR_CHARS
from tests.fault.router_doubles import HELLO, Served

CHAT, TEXT = "chat/completions", "completions"
IMPOSSIBLE = {"type": "integer", "minimum": 5, "maximum": 3}
DEEP: dict[str, Any] = {"type": "string"}
for _ in range(90):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
# Path, body, and the field that the error names.
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0.content",
    ),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": [1, "a"]}, "prompt"),
    (TEXT, {"prompt": [100_000]}, "prompt"),
    (TEXT, {"prompt": "a", "temperature": -1}, "temperature"),
    (TEXT, {"prompt": "a", "top_p": 0}, "top_p"),
    (TEXT, {"prompt": "a", "min_p": 1}, "min_p"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    (TEXT, {"prompt": "a", "stop": ["a", ""]}, "stop"),
    (TEXT, {"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids"),
    (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    (TEXT, {"prompt": "a", "best_of": 3, "n": 2, "stream": True}, "best_of"),
    (TEXT, {"prompt": "a", "best_of": 1, "n": 2}, "best_of"),
    (TEXT, {"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
    (TEXT, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (TEXT, {"prompt": "a", "n": 0}, "n"),
    (TEXT, {"prompt": "a", "n": 129}, "n"),
    (TEXT, {"prompt": "a", "presence_penalty": 2.1}, "presence_penalty"),
    (TEXT, {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    (TEXT, {"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias.a"),
    (TEXT, {"prompt": "a", "logit_bias": {"512": 1}}, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias.5"),
    (TEXT, {"prompt": "a", "guided_regex": "a", "min_tokens": 2}, "min_tokens"),
    (TEXT, {"prompt": "a", "guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    (TEXT, {"prompt": ["a"] * 5000, "n": 2}, "prompt"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": HELLO, "logprobs": 3}, "logprobs"),
    (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, "messages.0.role"),
    (CHAT, {"messages": HELLO, "max_completion_tokens": -1}, "max_completion_tokens"),
]
# Wishes for a grammar that nothing can satisfy, or that contradict each other.
GRAMMARS: list[tuple[dict[str, Any], str]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": IMPOSSIBLE}}},
        "response_format",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": "json_object"}, "response_format"),
    ({"guided_json": IMPOSSIBLE}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": {"type": "strin"}}, "guided_json"),
    ({"guided_json": DEEP}, "guided_json"),
    ({"guided_regex": "a("}, "guided_regex"),
    ({"guided_regex": "(?=a)b"}, "guided_regex"),
    ({"guided_regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [1]}, "guided_choice.0"),
    ({"guided_grammar": "no grammar"}, "guided_grammar"),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structural_tag": "{}"}, "structural_tag"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
]


@pytest.mark.parametrize(("path", "body", "param"), WRONG, ids=str)
def test_wrong_values_name_the_field(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    error = served.refusal(path, **body)
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (error["code"], error["param"]) == ("invalid_value", param)


@pytest.mark.parametrize(("wish", "param"), GRAMMARS, ids=lambda value: str(value)[:60])
def test_what_nothing_can_satisfy_names_the_field(
    served: Served, wish: dict[str, Any], param: str
) -> None:
    assert served.refusal(CHAT, messages=HELLO, **wish)["param"] == param
