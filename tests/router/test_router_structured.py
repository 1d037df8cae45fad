"""Structured output: grammars that the tokenizer can follow, and 400 for those it cannot."""

import json
from typing import Any
from unittest import mock

import pytest
from llguidance import LLTokenizer
from pydantic import BaseModel

from router.text.tokenizer import Text
from router.text.trial import Trials
from tests.fault.router_doubles import HELLO, KEEP, DecodeDouble, Served
from tests.support.prompts import accepts, ll_tokenizer
from worker.errors import Busy


class Step(BaseModel):
    why: str
    then: int


class Plan(BaseModel):
    steps: list[Step]
    name: str


PLAN = '{"steps":[{"why":"so","then":1}],"name":"é"}'


@pytest.fixture(scope="module")
def tokenizer(text: Text) -> LLTokenizer:
    return ll_tokenizer(text.directory, text.vocab_size)


SCRIPT = KEEP


def format_of(model: type[BaseModel], **more: Any) -> dict[str, Any]:
    schema = {"name": "plan", "schema": model.model_json_schema(), **more}
    return {"type": "json_schema", "json_schema": schema}


LOOSE = {"type": "object", "properties": {"a": {"type": "string", "format": "phone-ish"}}}
GRAMMARS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"response_format": {"type": "json_object"}}, ['{"a":1}', "{}"], ["1", '{ "a": 1}', ""]),
    ({"response_format": format_of(Plan, strict=True)}, [PLAN], ['{"steps":[]}', "{}"]),
    ({"response_format": format_of(Plan)}, [PLAN], ['{"name":3,"steps":[]}']),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": LOOSE}}},
        ['{"a":"b"}'],
        ['{"a":1}'],
    ),
    ({"guided_json": Step.model_json_schema()}, ['{"why":"","then":-3}'], ["{}"]),
    ({"guided_json": json.dumps({"type": "integer"})}, ["12"], ["a", "1.5"]),
    ({"guided_regex": "[ab]+/c?"}, ["ab/", "b/c"], ["c", "ab"]),
    ({"guided_choice": ["yes", "no way", 'é"\n']}, ["yes", "no way", 'é"\n'], ["ye", "nope"]),
    ({"guided_grammar": 'start: "a" more\nmore: /b+/'}, ["abb"], ["a", "b"]),
    ({"json_schema": json.dumps({"type": "integer"})}, ["12"], ["a", "1.5"]),
    ({"regex": "[ab]+/c?"}, ["ab/", "b/c"], ["c", "ab"]),
    ({"ebnf": 'root ::= "a" more\nmore ::= ("b" | [0-9])+ # some'}, ["ab", "a7b"], ["a", "b"]),
    ({"structured_outputs": {"json": {"type": "boolean"}}}, ["true"], ["1"]),
    ({"structured_outputs": {"regex": "a|b"}}, ["b"], ["ab"]),
    ({"structured_outputs": {"choice": ["x"]}}, ["x"], ["y"]),
    ({"structured_outputs": {"grammar": 'start: "x"'}}, ["x"], ["y"]),
    ({"structured_outputs": {"json_object": True}}, ['{"a":1}'], ["1"]),
]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize(("wish", "good", "bad"), GRAMMARS, ids=str)
def test_wishes_become_grammars(
    served: Served, double: DecodeDouble, tokenizer: LLTokenizer,
    wish: dict[str, Any], good: list[str], bad: list[str], path: str,
) -> None:  # fmt: skip
    asked = {"messages": HELLO} if path.startswith("chat") else {"prompt": "a"}
    response = served.post(path, **asked | wish)
    assert response.status_code == 200, response.text
    grammar = double.take()[1].sampling.grammar
    assert [output for output in good if not accepts(tokenizer, grammar, output)] == []
    assert [output for output in bad if accepts(tokenizer, grammar, output)] == []


def test_a_client_that_finds_too_many_grammars_is_told_when_to_come_back(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trials, "verdict", mock.Mock(side_effect=Busy("too many grammars", 5.0)))
    response = served.post("completions", prompt="a", guided_regex="ab")
    assert (response.status_code, response.headers["retry-after"]) == (429, "5")
