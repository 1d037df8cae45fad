"""Grade-school word problems with worked answers: what the model `tiny` learns and is judged on.

Needs the standard library only. A problem is a function of its seed; which split it belongs to is
a function of its question, so a held-out problem of a trained template never occurs in training.
"""

import hashlib
import random
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.train import stories, words
from benchmarks.train.arithmetic import Inexact, evaluate, expand

HELD_OUT_TEMPLATES = (
    "library_books", "parking_levels", "fruit_crates", "phone_photos", "machine_parts",
)  # fmt: skip
STORY = "story"  # the name of problems put together by stories.py; all of them are trained
STORY_SHARE = 0.25  # of the training problems
INVENTED_SHARE = 0.2  # of the training problems, with names and things that are no words
PRONOUN_SHARE = 0.4  # of all problems, that say "she" or "he" where the name comes again
MIN_PIECES, MAX_PIECES = 65, 130  # bounds `count_pieces` of an answer; keeps it in 60..150 tokens
MAX_NUMBER, MAX_ASKED = 9999, 999  # of a worked answer, of a question
HELD_OUT_SHARE = 32  # one question in this many is kept out of training
HELD_OUT_SEED = 1 << 40  # held-out problems draw from seeds above this, training from below

_PIECE = re.compile(r"\d| (?=\d)| ?[A-Za-z]+| ?[^\sA-Za-z\d]+ ?|\n")
_SENTENCE_NAME = re.compile(r"([.?] )\{N\}")
_LATER_NAME = re.compile(r"\b(does|did|must|Then|Later|After that|The next day|Now) \{N\}")
_CHOICE = re.compile(r"\[([^\]]*)\]")


@dataclass(frozen=True, slots=True)
class Problem:
    """One word problem; `answer` ends with the line `#### value`."""

    question: str
    answer: str
    value: int
    template: str


@dataclass(frozen=True, slots=True)
class Step:
    """`label: target = left op right`; left and right name numbers, or are numbers."""

    label: str
    target: str
    left: str
    op: str
    right: str


@dataclass(frozen=True, slots=True)
class Template:
    """One kind of problem, as read from templates.toml."""

    name: str
    draw: tuple[tuple[str, int, int], ...]
    lets: tuple[Step, ...]
    steps: tuple[Step, ...]
    close: str
    asks: tuple[str, ...]

    def solve(self, rng: random.Random) -> dict[str, int]:
        """Draws numbers and works every step; raises Inexact when this draw has no clean answer."""
        numbers = {name: rng.randint(low, high) for name, low, high in self.draw}
        for index, step in enumerate((*self.lets, *self.steps)):
            left, right = _operand(step.left, numbers), _operand(step.right, numbers)
            result = evaluate(left, step.op, right)
            if not 1 <= result <= (MAX_ASKED if index < len(self.lets) else MAX_NUMBER):
                raise Inexact(f"{self.name}: {result}")
            numbers[step.target] = result
        return numbers


def problem(rng: random.Random, names: tuple[str, ...], invented: bool = False) -> Problem:
    """A problem of one of the named templates, its answer 60 to 150 tokens long.

    `invented` fills it with made-up names and things, which teach the model to copy.
    """
    name = rng.choice(names)
    while True:
        template = _story(rng) if name == STORY else templates()[name]
        try:
            numbers = template.solve(rng)
        except Inexact:
            continue
        slots = words.draw_slots(rng, invented) | {key: str(n) for key, n in numbers.items()}
        answer = _work(template, numbers, slots)
        if MIN_PIECES <= count_pieces(answer) <= MAX_PIECES:
            question = _sentence(_wording(rng, template.asks).format_map(slots))
            return Problem(question, answer, numbers[template.steps[-1].target], template.name)


def training_problem(rng: random.Random) -> Problem:
    """A problem of a trained template whose question is not held out."""
    names = (STORY,) if rng.random() < STORY_SHARE else trained_templates()
    invented = rng.random() < INVENTED_SHARE
    while True:
        drawn = problem(rng, names, invented)
        if not is_held_out(drawn.question):
            return drawn


def held_out_problems(num: int, seed: int = 0, templates: str = "trained") -> list[Problem]:
    """Distinct problems that training never sees, the same ones for the same arguments.

    `templates` is "trained" (new problems of the templates learned) or "held_out" (problems of
    the templates kept out of training); anything else raises ValueError.
    """
    if templates not in ("trained", "held_out"):
        raise ValueError(f'templates must be "trained" or "held_out", not {templates!r}')
    names = trained_templates() if templates == "trained" else HELD_OUT_TEMPLATES
    rng = random.Random(HELD_OUT_SEED + seed)
    drawn: dict[str, Problem] = {}
    while len(drawn) < num:
        candidate = problem(rng, names)
        if templates == "held_out" or is_held_out(candidate.question):
            drawn[candidate.question] = candidate
    return list(drawn.values())


def is_held_out(question: str) -> bool:
    """Whether a question of a trained template belongs to the held-out split."""
    digest = hashlib.blake2b(question.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


def count_pieces(text: str) -> int:
    """Words, digits and signs of a text: close to, and mostly under, its token count."""
    return len(_PIECE.findall(text))


def parse_value(answer: str) -> int | None:
    """The number of an answer's final line `#### n`, or None when it has no such line."""
    match = re.search(r"^#### (\d+)\s*$", answer, re.MULTILINE)
    return int(match[1]) if match else None


@cache
def trained_templates() -> tuple[str, ...]:
    """Names of the templates that training uses, stories included."""
    return (*(name for name in templates() if name not in HELD_OUT_TEMPLATES), STORY)


@cache
def templates() -> dict[str, Template]:
    """Every fixed template by name."""
    raw = tomllib.loads(Path(__file__).with_name("templates.toml").read_text("utf-8"))
    return {name: _read_template(name, entry) for name, entry in raw.items()}


def _read_template(name: str, entry: dict[str, Any]) -> Template:
    ranges = re.findall(r"(\w)=(\d+)\.\.(\d+)", entry["draw"])
    return Template(
        name=name,
        draw=tuple((key, int(low), int(high)) for key, low, high in ranges),
        lets=tuple(_read_step("", text) for text in entry.get("lets", ())),
        steps=tuple(_read_step(*text.split(": ")) for text in entry["steps"]),
        close=entry["close"],
        asks=tuple(entry["asks"]),
    )


def _read_step(label: str, formula: str) -> Step:
    target, _, left, op, right = formula.split()
    return Step(label, target, left, op, right)


def _wording(rng: random.Random, asks: tuple[str, ...]) -> str:
    """One of the wordings with its choices made, its slots still open."""
    ask = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), rng.choice(asks))
    if rng.random() >= PRONOUN_SHARE or "{K}" in ask:  # a pronoun among three people is unclear
        return ask
    head, name, tail = ask.partition("{N}")
    tail = _LATER_NAME.sub(r"\1 {she}", _SENTENCE_NAME.sub(r"\1{She}", tail))
    return head + name + tail


def _story(rng: random.Random) -> Template:
    story = stories.compose(rng)
    total = f"{{{story.total}}} {{X}}"
    return Template(
        name=STORY,
        draw=tuple(story.draw),
        lets=(),
        steps=tuple(Step(*step) for step in story.steps),
        close=f"That is {total} each." if story.is_shared else f"There are {total}.",
        asks=(" ".join(story.text),),
    )


def _operand(text: str, numbers: dict[str, int]) -> int:
    return numbers[text] if text in numbers else int(text)


def _work(template: Template, numbers: dict[str, int], slots: dict[str, str]) -> str:
    lines: list[str] = []
    for step in template.steps:
        left, right = _operand(step.left, numbers), _operand(step.right, numbers)
        atoms = expand(left, step.op, right)
        plan = "" if len(atoms) == 1 else f"{left} {step.op} {right}. "
        label = _sentence(step.label.format_map(slots))
        lines.append(f"{label}: {plan}{', '.join(map(str, atoms))}.")
    lines.append(_sentence(template.close.format_map(slots)))
    lines.append(f"#### {numbers[template.steps[-1].target]}")
    return "\n".join(lines)


def _sentence(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]
