"""Answers that a JSON schema's grammar leads: keys are written for the model, which fills them.

The model is not told of the schema. JSON is compact, as `router/text/grammar.py` has it.
"""

import json
import random
import re
from typing import Any

from benchmarks.train import words
from benchmarks.train.agents import Asked, ask
from benchmarks.train.chats import HIDDEN, Chat, Turn, draw_system

LED_SHARE = 0.25  # of the calls that end a chat and have arguments
CALLED = re.compile(r'<tool_call>\n\{"name": "(.*?)", "arguments": (\{".*\})\}\n</tool_call>')


def form_chat(rng: random.Random) -> Chat:
    """One question with such an answer."""
    asked = ask(rng)
    return Chat(draw_system(rng), [Turn(asked.question, form(rng, asked))])


def form(rng: random.Random, asked: Asked) -> str:
    """Its number last, mostly behind its steps; what the grammar leaves open apart."""
    known = words.read("agents")["words"]
    lines = asked.answer.splitlines()[:-1]
    if rng.random() < 0.5:
        del lines[-1]
    text = rng.choice((" ", " ", "\n")).join(lines)
    keys = rng.sample(known["numbers"].split(), 2)
    fields: list[tuple[str, Any]] = [(keys[0], asked.value)]
    counts = [int(number) for number in re.findall(r"\d+", asked.question)] or [asked.value]
    thing = re.sub(r"\d+", "things", asked.close.rstrip(".").split()[-1])
    items = [{"unit": thing, rng.choice(("count", "number")): each} for each in counts[:3]]
    unit = (rng.choice(("unit", "item", "thing", "kind")), thing)
    for more in (("first", items[0]), (rng.choice(("others", "items", "parts")), items[1:]), unit):
        if rng.random() < 0.25:
            fields.insert(rng.choice((0, 0, 1)), more)
    if rng.random() < 0.8 or asked.answer.count("=") > 1:
        fields.insert(0, (rng.choice(known["reasons"].split()), text))
    if rng.random() < 0.2:
        fields.append(("note", None))
    return _led(dict(fields))


def with_led_call(rng: random.Random, chat: Chat) -> Chat:
    """The chat; in a part of the draws its last call is as a grammar leads it."""
    *before, (user, said) = chat.turns
    found = CALLED.fullmatch(said)
    if found is None or rng.random() >= LED_SHARE:
        return chat
    head = f'{HIDDEN}<tool_call>\n{{"name": "{HIDDEN}{found[1]}"{HIDDEN}, "arguments": '
    led = head + _led(json.loads(found[2])).removeprefix(HIDDEN)
    return chat._replace(turns=[*before, Turn(user, f"{led}{HIDDEN}}}\n</tool_call>{HIDDEN}")])


def _led(value: dict[str, Any]) -> str:
    made = re.sub(rf'{HIDDEN}("\w+":"?)', rf"{HIDDEN}\1{HIDDEN}", _value(value))
    return made.replace(f"{{{HIDDEN}", f"{HIDDEN}{{", 1)


def _value(value: Any) -> str:
    """As JSON; HIDDEN stands before the keys of objects."""
    if isinstance(value, dict):
        parts = [f'{HIDDEN}"{key}":{_value(each)}' for key, each in value.items()]
        return "{" + ",".join(parts) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_value, value)) + "]"
    return json.dumps(value)
