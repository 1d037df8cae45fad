"""Waking at a given moment, to a tenth of a millisecond.

An event loop's own timers are as coarse as `epoll_wait`, a millisecond, and always late. Linux's
timerfd is not: it becomes readable at its moment, which wakes the loop as a socket would. Python
has it from 3.13 on, so it is called through ctypes; elsewhere the loop's own timers have to do.
"""

import asyncio
import ctypes
import heapq
import itertools
import os
import sys
import time

now = time.monotonic  # one clock for every process of a host

_ABSOLUTE = 1  # TFD_TIMER_ABSTIME


class _Spec(ctypes.Structure):
    """struct itimerspec: repeat never, expire at sec + nsec."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("repeat_s", "repeat_ns", "sec", "nsec"))


class Pacer:
    """Wakes tasks of the loop that entered it. A context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = itertools.count()
        self._libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self._fd = -1

    def __enter__(self) -> "Pacer":
        if self._libc is not None:
            self._fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
            if self._fd < 0:
                raise OSError(ctypes.get_errno(), "timerfd_create")
            self._loop.add_reader(self._fd, self._fire)
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)

    async def until(self, moment: float) -> None:
        """Return at `moment` of the monotonic clock, at once if it has passed."""
        if moment <= now():
            return
        if self._fd < 0:
            return await asyncio.sleep(moment - now())
        entry = moment, next(self._count), self._loop.create_future()
        heapq.heappush(self._due, entry)
        if self._due[0] is entry:
            self._arm(moment)
        await entry[2]

    def _arm(self, moment: float) -> None:
        spec = _Spec(0, 0, *divmod(int(moment * 1e9) + 1, 10**9))  # rounded up; zero would disarm
        assert self._libc is not None
        if self._libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _fire(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # it was armed anew between the wake and here
        while self._due and self._due[0][0] <= now():
            wake = heapq.heappop(self._due)[2]
            if not wake.cancelled():
                wake.set_result(None)
        if self._due:
            self._arm(self._due[0][0])
