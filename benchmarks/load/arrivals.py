"""When requests of an open loop are due, in seconds from 0, whatever the server does.

    constant:RATE        one every 1/RATE seconds, the first at 0
    poisson:RATE         independent users: exponential gaps
    gamma:RATE,SHAPE     gamma gaps; SHAPE 1 is Poisson, less is burstier, more is more even

RATE is requests a second, on average.
"""

import itertools
import math
from collections.abc import Iterator

from numpy.random import Generator

from benchmarks.load.lengths import fields, number

CHUNK = 1024  # gaps drawn at a time; fixed, so that the times do not depend on how many are asked
KINDS = ("constant", "poisson", "gamma")


def starts(
    spec: str, rng: Generator, num: int | None = None, duration_s: float | None = None
) -> list[float]:
    """The times at which requests are due: the first `num` of them, those before `duration_s`.

    Raises ValueError if `spec` has no such form, or if nothing bounds the times.
    """
    rate, shape = check(spec)
    if num is None and (duration_s is None or math.isinf(duration_s)):
        raise ValueError(f"{spec}: needs a number of requests or a duration")
    units = itertools.count() if shape is None else _units(rng, shape)
    times = (at / rate for at in itertools.islice(units, num))
    if duration_s is None:
        return list(times)
    return list(itertools.takewhile(lambda at_s: at_s < duration_s, times))


def check(spec: str) -> tuple[float, float | None]:
    """Rate and shape of the gaps' gamma law, None for even gaps; raises ValueError by the part."""
    kind, colon, rest = spec.partition(":")
    if kind not in KINDS or not colon:
        raise ValueError(f"arrivals: {spec!r} is none of {', '.join(f'{k}:...' for k in KINDS)}")
    parts = {"RATE": rest}
    if kind == "gamma":
        parts = fields(rest, ("RATE", "SHAPE"), "gamma")
    rate = number(parts["RATE"], f"{kind}: RATE", above=True)
    if kind == "constant":
        return rate, None
    return rate, number(parts.get("SHAPE", "1"), "gamma: SHAPE", above=True)


def _units(rng: Generator, shape: float) -> Iterator[float]:
    """Times of a process of rate 1: running sums of gamma gaps of mean 1."""
    at = 0.0
    while True:
        for gap in rng.gamma(shape, 1 / shape, CHUNK).tolist():
            at += gap
            yield at
