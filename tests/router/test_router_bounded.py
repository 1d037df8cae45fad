"""Schemas closed and bounded: what llguidance then accepts, and that it satisfies the original."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from router.errors import ApiError
from router.text import bounded
from router.text.bounded import Bounds
from router.text.forms.schema import GROUPS, NAMED, SINGLE
from router.text.grammar import composed, schema_part
from tests.support.pairwise import whole
from tests.support.prompts import accepts as grammar_accepts
from tests.support.prompts import ll_tokenizer

BOUNDS = Bounds(max_string_chars=12, max_integer=10**6)
UNBOUNDED = Bounds(0, 0)
BOOLEAN: dict[str, Any] = {"type": "boolean"}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return ll_tokenizer()


def accepts(tokenizer: LLTokenizer, schema: Any, output: str, bounds: Bounds = BOUNDS) -> bool:
    part = schema_part(schema, "guided_json", bounds)
    return grammar_accepts(tokenizer, composed([("form", part)], ["body: @form"]), output)


def thing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


A, B = thing(a=BOOLEAN) | {"required": ["a"]}, thing(b={"type": "null"})
NODE = {"$ref": "#/$defs/node", "$defs": {"node": thing(v=BOOLEAN, next={
    "anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})}}  # fmt: skip
# A schema, what may be said, what may not though the schema itself allows it.
CLOSED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (A, ['{"a":true}'], ['{"a":true,"b":1}']),
    (thing(), ["{}"], ['{"a":1}']),
    ({"properties": {"p": A, "q": B}}, ['{"p":{"a":true},"q":{}}'], ['{"q":{"c":1}}']),
    ({"type": "array", "items": A}, ['[{"a":true}]'], ['[{"a":true,"c":1}]']),
    (NODE, ['{"v":true,"next":{"v":true,"next":null}}'], ['{"next":{"v":true,"w":1}}']),
    ({"anyOf": [A, B]}, ['{"a":true}', '{"b":null}'], ['{"a":true,"c":1}']),
    ({"allOf": [A]}, ['{"a":true}'], ['{"a":true,"c":1}']),
    ({"allOf": [A, B]}, ['{"a":true,"b":null}', '{"a":true}'], ['{"a":true,"c":1}']),
    ({"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}},
     ['{"a":true,"b":null}'], ['{"a":true,"c":1}']),
    (thing(k={"const": 1}) | {"anyOf": [A, B | {"required": ["b"]}]},
     ['{"k":1,"a":true}', '{"k":1,"b":null}'], ['{"k":1,"a":true,"c":1}']),
    (thing(a=BOOLEAN) | {"required": ["a", "z"]}, ['{"a":true,"z":1}'], ['{"a":true,"z":1,"y":1}']),
    ({"type": "object", "patternProperties": {"^x": BOOLEAN}},
     ['{"xa":true}', "{}"], ['{"ya":true}']),
    # What a schema allows by name stays allowed.
    ({"type": "object"}, ['{"a":{"b":[1,"c"]}}'], []),
    ({}, ['{"a":1}'], []),
    (A | {"additionalProperties": True}, ['{"a":true,"b":1}'], []),
    (A | {"additionalProperties": {"type": "integer"}}, ['{"a":true,"b":1}'], []),
    ({"allOf": [A, B | {"additionalProperties": True}]}, ['{"a":true,"c":1}'], []),
    (thing(data={"type": "object"}), ['{"data":{"x":1}}'], []),
    ({"enum": [{"a": 1, "b": "a text of some length"}]},
     ['{"a":1,"b":"a text of some length"}'], []),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), CLOSED, ids=str)
def test_objects_have_only_what_their_schema_names(
    tokenizer: LLTokenizer, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    original = copy.deepcopy(schema)
    validator = Draft202012Validator(schema)
    for output in (*good, *bad):
        validator.validate(json.loads(output))
    assert [output for output in good if not accepts(tokenizer, schema, output)] == []
    assert [output for output in bad if accepts(tokenizer, schema, output)] == []
    assert schema == original


TEXT = {"type": "string"}
LIMITED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (TEXT, ['"%s"' % ("é" * 12)], ['"%s"' % ("é" * 13)]),
    (TEXT | {"maxLength": 20}, ['"%s"' % ("a" * 20)], ['"%s"' % ("a" * 21)]),
    (TEXT | {"minLength": 15}, ['"%s"' % ("a" * 15)], ['"%s"' % ("a" * 16)]),
    (TEXT | {"pattern": "^a+$"}, ['"%s"' % ("a" * 13)], ['"b"']),
    (TEXT | {"format": "date-time"}, ['"2020-01-01T00:00:00Z"'], ['"2020"']),
    (TEXT | {"format": "uri"}, ['"http://a.b/some/page"'], ['"http://a.b/%s"' % ("a" * 256)]),
    ({"type": ["string", "null"]}, ["null", '"a"'], ['"%s"' % ("a" * 13)]),
    ({"enum": ["a text of some length"]}, ['"a text of some length"'], []),
    ({"type": "integer"}, ["1000000", "-1000000", "0"], ["1000001", "-1000001", "1" * 30]),
    ({"type": "integer", "minimum": 3}, ["3", "1000000"], ["2", "1000001"]),
    ({"type": "integer", "minimum": 2000000}, ["2000000", "123456789"], ["1999999"]),
    ({"type": "integer", "exclusiveMaximum": 0}, ["-1", "-1000000"], ["0", "-1000001"]),
    ({"type": "integer", "maximum": 2000000}, ["2000000"], ["2000001", "-1000001"]),
    ({"type": ["integer", "null"]}, ["null", "5"], ["1" * 9]),
    ({"type": "integer", "multipleOf": 7}, ["21"], ["22", "7000000"]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), LIMITED, ids=str)
def test_strings_and_integers_have_a_limit(
    tokenizer: LLTokenizer, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    inside = {"%s": schema, '{"x":%s}': thing(x=schema), "[%s]": {"items": schema}}
    for form, found in inside.items():
        assert [each for each in good if not accepts(tokenizer, found, form % each)] == []
        assert [each for each in bad if accepts(tokenizer, found, form % each)] == []


def test_zero_means_no_limit(tokenizer: LLTokenizer) -> None:
    schema = thing(s=TEXT, i={"type": "integer"})
    output = json.dumps({"s": "a" * 300, "i": 10**60}, separators=(",", ":"))
    assert accepts(tokenizer, schema, output, UNBOUNDED)
    assert not accepts(tokenizer, schema, output)
    assert not accepts(tokenizer, schema, '{"s":"a","i":1,"x":1}', UNBOUNDED)


def test_the_widest_limits_of_the_configuration_can_be_followed(tokenizer: LLTokenizer) -> None:
    widest = Bounds(32768, 9 * 10**18)
    assert accepts(tokenizer, TEXT, '"%s"' % ("ab " * 10922), widest)
    assert accepts(tokenizer, {"type": "integer"}, "-" + "8" * 19, widest)
    assert not accepts(tokenizer, {"type": "integer"}, "9" * 19, widest)


def test_a_schema_too_deep_for_us_is_the_request_s_fault() -> None:
    schema: dict[str, Any] = {}
    for _ in range(3000):
        schema = {"items": schema}
    with pytest.raises(ApiError) as caught:
        schema_part(schema, "guided_json", BOUNDS)
    assert (caught.value.status, caught.value.param) == (400, "guided_json")


def test_members_of_all_of_get_no_limit_that_another_contradicts(tokenizer: LLTokenizer) -> None:
    long = {"allOf": [{"type": "string"}, {"type": "string", "minLength": 20}]}
    assert accepts(tokenizer, long, json.dumps("x" * 25))
    assert not accepts(tokenizer, long, json.dumps("x"))


def test_a_reference_that_is_no_text_is_left_to_llguidance(tokenizer: LLTokenizer) -> None:
    part = schema_part({"$ref": [1], "properties": {"a": BOOLEAN}}, "guided_json", BOUNDS)
    matcher = LLMatcher(tokenizer, composed([("form", part)], ["body: @form"]), log_level=0)
    assert matcher.is_error()


WORDS = (
    *NAMED, *SINGLE, *GROUPS, "if", "then", "else", "$ref", "type", "enum", "const", "required",
    "maximum", "exclusiveMinimum", "minLength", "maxLength", "pattern", "format", "multipleOf", "a",
    "minProperties", "maxProperties", "uniqueItems",
)  # fmt: skip
LEAVES = st.sampled_from(
    [None, True, 0, -1, 10**400, 0.5, float("nan"), float("inf"), "", "a", "\ud800", "string",
     "integer", "object", "#/$defs/a", "#/definitions/a", "#", ["a"], ["string", 3]],
)  # fmt: skip
ANY_JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner),
    max_leaves=12,
)


@settings(max_examples=600 if whole else 150)
@given(ANY_JSON, st.booleans())
def test_any_json_is_a_schema_or_the_request_s_fault(schema: Any, as_text: bool) -> None:
    given = json.dumps(schema) if as_text else schema
    refusal = None
    try:
        part = schema_part(given, "guided_json", BOUNDS)
        assert isinstance(LLMatcher.validate_grammar(composed([("form", part)], [])), str)
    except ApiError as error:
        refusal = error.status, error.param
    assert refusal in (None, (400, "guided_json"))


def hub(num: int) -> dict[str, Any]:
    """Each of `num` definitions may be any of them."""
    named = {f"d{i}": thing(**{f"p{i}": {}}) | {"$ref": "#/$defs/hub"} for i in range(num)}
    refs = [{"$ref": f"#/$defs/d{i}"} for i in range(num)]
    return {"$ref": "#/$defs/hub", "$defs": {"hub": {"anyOf": refs}, **named}}


@pytest.mark.parametrize("named", [True, False])
def test_references_that_multiply_are_refused_before_their_work_is_done(
    monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    num_counted = 0
    count = bounded._Copy._count

    def counted(self: Any, num: int) -> None:
        nonlocal num_counted
        num_counted += num
        count(self, num)

    monkeypatch.setattr(bounded._Copy, "_count", counted)
    schema = hub(1500)
    if not named:
        for definition in schema["$defs"].values():
            definition.pop("properties", None)
            definition["oneOf"] = [{}]
    with pytest.raises(ApiError, match="references") as caught:
        schema_part(schema, "guided_json", BOUNDS)
    assert (caught.value.status, caught.value.param) == (400, "guided_json")
    assert num_counted < 2 * bounded.MAX_WORK
    schema_part(hub(200), "guided_json", BOUNDS)
