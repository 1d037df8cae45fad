"""When requests of an open loop are due, in seconds from 0, whatever the server does.

    constant:RATE             one every 1/RATE seconds, the first at 0
    poisson:RATE              independent users: exponential gaps
    gamma:RATE,SHAPE          gamma gaps; SHAPE 1 is Poisson, less is burstier, more is more even
    bursts:RATE,SIZE          SIZE at once; exponential gaps between bursts of mean SIZE/RATE
    ramp:FROM-TO,SECONDS      Poisson whose rate goes from FROM to TO, then stays at TO
    steps:R1,R2,...@SECONDS   Poisson at each rate for SECONDS, then stays at the last

RATE is requests a second, on average. The last two come from a Poisson process of rate 1: its
k-th event is moved to the time at which the expected number of requests reaches it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from numpy.random import Generator

from benchmarks.load import spec as read

CHUNK = 1024  # gaps drawn at a time; fixed, so that the times do not depend on how many are asked

Times = Callable[[Generator], Iterator[float]]


def starts(
    spec: str, rng: Generator, num: int | None = None, duration_s: float | None = None
) -> list[float]:
    """The times at which requests are due: the first `num` of them, those before `duration_s`.

    Raises:
        ValueError: `spec` has no such form, or nothing bounds the times.
    """
    times, is_endless = _process(spec)
    if num is None and (duration_s is None or math.isinf(duration_s)):
        raise ValueError(f"{spec}: needs a number of requests or a duration")
    if not is_endless and duration_s is None:
        raise ValueError(f"{spec}: ends at rate 0, so it needs a duration")
    found: list[float] = []
    for at_s in times(rng):
        if duration_s is not None and at_s >= duration_s:
            break
        if num is not None and len(found) >= num:
            break
        found.append(at_s)
    return found


def check(spec: str) -> None:
    """Raises ValueError, which names the part, if `spec` has no form of the above."""
    _process(spec)


def _process(spec: str) -> tuple[Times, bool]:
    """The times of `spec`, and whether they go on for ever."""
    kind, colon, rest = spec.partition(":")
    if kind not in _KINDS or not colon:
        raise ValueError(f"arrivals: {spec!r} is none of {', '.join(f'{k}:...' for k in _KINDS)}")
    return _KINDS[kind](rest)


def _constant(rest: str) -> tuple[Times, bool]:
    rate = read.number(rest, "constant: RATE", above=True)

    def times(_: Generator) -> Iterator[float]:
        index = 0
        while True:
            yield index / rate
            index += 1

    return times, True


def _poisson(rest: str) -> tuple[Times, bool]:
    rate = read.number(rest, "poisson: RATE", above=True)
    return lambda rng: (at / rate for at in _units(rng)), True


def _gamma(rest: str) -> tuple[Times, bool]:
    parts = read.fields(rest, ("RATE", "SHAPE"), (), "gamma")
    rate = read.number(parts["RATE"], "gamma: RATE", above=True)
    shape = read.number(parts["SHAPE"], "gamma: SHAPE", above=True)
    return lambda rng: (at / rate for at in _units(rng, shape)), True


def _bursts(rest: str) -> tuple[Times, bool]:
    parts = read.fields(rest, ("RATE", "SIZE"), (), "bursts")
    rate = read.number(parts["RATE"], "bursts: RATE", above=True)
    size = read.whole(parts["SIZE"], "bursts: SIZE", low=1)
    return lambda rng: (at * size / rate for at in _units(rng) for _ in range(size)), True


def _ramp(rest: str) -> tuple[Times, bool]:
    parts = read.fields(rest, ("FROM-TO", "SECONDS"), (), "ramp")
    begin, dash, end = parts["FROM-TO"].partition("-")
    if not dash:
        raise ValueError(f"ramp: FROM-TO is two rates and a dash, not {parts['FROM-TO']!r}")
    first = read.number(begin, "ramp: FROM")
    last = read.number(end, "ramp: TO")
    length_s = read.number(parts["SECONDS"], "ramp: SECONDS", above=True)
    if first == last == 0:
        raise ValueError("ramp: FROM and TO are both 0")
    slope = (last - first) / length_s
    total = (first + last) / 2 * length_s  # requests expected by the end of the ramp

    def inverse(expected: float) -> float:
        if expected >= total:
            return length_s + (expected - total) / last if last else math.inf
        # first * t + slope / 2 * t**2 = expected, in the form without cancellation
        root = math.sqrt(max(first * first + 2 * slope * expected, 0.0))
        return min(2 * expected / (first + root), length_s) if expected else 0.0

    return lambda rng: _until_inf(inverse(at) for at in _units(rng)), last > 0


def _steps(rest: str) -> tuple[Times, bool]:
    head, at, tail = rest.partition("@")
    if not at:
        raise ValueError(f"steps: the form is steps:R1,R2,...@SECONDS, not steps:{rest}")
    rates = [
        read.number(text, f"steps: R{index}")
        for index, text in enumerate(read.split(head, ","), start=1)
    ]
    length_s = read.number(tail, "steps: SECONDS", above=True)
    if not any(rates):
        raise ValueError("steps: all rates are 0")

    def inverse(expected: float) -> float:
        for index, rate in enumerate(rates[:-1]):
            if expected < rate * length_s:
                return index * length_s + expected / rate
            expected -= rate * length_s
        begin_s = (len(rates) - 1) * length_s
        return begin_s + expected / rates[-1] if rates[-1] else math.inf

    return lambda rng: _until_inf(inverse(at) for at in _units(rng)), rates[-1] > 0


def _units(rng: Generator, shape: float = 1.0) -> Iterator[float]:
    """Times of a process of rate 1: running sums of gamma gaps of mean 1."""
    at = 0.0
    while True:
        for gap in rng.gamma(shape, 1 / shape, CHUNK).tolist():
            at += gap
            yield at


def _until_inf(times: Iterator[float]) -> Iterator[float]:
    for at_s in times:
        if math.isinf(at_s):
            return
        yield at_s


_KINDS: dict[str, Callable[[str], tuple[Times, bool]]] = {
    "constant": _constant,
    "poisson": _poisson,
    "gamma": _gamma,
    "bursts": _bursts,
    "ramp": _ramp,
    "steps": _steps,
}
