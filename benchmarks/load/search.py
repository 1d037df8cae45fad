"""The highest request rate at which a server still holds its objectives.

Rates are doubled until one fails, or halved until one holds. Then the interval between is halved
on a logarithmic scale.
"""

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
    """The highest rate at which `share` (0 to 1) of the requests are good, and all probes in order.

    `share_at` runs at a rate, requests per second, from `start` on. The result is within a factor
    of 1 + `precision` of the truth; 0.0: no rate held.
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
