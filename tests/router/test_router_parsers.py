"""Parsers of answers: what they find does not depend on how the text was cut."""

import json
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.parsers import FirstCallOnly, Hermes, Llama3, Parsed, Parser, Plain
from router.text.reasoning import Reasoning

NAMES = ("look", "add")
Parts = tuple[str, str, list[tuple[str, str]]]  # content, reasoning, (name, arguments) of calls


def call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def llama3() -> Llama3:
    return Llama3(NAMES)


def thinking() -> Reasoning:
    return Reasoning(Hermes(), inside=False)


def opened() -> Reasoning:
    return Reasoning(Plain(), inside=True)


def first() -> FirstCallOnly:
    return FirstCallOnly(Hermes())


def parts(parsed: Parsed) -> Parts:
    return parsed.content, parsed.reasoning, [(each.name, each.arguments) for each in parsed.calls]


def through(
    make: Callable[[], Parser], text: str, seed: int | None, *, cut: bool = False
) -> Parsed:
    """The sum of what a parser says of `text`, in pieces at random; None: in one piece."""
    parser, parsed, rng = make(), Parsed(), random.Random(seed)
    while text:
        size = len(text) if seed is None else rng.randint(1, 4)
        parsed += parser.feed(text[:size])
        text = text[size:]
    parsed += parser.finish(cut=cut)
    assert [each.index for each in parsed.calls] == list(range(len(parsed.calls)))
    assert all(each.id.startswith("call_") for each in parsed.calls)
    assert len({each.id for each in parsed.calls}) == len(parsed.calls)
    return parsed


ARGS = '{"a": "}]<\\"", "b": [{"c": {}}]}'
ONE, TWO = call("look", ARGS), call("add", "{}")
CASES: list[tuple[Callable[[], Parser], str, Parts]] = [
    (Plain, "a <tool_call>", ("a <tool_call>", "", [])),
    (Hermes, "", ("", "", [])),
    (Hermes, "just text \n", ("just text \n", "", [])),
    (Hermes, hermes(ONE), ("", "", [("look", ARGS)])),
    (Hermes, f"Let me see.\n{hermes(ONE)}", ("Let me see.", "", [("look", ARGS)])),
    (Hermes, f"{hermes(ONE)}\n{hermes(TWO)}\n", ("", "", [("look", ARGS), ("add", "{}")])),
    (Hermes, hermes('{"arguments": {"a": 1}, "name": "x"}'), ("", "", [("x", '{"a": 1}')])),
    (Hermes, hermes('{"name": "x"}'), ("", "", [("x", "{}")])),
    (Hermes, hermes(call("x", '"{}"')), ("", "", [("x", "{}")])),
    (Hermes, hermes("not JSON"), (hermes("not JSON"), "", [])),
    (Hermes, hermes(call("\\ud800", "{}")), (hermes(call("\\ud800", "{}")), "", [])),
    (Hermes, hermes(call("x", '"\\udfff"')), (hermes(call("x", '"\\udfff"')), "", [])),
    (Hermes, "<tool_call>\n{", ("<tool_call>\n{", "", [])),
    (Hermes, f"<tool_call>{ONE}", ("", "", [("look", ARGS)])),
    (Hermes, f"<tool_call>{ONE[:-6]}", ("", "", [("look", ARGS[:-5])])),
    (Hermes, "a < b <tool", ("a < b <tool", "", [])),
    (first, f"{hermes(ONE)}\n{hermes(TWO)}", ("", "", [("look", ARGS)])),
    (llama3, "plain {text}", ("plain {text}", "", [])),
    (llama3, call("look", ARGS, "parameters"), ("", "", [("look", ARGS)])),
    (llama3, "<|python_tag|>" + call("look", ARGS, "parameters"), ("", "", [("look", ARGS)])),
    (
        llama3,
        '{"type": "function", "name": "add", "parameters": {"x": 1}}',
        ("", "", [("add", '{"x": 1}')]),
    ),
    (llama3, f"{ONE}; {TWO}", ("", "", [("look", ARGS), ("add", "{}")])),
    (llama3, call("other", "{}"), (call("other", "{}"), "", [])),
    (llama3, '{"answer": [1, 2]} and more', ('{"answer": [1, 2]} and more', "", [])),
    (llama3, '{"answer": "' + "x" * 600, ('{"answer": "' + "x" * 600, "", [])),
    (llama3, '{"parameters": {"a": 1}, "name": "add"}', ("", "", [("add", '{"a": 1}')])),
    (llama3, ' {"na', (' {"na', "", [])),
    (thinking, "<think>\nwhy\n</think>\n\nso", ("so", "why", [])),
    (thinking, "so <think>no</think>", ("so <think>no</think>", "", [])),
    (thinking, "<think>\n\n</think>\n\nso", ("so", "", [])),
    (thinking, f"<think>a</think>\n{hermes(TWO)}", ("", "a", [("add", "{}")])),
    (thinking, "<think>a < b", ("", "a < b", [])),
    (thinking, "<thi", ("<thi", "", [])),
    (opened, "\nwhy so\n</think>\n\n<b>", ("<b>", "why so", [])),
    (opened, "never ends ", ("", "never ends", [])),
]


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
@pytest.mark.parametrize(
    ("make", "text", "expected"),
    CASES,
    ids=lambda value: getattr(value, "__name__", str(value))[:50],
)
def test_answers_are_taken_apart(
    make: Callable[[], Parser], text: str, expected: Parts, seed: int | None
) -> None:
    assert parts(through(make, text, seed)) == expected


TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>")
HEADS = ('{"name": "add", "arguments": {', '{"name": "look", "parameters": {}}')
PIECES = st.sampled_from([*TAGS, *HEADS, *'{}"\\ \n;x'])


@settings(max_examples=200)
@given(st.lists(PIECES, max_size=14).map("".join), st.integers(0, 1000))
@pytest.mark.parametrize("make", [Hermes, llama3, thinking, opened], ids=lambda make: make.__name__)
def test_no_cut_changes_anything(make: Callable[[], Parser], text: str, seed: int) -> None:
    for cut in (False, True):
        found = parts(through(make, text, seed, cut=cut))
        assert found == parts(through(make, text, None, cut=cut))


BACKWARDS = '{"arguments": {"a": 1}, "name": "look"}'
TYPED = '{"type": "function", "name": "add", "parameters": {"x": 1}}'
LIMITED: list[tuple[Callable[[], Parser], str]] = [
    (Hermes, f"Let me see.\n{hermes(ONE)}\n{hermes(TWO)}"),
    (Hermes, hermes(BACKWARDS)),
    (first, f"Let me see.\n{hermes(ONE)}\n{hermes(TWO)}"),
    (thinking, f"<think>a</think>\n{hermes(ONE)}\n{hermes(TWO)}"),
    (llama3, f"<|python_tag|>{ONE}; {TYPED}"),
    (llama3, f" {TYPED}\n;{ONE}"),
    (llama3, BACKWARDS),
    (lambda: FirstCallOnly(llama3()), f"{ONE}; {TYPED}"),
]


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


@pytest.mark.parametrize("make", [Hermes, llama3, thinking, first], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "text", ["a < b, {x}", '{"answer": [1, 2', '["name', "\n", "{ }", '{"names": 1', "a tool_call"]
)
def test_what_begins_no_call_is_kept_where_it_is_cut(make: Callable[[], Parser], text: str) -> None:
    assert parts(through(make, text, None, cut=True)) == (text, "", [])


def test_arguments_are_streamed_as_they_come() -> None:
    parser = Hermes()
    assert parser.feed('<tool_call>\n{"name": "look", "arguments": {"a').calls[0].arguments == '{"a'
    assert parser.feed('": 1').calls[0].arguments == '": 1'
    assert json.loads('{"a' + '": 1' + parser.feed("}}\n").calls[0].arguments) == {"a": 1}
    assert not parser.feed("</tool_call>")
    assert not parser.finish()
