"""Calls as Mistral, Granite, Phi and GLM write them, and gpt-oss's channels: cut anywhere."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.openai.tools import detected
from router.text.call_formats import Bare, Harmony, Marked
from router.text.parsers import Parser
from router.text.reasoning import MARKS as THINKS
from router.text.tokenizer import Text
from tests.fault.router_doubles import HELLO, DecodeDouble, Serve, make_model, speak
from tests.router.test_router_parsers import ARGS, NAMES, ONE, TWO, Parts, parts, through
from tests.router.test_router_tools import grammar_accepts
from tests.support.mutants import TOOLS


def mistral() -> Parser:
    return Marked(("[TOOL_CALLS]",))


def granite() -> Parser:
    return Marked(("<|tool_call|>", "<tool_call>"), ("</tool_call>",))


def phi() -> Parser:
    return Marked(("<|tool_call|>", "functools"), ("<|/tool_call|>",))


def gemma() -> Parser:
    return Marked(("```tool_code",), ("```",), python=True)


def glm() -> Parser:
    return Bare(NAMES)


def message(channel: str, text: str, end: str = "<|end|>", to: str = "") -> str:
    to = f" to=functions.{to} <|constrain|>json" if to else ""
    return f"<|channel|>{channel}{to}<|message|>{text}{end}"


BOTH = [("look", ARGS), ("add", "{}")]
THOUGHT = message("analysis", "why < so")
CASES: list[tuple[Callable[[], Parser], str, Parts]] = [
    (mistral, "just text \n", ("just text \n", "", [])),
    (mistral, f"[TOOL_CALLS] [{ONE}, {TWO}]", ("", "", BOTH)),
    (mistral, f"Let me see.\n[TOOL_CALLS][{ONE}]", ("Let me see.", "", [("look", ARGS)])),
    (mistral, f"[TOOL_CALLS]look{ARGS}[TOOL_CALLS]add{{}}", ("", "", BOTH)),
    (mistral, f"[TOOL_CALLS]look[ARGS]{ARGS}[TOOL_CALLS]add[ARGS]{{}}", ("", "", BOTH)),
    (mistral, f"[TOOL_CALLS]look[CALL_ID]a1B2[ARGS]{ARGS}", ("", "", [("look", ARGS)])),
    (mistral, '[TOOL_CALLS][{"arguments": {"a": 1}, "name": "x"}]', ("", "", [("x", '{"a": 1}')])),
    (mistral, "[TOOL_CALLS] nothing, sorry", ("[TOOL_CALLS] nothing, sorry", "", [])),
    (mistral, "[TOOL_CALLS]add{}\nand so", ("and so", "", [("add", "{}")])),
    (mistral, "a [TOOL", ("a [TOOL", "", [])),
    (mistral, '[TOOL_CALLS]look{"a": [1', ("", "", [("look", '{"a": [1')])),
    (granite, f"<|tool_call|>[{ONE}, {TWO}]", ("", "", BOTH)),
    (granite, f"<tool_call>[{ONE}]", ("", "", [("look", ARGS)])),
    (granite, f"<tool_call>\n{ONE}\n", ("", "", [("look", ARGS)])),
    (phi, f"functools[{ONE}, {TWO}]", ("", "", BOTH)),
    (phi, f"<|tool_call|>[{ONE}]<|/tool_call|>", ("", "", [("look", ARGS)])),
    (granite, f"<tool_call>[{ONE}]</tool_call>\nso", ("\nso", "", [("look", ARGS)])),
    (
        gemma,
        "I look.\n```tool_code\nlook(a='x)', b=[1, {\"c\": None}])\nprint(add(x=-1))\n```\nso",
        ("I look.\nso", "", [("look", '{"a": "x)", "b": [1, {"c": null}]}'), ("add", '{"x": -1}')]),
    ),
    (gemma, f"```tool_code\n{ONE}\n```", ("", "", [("look", ARGS)])),
    (gemma, "```tool_code\nlook(1)\n```", ("```tool_code\nlook(1)\n```", "", [])),
    (gemma, "```python\nlook(a=1)\n```", ("```python\nlook(a=1)\n```", "", [])),
    (glm, f"look\n{ARGS}", ("", "", [("look", ARGS)])),
    (glm, "\nadd\n{}", ("", "", [("add", "{}")])),
    (glm, "look at this", ("look at this", "", [])),
    (glm, "other\n{}", ("other\n{}", "", [])),
    (glm, "loo", ("loo", "", [])),
    (Harmony, THOUGHT + message("final", "so", "<|return|>"), ("so", "why < so", [])),
    (
        Harmony,
        f"{THOUGHT}<|start|>assistant{message('commentary', ARGS, '<|call|>', to='look')}",
        ("", "why < so", [("look", ARGS)]),
    ),
    (
        Harmony,
        message("commentary", "Wait.") + "<|start|>assistant to=functions.add"
        "<|channel|>commentary json<|message|>{}<|call|>",
        ("Wait.", "", [("add", "{}")]),
    ),
    (Harmony, "<|channel|>final<|message|>a <|e", ("a <|e", "", [])),
    (Harmony, "<|channel|>fin", ("", "", [])),
]
MAKERS = (mistral, granite, phi, gemma, glm, Harmony)


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
@pytest.mark.parametrize(("make", "text", "expected"), CASES, ids=map(str, range(len(CASES))))
def test_answers_are_taken_apart(
    make: Callable[[], Parser], text: str, expected: Parts, seed: int | None
) -> None:
    assert parts(through(make, text, seed)) == expected


MARKS = (
    *(
        "[TOOL_CALLS]",
        "<|tool_call|>",
        "[ARGS]",
        "functools",
        "look",
        "add",
        "<|message|>",
        "<|end|>",
    ),
    *("<|channel|>", "analysis", " to=functions.add ", "```tool_code", "```", "add(x=1)", "look("),
)
PIECES = st.sampled_from([*MARKS, ONE, '{"name": "add", "arguments": {', *'{}[]"\\ \n,x'])


@settings(max_examples=200)
@given(st.lists(PIECES, max_size=14).map("".join), st.integers(0, 1000))
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_no_cut_changes_anything(make: Callable[[], Parser], text: str, seed: int) -> None:
    for cut in (False, True):
        found = parts(through(make, text, seed, cut=cut))
        assert found == parts(through(make, text, None, cut=cut))


LIMITED = [
    (mistral, f"Let me see.\n[TOOL_CALLS] [{ONE}, {TWO}]"),
    (mistral, f"[TOOL_CALLS]look[CALL_ID]a1[ARGS]{ARGS}[TOOL_CALLS]add{{}}"),
    (granite, f"<|tool_call|>[{ONE}, {TWO}]"),
    (phi, f"functools[{ONE}]"),
    (gemma, "I look.\n```tool_code\nlook(a='x)', b=2)\nadd(x=1)\n```"),
    (glm, f"look\n{ARGS}"),
    (Harmony, f"{THOUGHT}<|start|>assistant{message('commentary', ARGS, '<|call|>', to='look')}"),
]


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(("make", "text"), LIMITED, ids=map(str, range(len(LIMITED))))
def test_a_call_that_is_cut_off_leaves_no_markup(
    make: Callable[[], Parser], text: str, seed: int | None
) -> None:
    said, thought, calls = parts(through(make, text, None))
    for size in range(len(text) + 1):
        content, reasoning, found = parts(through(make, text[:size], seed, cut=True))
        assert said.startswith(content.strip()), text[:size]
        assert thought.startswith(reasoning)
        given = list(zip(found, calls, strict=False))
        assert len(given) == len(found)
        assert all(whole == name for (name, _), (whole, _) in given)
        assert all(whole.startswith(part) for (_, part), (_, whole) in given)


@pytest.mark.parametrize(
    "make", [mistral, granite, phi, gemma, glm], ids=lambda make: make.__name__
)
@pytest.mark.parametrize("text", ["a < b, {x}", '{"answer": [1, 2', "\n", "a tool_call", "[x"])
def test_what_begins_no_call_is_kept_where_it_is_cut(make: Callable[[], Parser], text: str) -> None:
    assert parts(through(make, text, None, cut=True)) == (text, "", [])


LOOP = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TIME, WEATHER = (
    '{"name": "time", "arguments": {}}',
    '{"name": "weather", "arguments": {"city":"x"}}',
)
# What a template of each format has; tokens of its own; an answer of two calls and its grammar's.
FORMATS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "mistral": ("[TOOL_CALLS]", ("[TOOL_CALLS]",), f"[TOOL_CALLS][{TIME}, {WEATHER}]"),
    "mistral11": (
        "[TOOL_CALLS]name[ARGS]",
        ("[TOOL_CALLS]", "[ARGS]"),
        '[TOOL_CALLS]time[ARGS]{}[TOOL_CALLS]weather[ARGS]{"city":"x"}',
    ),
    "granite": ("<|start_of_role|>", ("<|tool_call|>",), f"<|tool_call|>[{TIME}, {WEATHER}]"),
    "phi": ("<|tool|>", (), f"<|tool_call|>[{TIME}, {WEATHER}]"),
    "gemma": ("<start_of_turn>", (), f"```tool_code\n{TIME}\n{WEATHER}\n```"),
    "glm": ("[gMASK]", (), 'weather\n{"city":"x"}'),
}


@pytest.mark.parametrize("form", FORMATS)
def test_the_template_says_the_format_and_a_demanded_call_keeps_to_it(
    form: str, serve: Serve, tmp_path: Path
) -> None:
    sign, words, answer = FORMATS[form]
    text = Text(make_model(tmp_path, f"{{# {sign} #}}{LOOP}", words, 2048))
    assert detected(text.template_source) == form
    double, url, _ = serve(DecodeDouble(), directory=text.directory)
    double.script = speak(text.encode(answer, add_special_tokens=False), sizes=(1, 2), kept=True)
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required"}
    found = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]
    calls = [each["function"] for each in found["message"]["tool_calls"]]
    wanted = [("time", {}), ("weather", {"city": "x"})][form == "glm" :]
    assert [(each["name"], json.loads(each["arguments"])) for each in calls] == wanted
    assert not found["message"]["content"]
    assert found["finish_reason"] == "tool_calls"
    grammar = double.take()[1].sampling.grammar
    assert grammar_accepts(text, grammar, answer)
    assert not grammar_accepts(text, grammar, "no call")


def test_harmony_is_told_apart_without_tools(serve: Serve, tmp_path: Path) -> None:
    words = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    text = Text(make_model(tmp_path, f"{{# <|channel|> #}}{LOOP}", words, 2048))
    assert detected(text.template_source) == "harmony"
    double, url, _ = serve(DecodeDouble(), directory=text.directory)
    answer = f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>so"
    double.script = speak(text.encode(answer, add_special_tokens=False), sizes=(1, 2), kept=True)
    body: dict[str, Any] = {"messages": HELLO}
    found = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert (found["content"], found["reasoning_content"]) == ("so", "why < so")
    assert found["reasoning"] == found["reasoning_content"]
    body |= {"tools": TOOLS, "tool_choice": "required"}
    refused = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("whose", ["mistral", "seed_oss"])
def test_reasoning_of_other_marks_is_told_apart(whose: str, serve: Serve, tmp_path: Path) -> None:
    marks = THINKS[whose]
    text = Text(make_model(tmp_path, f"{{# {marks[0]} #}}{LOOP}", marks, 2048))
    double, url, _ = serve(DecodeDouble(), directory=text.directory)
    answer = f"{marks[0]}why{marks[1]}\nso"
    double.script = speak(text.encode(answer, add_special_tokens=False), sizes=(1, 2), kept=True)
    body: dict[str, Any] = {"messages": HELLO, "response_format": {"type": "json_object"}}
    found = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert (found["content"], found["reasoning_content"]) == ("so", "why")
    grammar = double.take()[1].sampling.grammar
    assert grammar_accepts(text, grammar, f"{marks[0]}why{marks[1]}{{}}")
    assert not grammar_accepts(text, grammar, "why")
