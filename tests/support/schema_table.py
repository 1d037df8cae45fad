"""What becomes of each keyword of JSON schemas: kept, left out and told by its path, or refused.

    python -m tests.support.schema_table > tests/support/schemas.txt

Each row is tried by outputs drawn at random from what its grammar allows, for an answer in JSON and
for a call in JSON and with bare texts between tags: what is kept fits the schema as it was given.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jsonschema import Draft202012Validator
from llguidance import LLMatcher

from router.errors import ApiError
from router.text.bounded import Bounds
from router.text.forms.known import FORMS
from router.text.forms.parser import FormParser
from router.text.forms.rules import Called, rules_of
from router.text.forms.schema import Schema
from router.text.grammar import composed, schema_part, unkept
from tests.support.call_checks import calls_of, forced, taken, tokenizer

TABLE = Path(__file__).with_name("schemas.txt")
BOUNDS = Bounds(8, 10**4, 1)
BIG = (1 << 53) + 1
TEXT, NUMBER, INTEGER, LIST, OBJECT = (
    {"type": kind} for kind in ("string", "number", "integer", "array", "object")
)
FLAG: Schema = {"type": "boolean"}
AB: Schema = {**OBJECT, "properties": {"x": FLAG, "y": FLAG, "z": FLAG}}
FLAGS: Schema = {"additionalProperties": FLAG}
ID: Schema = {"const": BIG}
CLOSED: Schema = {"additionalProperties": False}
EMAIL = r"^(?!\.)(?!.*\.\.)[A-Za-z0-9_'+\-\.]*@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"


def kind(word: str, more: Schema | None = None) -> Schema:
    """One of a union that a property tells apart."""
    named: Schema = {"kind": {"const": word}, **(more or {})}
    return {**OBJECT, "properties": named, "required": ["kind"], **CLOSED}


ROWS: dict[str, Schema] = {
    "type": {"type": ["boolean", "null"]},
    "enum": {"enum": ["a", 1, None, 2.5]},
    "const": {"const": {"k": [1, "two", None]}},
    "const beyond 2^53": {"const": BIG},
    "enum beyond 2^53": {**INTEGER, "enum": [1234567890123456789, -BIG, 7]},
    "enum beyond 2^64": {"enum": [10**30 + 1, "x"]},
    "const beyond 2^53 in a list": {**LIST, "items": ID, "minItems": 1, "maxItems": 2},
    "const beyond 2^53 by $ref": {"$ref": "#/$defs/id"},
    "const beyond 2^53 in anyOf": {"anyOf": [{**OBJECT, "properties": {"i": ID, "x": FLAG}}, FLAG]},
    "const beyond 2^53 in allOf": {"allOf": [ID, INTEGER]},
    "bounds beyond 2^53": {**INTEGER, "minimum": BIG, "maximum": BIG + 10**6},
    "bounds of 64 bits": {**INTEGER, "minimum": -(1 << 63), "maximum": (1 << 63) - 1},
    "bounds of a number, 64 bits": {**NUMBER, "minimum": -(1 << 63), "maximum": (1 << 63) - 1},
    "bounds around one integer": {**INTEGER, "minimum": BIG, "maximum": BIG},
    "exclusive bounds, 2^53": {**INTEGER, "exclusiveMinimum": 1 << 53, "exclusiveMaximum": 1 << 54},
    "minimum beyond 64 bits": {**INTEGER, "minimum": 1 << 70},
    "maximum of 1e300": {**NUMBER, "maximum": 1e300},
    "minimum, maximum": {**INTEGER, "minimum": -3, "maximum": 12},
    "exclusiveMinimum, exclusiveMaximum": {**NUMBER, "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "multipleOf": {**INTEGER, "multipleOf": 7, "minimum": 0, "maximum": 100},
    "minLength, maxLength": {**TEXT, "minLength": 2.0, "maxLength": 3},
    "pattern": {**TEXT, "pattern": "^[a-z]{2}-\\d$"},
    "pattern, look-around": {**TEXT, "pattern": "^(?=.*x).+$"},
    "pattern, back-reference": {**TEXT, "pattern": r"^(a|b)\1$"},
    "pattern, boundary of words": {**TEXT, "pattern": r"\bx"},
    "pattern, a set in a set": {**TEXT, "pattern": "^[a&[b~-]$"},
    "pattern, of zod's email": {**TEXT, "format": "email", "pattern": EMAIL},
    "pattern, of zod's cuid2": {**TEXT, "format": "cuid2", "pattern": "^[0-9a-z]{2,4}$"},
    **{f"format {name}": {**TEXT, "format": name} for name in (
        "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
        "uri-reference", "regex", "phone")},
    "format int64": {**INTEGER, "format": "int64"},
    "properties, required": {**AB, "required": ["x"]},
    "required without a property": {**AB, "required": ["w"]},
    "required, yet forbidden": {**AB, "required": ["w"], **CLOSED},
    "additionalProperties": {**OBJECT, "properties": {"x": FLAG}, "additionalProperties": INTEGER},
    "patternProperties": {**OBJECT, "patternProperties": {"^x": FLAG}},
    "patternProperties, look-around": {**OBJECT, "patternProperties": {"^(?!x)": FLAG}},
    "propertyNames, of strings": {**OBJECT, "propertyNames": TEXT, **FLAGS},
    "propertyNames, enum": {**OBJECT, "propertyNames": {"enum": ["p", "q"]}, **FLAGS},
    "propertyNames, pattern": {**OBJECT, "propertyNames": {"pattern": "^[pq]$"}, **FLAGS},
    "propertyNames, other": {**OBJECT, "propertyNames": {"minLength": 2}, **FLAGS},
    "minProperties": {**AB, "minProperties": 2},
    "maxProperties": {**AB, "maxProperties": 2},
    "minProperties, maxProperties": {**AB, "minProperties": 2, "maxProperties": 2},
    "minProperties of any": {**OBJECT, "minProperties": 1, "maxProperties": 2, **FLAGS},
    "minProperties, named and others": {**AB, "minProperties": 2, **FLAGS},
    "dependentRequired": {**AB, "dependentRequired": {"x": ["y"]}},
    "dependentSchemas": {**AB, "dependentSchemas": {"x": {"required": ["y"]}}},
    "unevaluatedProperties": {"allOf": [AB], "unevaluatedProperties": False},
    "items, minItems, maxItems": {**LIST, "items": FLAG, "minItems": 1, "maxItems": 3},
    "prefixItems": {**LIST, "prefixItems": [FLAG, TEXT], "items": False, "minItems": 2},
    "contains": {**LIST, "items": FLAG, "contains": {"const": True}, "maxItems": 3},
    "uniqueItems": {**LIST, "items": FLAG, "uniqueItems": True, "maxItems": 3},
    "uniqueItems, false": {**LIST, "items": FLAG, "uniqueItems": False, "maxItems": 3},
    "unevaluatedItems": {**LIST, "prefixItems": [FLAG], "unevaluatedItems": False, "maxItems": 3},
    "anyOf": {"anyOf": [FLAG, {"enum": ["a"]}]},
    "allOf": {"allOf": [{**INTEGER, "minimum": 3}, {"maximum": 9}]},
    "oneOf, apart": {"oneOf": [FLAG, {"enum": ["a"]}]},
    "oneOf, apart by a property": {"oneOf": [kind("p"), kind("q", {"x": FLAG})]},
    "oneOf, apart by $ref": {"oneOf": [{"$ref": "#/$defs/p"}, {"$ref": "#/$defs/q"}]},
    "oneOf, overlapping": {"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]},
    "oneOf, open objects": {"oneOf": [{**OBJECT, "properties": {"x": FLAG}, "required": ["x"]},
                                      {**OBJECT, "properties": {"y": FLAG}}]},
    "not": {**INTEGER, "not": {"const": 3}},
    "if, then, else": {**AB, "if": {"required": ["x"]}, "then": {"required": ["y"]}},
    "$ref": {"$ref": "#/$defs/p"},
    "$dynamicRef": {"$dynamicRef": "#p"},
    "contentEncoding": {**TEXT, "contentEncoding": "base64"},
}  # fmt: skip
DEFINED: Schema = {
    "id": {"const": BIG},
    "p": kind("p") | {"$dynamicAnchor": "p"},
    "q": kind("q", {"x": FLAG}),
}


class Made(NamedTuple):
    """A grammar of a row, and what it does not keep to."""

    grammar: str
    told: list[str]


def whole(schema: Schema) -> Schema:
    """An object whose property `a` has the schema."""
    named: Schema = {**OBJECT, "properties": {"a": schema}, "required": ["a"], **CLOSED}
    return {**named, "$defs": DEFINED} if 'ref": "#' in json.dumps(schema).lower() else named


def answer(schema: Schema, *, strict: bool) -> Made:
    """As `response_format` asks for it."""
    told = list[str]()
    part = schema_part(whole(schema), "schema", BOUNDS, lenient=not strict, told=told)
    return Made(composed([("form", part)], ["body: @form"]), told)


def call(form: str, schema: Schema, *, strict: bool) -> Made:
    """As a tool of that schema is demanded."""
    called = Called("f", whole(schema), strict)
    made = rules_of(FORMS[form], [called], 1, tokenizer(())[1], BOUNDS)
    return Made(composed(made.parts, [*made.rules, "body: calls"]), made.unkept)


COLUMNS = (
    "keyword",
    "JSON",
    "JSON, strict",
    "call in JSON",
    "call in tags",
    "call in tags, strict",
)
FORM_OF = {
    "call in JSON": "hermes",
    "call in tags": "qwen3_coder",
    "call in tags, strict": "qwen3_coder",
}


def cell(column: str, schema: Schema, num: int) -> str:
    """What becomes of a row's schema there; ✗: an output does not fit it and nothing tells that."""
    strict, form = column.endswith("strict"), FORM_OF.get(column, "")
    try:
        made = call(form, schema, strict=strict) if form else answer(schema, strict=strict)
    except ApiError as error:
        return "refused by path" if ".a" in str(error) else f"✗ refused: {error}"
    made_by = tokenizer(())[0]
    failed, words = LLMatcher.validate_grammar_with_warnings(made.grammar, made_by)
    known = {one.rpartition(".")[2] for one in made.told}
    if failed or {*unkept(words)} - known - {"then", "else"}:
        return f"✗ llguidance: {words[0][:60]}"
    validator = Draft202012Validator(
        whole(schema), format_checker=Draft202012Validator.FORMAT_CHECKER
    )
    for seed in range(num):
        said = forced(made_by, made.grammar, seed, closes_at=60)
        if form:
            parameters = {"f": whole(schema)}
            ((_, value),) = calls_of(taken(FormParser(FORMS[form], parameters), said))
        else:
            value = json.loads(said)
        if not made.told and not validator.is_valid(value):
            return f"✗ {json.dumps(value)[:80]}"
    return (
        "told: " + ", ".join(one.partition(".properties.a")[2][1:] for one in made.told)
        if made.told
        else "kept"
    )


def rows(num: int) -> Iterator[tuple[str, ...]]:
    """The table, each cell tried by so many outputs."""
    for name, schema in ROWS.items():
        Draft202012Validator.check_schema(whole(schema))
        yield name, *(cell(column, schema, num) for column in COLUMNS[1:])


def main() -> None:
    """Print the table."""
    lines = [COLUMNS, *rows(40)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    print((__doc__ or "").split("\n\n")[2], end="\n\n")
    for line in lines:
        print(
            " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        )


if __name__ == "__main__":
    main()
