"""Answers, and what parsers find in them: text, reasoning and calls, by format."""

import random
from collections.abc import Callable

from hypothesis import strategies as st

from router.text.forms.known import FORMS
from router.text.forms.parser import FormParser
from router.text.harmony import Harmony
from router.text.parsers import Cut, FirstCallOnly, Parsed, Parser, Plain
from router.text.reasoning import Reasoning

NAMES = ("look", "add")
Parts = tuple[str, str, list[tuple[str, str]]]  # content, reasoning, (name, arguments) of calls


def call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def of_form(name: str) -> Callable[[], FormParser]:
    """Makes parsers of a known form."""

    def make() -> FormParser:
        return FormParser(FORMS[name], {key: {} for key in NAMES})

    make.__name__ = name
    return make


Hermes, llama3, mistral, mistral11, granite, phi, gemma, glm = map(
    of_form,
    ("hermes", "llama3", "mistral", "mistral11", "granite", "phi", "gemma", "glm"),
)


def thinking() -> Reasoning:
    return Reasoning(Hermes(), inside=False)


def opened() -> Reasoning:
    return Reasoning(Plain(), inside=True)


def first() -> FirstCallOnly:
    return FirstCallOnly(Hermes())


def message(channel: str, text: str, end: str = "<|end|>", to: str = "") -> str:
    to = f" to=functions.{to} <|constrain|>json" if to else ""
    return f"<|channel|>{channel}{to}<|message|>{text}{end}"


def parts(parsed: Parsed) -> Parts:
    return parsed.content, parsed.reasoning, [(each.name, each.arguments) for each in parsed.calls]


def through(make: Callable[[], Parser], text: str, seed: int | None, *, cut: Cut = False) -> Parsed:
    """The sum of what a parser says of `text`, in pieces at random; None: in one piece."""
    parser, parsed, rng = make(), Parsed(), random.Random(seed)
    while text:
        size = len(text) if seed is None else rng.randint(1, 4)
        parsed += parser.feed(text[:size])
        text = text[size:]
    parsed += parser.finish(cut=cut)
    assert [each.index for each in parsed.calls] == list(range(len(parsed.calls)))
    is_short = make is mistral  # whose template takes ids of 9 letters and digits alone
    assert all(each.id.startswith("call_") != is_short for each in parsed.calls)
    assert all(len(each.id) == (9 if is_short else 29) for each in parsed.calls)
    assert len({each.id for each in parsed.calls}) == len(parsed.calls)
    return parsed


ARGS = '{"a": "}]<\\"", "b": [{"c": {}}]}'
ONE, TWO = call("look", ARGS), call("add", "{}")
BOTH = [("look", ARGS), ("add", "{}")]
THOUGHT = message("analysis", "why < so")
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
    # What a model forgets: a closing mark, a bracket, both.
    (Hermes, f"<tool_call>{ONE}\n{hermes(TWO)}\nso", ("so", "", BOTH)),
    (Hermes, f"<tool_call>{ONE}\nso", ("so", "", [("look", ARGS)])),
    (Hermes, f"{hermes(ONE[:-1])}\nso", ("so", "", [("look", ARGS)])),
    (Hermes, f"<tool_call>{ONE[:-1]}{hermes(TWO)}", ("", "", BOTH)),
    (Hermes, f"a {hermes(ONE)}b{hermes(TWO)}\nc", ("a b\nc", "", BOTH)),
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
    (mistral, "just text \n", ("just text \n", "", [])),
    (mistral, f"[TOOL_CALLS] [{ONE}, {TWO}]", ("", "", BOTH)),
    (mistral, f"Let me see.\n[TOOL_CALLS][{ONE}]", ("Let me see.", "", [("look", ARGS)])),
    (mistral11, f"[TOOL_CALLS]look{ARGS}[TOOL_CALLS]add{{}}", ("", "", BOTH)),
    (mistral11, f"[TOOL_CALLS]look[ARGS]{ARGS}[TOOL_CALLS]add[ARGS]{{}}", ("", "", BOTH)),
    (mistral11, f"[TOOL_CALLS]look[CALL_ID]a1B2[ARGS]{ARGS}", ("", "", [("look", ARGS)])),
    (mistral, '[TOOL_CALLS][{"arguments": {"a": 1}, "name": "x"}]', ("", "", [("x", '{"a": 1}')])),
    (mistral, "[TOOL_CALLS] nothing, sorry", ("[TOOL_CALLS] nothing, sorry", "", [])),
    (mistral11, "[TOOL_CALLS]add{}\nand so", ("and so", "", [("add", "{}")])),
    (mistral, "a [TOOL", ("a [TOOL", "", [])),
    (mistral11, '[TOOL_CALLS]look{"a": [1', ("", "", [("look", '{"a": [1')])),
    (granite, f"<|tool_call|>[{ONE}, {TWO}]", ("", "", BOTH)),
    (granite, f"<tool_call>[{ONE}]", ("", "", [("look", ARGS)])),
    (granite, f"<tool_call>\n{ONE}\n", ("", "", [("look", ARGS)])),
    (phi, f"functools[{ONE}, {TWO}]", ("", "", BOTH)),
    (phi, f"<|tool_call|>[{ONE}]<|/tool_call|>", ("", "", [("look", ARGS)])),
    (granite, f"<tool_call>[{ONE}]</tool_call>\nso", ("so", "", [("look", ARGS)])),
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
    (Harmony, "so", ("so", "", [])),
    (Harmony, f"{THOUGHT}so", ("so", "why < so", [])),
    (Harmony, f"{THOUGHT}<|start|>assistant", ("", "why < so", [])),
]
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
    (mistral, f"Let me see.\n[TOOL_CALLS] [{ONE}, {TWO}]"),
    (mistral11, f"[TOOL_CALLS]look[CALL_ID]a1[ARGS]{ARGS}[TOOL_CALLS]add{{}}"),
    (granite, f"<|tool_call|>[{ONE}, {TWO}]"),
    (phi, f"functools[{ONE}]"),
    (gemma, "I look.\n```tool_code\nlook(a='x)', b=2)\nadd(x=1)\n```"),
    (glm, f"look\n{ARGS}"),
    (Harmony, f"{THOUGHT}<|start|>assistant{message('commentary', ARGS, '<|call|>', to='look')}"),
]
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>")
HEADS = ('{"name": "add", "arguments": {', '{"name": "look", "parameters": {}}')
MARKS = (
    "[TOOL_CALLS]", "<|tool_call|>", "[ARGS]", "functools", "look", "add", "<|message|>", "<|end|>",
    "<|channel|>", "analysis", " to=functions.add ", "```tool_code", "```", "add(x=1)", "look(",
)  # fmt: skip
# Of what a parser's texts are made.
OF_TAGS = st.sampled_from([*TAGS, *HEADS, *'{}"\\ \n;x'])
OF_MARKS = st.sampled_from([*MARKS, ONE, HEADS[0], *'{}[]"\\ \n,x'])
PIECES = dict.fromkeys((Hermes, llama3, thinking, opened), OF_TAGS) | dict.fromkeys(
    (mistral, mistral11, granite, phi, gemma, glm, Harmony), OF_MARKS
)
