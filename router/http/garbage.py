"""When the garbage of a router's process is collected.

A full collection looks at every object: with 4,096 requests open it took 0.36 s, in which no stream
went on, and while they came eight of them took 45 % of the router's time. Most of what a request
leaves is freed without; what is left is some 34 objects of each connection that has closed.
"""

import gc

USUAL = gc.get_threshold()
FEW = 256  # open requests, with which a full collection takes some 20 ms
# Collections of what is younger since the last full one; each comes with some 8,000 objects more.
# An object is 100 bytes or so: what waits is below 80 MB, and below 300 MB while many are open.
MIN_YOUNG, MAX_YOUNG = 100, 400


def postpone() -> None:
    """From now on `collect` alone makes full collections."""
    gc.set_threshold(*USUAL[:2], 1 << 30)


def as_usual() -> None:
    """Python makes them when it likes."""
    gc.set_threshold(*USUAL)


def collect(num_open: int) -> None:
    """Make a full collection if one is due; to be called now and then."""
    if is_due(gc.get_count()[2], num_open):
        gc.collect()


def is_due(num_young: int, num_open: int) -> bool:
    """Whether one is, after so many younger ones, with so many requests open."""
    return num_young >= (MIN_YOUNG if num_open <= FEW else MAX_YOUNG)
