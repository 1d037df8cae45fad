"""Parsers of answers: what they find does not depend on how the text was cut."""

import json
from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.parsers import Parser
from tests.router.parser_cases import (
    ARGS,
    CASES,
    LIMITED,
    ONE,
    PIECES,
    Harmony,
    Hermes,
    Parts,
    first,
    gemma,
    glm,
    granite,
    hermes,
    llama3,
    message,
    mistral,
    parts,
    phi,
    thinking,
    through,
)
from tests.support.pairwise import whole

BEGINNINGS = [  # of no call
    *product(
        (Hermes, llama3, thinking, first),
        ("a < b, {x}", '{"answer": [1, 2', '["name"', "\n", "{ }", '{"names": 1', "a tool_call"),
    ),
    *product(
        (mistral, granite, phi, gemma, glm),
        ("a < b, {x}", '{"answer": [1, 2', "\n", "a tool_call", "[x"),
    ),
]


def name_of(value: object) -> str:
    return getattr(value, "__name__", str(value))[:50]


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
@pytest.mark.parametrize(("make", "text", "expected"), CASES, ids=name_of)
def test_answers_are_taken_apart(
    make: Callable[[], Parser], text: str, expected: Parts, seed: int | None
) -> None:
    assert parts(through(make, text, seed)) == expected


@settings(max_examples=200 if whole else 50)
@given(st.data(), st.integers(0, 1000))
@pytest.mark.parametrize("make", PIECES, ids=name_of)
def test_no_cut_changes_anything(
    make: Callable[[], Parser], data: st.DataObject, seed: int
) -> None:
    text = data.draw(st.lists(PIECES[make], max_size=14).map("".join))
    for cut in (False, True):
        found = parts(through(make, text, seed, cut=cut))
        assert found == parts(through(make, text, None, cut=cut))


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(("make", "text"), LIMITED, ids=map(str, range(len(LIMITED))))
def test_a_call_that_is_cut_off_leaves_no_markup(
    make: Callable[[], Parser], text: str, seed: int | None
) -> None:
    """Wherever it is cut: what is found is a beginning of what the whole text holds."""
    said, thought, calls = parts(through(make, text, None))
    for size in range(len(text) + 1):
        content, reasoning, found = parts(through(make, text[:size], seed, cut=True))
        assert said.startswith(content.strip()), text[:size]
        assert thought.startswith(reasoning.removesuffix("</think"[: len(reasoning) - 1]))
        assert [name for name, _ in found] == [name for name, _ in calls[: len(found)]]
        given = zip(found, calls, strict=False)
        assert all(whole.startswith(part) for (_, part), (_, whole) in given)


@pytest.mark.parametrize(("make", "text"), BEGINNINGS, ids=name_of)
def test_what_begins_no_call_is_kept_where_it_is_cut(make: Callable[[], Parser], text: str) -> None:
    assert parts(through(make, text, None, cut=True)) == (text, "", [])


def test_arguments_are_streamed_as_they_come() -> None:
    parser = Hermes()
    assert parser.feed('<tool_call>\n{"name": "look", "arguments": {"a').calls[0].arguments == '{"a'
    assert parser.feed('": 1').calls[0].arguments == '": 1'
    assert json.loads('{"a' + '": 1' + parser.feed("}}\n").calls[0].arguments) == {"a": 1}
    assert not parser.feed("</tool_call>")
    assert not parser.finish()


@pytest.mark.parametrize(
    ("text", "stop", "found"),
    [
        ("a <", "\n", ("a <", "", [])), ("a <", "tool", ("a", "", [])),
        ("a <tool_call>\n", "{", ("a", "", [])), ("<tool_call>no", "x", ("<tool_call>no", "", [])),
        (f"<tool_call>{ONE[:-6]}", "x", ("", "", [("look", ARGS[:-5])])),
    ],
)  # fmt: skip
def test_a_stop_string_leaves_no_markup_and_takes_no_text(
    text: str, stop: str, found: Parts
) -> None:
    assert parts(through(Hermes, text, None, cut=stop)) == found


def test_the_parts_of_a_call_say_when_it_is_whole() -> None:
    for make, text in ((Hermes, hermes(ONE)), (Harmony, message("analysis", ARGS, to="look"))):
        for cut in range(len(text) + 1):
            calls = through(make, text[:cut], None, cut=True).calls
            assert not calls or calls[-1].is_whole == (calls[-1].arguments == ARGS)
