"""What llguidance reads otherwise than JSON Schema or GBNF: said otherwise, told or refused."""

import json
import random
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from router.errors import ApiError
from router.text.bounded import Bounds
from router.text.ebnf import MAX_CHARS, Bad, lark_of
from router.text.grammar import composed, ebnf_part, schema_part
from router.text.keywords import readable
from tests.support import pairwise, schema_table
from tests.support.call_checks import forced
from tests.support.prompts import accepts, ll_tokenizer

BOUNDS = Bounds(8, 10**4)
BIG = (1 << 53) + 1


def grammar_of(schema: Any) -> str:
    part = schema_part(schema, "guided_json", BOUNDS)
    return composed([("form", part)], ["body: @form"])


def test_the_table_of_keywords_is_up_to_date_and_nothing_in_it_fails() -> None:
    written = schema_table.TABLE.read_text(encoding="utf-8")
    assert "✗" not in written
    lines = [[cell.strip() for cell in line.split(" | ")] for line in written.splitlines()]
    found = [list(row) for row in schema_table.rows(20 if pairwise.whole else 1)]
    assert [line for line in lines if len(line) > 1] == [list(schema_table.COLUMNS), *found]


EXACT: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"const": BIG}, [BIG], [BIG - 1]),
    ({"const": -(1 << 63)}, [-(1 << 63)], [-(1 << 63) + 1]),
    ({"enum": [BIG, 3, "x", {"a": [BIG]}]}, [BIG, 3, "x", {"a": [BIG]}], [BIG - 1, "y"]),
    ({"type": "string", "enum": [BIG, "x"]}, ["x"], [BIG]),
    ({"enum": [BIG, BIG + 2], "exclusiveMinimum": BIG}, [BIG + 2], [BIG]),
    ({"type": "integer", "minimum": BIG, "maximum": BIG}, [BIG], [BIG - 1, BIG + 1]),
    ({"type": "integer", "exclusiveMinimum": BIG - 1, "maximum": BIG + 9}, [BIG + 1], [BIG - 1]),
    ({"type": "integer", "minimum": 1 << 62}, [1 << 62], [(1 << 62) - 1, 1 << 63]),
    ({"type": "integer", "maximum": -BIG}, [-BIG - 1], [-BIG + 1]),
    ({"items": {"const": BIG}, "type": "array", "minItems": 1}, [[BIG], [BIG, BIG]], [[], [1]]),
    ({"type": ["array", "null"], "items": {"const": BIG}, "maxItems": 1}, [None, [], [BIG]], [[3]]),
    ({"properties": {"p": {"type": "null"}, "q": {"const": BIG}, "r": {"enum": ['"', BIG]}},
      "type": "object", "required": ["q"]},
     [{"q": BIG}, {"p": None, "q": BIG, "r": '"'}, {"q": BIG, "r": BIG}], [{}, {"q": 1}]),
    ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {
        "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}, "id": {"const": BIG}}}}},
     [{"id": BIG}, {"next": {"next": None, "id": BIG}}], [{"next": {"id": BIG - 1}}]),
    ({"properties": {"enum": {"enum": [BIG]}, "title": {"type": "null"}}, "type": "object"},
     [{"enum": BIG, "title": None}, {}], [{"enum": BIG - 1}]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), EXACT, ids=str)
def test_integers_beyond_doubles_are_those_of_the_schema(
    schema: dict[str, Any], good: list[Any], bad: list[Any]
) -> None:
    for name, made in (("%s", schema), ('{"x":%s}', inside(schema))):
        grammar = grammar_of(made)
        for value in (*good, *bad):
            said = name % json.dumps(value, separators=(",", ":"))
            assert accepts(ll_tokenizer(), grammar, said) == (value in good), said


def inside(schema: dict[str, Any]) -> dict[str, Any]:
    places = {key: schema[key] for key in ("$defs",) if key in schema}
    own = {key: value for key, value in schema.items() if key not in places}
    return {"type": "object", "properties": {"x": own}, "required": ["x"], **places}


ENDS = st.one_of(st.integers(-(1 << 64), 1 << 64), st.sampled_from(
    [sign * (1 << bits) + by for bits in (53, 60, 63) for by in (-1, 0, 1) for sign in (-1, 1)]
))  # fmt: skip
SIDES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


@settings(max_examples=600 if pairwise.whole else 20, deadline=None)
@given(
    st.dictionaries(st.sampled_from(SIDES), ENDS, min_size=1),
    st.sampled_from(["integer", "number"]),
)
@example({"minimum": (1 << 56) - 7, "maximum": 1 << 56}, "number")  # 2^56 is written ...940
@example({"minimum": -(1 << 56), "exclusiveMaximum": 7 - (1 << 56)}, "number")
def test_whatever_bounds_allow_is_within_them(sides: dict[str, int], kind: str) -> None:
    schema = {"type": kind, **sides}
    try:
        part = schema_part(schema, "guided_json", BOUNDS)
    except ApiError:
        return
    if BOUNDS.tried(part.get("json_schema", {})):
        return  # nothing fits: a 400 from the trial
    said = forced(ll_tokenizer(), composed([("form", part)], ["body: @form"]), 7, closes_at=9)
    Draft202012Validator(schema).validate(json.loads(said, parse_float=Decimal))


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"items": {"const": BIG, "not": {}}}, "items.not: "),
        ({"prefixItems": [{"const": BIG}], "type": "array"}, ""),
        (
            {"properties": {"a": {"allOf": [{"const": BIG}, {}]}}, "type": "object"},
            "properties.a: ",
        ),
        ({"type": "integer", "minimum": 1 << 64}, "minimum: "),
        ({"oneOf": [{"type": "integer"}, {}]}, "oneOf: "),
    ],
)
def test_what_cannot_be_said_is_refused_by_its_path(schema: dict[str, Any], path: str) -> None:
    with pytest.raises(ApiError) as caught:
        schema_part(schema, "guided_json", BOUNDS)
    assert str(caught.value).startswith(f"guided_json.{path}" if path else "guided_json")
    assert (caught.value.status, caught.value.param) == (400, "guided_json")


def test_sets_of_characters_mean_what_they_mean_in_javascript() -> None:
    assert readable(r"^[a-z&&[^b]]\[[^[~\]--]$") == r"^[a-z\&\&\[^b]]\[[^\[\~\]-\-]$"


GBNF: list[tuple[str, list[str], list[str]]] = [
    ('root ::= word "ing"\nword ::= [a-z]+', ["king", "inging"], ["ing", "kin"]),
    ('root ::= ("a" | "ab") "b"', ["ab", "abb"], ["a", "b"]),
    ('root ::= [^"\\\\]* "\\"" "é😀" [é-ü]{2,3}', ['x\n"é😀éü'], ['"é😀é']),
    ('root ::= .{0,5} "\\x41\\u00e9" # any', ["\nAé"], ["A"]),
    ('root ::= "x" | ', ["x", ""], ["y"]),
    ('root ::= "x"\n  "y" |\n "z"\nb.1 ::= root', ["xy", "z"], ["x"]),
    ('root ::= root "a" | "b"', ["b", "baaa"], ["a"]),
    ("root ::= [-a] [a-] [\\]\\-x^]", ["--]", "aa-", "-a^"], ["b-]"]),
    ('root ::= "ab"{2} "c"?', ["abab", "ababc"], ["ab", "ababab"]),
    ('root ::= (("a"?){2,3} "b"){1}', ["b", "aaab"], ["aaaab", "bb"]),
    ('sum ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" sum ")"\nroot ::= sum "="',
     ["1+(2-3)=", "12="], ["1+=", "12"]),
    ('root ::= "/" [/] "\\\\"', ["//\\"], ["/"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "good", "bad"), GBNF, ids=str)
def test_gbnf_is_a_plain_grammar_free_of_context(
    text: str, good: list[str], bad: list[str]
) -> None:
    grammar = composed([("form", ebnf_part(text, "ebnf"))], ["body: @form"])
    for said in (*good, *bad):
        assert accepts(ll_tokenizer(), grammar, said) == (said in good), said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('a ::= "b"', "`root`"), ("root ::= x", "no rule"), ('root ::= "a" root', "no text ends"),
        ("root ::= [a", "read"), ('root ::= ("a"', "not closed"), ("root ::= [b-a]", "backward"),
        ('root ::= "a"{3,2}', "in order"), ("root ::= [\\ud800]", "no character"),
        ('root ::= "a"\nroot ::= "b"', "a second rule"), ('"a"', "begins with its name"),
        ('root ::= (("a"{4000}){4000})', "more than"), ("x" * (MAX_CHARS + 1), "at most"),
        ("root ::= " + "(" * 200 + ")" * 200, "too deeply"), ('root ::= "\\q"', "no escape"),
    ],
)  # fmt: skip
def test_a_grammar_that_is_none_is_told_where(text: str, words: str) -> None:
    with pytest.raises(Bad, match=words):
        lark_of(text)


def test_any_text_is_a_grammar_or_refused() -> None:
    rng = random.Random(5)
    parts = [
        "root ::= ",
        '"a"',
        "[a-c]",
        "|",
        "(",
        ")",
        "*",
        "{2,3}",
        "\n",
        "b ::= ",
        "b",
        ".",
        '"',
        "\\",
    ]
    for _ in range(300):
        try:
            lark_of("".join(rng.choices(parts, k=rng.randrange(12))))
        except Bad:
            continue
