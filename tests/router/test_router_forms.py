"""Forms of calls: recognised by a template's own calls, read in any pieces, forced by a grammar."""

import json
import logging
import random
import time
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest

from router.config import CallFormat, ReasoningFormat, RouterConfig
from router.errors import ApiError
from router.openai.tools import can_be_free
from router.text.bounded import Bounds
from router.text.forms.form import Form
from router.text.forms.known import BAR, FORMS, HARMONY, SIGNS
from router.text.forms.parser import FormParser
from router.text.forms.rules import Called, rules_of
from router.text.forms.schema import kinds_of
from router.text.forms.values import as_json, object_of, typed
from router.text.grammar import Spelling, composed
from router.text.parsers import Parsed
from router.text.reasoning import MARKS, Reasoning
from router.text.speech import speech_of
from router.text.tokenizer import Text
from tests.fault.router_doubles import HELLO, DecodeDouble, Serve, make_model
from tests.support.call_checks import (
    CHECKS,
    accepts,
    calls_of,
    forced,
    found,
    taken,
    tokenizer,
    wander,
)
from tests.support.call_forms import CASES, FUNCTIONS, PARAMETERS, Case, rendered

LOOP = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
KNOWN: dict[str, Any] = {"look": CITY, "add": {}}
XML = "<tool_call>\n<function=look>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"


def of(form: str) -> FormParser:
    return FormParser(FORMS[form], KNOWN)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{case.name}" for i, case in enumerate(CASES)])
def test_what_a_template_writes_is_recognised_read_and_forced(case: Case, check: str) -> None:
    CHECKS[check](case)


@pytest.mark.parametrize("num", [2, pytest.param(60, marks=pytest.mark.whole)])
def test_whatever_a_free_grammar_takes_has_calls_that_are_kept_to_their_schema(num: int) -> None:
    free = [case for case in CASES if can_be_free(found(case).form, begun=False)]
    assert sum(wander(case, num) for case in free) > 30 * num


def test_settings_name_every_form() -> None:
    assert set(get_args(CallFormat)) == {*FORMS, "none"}
    assert set(get_args(ReasoningFormat)) == {*MARKS, "auto", "none"}
    assert {name for _, name in SIGNS} <= set(FORMS)
    assert {case.name for case in CASES} == {*FORMS, "own"} - {"harmony"}


# Form, answer, content and arguments of calls, where a model writes what its template would not.
ASIDE: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("qwen3_coder", XML.format("a </parameter> b\n</parameter>\nc"), "",
     [("look", '{"city": "a </parameter> b\\n</parameter>\\nc"}')]),
    ("qwen3_coder", XML.format("null"), "", [("look", '{"city": "null"}')]),
    ("qwen3_coder", XML.replace("{}\n", ""), "", [("look", '{"city": ""}')]),
    ("qwen3_coder", "Hi <function=look><parameter=days>9007199254740993</parameter></function> so",
     "Hi so", [("look", '{"days": 9007199254740993}')]),
    ("qwen3_coder", "<tool_call>\n<function=add>\n</function>\n</tool_call>", "", [("add", "{}")]),
    ("qwen3_coder", '<tool_call>\n{"name": "add", "arguments": {"a": 1.50}}\n</tool_call>\n\nso',
     "so", [("add", '{"a": 1.50}')]),
    ("qwen3_coder", XML.format("x") + "\n<tool_call>\n<function=look>\n<parameter=city>\nOs", "",
     [("look", '{"city": "x"}'), ("look", '{"city": "Os"}')]),
    ("qwen3_coder", "a <tool_call> and <function= too", "a <tool_call> and <function= too", []),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}}\n<tool_call>'
     '{"name": "look", "arguments": {"city": "x"}, "id": "7"}}\n</tool_call>', "",
     [("add", "{}"), ("look", '{"city": "x"}')]),
    ("glm45", "<tool_call>add</tool_call>", "", [("add", "{}")]),
    ("seed_oss", "<seed:tool_call><function=look><parameter=city>\nx\n</parameter></function>"
     "</seed:tool_call>", "", [("look", '{"city": "\\nx\\n"}')]),
    ("minicpm5", '<function name="look"><param name="city"><![CDATA[a </param> b]]></param>'
     "</function>", "", [("look", '{"city": "a </param> b"}')]),
    ("command_r", 'Action: ```json\n[{"tool_name": "directly-answer", "parameters": {}}]```\nHi',
     "Hi", []),
    ("functionary32", "all\nHi there", "Hi there", []),
    ("functionary32", 'all\nHi>>>add\n{}>>>look\n{"city": "x"}', "Hi",
     [("add", "{}"), ("look", '{"city": "x"}')]),
    ("functionary32", "a >>> b", "a >>> b", []),
    ("pythonic", "[add(), look(city='it\\'s', days=3)]", "",
     [("add", "{}"), ("look", '{"city": "it\'s", "days": 3}')]),
    ("pythonic", "[1, 2] is a list", "[1, 2] is a list", []),
    ("llama3", '{"type": "function", "function": {"name": "look", "parameters": {"city": "x"}}}',
     "", [("look", '{"city": "x"}')]),
    ("nemotron", '<toolcall> {"name": "add", "arguments": {}} </toolcall>', "", [("add", "{}")]),
    ("qwen3_coder", XML.replace("city", "days").format("NaN"), "", [("look", '{"days": "NaN"}')]),
    ("qwen3_coder", XML.replace("city", "a").format("[Infinity]"), "",
     [("look", '{"a": "[Infinity]"}')]),
    ("deepseek_r1", f"<{BAR}tool▁call▁begin{BAR}>function<{BAR}tool▁sep{BAR}>add\n"
     f"```json\n{{}}\n```<{BAR}tool▁call▁end{BAR}>", "", [("add", "{}")]),
    ("kimi_k2", "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
     "", [("add", "{}")]),
    ("olmo3", '<function_calls>[add(), look(city="a"); add()]</function_calls>', "",
     [("add", "{}"), ("look", '{"city": "a"}'), ("add", "{}")]),
    ("hermes", f'<tool_call>{{"id": "{2000 * "7"}", "name": "add", "arguments": {{}}}}</tool_call>',
     "", [("add", "{}")]),
    ("phi", "functools is a module", "functools is a module", []),
]  # fmt: skip


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize(("form", "text", "content", "calls"), ASIDE, ids=str)
def test_answers_that_no_template_would_write(
    form: str, text: str, content: str, calls: list[tuple[str, str]], seed: int | None
) -> None:
    parsed = taken(of(form), text, seed)
    assert (parsed.content, [(one.name, one.arguments) for one in parsed.calls]) == (content, calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "' + "a" * 40_000),
        ("hermes", '<tool_call>{"' + "a" * 40_000),
        ("qwen3_coder", "<tool_call>{" + '"type": "a", ' * 3_000),
        ("qwen3_coder", "<tool_call>" * 4_000),
        ("functionary32", ">>>" * 12_000),
        ("phi", "a" + "\n" * 40_000),
    ],
    ids=lambda value: value[:30],
)
def test_a_call_that_never_tells_its_name_costs_no_more_with_each_piece(
    form: str, text: str
) -> None:
    """What is held back is not looked at again, whole, at each piece."""
    parser, start = of(form), time.process_time()
    parsed = Parsed()
    for i in range(0, len(text), 4):
        parsed += parser.feed(text[i : i + 4])
    parsed += parser.finish()
    assert (parsed.content, parsed.calls) == (text, [])
    assert time.process_time() - start < 3


@pytest.mark.parametrize("form", [form for form in FORMS.values() if form is not HARMONY], ids=str)
def test_no_cut_of_a_disturbed_call_changes_anything(form: Form) -> None:
    """The sum of what is returned does not depend on the pieces, nor on what is wrong."""
    rng = random.Random(form.name)
    signs = [*form.texts(), "look", "add", "city", '{"name": "add", ', *' \n{}[]"(),=:5<>']
    texts = [rendered(case) for case in CASES if case.name == form.name]
    texts += ["".join(rng.choices(signs, k=rng.randint(1, 12))) for _ in range(25)]
    for text in texts:
        at = rng.randrange(len(text) + 1)
        text = f"{text[:at]}{rng.choice(signs)}{text[at + rng.randrange(9) :]}"
        whole = taken(of(form.name), text)
        for seed in range(2):
            parsed = taken(of(form.name), text, seed)
            assert (parsed.content, parsed.calls and calls(parsed)) == (
                whole.content, whole.calls and calls(whole)
            ), text  # fmt: skip


def calls(parsed: Any) -> list[tuple[int, str, str]]:
    return [(one.index, one.name, one.arguments) for one in parsed.calls]


def test_a_text_between_marks_is_passed_on_as_it_comes_and_other_values_when_they_are_whole() -> (
    None
):
    parser = of("qwen3_coder")
    head = "<tool_call>\n<function=look>\n<parameter=city>\n"
    assert parser.feed(head + "Os").calls[-1].arguments == '{"city": "Os'
    assert parser.feed("lo\n").calls[-1].arguments == "lo"
    assert parser.feed("\n</para").calls[-1].arguments == "\\n"
    assert parser.feed("meter>\n<parameter=days>\n12").calls[-1].arguments == '", "days": '
    assert not parser.feed("3")
    assert parser.feed("\n</parameter>\n</function>").calls[-1].arguments == "123}"


def test_a_call_in_a_thought_is_no_call() -> None:
    call = XML.format("x")
    for marks in MARKS.values():
        parser = Reasoning(of("qwen3_coder"), inside=True, marks=marks)
        parsed = taken(parser, f"{call}{marks.closes}\n{call}", 3)
        assert (parsed.reasoning, calls_of(parsed)) == (call, [("look", {"city": "x"})])


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_call_ends_the_thought_in_forms_whose_models_forget_to(seed: int | None) -> None:
    form, call = FORMS["qwen3_coder"], XML.format("x")
    for text, thought in (
        (f"so <tool_call> it\n{call}", "so <tool_call> it"), (f"a</think>\n{call}", "a"),
        (call, ""),
    ):  # fmt: skip
        parser = Reasoning(of(form.name), inside=True, call=form.ends_thought)
        parsed = taken(parser, text, seed)
        assert (parsed.reasoning, calls_of(parsed)) == (thought, [("look", {"city": "x"})])


@pytest.mark.parametrize("whose", ["cohere", "cohere2", "granite"])
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_an_answer_between_marks_is_taken_out_of_them(whose: str, seed: int | None) -> None:
    opens, closes, begins, ends = MARKS[whose]
    for said in ("so", f"so {ends} is it", "<b>", begins):
        for text, thought in (
            (f"{opens}why{closes}{begins}{said}{ends}\n", "why"), (f"{begins}{said}{ends}", "")
        ):  # fmt: skip
            parsed = taken(Reasoning(of("cohere"), inside=False, marks=MARKS[whose]), text, seed)
            assert (parsed.content, parsed.reasoning) == (said, thought)
    parsed = taken(Reasoning(of("cohere"), inside=False, marks=MARKS[whose]), f"no {ends}", seed)
    assert parsed.content == f"no {ends}"


DEFINED = {
    "$defs": {
        "A": {"$ref": "#/$defs/B"},
        "B": {"type": ["integer", "null"]},
        "C": {"$ref": "#/$defs/C"},
    }
}


@pytest.mark.parametrize(
    ("schema", "text", "made"),
    [
        ({"type": "string"}, "null", '"null"'),
        ({"type": "string"}, '{"a": 1}', '"{\\"a\\": 1}"'),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12", "12"),
        ({"anyOf": [{"type": "string"}, {"type": "boolean"}]}, "12", '"12"'),
        ({"type": "number"}, "1.50", "1.50"),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "boolean", "nullable": True}, "null", "null"),
        ({"type": "object"}, "{'a': [True, None, 'x\\'\\u00e9']}", '{"a": [true, null, "x\'é"]}'),
        ({"items": {}}, "(1, 'b',)", '[1, "b"]'),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"const": 1}, "1", "1"),
        ({"$ref": "#/$defs/A"}, "7", "7"),
        ({"$ref": "#/$defs/A"}, "None", "null"),
        ({"$ref": "#/$defs/C"}, "x", '"x"'),
        ({}, "7", "7"),
        ({}, "a b", '"a b"'),
        ({}, '"a"', '"\\"a\\""'),
        ({"type": "integer"}, "seven", '"seven"'),
        ({"type": "array"}, "[1, ", '"[1, "'),
    ],
    ids=str,
)
def test_bare_text_is_typed_by_the_schema(schema: Any, text: str, made: str) -> None:
    assert typed(text, kinds_of(schema, DEFINED)) == made


def test_values_of_other_languages_become_json() -> None:
    assert as_json("1_000") is as_json("f(x)") is as_json("[1") is None
    assert as_json("'\\ud83d\\ude00 \\ud83d'") == '"😀 \ufffd"'
    assert as_json('{a:<|"|>x, "y"<|"|>,b:None}', '<|"|>') == '{"a": "x, \\"y\\"", "b": null}'
    assert object_of("a=1, b='x, y'", "=") == '{"a": 1, "b": "x, y"}'
    assert object_of("", "=") == "{}"
    assert object_of("a=1, 2", "=") is object_of("7", "=") is None


STRICT = {"properties": {
    "code": {"type": "string", "pattern": "^[a-z]+/[0-9]{2}$"},
    "part": {"type": "string", "pattern": "b.d", "maxLength": 5},
    "size": {"type": "string", "minLength": 2, "maxLength": 3},
    "unit": {"anyOf": [{"enum": ["mm", 7]}, {"type": "null"}]},
    "no": {"type": ["boolean", "null"]},
    "any": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
}, "required": ["code"]}  # fmt: skip
VALUES: list[tuple[str, list[str], list[str]]] = [
    ("code", ["ab/12"], ["ab", "ab/123", ""]),
    ("part", ["bad", "abXde"], ["bd", "abcdef", "xxbad.x"]),
    ("size", ["ab", "a\nb"], ["a", "abcd"]),
    ("unit", ["mm", "7", "None"], ["cm", "null"]),
    ("no", ["True", "None"], ["true", "0"]),
    ("any", ["-12", "None"], ["1.5", "x"]),
]


def grammar_of(form: str, schema: Any, spelling: Spelling, *, strict: bool = True) -> Any:
    function = Called("look", {"type": "object", **schema}, strict)
    made = rules_of(FORMS[form], [function], 1, spelling, Bounds(64, 10**6, 1))
    return composed(made.parts, [*made.rules, "body: calls"]), made.unkept


@pytest.mark.parametrize(("key", "good", "bad"), VALUES, ids=str)
def test_a_grammar_holds_bare_text_to_its_schema(key: str, good: list[str], bad: list[str]) -> None:
    tokens, spelling = tokenizer(("<tool_call>", "</tool_call>", "</think>"))
    grammar, told = grammar_of("qwen3_coder", STRICT, spelling)
    assert not told
    for value in (*good, *bad):
        given = {"code": "x/00"} | {key: value}
        text = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in given.items())
        text = f"<tool_call>\n<function=look>\n{text}</function>\n</tool_call>"
        assert accepts(tokens, grammar, text) == (value in good), value


def test_what_a_grammar_of_bare_text_cannot_keep_is_told_or_refused() -> None:
    _, spelling = tokenizer(())
    schema = {
        "properties": {"day": {"type": "string", "format": "phone"}, "x": {"pattern": r"\bx"}}
    }
    paths = ["tools.look.properties.x.pattern", "tools.look.properties.day.format"]
    assert grammar_of("seed_oss", schema, spelling, strict=False)[1] == paths
    with pytest.raises(ApiError, match=f"{paths[0]}: no grammar"):
        grammar_of("seed_oss", schema, spelling)


def test_a_text_may_have_tokens_that_no_text_of_a_grammar_matches() -> None:
    """Marks of a form, and of reasoning, are such tokens, though a value may speak of them."""
    tokens, spelling = tokenizer(("<tool_call>", "</think>", "</arg_value>"))
    for form, ends in (
        ("qwen3_coder", "\n</parameter>\n</function>\n"),
        ("glm45", "</arg_value>\n"),
    ):
        grammar, _ = grammar_of(form, CITY, spelling)
        opens = XML.partition("{}")[0]
        if form == "glm45":
            opens = "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>"
        text = f"{opens}a </think> <tool_call> b{ends}</tool_call>"
        assert accepts(tokens, grammar, text)
        assert calls_of(taken(of(form), text)) == [("look", {"city": "a </think> <tool_call> b"})]


def test_further_arguments_are_allowed_where_the_schema_allows_them() -> None:
    tokens, spelling = tokenizer(())
    for form in ("minimax_m2", "olmo3", "functiongemma"):
        grammar, _ = grammar_of(
            form, CITY | {"additionalProperties": {"type": "integer"}}, spelling
        )
        names = {name for seed in range(8) for _, given in calls_of(
            taken(of(form), forced(tokens, grammar, seed))) for name in given}  # fmt: skip
        assert names - set(CITY["properties"])


def of_template(path: Path, template: str, **named: Any) -> Text:
    directory = make_model(path, template)
    fields = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(fields | named))
    return Text(directory)


def template_of(name: str) -> str:
    return next(case.template() for case in CASES if case.name == name)


ANSWERED = {"fields": {
    "thinking": {"open": "<mull>", "close": "</mull>"},
    "tool_calls": {"open_pattern": r"<\|START_ACTION\|>\s*", "content": "json", "repeats": True},
}}  # fmt: skip


@pytest.mark.parametrize(
    ("template", "named", "asked", "calls", "reasoning", "log"),
    [
        (template_of("qwen3_coder"), {}, "auto", ("qwen3_coder", "probe"), ("none", "none"), ""),
        (template_of("own"), {}, "auto", ("own", "probe"), ("none", "none"), ""),
        (template_of("own"), {}, "llama3", ("llama3", "setting"), ("none", "none"), ""),
        (template_of("own"), {}, "none", ("none", "setting"), ("none", "none"), ""),
        (LOOP, {}, "auto", ("hermes", "none"), ("none", "none"), "is unknown"),
        (f"{{# [TOOL_CALLS] #}}{LOOP}", {}, "auto", ("mistral", "guess"), ("none", "none"),
         "a guess"),
        (f"{{% if tools %}}say <|tool_call|> as a <|start_of_role|>{{% endif %}}<tool_call>{LOOP}",
         {}, "auto", ("granite", "guess"), ("none", "none"), "a guess"),
        (LOOP, {"response_template": ANSWERED}, "auto", ("cohere", "response_template"),
         ("own", "response_template"), ""),
        (f"<think>{LOOP}<response>", {}, "auto", ("hermes", "none"), ("granite", "guess"),
         "unknown"),
        (LOOP.replace("}: {", "}: <think>{{ m.reasoning_content }}</think>{"), {}, "auto",
         ("hermes", "none"), ("qwen3", "probe"), "unknown"),
        (LOOP.replace("}: {", "}: <deep>{{ m.reasoning_content }}</deep>{"), {}, "auto",
         ("hermes", "none"), ("own", "probe"), "unknown"),
    ],
    ids=str,
)  # fmt: skip
def test_what_was_recognised_and_how_is_told(
    template: str, named: Any, asked: Any, calls: Any, reasoning: Any, log: str, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    text = of_template(tmp_path, template, **named)
    with caplog.at_level(logging.WARNING, "kvlane.router"):
        shown = speech_of(text, RouterConfig(tool_parser=asked)).shown()
    assert tuple(shown["calls"].values()) == calls
    assert tuple(shown["reasoning"].values()) == reasoning
    assert log in caplog.text
    assert bool(log) == bool(caplog.records)


@pytest.mark.parametrize("name", ["qwen3_coder", "cohere"])
@pytest.mark.parametrize("special", [False, True])
def test_calls_pass_the_router_in_the_form_of_the_template(
    name: str, special: bool, serve: Serve, tmp_path: Path, streamed: bool
) -> None:
    """Also where their marks are special tokens, which an answer's text leaves out else."""
    case = next(case for case in CASES if case.name == name)
    marks = ("<tool_call>", "</tool_call>", "<|START_ACTION|>", "<|END_ACTION|>")
    directory = make_model(tmp_path, case.template(), marks, 2048)
    described = json.loads((directory / "tokenizer.json").read_text())
    for token in described["added_tokens"][-len(marks) :]:
        token["special"] = special
    (directory / "tokenizer.json").write_text(json.dumps(described))
    text = Text(directory)
    served = serve(DecodeDouble(), directory=directory)
    served.double.says(text, f"I look.\n{rendered(case)}", sizes=(3, 1, 2))
    tools = [
        {"type": "function", "function": {"name": one, "parameters": PARAMETERS}}
        for one in FUNCTIONS
    ]
    (choice,), _ = served.told("chat/completions", streamed, messages=HELLO, tools=tools)
    assert (choice["text"], choice["reason"]) == ("I look.", "tool_calls")
    made: dict[int, list[str]] = {}
    for i, call in enumerate(choice["calls"]):
        held = made.setdefault(call.get("index", i), ["", ""])
        held[0] += call["function"].get("name", "")
        held[1] += call["function"]["arguments"]
    assert [(one, json.loads(given)) for one, given in made.values()] == case.called
    told = httpx.get(f"{served.url}/config").json()
    assert told["calls"] == {"form": name, "by": "probe"}
