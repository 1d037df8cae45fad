"""The names and things that fill a word problem."""

from __future__ import annotations

import random


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


HER_NAMES = _split(
    "Mia Anna Clara Emma Grace Ivy Kate Maya Olga Rosa Tina Vera Zoe Bella Dora Fay Hana Jane Lena "
    "Nina"
)
HIS_NAMES = _split(
    "Leo Ben Dan Finn Hugo Jack Liam Noah Paul Sam Omar Will Amir Carl Eli Gus Ian Karl Max Oscar"
)
NAMES = HER_NAMES + HIS_NAMES
THINGS = _split(
    "apples pears pencils pens stickers marbles cards coins books buttons beads shells stamps "
    "stones candles cookies cups toys lemons oranges plums nuts balloons ribbons notebooks "
    "badges bottles flowers keys rings"
)
CONTAINERS = (
    ("box", "boxes"),
    ("bag", "bags"),
    ("basket", "baskets"),
    ("pack", "packs"),
    ("jar", "jars"),
    ("crate", "crates"),
    ("tin", "tins"),
)
PLACES = ("shop", "market", "store", "zoo", "museum", "park", "library", "farm", "pool", "station")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


_ONSETS = _split("b c d f g h j k l m n p r s t v w z br ch dr fl gr pl sh st th tr")
_VOWELS = _split("a e i o u a e i o u ai ee oo ou")
_CODAS = ["", "", "", "l", "n", "r", "s", "t", "ck", "nd", "m", "x", "p"]


def draw_slots(rng: random.Random, invented: bool = False) -> dict[str, str]:
    """Words for the slots of a template: names, things, a container, a place and two days.

    The pronouns are those of the first name, N.
    `invented` makes up the names and things.
    """
    if invented:
        first, second, third = (_invent(rng).capitalize() for _ in range(3))
        thing = _invent(rng) + "s"
    else:
        first, second, third = rng.sample(NAMES, 3)
        thing = rng.choice(THINGS)
    pronoun = rng.choice(("she", "he")) if invented else "she" if first in HER_NAMES else "he"
    container, containers = rng.choice(CONTAINERS)
    day = rng.randrange(len(DAYS))
    return {
        "N": first,
        "M": second,
        "K": third,
        "she": pronoun,
        "She": pronoun.capitalize(),
        "X": thing,
        "C": containers,
        "C1": container,
        "P": rng.choice(PLACES),
        "D": DAYS[day],
        "E": DAYS[(day + 1) % len(DAYS)],
    }


def _invent(rng: random.Random) -> str:
    """A word that sounds like one and is none."""
    syllables = rng.choice((1, 2, 2))
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables)
    )
