"""The names and things that fill a word problem."""

import random
import tomllib
from functools import cache
from pathlib import Path
from typing import Any


@cache
def read(name: str) -> dict[str, Any]:
    """Texts of training, NAME.toml beside this file."""
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text("utf-8"))


_RAW = read("words")
HER_NAMES = _RAW["her_names"]
NAMES = HER_NAMES + _RAW["his_names"]


def draw_slots(rng: random.Random, invented: bool = False) -> dict[str, str]:
    """Words for the slots of a template: names, things, a container, a place and two days.

    The pronouns are those of the first name, N. `invented` makes up the names and things.
    """
    if invented:
        first, second, third = (invented_word(rng).capitalize() for _ in range(3))
        thing = invented_word(rng) + "s"
    else:
        first, second, third = rng.sample(NAMES, 3)
        thing = rng.choice(_RAW["things"])
    pronoun = rng.choice(("she", "he")) if invented else "she" if first in HER_NAMES else "he"
    container, containers = rng.choice(_RAW["containers"])
    days = _RAW["days"]
    day = rng.randrange(len(days))
    return {
        "N": first, "M": second, "K": third, "she": pronoun, "She": pronoun.capitalize(),
        "X": thing, "C": containers, "C1": container, "P": rng.choice(_RAW["places"]),
        "D": days[day], "E": days[(day + 1) % len(days)],
    }  # fmt: skip


def invented_word(rng: random.Random) -> str:
    """A word that sounds like one and is none."""
    kinds = [_RAW[name] for name in ("onsets", "vowels", "codas")]
    return "".join(rng.choice(kind) for _ in range(rng.choice((1, 2, 2))) for kind in kinds)
