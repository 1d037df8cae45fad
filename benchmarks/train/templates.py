"""Templates of word problems: numbers to draw, steps that are worked with them, and wordings."""

import random
import re
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from benchmarks.train.arithmetic import Inexact, evaluate, worked
from benchmarks.train.words import read

MAX_NUMBER, MAX_ASKED = 9999, 999  # of a worked answer, of a question


class Step(NamedTuple):
    """`label: target = left op right`; left and right name numbers, or are numbers."""

    label: str
    target: str
    left: str
    op: str
    right: str

    def operands(self, numbers: dict[str, int]) -> tuple[int, str, int]:
        """The operation with its numbers."""
        left, right = (
            numbers[text] if text in numbers else int(text) for text in (self.left, self.right)
        )
        return left, self.op, right


@dataclass(frozen=True, slots=True)
class Template:
    """One kind of problem, as read from templates.toml or put together by stories.py."""

    name: str
    draw: tuple[tuple[str, int, int], ...]
    steps: tuple[Step, ...]
    close: str
    asks: tuple[str, ...]
    lets: tuple[Step, ...] = ()

    def solve(self, rng: random.Random) -> dict[str, int]:
        """Draws numbers and works every step; raises Inexact when this draw has no clean answer."""
        numbers = {name: rng.randint(low, high) for name, low, high in self.draw}
        for index, step in enumerate((*self.lets, *self.steps)):
            result = evaluate(*step.operands(numbers))
            if not 1 <= result <= (MAX_ASKED if index < len(self.lets) else MAX_NUMBER):
                raise Inexact(f"{self.name}: {result}")
            numbers[step.target] = result
        return numbers

    def answer(self, numbers: dict[str, int], slots: dict[str, str]) -> str:
        """The worked answer; its last line is `#### value`."""
        lines = [
            f"{sentence(step.label.format_map(slots))}: {worked(*step.operands(numbers))}."
            for step in self.steps
        ]
        lines.append(sentence(self.close.format_map(slots)))
        return "\n".join((*lines, f"#### {numbers[self.steps[-1].target]}"))


def sentence(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


@cache
def templates() -> dict[str, Template]:
    """Every fixed template by name."""
    return {
        name: Template(
            name=name,
            draw=tuple(
                (key, int(low), int(high))
                for key, low, high in re.findall(r"(\w)=(\d+)\.\.(\d+)", entry["draw"])
            ),
            lets=tuple(_step("", text) for text in entry.get("lets", ())),
            steps=tuple(_step(*text.split(": ")) for text in entry["steps"]),
            close=entry["close"],
            asks=tuple(entry["asks"]),
        )
        for name, entry in read("templates").items()
    }


def _step(label: str, formula: str) -> Step:
    target, _, left, op, right = formula.split()
    return Step(label, target, left, op, right)
