"""Short sums as newcomers word them, short JSON, and one call of a tool: chats of a grammar.

What is asked to judge the model (benchmarks/newcomers.toml) is never read here.
"""

import json
import random
import re
from functools import cache
from typing import Any, NamedTuple

from benchmarks.train import words
from benchmarks.train.arithmetic import Inexact, evaluate, worked
from benchmarks.train.chats import Chat, Turn, draw_system
from benchmarks.train.templates import sentence
from benchmarks.train.tools import call_turn, calls_text, result_turn, system_text

SHARES = {"sum": 0.72, "json": 0.16, "tool": 0.12}  # of the chats of this module
INVENTED_SHARE = 0.35  # of the names and things: they teach the model to copy
CARELESS_SHARE = 0.06  # of the questions: no capitals, no sign at the end
FILLED_SHARE = 0.1  # of the questions: a sentence that does not count
SPELLED_SHARE = 0.06  # of the questions: small numbers as words
ROLE_SHARE = 0.12  # of the people: "my aunt", "Ann's coach"
SMALL_SHARE = 0.55  # of the sums: numbers up to 40

_RULE = re.compile(r"<(\w+)>")
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_START = re.compile(r"(^|[.?!:] )([a-z])")


class Kind(NamedTuple):
    """One kind of sum: steps (label, left, op, right), ranges of its numbers, and its wordings."""

    steps: list[tuple[str, str, str, str]]
    ranges: dict[str, tuple[int, int]]
    tell: list[str]
    ask: list[str]
    say: str


class Sum(NamedTuple):
    """A question, the steps of its answer, its last sentence, and the number."""

    question: str
    work: list[str]
    say: str
    value: int


def newcomer_chat(rng: random.Random) -> Chat:
    """A chat of one sum, of short JSON, or of a tool's call."""
    (kind,) = rng.choices(list(SHARES), list(SHARES.values()))
    if kind == "tool":
        return _tool_chat(rng)
    turn = _json_turn(rng) if kind == "json" else sum_turn(rng)
    return Chat(draw_system(rng), [turn])


def sum_turn(rng: random.Random) -> Turn:
    """A sum with its worked answer."""
    drawn = draw_sum(rng)
    return Turn(drawn.question, "\n".join((*drawn.work, drawn.say, f"#### {drawn.value}")))


def draw_sum(rng: random.Random) -> Sum:
    """A sum of any kind, in a wording of the grammar."""
    while True:
        kind = rng.choice(_kinds())
        most = 40 if rng.random() < SMALL_SHARE else 1000
        numbers = {
            key: rng.randint(low, min(high, most)) for key, (low, high) in kind.ranges.items()
        }
        if kind.steps[0][1:3] == ("a", "/"):  # comes out even
            divisor = numbers.get("b", 2)
            numbers["a"] = divisor * max(2, numbers["a"] // divisor)
        slots, work = _slots(rng), []
        try:
            for label, left, op, right in kind.steps:
                first, second = (int(numbers.get(name, name)) for name in (left, right))
                numbers["u"] = evaluate(first, op, second)
                label = sentence(label.format_map(slots))
                work.append(f"{label}: {worked(first, op, second)}.")
        except Inexact:
            continue
        value = numbers["u"]
        if not 1 <= value <= 2000:
            continue
        spelled = rng.random() < SPELLED_SHARE
        slots |= {key: _written(number, spelled) for key, number in numbers.items()}
        slots["r"] = str(value)
        say = kind.say.format_map(slots)
        return Sum(_question(rng, kind, slots), work, sentence(say), value)


def _written(number: int, spelled: bool) -> str:
    names = bank()["spelled"]
    return names[number - 2] if spelled and 2 <= number < len(names) + 2 else str(number)


def _question(rng: random.Random, kind: Kind, slots: dict[str, str]) -> str:
    """Facts and question in one of the orders, with its capitals and signs."""
    tell = _expand(rng, rng.choice(kind.tell)).format_map(slots)
    ask = _expand(rng, rng.choice(kind.ask)).format_map(slots)
    end = "?" if re.match(r"(how|what|can|so)", ask) or "how many" in ask else "."
    order = rng.random()
    if order < 0.76:
        text = f"{tell}. {ask}{end}"
    elif order < 0.84:
        text = f"if {tell.replace('. ', ' and ')}, {ask}{end}"
    elif order < 0.91:
        text = f"{ask} if {tell.replace('. ', ' and ')}{end}"
    else:
        text = f"{ask}{end} {tell}."
    if rng.random() < FILLED_SHARE:
        text = _expand(rng, "<fill>").format_map(slots) + text
    text = _expand(rng, "<please>") + text
    text = re.sub(r" +", " ", re.sub(r" +([.,?;])", r"\1", text)).replace("..", ".").strip()
    if rng.random() < CARELESS_SHARE:
        return text.rstrip("?.")
    text = re.sub(r"\bi\b", "I", text)
    return _START.sub(lambda match: match[1] + match[2].upper(), text)


def _expand(rng: random.Random, text: str) -> str:
    """The text with its rules and choices made, its slots still open."""
    while match := _RULE.search(text):
        made = rng.choice(_rule(match[1]))
        text = text[: match.start()] + made + text[match.end() :]
    while _CHOICE.search(text):
        text = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), text, count=1)
    return text


def _slots(rng: random.Random) -> dict[str, str]:
    """Words for the slots of a wording."""
    slots, known = words.draw_slots(rng, invented=rng.random() < INVENTED_SHARE), bank()
    if rng.random() < 0.7:
        slots["N"], slots["M"], slots["K"] = rng.sample(known["names"], 3)
    role = rng.choice(_rule("role"))
    for slot in "NM":
        if rng.random() < ROLE_SHARE:
            slots[slot] = rng.choice(("the ", "my ", "a ", "our ", f"{slots[slot]}'s ")) + role
            role = rng.choice(_rule("role"))
    things = rng.sample(known["things"], 2)
    if rng.random() > INVENTED_SHARE:
        slots["X"] = things[0]
    group = rng.choice(_rule("group"))
    her = rng.random() < 0.5
    first, second = rng.sample(known["objects"], 2)
    kinds = rng.sample(known["kinds"], 2)
    people = rng.choice(_rule("we"))
    return slots | {
        "we": _expand(rng, people).format_map(slots | {"role": role, "group": group}),
        "I": "she" if her else "he", "him": "her" if her else "him", "his": "her" if her else "his",
        "Y": things[1], "T": first, "U": second, "A": kinds[0], "B": kinds[1],
        "role": role, "group": group,
    }  # fmt: skip


def _json_turn(rng: random.Random) -> Turn:
    """A sum whose answer is JSON, or facts that are written as JSON."""
    slots, known = _slots(rng), bank()
    kind = rng.random()
    if kind < 0.25:
        return _pairs_turn(rng, slots)
    if kind < 0.75:
        while " + ".join((drawn := draw_sum(rng)).work).count("=") > 1:
            pass  # one step only: what can be told without its steps
        key = rng.choice((*known["keys"], slots["X"], slots["T"]))
        told, made = drawn.question, {key: drawn.value}
        if rng.random() < 0.2:
            second, first = sorted(rng.randint(1, 99) for _ in range(2))
            op = rng.choice("+-")
            told, made = f"What is {first} {op} {second}?", {key: evaluate(first, op, second)}
    else:
        told, keys = rng.choice(words.read("sums")["others"]["fact_asks"]).split("|")
        number, city = rng.randint(1, 99), rng.choice(known["cities"])
        if rng.random() < INVENTED_SHARE:
            city = words.draw_slots(rng, invented=True)["N"]
        facts = {"name": slots["N"], "age": number, "count": number, "city": city}
        facts["item"] = slots["X"]
        told = told.format_map(slots | {"a": number, "T": city})
        chosen = keys.split()
        chosen = rng.sample(chosen, rng.randint(min(2, len(chosen)), len(chosen)))
        made = {key: facts[key] for key in chosen}
    form = {key: 0 if isinstance(value, int) else "..." for key, value in made.items()}
    if rng.random() < 0.4:
        form = {key: "number" if value == 0 else "text" for key, value in form.items()}
    named = [f'"{key}"' for key in made]
    listed = " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))
    many = "s" * (len(made) > 1)
    prefix = rng.choice(("", f"the key{many} ", f"the field{many} "))
    ask = rng.choice(words.read("sums")["others"]["json_asks"]).format(
        json.dumps(form), prefix + listed
    )
    text = f"{told} {ask}" if rng.random() < 0.8 else f"{ask} {told}"
    return Turn(text, json.dumps(made))


def _pairs_turn(rng: random.Random, slots: dict[str, str]) -> Turn:
    """What each key is, told one by one: any keys and values, to be copied."""
    known, pairs = bank(), dict[str, Any]()
    for _ in range(rng.randint(1, 3)):
        key = rng.choice((*known["keys"], *known["things"], *known["objects"]))
        if rng.random() < INVENTED_SHARE:
            key = words.draw_slots(rng, invented=True)["X"]
        number: Any = rng.randint(0, 999)
        pairs[key] = rng.choice((number, slots["N"], slots["X"], rng.choice(known["cities"])))
    told = [f'"{key}" is {value}' for key, value in pairs.items()]
    asks = words.read("sums")["others"]["pair_asks"]
    return Turn(rng.choice(asks).format(" and ".join(told)), json.dumps(pairs))


def _tool_chat(rng: random.Random) -> Chat:
    """A chat with one to three tools, a call of one, and often what it gave."""
    wanted, turns = request_turns(rng)
    others = (_draw_request(rng)[0] for _ in range(rng.choice((0, 0, 1, 2))))
    tools = list(({tool["name"]: tool for tool in others} | {wanted["name"]: wanted}).values())
    rng.shuffle(tools)
    system = system_text(tools)
    if told := draw_system(rng):
        system = f"{told}\n\n{system}"
    return Chat(system, turns, calls_text(tools))


def request_turns(rng: random.Random) -> tuple[dict[str, Any], list[Turn]]:
    """A tool, its call, and often what it gave."""
    wanted, ask, arguments = _draw_request(rng)
    turns = [call_turn(ask, wanted, arguments)]
    if rng.random() < 0.5:
        value = str(rng.randint(1, 999)) if rng.random() < 0.6 else _slots(rng)["N"]
        turns.append(result_turn(value, f"The answer is {value}."))
    return wanted, turns


def number_tool(rng: random.Random, op: str) -> tuple[dict[str, Any], tuple[str, str]]:
    """A function of two integers, and their names."""
    keys = rng.choice((("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")))
    names = words.read("sums")["ops"].get(op, ["divide quotient"])[0].split()
    name = rng.choice(names) + rng.choice(("", "", "_numbers", "_two"))
    about = f"{name.split('_')[0]} two {rng.choice(('numbers', 'integers'))}"
    return _described(rng, name, about, dict.fromkeys(keys, "integer")), keys


def _draw_request(rng: random.Random) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """A function as chats describe it, a request that needs it, and the call's arguments."""
    if rng.random() < 0.3:
        op = rng.choice(list(words.read("sums")["ops"]))
        tool, keys = number_tool(rng, op)
        second, first = sorted(rng.randint(1, 200) for _ in range(2))
        arguments: dict[str, Any] = dict(zip(keys, (first, second), strict=True))
        ask = rng.choice(words.read("sums")["ops"][op][1].split("|")).format(first, second)
        if op == "+" and rng.random() < 0.3:
            drawn = draw_sum(rng)
            found = re.findall(r"(\d+) \+ (\d+) = ", drawn.work[0])
            if len(drawn.work) == len(found) == 1:
                ask = drawn.question
                arguments = dict(zip(keys, map(int, found[0]), strict=True))
        return tool, ask, arguments
    known, slots, parts = bank(), _slots(rng), words.read("sums")["parts"]
    polite, others = words.read("sums")["others"]["polite"], words.read("sums")["keys"]
    verb, noun = rng.choice(known["verbs"]), rng.choice(known["nouns"])
    if rng.random() < 0.2:
        noun = words.draw_slots(rng, invented=True)["X"].rstrip("s")
    values: dict[str, Any] = {
        "city": rng.choice(known["cities"]), "name": slots["N"], "day": slots["D"],
        "count": rng.randint(2, 99), "origin": rng.choice(known["cities"]),
        "target": rng.choice(known["cities"]), "query": slots["X"],
    }  # fmt: skip
    chosen = rng.sample(list(parts), rng.choice((1, 1, 2)))
    if "origin" in chosen or "target" in chosen:
        chosen = ["origin", "target"]
    for key in chosen:
        if key in ("city", "origin", "target") and rng.random() < INVENTED_SHARE:
            values[key] = words.draw_slots(rng, invented=True)["N"]
    renamed = {
        key: key if rng.random() < 0.6 else rng.choice(others[key].split()) for key in chosen
    }
    phrases = " ".join(rng.choice(parts[key][1].split("|")).format(values[key]) for key in chosen)
    if rng.random() < 0.25:
        ask = f"What is the {noun} {phrases}?"
    else:
        ask = f"{rng.choice(polite)}{verb} {rng.choice(('the', 'a', 'my'))} {noun} {phrases}."
    types = {renamed[key]: parts[key][0] for key in chosen}
    about = f"{verb.capitalize()} {rng.choice(('the', 'a'))} {noun}{rng.choice(('', '.'))}"
    made = _described(rng, f"{verb}_{noun}", about, types)
    return made, sentence(ask), {renamed[key]: values[key] for key in chosen}


def _described(rng: random.Random, name: str, about: str, types: dict[str, str]) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    if rng.random() < 0.2:
        properties = {key: entry | {"title": key.title()} for key, entry in properties.items()}
    schema = {"type": "object", "properties": properties, "required": list(types)}
    described = {"name": name, "description": about} if rng.random() < 0.85 else {"name": name}
    return described | {"parameters": schema}


@cache
def _kinds() -> list[Kind]:
    made = []
    for entry in words.read("sums")["kind"]:
        steps = [
            (label, *formula.split()) for label, formula in (s.split(": ") for s in entry["steps"])
        ]
        bounds = {key: entry[key].split("..") for key in "abc" if key in entry}
        ranges = {key: (int(low), int(high)) for key, (low, high) in bounds.items()}
        made.append(Kind(steps, ranges, entry["tell"], entry["ask"], entry["say"]))
    return made


@cache
def bank() -> dict[str, list[str]]:
    """Words of each kind that fill the wordings."""
    return {name: text.split() for name, text in words.read("sums")["words"].items()}


def _rule(name: str) -> list[str]:
    return words.read("sums")["rules"][name].split("|")
