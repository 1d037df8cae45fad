"""Stories: word problems put together from events, so that the model must read each sentence.

A story is a template made on the spot. It starts with a number of things, gains and loses some,
and may end with a fair share.
"""

import random
from typing import Any

from benchmarks.train.templates import Step, Template, sentence
from benchmarks.train.words import read

STORY = "story"  # the name of all of them
RANGES = {"loose": (8, 420), "groups": (2, 9), "size": (3, 60)}  # of drawn numbers


class Story:
    """A story as it grows: its text, drawn numbers and steps."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.draw: list[tuple[str, int, int]] = []
        self.steps: list[Step] = []
        self.total = ""  # the name of the number of things
        self.is_shared = False

    def add(self, event: dict[str, Any], text: str) -> None:
        """Appends one event of stories.toml; its numbers get names of their own."""
        index = len(self.text)
        names = {"b": f"b{index}", "c": f"c{index}", "t": self.total}
        for letter in "bc":
            text = text.replace(f"{{{letter}}}", f"{{{names[letter]}}}")
            if letter in event:
                self.draw.append((names[letter], *RANGES[event[letter]]))
        self.text.append(text)
        self.total = names["b"]
        for step in event.get("steps", ()):
            label, formula = step.split(": ")
            left, op, right = formula.split()
            label = label.replace("{c}", f"{{{names['c']}}}")
            target = f"r{len(self.steps)}"
            self.steps.append(Step(label, target, names[left], op, names[right]))
            names["u"] = self.total = target


def compose(rng: random.Random) -> Template:
    """A story of two to four steps."""
    num_steps, told = rng.randint(2, 4), read("stories")
    while True:
        story = Story()
        start = rng.choice(told["start"])
        story.add(start, rng.choice(start["texts"]))
        while len(story.steps) < num_steps:
            story.is_shared = len(story.steps) == num_steps - 1 and rng.random() < 0.4
            event = told["share"][0] if story.is_shared else rng.choice(told["middle"])
            text = rng.choice(told["joins"]) + rng.choice(event["texts"]) + "."
            story.add(event, text if text[0] == "{" else sentence(text))
        if len(story.steps) == num_steps:
            ask = rng.choice(told["share_asks" if story.is_shared else "asks"])
            total = f"{{{story.total}}} {{X}}"
            close = f"That is {total} each." if story.is_shared else f"There are {total}."
            steps, draw = tuple(story.steps), tuple(story.draw)
            return Template(STORY, draw, steps, close, (" ".join((*story.text, ask)),))
