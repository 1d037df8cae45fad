"""The highest request rate at which a server still holds its objectives.

Rates are doubled until one fails, or halved until one holds. Then the interval between is halved
on a logarithmic scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

MAX_DOUBLINGS = 12
MAX_HALVINGS = 4  # below the first rate; slower and slower probes tell less and less


class Probe(msgspec.Struct):
    """One rate that was tried."""

    rate: float  # requests per second, offered
    share: float  # of requests that were good
    held: bool


def highest_rate(
    share_at: Callable[[float], float], *, start: float, share: float, precision: float
) -> tuple[float, list[Probe]]:
    """Search for the highest rate at which at least `share` of the requests are good.

    Args:
        share_at: runs at a rate; the share of good requests.
        start: the first rate, requests per second.
        share: that has to be good, 0 to 1.
        precision: the result is within this factor of the truth: 0.1 = 10 %.

    Returns:
        The highest rate that held (0.0: none did), and all probes in order.
    """
    probes: list[Probe] = []

    def holds(rate: float) -> bool:
        good = share_at(rate)
        probes.append(Probe(rate, good, good >= share))
        return probes[-1].held

    low, high = 0.0, start
    while holds(high):
        low, high = high, 2 * high
        if len(probes) == MAX_DOUBLINGS:
            return low, probes
    while not low:
        if len(probes) > MAX_HALVINGS:
            return 0.0, probes
        if holds(high / 2):
            low = high / 2
        else:
            high /= 2
    while high / low > 1 + precision:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, probes
