"""Stories: word problems put together from events, so that the model must read each sentence.

A story is a template made on the spot. It starts with a number of things, gains and loses some,
and may end with a fair share.
"""

import random
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

RANGES = {"loose": (8, 420), "groups": (2, 9), "size": (3, 60)}  # of drawn numbers


@dataclass(frozen=True, slots=True)
class Event:
    """Wordings of one kind of event, its steps, and the ranges of its numbers."""

    texts: tuple[str, ...]
    steps: tuple[str, ...]
    b: tuple[int, int]
    c: tuple[int, int] | None


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
        start = rng.choice(events("start"))
        story.add(start, rng.choice(start.texts))
        while len(story.steps) < num_steps:
            story.is_shared = len(story.steps) == num_steps - 1 and rng.random() < 0.4
            if story.is_shared:
                (event,) = events("share")
            else:
                event = rng.choice(events("middle"))
            text = rng.choice(_raw()["joins"]) + rng.choice(event.texts) + "."
            story.add(event, text if text[0] == "{" else text[0].upper() + text[1:])
        if len(story.steps) == num_steps:
            story.text.append(rng.choice(_raw()["share_asks" if story.is_shared else "asks"]))
            return story


@cache
def events(kind: str) -> tuple[Event, ...]:
    """The events of a kind: "start", "middle" or "share"."""
    return tuple(
        Event(tuple(e["texts"]), tuple(e.get("steps", ())), RANGES[e["b"]], RANGES.get(e.get("c")))
        for e in _raw()[kind]
    )


@cache
def _raw() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("stories.toml").read_text("utf-8"))
