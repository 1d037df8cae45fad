"""Grade-school word problems with worked answers: what the model `tiny` learns and is judged on.

Needs the standard library only. A problem is a function of its seed; which split it belongs to is
a function of its question, so a held-out problem of a trained template never occurs in training.
"""

import hashlib
import random
import re
from dataclasses import dataclass
from functools import cache

from benchmarks.train import stories, words
from benchmarks.train.arithmetic import Inexact
from benchmarks.train.stories import STORY
from benchmarks.train.templates import sentence, templates

HELD_OUT_TEMPLATES = (
    "library_books", "parking_levels", "fruit_crates", "phone_photos", "machine_parts",
)  # fmt: skip
STORY_SHARE = 0.25  # of the training problems
INVENTED_SHARE = 0.2  # of the training problems, with names and things that are no words
PRONOUN_SHARE = 0.4  # of all problems, that say "she" or "he" where the name comes again
MIN_PIECES, MAX_PIECES = 65, 130  # bounds `count_pieces` of an answer; keeps it in 60..150 tokens
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


def problem(rng: random.Random, names: tuple[str, ...], invented: bool = False) -> Problem:
    """A problem of one of the named templates, its answer 60 to 150 tokens long.

    `invented` fills it with made-up names and things, which teach the model to copy.
    """
    name = rng.choice(names)
    while True:
        template = stories.compose(rng) if name == STORY else templates()[name]
        try:
            numbers = template.solve(rng)
        except Inexact:
            continue
        slots = words.draw_slots(rng, invented) | {key: str(n) for key, n in numbers.items()}
        answer = template.answer(numbers, slots)
        if MIN_PIECES <= count_pieces(answer) <= MAX_PIECES:
            question = sentence(_wording(rng, template.asks).format_map(slots))
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


def _wording(rng: random.Random, asks: tuple[str, ...]) -> str:
    """One of the wordings with its choices made, its slots still open."""
    ask = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), rng.choice(asks))
    if rng.random() >= PRONOUN_SHARE or "{K}" in ask:  # a pronoun among three people is unclear
        return ask
    head, name, tail = ask.partition("{N}")
    tail = _LATER_NAME.sub(r"\1 {she}", _SENTENCE_NAME.sub(r"\1{She}", tail))
    return head + name + tail
