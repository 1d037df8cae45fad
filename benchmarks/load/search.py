"""The highest request rate at which a server still holds its objectives.

Rates are doubled until one fails, or halved until one holds, and then the interval between is
halved on a logarithmic scale. Each probe is
a run of its own, with pauses between them, so that one that drowned does not judge the next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import msgspec

SETTLE_S = 2.0
MAX_DOUBLINGS = 12
MAX_HALVINGS = 4  # below the first rate; slower and slower probes tell less and less


class Probe(msgspec.Struct):
    """One rate that was tried."""

    rate: float  # requests per second, offered
    share: float  # of requests that were good
    held: bool
    summary: dict[str, Any] = {}


def highest_rate(
    attempt: Callable[[float], tuple[float, dict[str, Any]]],
    *,
    start: float,
    share: float,
    precision: float,
    say: Callable[[Probe], None] = lambda probe: None,
    settle_s: float = SETTLE_S,
) -> tuple[float, list[Probe]]:
    """Search for the highest rate at which at least `share` of the requests are good.

    Args:
        attempt: runs at a rate; the share of good requests, and the run's summary.
        start: the first rate, requests per second.
        share: that has to be good, 0 to 1.
        precision: the result is within this factor of the truth: 0.1 = 10 %.
        say: told of every probe.
        settle_s: pause between probes.

    Returns:
        The highest rate that held (0.0: none did), and all probes in order.
    """
    probes: list[Probe] = []

    def held(rate: float) -> bool:
        if probes:
            time.sleep(settle_s)
        good, summary = attempt(rate)
        probes.append(Probe(rate, good, good >= share, summary))
        say(probes[-1])
        return good >= share

    low, high = 0.0, start
    for _ in range(MAX_DOUBLINGS):
        if not held(high):
            break
        low, high = high, 2 * high
    else:
        return low, probes
    if not low:
        for _ in range(MAX_HALVINGS):
            low = high / 2
            if held(low):
                break
            high = low
        else:
            return 0.0, probes
    while high / low > 1 + precision:
        middle = math.sqrt(low * high)
        if held(middle):
            low = middle
        else:
            high = middle
    return low, probes
