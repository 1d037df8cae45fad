"""How fast this machine runs Python now: figures of CPU scaled by it can be compared."""

from __future__ import annotations

import time

CALIBRATION_S = 0.0088  # of the two-core machine where the router's marks were set, when quiet


def calibration_s() -> float:
    """CPU seconds of a fixed loop of Python."""
    began, table = time.process_time(), dict[int, int]()
    for i in range(50_000):
        table[i & 1023] = table.get(i & 511, 0) + (i ^ 7)
    return time.process_time() - began
