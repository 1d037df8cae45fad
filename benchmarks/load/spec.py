"""How textual specs are read: pieces by commas outside brackets, numbers with a named part."""

from __future__ import annotations

import math


def split(text: str, separator: str) -> list[str]:
    """`text` in pieces at each `separator` outside of round brackets, without outer spaces."""
    pieces, depth, begin = [], 0, 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == separator and depth == 0:
            pieces.append(text[begin:index].strip())
            begin = index + 1
    return [*pieces, text[begin:].strip()]


def number(text: str, part: str, *, low: float = 0.0, above: bool = False) -> float:
    """The finite number `text`, at least `low` (more than it, if `above`).

    Raises:
        ValueError: it is no such number; the message names `part`.
    """
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{part}: {text!r} is no number") from None
    if not math.isfinite(value) or value < low or (above and value == low):
        raise ValueError(f"{part}: must be {'above' if above else 'at least'} {low:g}, not {text}")
    return value


def whole(text: str, part: str, *, low: int = 0) -> int:
    """The whole number `text`, at least `low`; raises ValueError, which names `part`."""
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{part}: {text!r} is no whole number") from None
    if value < low:
        raise ValueError(f"{part}: must be at least {low}, not {text}")
    return value


def fields(text: str, names: tuple[str, ...], what: str) -> dict[str, str]:
    """The pieces of `a,b,...` by name.

    Raises:
        ValueError: there are more or fewer; the message names `what`.
    """
    pieces = split(text, ",")
    if len(pieces) != len(names) or not all(pieces):
        raise ValueError(f"{what}: the form is {what}:{','.join(names)}, not {what}:{text}")
    return dict(zip(names, pieces, strict=True))
