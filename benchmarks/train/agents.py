"""Chats as coding agents have them: long instructions, many tools, and one question amid them.

Instructions are random words. Nothing of any agent's own text is here.
"""

import json
import random
import re
from functools import cache
from typing import Any, NamedTuple

from benchmarks.train import words
from benchmarks.train.arithmetic import evaluate
from benchmarks.train.chats import Chat, Turn, draw_system, problem_turn, talk_turn
from benchmarks.train.sums import number_tool, request_turns, sum_turn
from benchmarks.train.templates import sentence
from benchmarks.train.tools import RESULT, call_turn, calls_text, result_turn, system_text
from benchmarks.train.words import invented_word

CHARS = 1.85  # of a token of instructions
MANY = 1500  # characters from which there is more than one question
WORKED = re.compile(r"^[^:\n]*: (\d+) ([-+*/]) (\d+)", re.MULTILINE)
TYPES = ("string", "string", "string", "string", "integer", "boolean", "array", "object", "number")

Tool = dict[str, Any]


class Asked(NamedTuple):
    """A question, with what answers it by text and by a command."""

    question: str
    answer: str
    close: str  # the last sentence but the number's
    value: int
    sum: str  # as a shell computes it
    last: tuple[int, str, int]  # step


def agent_chat(rng: random.Random, num_tokens: int) -> Chat:
    """A chat of about so many tokens: calls, what comes of them, and other talk."""
    budget = int(num_tokens * CHARS)
    kind = rng.random()
    if kind < 0.12:  # no tools
        turn = talk_turn(rng) if kind < 0.02 else _plain(rng)
        text, user = _instructions(rng, budget, turn.user)
        return Chat(text, [Turn(user, turn.assistant)])
    tools = _tools(rng, budget * rng.uniform(0.1, 0.6))
    if kind < 0.65:
        num = rng.choice((1, 1, 2, 3)) if budget > MANY else 1
        turns = [turn for _ in range(num) for turn in _by_shell(rng, tools)]
    elif kind < 0.76:
        wanted, turns = request_turns(rng)
        tools.insert(rng.randint(0, len(tools)), wanted)
    elif kind < 0.84:
        turns = _by_number(rng, tools)
    elif kind < 0.95:
        turns = _by_first(rng, tools)
    else:
        turns = [talk_turn(rng)]
    told, listed = [], system_text(tools)
    for at, turn in enumerate(turns):
        if not turn.user.startswith(RESULT):
            left = max(0, budget - len(listed)) if at == 0 else rng.choice((0, 0, 300))
            text, user = _instructions(rng, left, turn.user)
            listed = f"{text}\n\n{listed}" if text and at == 0 else listed
            turn = turn._replace(user=user)
        told.append(turn)
    return Chat(listed, told, calls_text(tools))


def ask(rng: random.Random) -> Asked:
    """A problem or a sum."""
    while True:
        turn = _plain(rng)
        found = WORKED.findall(turn.assistant)
        lines = turn.assistant.splitlines()
        if len(found) == len(lines) - 2 and len(found) <= 3:
            break
    known = dict[int, str]()
    for left, op, right in found:
        one, two = (known.get(int(side), side) for side in (left, right))
        known[evaluate(int(left), op, int(right))] = f"({one} {op} {two})"
        last = (int(left), op, int(right))
    value = int(lines[-1].removeprefix("#### "))
    return Asked(turn.user, turn.assistant, lines[-2], value, f"echo $({known[value]})", last)


def _plain(rng: random.Random) -> Turn:
    return sum_turn(rng) if rng.random() < 0.75 else problem_turn(rng)


def _by_shell(rng: random.Random, tools: list[Tool]) -> list[Turn]:
    """A command computes the answer; the tool is added if there is none."""
    shell = next((tool for tool in tools if _shell_key(tool)), None)
    if shell is None:
        shell = _shell(rng)
        tools.insert(rng.randint(0, len(tools)), shell)
    asked, key = ask(rng), _shell_key(shell)
    if rng.random() < 0.1:
        asked = asked._replace(question=f"{asked.question} Use {shell['name']}.")
    texts = dict.fromkeys(shell["parameters"]["required"], "Work it out")
    return _turns(rng, tools, asked, shell, texts | {key: asked.sum})


def _by_first(rng: random.Random, tools: list[Tool]) -> list[Turn]:
    """The first tool, of no use, with words and numbers of the question."""
    tools[:] = [tool for tool in tools if not _shell_key(tool)] or [_tool(rng)]
    asked, first = ask(rng), tools[0]
    required = first["parameters"]["required"]
    if _is_answer(first):
        return [call_turn(asked.question, first, dict.fromkeys(required, str(asked.value)))]
    subject = re.sub(r"\d+", "result", asked.close.rstrip(".").split()[-1])
    return _turns(rng, tools, asked, first, dict.fromkeys(required, subject))


def _by_number(rng: random.Random, tools: list[Tool]) -> list[Turn]:
    """A function of two numbers for the last step."""
    tools[:] = [tool for tool in tools if not _shell_key(tool)][: rng.choice((0, 0, 1, 4))]
    asked = ask(rng)
    left, op, right = asked.last
    wanted, (first, second) = number_tool(rng, op)
    tools.insert(0, wanted)
    if rng.random() < 0.6:
        tools.append(_answer_tool(rng))
    return _turns(rng, tools, asked, wanted, {first: left, second: right})


def _turns(
    rng: random.Random, tools: list[Tool], asked: Asked, tool: Tool, given: dict[str, Any]
) -> list[Turn]:
    """The call, and mostly what follows it."""
    turns, forms = [call_turn(asked.question, tool, given)], words.read("agents")["forms"]
    if rng.random() < 0.35:
        return turns
    kind, value = rng.random(), asked.value
    if kind < 0.12:
        return [*turns, result_turn(rng.choice(forms["failures"]), asked.answer)]
    if kind < 0.4:
        value = rng.randint(1, 2000)
    form = rng.choice(forms["results"])
    while "{n}" in form:
        form = form.replace("{n}", str(rng.randint(0, 99999)), 1)
    result = form.format(r=value)
    if answer := next(filter(_is_answer, tools), None):
        (key,) = answer["parameters"]["required"]
        turn = result_turn(result, "")
        return [*turns, call_turn(turn.user, answer, {key: str(value)})]
    close = re.sub(rf"\b{asked.value}\b", str(value), asked.close)
    return [*turns, result_turn(result, f"{close}\n#### {value}")]


def _shell_key(tool: Tool) -> str:
    """What takes its command, "" if it is no shell."""
    keys = bank()["shell_keys"]
    return next((key for key in tool["parameters"]["required"] if key in keys), "")


def _is_answer(tool: Tool) -> bool:
    name = tool["name"].lower().replace("_", "")
    return any(name == known.replace("_", "") for known in bank()["answers"])


def _tools(rng: random.Random, chars: float) -> list[Tool]:
    """Tools of about so many characters, of different names."""
    made = dict[str, Tool]()
    verbosity = min(rng.choice((0, 40, 200, 800, 2500)), int(chars / 4))
    most = rng.choice((1, 2, 4, 8, 16, 30, 40))
    while len(made) < most and (not made or chars > 0):
        is_shell = rng.random() < 0.1 and not any(map(_shell_key, made.values()))
        tool = (_shell if is_shell else _tool)(rng, verbosity)
        made[tool["name"]] = tool
        chars -= len(json.dumps(tool))
    return [*made.values()] if rng.random() > 0.08 else [*made.values(), _answer_tool(rng)]


def _tool(rng: random.Random, verbosity: int = 100) -> Tool:
    known = bank()
    properties = dict[str, Tool]()
    for _ in range(rng.randint(0, 6 if verbosity > 30 else 3)):
        key = invented_word(rng) if rng.random() < 0.2 else rng.choice(known["keys"])
        if rng.random() < 0.25:
            key = f"{key}_{rng.choice(known['nouns'])}"
        kind = rng.choice(TYPES)
        entry: Tool = {"type": kind}
        if kind == "array":
            entry["items"] = {"type": rng.choice(("string", "object"))}
        if kind == "string" and rng.random() < 0.12:
            entry["enum"] = list(dict.fromkeys(rng.choices(known["common"], k=rng.randint(2, 5))))
        if rng.random() < 0.7 and verbosity > 30:
            entry["description"] = prose(rng, rng.randint(10, 40 + verbosity // 8))
        properties[key] = entry
    required = [key for key in properties if rng.random() < 0.5][:4]
    parts = [rng.choice(known["verbs"])]
    if rng.random() < 0.6:
        parts.append(rng.choice(known["nouns"]))
    if rng.random() < 0.3:
        parts.insert(rng.randint(0, len(parts)), invented_word(rng))
    if rng.random() < 0.1:
        parts[:0] = ["mcp", "", invented_word(rng), ""]
    return _schema(rng, parts, verbosity, properties, required)


def _shell(rng: random.Random, verbosity: int = 100) -> Tool:
    known = bank()
    required = [rng.choice(known["shell_keys"])]
    keys = [*required, *rng.choices(known["options"], k=rng.choice((0, 0, 1, 3)))]
    if rng.random() < 0.4:
        keys.append(rng.choice(known["others"]))
        required += keys[-1:] * (rng.random() < 0.7)
    properties = {key: {"type": "string", "description": prose(rng, 60)} for key in keys}
    for key in known["options"]:
        if key in properties:
            properties[key]["type"] = rng.choice(("integer", "string", "boolean"))
    name = rng.choice(known["shells"]).split("_")
    if rng.random() < 0.15:
        name = [rng.choice(known["verbs"]), invented_word(rng)]
    return _schema(rng, name, verbosity, properties, required)


def _answer_tool(rng: random.Random) -> Tool:
    known = bank()
    key, kind = rng.choice(known["answer_keys"]), rng.choice(("string", "any"))
    properties = {key: {"type": kind, "description": prose(rng, 40)}}
    return _schema(rng, rng.choice(known["answers"]).split("_"), 60, properties, [key])


def _schema(
    rng: random.Random, name: list[str], verbosity: int, properties: Tool, required: list[str]
) -> Tool:
    schema: Tool = {"type": "object", "properties": properties, "required": required}
    if rng.random() < 0.3:
        schema = {"$schema": f"https://{rng.choice(bank()['common'])}/draft#"} | schema
    if rng.random() < 0.4:
        schema["additionalProperties"] = False
    about = prose(rng, rng.randint(10, 20 + verbosity))
    return {"name": _styled(rng, name), "description": about, "parameters": schema}


def _styled(rng: random.Random, parts: list[str]) -> str:
    style = rng.random()
    if style < 0.5:
        return "_".join(parts)
    first = parts[0].capitalize() if style < 0.75 else parts[0]
    if style < 0.9:
        return first + "".join(map(str.capitalize, parts[1:]))
    return rng.choice(("-", ".", "", "")).join(filter(None, parts))


def _instructions(rng: random.Random, chars: int, question: str) -> tuple[str, str]:
    """The system's text, and the user's with the question, both of about so many characters."""
    user = rng.choice(words.read("agents")["forms"]["asks"]).format(question)
    aside = int(min(chars * rng.choice((0, 0, 0.1, 0.4, 0.9)), 16000))
    before = int(aside * rng.choice((0, 0, 0.5, 1, 1)))
    mark = rng.choice(("\n", "\n\n", "<|im_end|>\n<|im_start|>user\n"))
    if before > 40:
        user = f"{_wrapped(rng, filler(rng, before))}{mark}{user}"
    if aside - before > 40:
        mark = rng.choice(("\n\n", "<|im_end|>\n<|im_start|>system\n"))
        user = f"{user}{mark}{_wrapped(rng, filler(rng, aside - before))}"
    rest = chars - aside
    told = filler(rng, rest) if rest > 40 else draw_system(rng) or ""
    if rest > 400 and rng.random() < 0.15:  # what is asked by others does not count
        told = f"{told}\n\nExample: {_plain(rng).user}\n\n{prose(rng, 200)}"
    if rest > 400 and rng.random() < 0.15:  # another block
        told = f"{told}<|im_end|>\n<|im_start|>system\n{prose(rng, 120)}"
    return told, user


def _wrapped(rng: random.Random, text: str) -> str:
    tag = rng.choice(bank()["tags"])
    return f"<{tag}>\n{text}\n</{tag}>" if rng.random() < 0.7 else text


def filler(rng: random.Random, chars: int) -> str:
    """Instructions of about so many characters: paragraphs, lists, code, tags."""
    made, length = list[str](), 0
    while length < chars:
        made.append(_block(rng, min(chars - length, rng.choice((80, 200, 500)))))
        length += len(made[-1]) + 2
    return rng.choice(("\n", "\n\n")).join(made)


def _block(rng: random.Random, chars: int) -> str:
    known, kind = bank(), rng.random()
    if kind < 0.55:
        return _wrapped(rng, prose(rng, chars)) if kind < 0.07 else prose(rng, chars)
    if kind < 0.8:
        mark = rng.choice(("- ", "* ", "1. ", "  - "))
        return "\n".join(mark + prose(rng, rng.randint(20, 120)) for _ in range(1 + chars // 90))
    if kind < 0.88:
        return "#" * rng.randint(1, 3) + " " + prose(rng, 25).rstrip(".")
    if kind < 0.98:
        lines = (" ".join(rng.choices(known["code"], k=4)) for _ in range(1 + chars // 60))
        if kind < 0.95:
            return "```\n" + "\n".join(lines) + "\n```"
        return f"{rng.choice(known['keys'])}: /" + "\n/".join(lines).replace(" ", "/")
    form = {"name": invented_word(rng), "arguments": {rng.choice(known["keys"]): prose(rng, 20)}}
    return f"{prose(rng, 40)} <tool_call>{json.dumps(form)}</tool_call>"


def prose(rng: random.Random, chars: int) -> str:
    """Sentences of random words."""
    made, common = list[str](), bank()["common"]
    while chars > 0:
        chosen = rng.choices(common, k=rng.randint(3, min(18, 3 + chars // 6)))
        if rng.random() < 0.2:
            odd = (invented_word(rng), str(rng.randint(0, 9999)), f"`{rng.choice(bank()['code'])}`")
            chosen[rng.randrange(len(chosen))] = rng.choice(odd)
        if rng.random() < 0.3:
            chosen[len(chosen) // 2] += ","
        made.append(sentence(" ".join(chosen)) + rng.choice((".", ".", ".", ".", ":", "!")))
        chars -= len(made[-1]) + 1
    return " ".join(made)


@cache
def bank() -> dict[str, list[str]]:
    """Words by kind."""
    return {name: text.split() for name, text in words.read("agents")["words"].items()}
