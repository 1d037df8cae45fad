"""What is learnt of a chat template by rendering an assistant's calls: templates with traps."""

import json
import time

import pytest

from router.text.probe import NAMES, PLAIN, RICH, Probe
from router.text.template import ChatTemplate

TURN = "{{% for m in messages %}}<{{{{ m.role }}}}>{}<end>\n{{% endfor %}}"
BEGIN = "{% if add_generation_prompt %}<assistant>{% endif %}"
SAID = "{{ m.content }}"
EACH = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
JSON = '[call]{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
WRITES = EACH + JSON + "{% endfor %}"
IF_CALLS = "{% if m.tool_calls %}"
REFUSE = "{{ raise_exception('no') }}"
ONE, TWO = (
    f'[call]{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}'
    for name, arguments in zip(NAMES, RICH, strict=True)
)


def probe(turn: str, *, begin: str = BEGIN, first: str = "") -> Probe:
    return ChatTemplate(first + TURN.format(turn) + begin, {}).probe


# What stands in a turn, and of its probe: calls, whether arguments are a string, content, the text.
TRAPS = {
    "none": (SAID + WRITES, (2, False, "empty", ONE + TWO)),
    "raises at two": (
        "{% if m.tool_calls | length > 1 %}" + REFUSE + "{% endif %}" + SAID + WRITES,
        (1, False, "empty", ONE),
    ),
    "drops the second": (
        SAID + WRITES.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
        (1, False, "empty", ONE),
    ),
    "adds arguments as a string": (
        SAID + EACH + "{{ '[call]' + f.arguments }}{{ f.name }}{% endfor %}",
        (2, True, "empty", "".join("[call]" + json.dumps(arguments, ensure_ascii=False) + name
                                   for name, arguments in zip(NAMES, RICH, strict=True))),
    ),
    "prints arguments": (
        SAID + EACH + "[call]{{ f.name }}{{ f.arguments }}{% endfor %}",
        (2, True, "empty", "".join("[call]" + name + json.dumps(arguments, ensure_ascii=False)
                                   for name, arguments in zip(NAMES, RICH, strict=True))),
    ),
    "raises on strings": (
        SAID + EACH + "{% for k in f.arguments.items() %}{% endfor %}" + JSON + "{% endfor %}",
        (2, False, "empty", ONE + TWO),
    ),
    "calls only where content is null": (
        "{% if m.content is none %}" + WRITES + "{% else %}" + SAID + "{% endif %}",
        (2, False, "null", ONE + TWO),
    ),
    "calls only where there is no content": (
        "{% if m.content is not defined %}" + WRITES + "{% else %}" + SAID + "{% endif %}",
        (2, False, "absent", ONE + TWO),
    ),
    "raises where content is null or absent": (
        "{{ m.content + '' }}" + WRITES, (2, False, "empty", ONE + TWO),
    ),
    "an empty turn where content is empty": (
        "{% if m.content is string %}" + SAID + "<end>\n<assistant>{% endif %}" + WRITES,
        (2, False, "null", ONE + TWO + "<end>\n"),
    ),
    "refuses ids of another length": (
        SAID + "{% for c in m.tool_calls or [] if c.id | length != 9 %}" + REFUSE + "{% endfor %}"
        + WRITES,
        (2, False, "empty", ONE + TWO),
    ),
    "leaves calls out": (SAID, (0, False, "empty", "")),
    "raises at any": (
        IF_CALLS + REFUSE + "{% endif %}" + SAID, (0, False, "empty", ""),
    ),
    "writes names alone where content is null": (
        "{% if m.content is none %}" + EACH + "{{ f.name }}{% endfor %}{% endif %}",
        (0, False, "null", ""),
    ),
}  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS)
def test_calls_are_written_as_the_template_takes_them(trap: str) -> None:
    turn, right = TRAPS[trap]
    found = probe(turn)
    assert (found.num_calls, found.as_text, found.content, found.text) == right
    assert found.arguments == (RICH[: found.num_calls] if found.num_calls else ())


def test_the_ladder_goes_on_without_tools_and_with_variables_that_a_template_reads() -> None:
    assert probe(SAID + WRITES).has_tools
    without = probe(SAID + WRITES, first="{% if tools %}" + REFUSE + "{% endif %}")
    assert (without.text, without.has_tools) == (ONE + TWO, False)
    assert probe(SAID + WRITES, first="{{ datetime + functions }}").text == ONE + TWO


def test_values_that_a_template_refuses_are_left_out() -> None:
    values = "{% for k, v in f.arguments.items() %}{{ k + '=' + v }};{% endfor %}"
    found = probe(SAID + EACH + "{{ f.name }}:" + values + "{% endfor %}")
    assert found.arguments == PLAIN
    assert found.text == f"{NAMES[0]}:word=kvlaneword;city=Oslo;{NAMES[1]}:word=kvlanelast;"


@pytest.mark.parametrize(
    ("turn", "begin", "right"),
    [
        (SAID + WRITES, "<assistant><think>\n", ONE + TWO),  # opened in the prompt alone
        (SAID + WRITES, "<assistant>\n[call", ONE + TWO),  # within a mark
        ("{{ '>>>all\n' + m.content if m.content else '>>>' }}" + WRITES, ">>>", ONE + TWO),
        ("{{ '[a][/a]' if m.role == 'assistant' }}" + SAID + WRITES, "<assistant>", ONE + TWO),
        (SAID + WRITES + IF_CALLS + "[tail]{% endif %}", "<assistant>", ONE + TWO + "[tail]"),
        (SAID + WRITES, "", ONE + TWO),  # no generation prompt
    ],
)  # fmt: skip
def test_the_text_is_the_assistants_own(turn: str, begin: str, right: str) -> None:
    begins = "{% if add_generation_prompt %}" + begin + "{% endif %}"
    assert probe(turn, begin=begins).text == right


TEXTS = "{% for p in m.content %}{{ p.text | trim }}{% endfor %}"
STRING_OR = "{% if m.content is string %}" + SAID + "{% else %}"


@pytest.mark.parametrize(
    ("turn", "takes", "needs"),
    [
        (SAID, "", ""),  # prints the list
        ("{{ m.content | tojson }}", "", ""),
        ("{{ '' + m.content }}", "", ""),
        (STRING_OR + TEXTS + "{% endif %}", "assistant system tool user", ""),
        (STRING_OR + "{{ m.content[0].text }}{% endif %}", "", ""),  # loses the second
        (STRING_OR + "{% if m.role != 'user' %}" + REFUSE + "{% endif %}" + TEXTS + "{% endif %}",
         "user", ""),
        (TEXTS, "assistant system tool user", "assistant system tool user"),
    ],
)  # fmt: skip
def test_roles_of_which_the_template_takes_parts(turn: str, takes: str, needs: str) -> None:
    found = probe(turn + WRITES)
    assert sorted(found.takes_parts) == takes.split()
    assert sorted(found.needs_parts) == needs.split()
    assert found.num_calls == 2


def test_what_tools_change_and_what_stands_around_reasoning() -> None:
    tools = "{% if tools %}Write <|tool_call|>{{ tools | length }}.{% endif %}"
    thought = "{% if m.reasoning_content %}[think]{{ m.reasoning_content }}[/think]\n{% endif %}"
    found = probe(thought + SAID, first="(" + tools + ")")
    assert found.tools_text == "Write <|tool_call|>2."
    assert found.reasoning == ("<end>\n<assistant>[think]", "[/think]\n")
    assert probe(SAID).reasoning is None
    assert probe(SAID + "{{ m.thinking }}").reasoning is None  # behind the content


def test_a_slow_template_is_not_tried_for_long() -> None:
    loops = "{% for i in range(90000) %}{% endfor %}" * 5
    began = time.process_time()
    probe(SAID, first=loops)
    assert time.process_time() - began < 1.5


def test_a_probe_costs_little() -> None:
    began = time.process_time()
    for _ in range(5):
        probe(SAID + WRITES)
    assert (time.process_time() - began) / 5 < 0.03
