"""When the garbage of a router's process is collected.

A full collection looks at every object: with 4,096 requests open it took 0.36 s, in which no stream
went on, and while they came eight of them took 45 % of the router's time. What requests and
connections leave is freed without; little else refers to itself.

A router that has become idle makes one, too: what a crowd has left may be older than the last one.
"""

import ctypes
import gc
import threading

USUAL = gc.get_threshold()
FEW = 256  # open requests, with which a full collection takes some 20 ms
# Collections of what is younger since the last full one; one comes with 8,000 objects more.
# An object is 100 bytes or so: what waits is below 80 MB, and below 300 MB while many are open.
MIN_YOUNG, MAX_YOUNG = 100, 400
IDLE_LOOKS = 5, 30  # without an open request; connections may close later

# Blocks from this size on are mapped on their own and given back when they are freed. glibc would
# raise it to the largest one that was freed, up to 32 MiB, and keep bodies' memory in pieces.
MAPPED_BYTES = 256 << 10
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1

_libc = ctypes.CDLL(None)
_trim = getattr(_libc, "malloc_trim", None)  # glibc has them
_mallopt = getattr(_libc, "mallopt", None)


def postpone() -> None:
    """From now on a `Collector` alone makes full collections, and large blocks are given back."""
    gc.set_threshold(*USUAL[:2], 1 << 30)
    if _mallopt is not None:
        _mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        _mallopt(_M_TRIM_THRESHOLD, 4 * MAPPED_BYTES)


def as_usual() -> None:
    """Python makes them when it likes."""
    gc.set_threshold(*USUAL)


class Collector:
    """Makes full collections when they are due."""

    def __init__(self) -> None:
        self._num_idle = 0

    def look(self, num_open: int) -> None:
        """To be called once a second, with how many requests are open."""
        self._num_idle = 0 if num_open else self._num_idle + 1
        if self._num_idle in IDLE_LOOKS or is_due(gc.get_count()[2], num_open):
            gc.collect()
            if num_open <= FEW and _trim is not None:
                # glibc keeps 25 MB of what 10,000 connections had, in pieces. Of bodies it takes
                # 0.1 s to give back, without the interpreter's lock.
                threading.Thread(target=_trim, args=(0,), name="kvlane-trim", daemon=True).start()


def is_due(num_young: int, num_open: int) -> bool:
    """Whether one is, after so many younger ones, with so many requests open."""
    return num_young >= (MIN_YOUNG if num_open <= FEW else MAX_YOUNG)
