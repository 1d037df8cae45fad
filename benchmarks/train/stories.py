"""Stories: word problems put together from events, so that the model must read each sentence.

A story is a template made on the spot. It starts with a number of things, gains and loses some,
and may end with a fair share.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

LOOSE = (8, 420)  # things gained or lost one by one
GROUPS = (2, 9)
GROUP_SIZE = (3, 60)


@dataclass(frozen=True, slots=True)
class Event:
    """Wordings of one kind of event, and its steps as "label: left op right".

    In a step `t` is the number so far, `b` and `c` the event's own numbers, and `u` the result of
    the step before; the last step gives the next `t`.
    """

    texts: tuple[str, ...]
    steps: tuple[str, ...] = ()
    b: tuple[int, int] = LOOSE
    c: tuple[int, int] | None = None


STARTS = (
    Event(
        (
            "{N} has {b} {X}.",
            "There are {b} {X} in a {C1}.",
            "At first {N} owns {b} {X}.",
            "A {C1} holds {b} {X}.",
            "{N} brings {b} {X} to school.",
            "{N} counts {b} {X} at home.",
        )
    ),
    Event(
        (
            "{N} has {b} {C} with {c} {X} each.",
            "There are {c} {X} in each of {b} {C}.",
            "{N} fills {b} {C} with {c} {X} each.",
            "Each of the {b} {C} of {N} holds {c} {X}.",
            "{N} owns {b} {C} of {c} {X}.",
        ),
        ("In the {C}: b * c",),
        GROUPS,
        GROUP_SIZE,
    ),
    Event(
        (
            "{N} makes {b} {X} each day for {c} days.",
            "For {c} days {N} finds {b} {X} a day.",
            "{N} collects {b} {X} every day. After {c} days {N} stops.",
            "Each day {N} gets {b} {X}, and this goes on for {c} days.",
        ),
        ("In {c} days: b * c",),
        GROUP_SIZE,
        GROUPS,
    ),
    Event(
        (
            "{N} has {b} {X} and {M} has {c} {X}. {N} takes all of them.",
            "{N} picks {b} {X} in the morning and {c} {X} in the evening.",
            "{N} keeps {b} {X} at home and {c} {X} at school.",
            "{N} finds {b} {X} on {D} and {c} on {E}.",
        ),
        ("In all: b + c",),
        LOOSE,
        LOOSE,
    ),
)
MIDDLES = (
    Event(
        (
            "{N} finds {b} {X}",
            "{M} gives {N} {b} {X}",
            "{N} gets {b} more {X} from {M}",
            "{N} wins {b} {X} in a game",
            "{N} buys {b} new {X}",
            "{N} picks another {b} {X}",
            "{b} more {X} come in",
        ),
        ("In all: t + b",),
    ),
    Event(
        (
            "{N} buys {b} {C} of {c} {X}",
            "{M} brings {N} {b} {C} with {c} {X} each",
            "{N} gets {c} {X} from each of {b} friends",
            "{N} adds {b} rows of {c} {X}",
        ),
        ("Added: b * c", "In all: t + u"),
        GROUPS,
        GROUP_SIZE,
    ),
    Event(
        (
            "{N} gives {b} {X} to {M}",
            "{N} loses {b} {X}",
            "{N} sells {b} of the {X}",
            "{N} throws {b} {X} away",
            "{M} takes {b} {X}",
            "{b} of the {X} break",
            "{N} uses {b} {X}",
            "{b} {X} are sold",
        ),
        ("Left: t - b",),
    ),
    Event(
        (
            "{N} sells {b} {C} of {c} {X}",
            "{N} gives {c} {X} to each of {b} friends",
            "{N} uses {b} {X} a day for {c} days",
            "{b} kids take {c} {X} each",
        ),
        ("Gone: b * c", "Left: t - u"),
        GROUPS,
        GROUP_SIZE,
    ),
    Event(
        (
            "{N} works on until there are {b} times as many {X}",
            "the number of {X} grows to {b} times as many",
        ),
        ("Now: t * b",),
        GROUPS,
    ),
)
SHARE = Event(
    (
        "{N} shares them equally among {b} friends",
        "the {X} are put into {b} {C}, the same number in each",
        "{b} people split the {X} equally",
    ),
    ("Each: t / b",),
    GROUPS,
)
JOINS = ("", "Then ", "Later ", "After that ", "The next day ", "Now ")
ASKS = (
    "How many {X} are there now?",
    "How many {X} are left in the end?",
    "Find the number of {X}.",
    "How many {X} is that in all?",
)
SHARE_ASKS = ("How many {X} is that for each?", "How many {X} are in each part?")


@dataclass(slots=True)
class Story:
    """A story as it grows: its text, drawn numbers and steps (label, target, left, op, right)."""

    text: list[str] = field(default_factory=list)
    draw: list[tuple[str, int, int]] = field(default_factory=list)
    steps: list[tuple[str, str, str, str, str]] = field(default_factory=list)
    total: str = ""
    is_shared: bool = False

    def add(self, event: Event, text: str) -> None:
        """Appends one event; its numbers get names of their own."""
        index = len(self.text)
        names = {"b": f"b{index}", "c": f"c{index}", "t": self.total}
        for letter, bounds in (("b", event.b), ("c", event.c)):
            text = text.replace(f"{{{letter}}}", f"{{{names[letter]}}}")
            if bounds is not None:
                self.draw.append((names[letter], *bounds))
        self.text.append(text)
        self.total = names["b"]
        for step in event.steps:
            label, formula = step.split(": ")
            left, op, right = formula.split()
            label = label.replace("{c}", f"{{{names['c']}}}")
            target = f"r{len(self.steps)}"
            self.steps.append((label, target, names[left], op, names[right]))
            names["u"] = self.total = target


def compose(rng: random.Random) -> Story:
    """A story of two to four steps."""
    num_steps = rng.randint(2, 4)
    while True:
        story = Story()
        start = rng.choice(STARTS)
        story.add(start, rng.choice(start.texts))
        while len(story.steps) < num_steps:
            story.is_shared = len(story.steps) == num_steps - 1 and rng.random() < 0.4
            event = SHARE if story.is_shared else rng.choice(MIDDLES)
            text = rng.choice(JOINS) + rng.choice(event.texts) + "."
            story.add(event, text if text[0] == "{" else text[0].upper() + text[1:])
        if len(story.steps) == num_steps:
            story.text.append(rng.choice(SHARE_ASKS if story.is_shared else ASKS))
            return story
