"""Waking at a given moment, to a tenth of a millisecond.

An event loop's own timers are as coarse as `epoll_wait`, a millisecond, and always late. A thread
that sleeps on a condition variable is not; it wakes the loop through its self-pipe.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from types import TracebackType

now = time.monotonic  # one clock for every process of a host


class Pacer:
    """Wakes tasks of the loop that entered it. A context manager; leaving it ends its thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="pacer", daemon=True)

    def __enter__(self) -> Pacer:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    async def until(self, moment: float) -> None:
        """Return at `moment` of the monotonic clock, at once if it has passed."""
        if moment <= now():
            return
        wake = self._loop.create_future()
        with self._changed:
            heapq.heappush(self._due, (moment, next(self._count), wake))
            if self._due[0][2] is wake:
                self._changed.notify()
        await wake

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                left = self._due[0][0] - now() if self._due else None
                if left is None or left > 0:
                    self._changed.wait(left)
                    continue
                _, _, wake = heapq.heappop(self._due)
            self._tell(_resolve, wake)

    def _tell(
        self, done: Callable[[asyncio.Future[None]], None], wake: asyncio.Future[None]
    ) -> None:
        try:
            self._loop.call_soon_threadsafe(done, wake)
        except RuntimeError:  # the loop is closed: nobody waits any more
            self._closed = True


def _resolve(wake: asyncio.Future[None]) -> None:
    if not wake.done():  # else its task was cancelled
        wake.set_result(None)
