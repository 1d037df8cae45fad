"""How long prompts and answers are, in tokens.

A length is one of

    512                  always
    128-1024             each whole number from 128 to 1024 as likely
    normal(512,100)      mean, standard deviation; rounded, at least 1
    lognormal(512,0.5)   median, standard deviation of the logarithm; rounded, at least 1
    64+lognormal(448,1)  the sum of two

and a pair of lengths is `IN,OUT`.
"""

import math
import re
from collections.abc import Callable

from numpy.random import Generator

Length = Callable[[Generator], int]
Pair = Callable[[Generator], tuple[int, int]]
OUTSIDE = r"(?![^(]*\))"  # of brackets


def length(text: str, part: str) -> Length:
    """A drawer of lengths, at least 1; raises ValueError, which names `part`."""
    first, plus, second = text.partition("+")
    if plus:
        one, other = length(first, part), length(second, part)
        return lambda rng: one(rng) + other(rng)
    if "(" in text:
        law = re.fullmatch(r"(normal|lognormal)\(([^,]*),([^,]*)\)", text)
        if law is None:
            raise ValueError(f"{part}: {text!r} is not normal(MEAN,SD) or lognormal(MEDIAN,SIGMA)")
        middle = number(law[2], f"{part}: {law[1]}", low=1)
        spread = number(law[3], f"{part}: {law[1]}")
        if law[1] == "normal":
            return lambda rng: max(1, round(rng.normal(middle, spread)))
        return lambda rng: max(1, round(rng.lognormal(math.log(middle), spread)))
    low_text, dash, high_text = text.partition("-")
    low = whole(low_text, part, low=1)
    if not dash:
        return lambda _: low
    high = whole(high_text, part, low=low)
    return lambda rng: int(rng.integers(low, high + 1))


def pair(text: str, what: str) -> Pair:
    """A drawer of (prompt, answer) lengths; raises ValueError, which names `what` and the part."""
    parts = fields(text, ("IN", "OUT"), what)
    num_in, num_out = (length(parts[name], f"{what}: {name}") for name in parts)
    return lambda rng: (num_in(rng), num_out(rng))


def clip(num_in: int, num_out: int, room: int | None) -> tuple[int, int]:
    """Both lengths made to fit `room` tokens (None: no bound); answers keep at most half of it."""
    if room is None or num_in + num_out <= room:
        return num_in, num_out
    num_out = min(num_out, max(1, room // 2))
    return max(1, min(num_in, room - num_out)), num_out


def number(text: str, part: str, *, low: float = 0.0, above: bool = False) -> float:
    """The finite number `text`, at least `low`, or `above` it; ValueError names `part`."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{part}: {text!r} is no number") from None
    if not math.isfinite(value) or value < low or (above and value == low):
        raise ValueError(f"{part}: must be {'above' if above else 'at least'} {low:g}, not {text}")
    return value


def whole(text: str, part: str, *, low: int = 0) -> int:
    """The whole number `text`, at least `low`; raises ValueError, which names `part`."""
    value = number(text, part, low=low)
    if value % 1:
        raise ValueError(f"{part}: {text!r} is no whole number")
    return int(value)


def fields(text: str, names: tuple[str, ...], what: str) -> dict[str, str]:
    """The pieces of `a,b,...` by name; raises ValueError, which names `what`."""
    pieces = [piece.strip() for piece in re.split("," + OUTSIDE, text)]
    if len(pieces) != len(names) or not all(pieces):
        raise ValueError(f"{what}: the form is {what}:{','.join(names)}, not {what}:{text}")
    return dict(zip(names, pieces, strict=True))
