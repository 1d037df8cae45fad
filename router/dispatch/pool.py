"""Threads for what may take long, in turn between sources."""

import asyncio
import os
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

Result = TypeVar("Result")
Waiting = TypeVar("Waiting")
NUM_THREADS, NAME = 4, "kvlane-pool"
MAX_OWN = 2 if len(os.sched_getaffinity(0)) > 2 else 1  # of one source at a time, of few cores one


class Rounds(Generic[Waiting]):
    """Who waits, by source: all sources in turn."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Waiting]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, source: str, waiting: Waiting) -> None:
        """One more, behind those of its source."""
        self._waiting.setdefault(source, deque()).append(waiting)

    def next(self, fits: Callable[[str], bool] = lambda _: True) -> tuple[str, Waiting] | None:
        """Whose turn it is, of the sources that fit; None: nobody's."""
        if (source := next(filter(fits, self._waiting), None)) is None:
            return None
        turns = self._waiting.pop(source)
        turn = turns.popleft()
        if turns:
            self._waiting[source] = turns  # behind the others
        return source, turn


class Pool:
    """Runs work of sources in turn, and never as much of one that others find no thread.

    A thread takes the next job by itself: the loop, which has the least time, need not tell it.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, NAME)
        self._lock = threading.Lock()
        self._running = Counter[str]()
        self._waiting = Rounds[Callable[[], None]]()

    async def run(self, source: str, work: Callable[[], Result]) -> Result:
        """What `work` returns or raises; what nobody waits for any more is not begun."""
        loop = asyncio.get_running_loop()
        job: asyncio.Future[Result] = loop.create_future()

        def run() -> None:
            if job.done():
                return
            try:
                ended = partial(job.set_result, work())
            except BaseException as error:  # a panic of a library in Rust is no `Exception`
                ended = partial(job.set_exception, error)
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(lambda: None if job.done() else ended())

        with self._lock:
            if fits := self._fits(source):  # then none of it waits
                self._running[source] += 1
            else:
                self._waiting.add(source, run)
        if fits:
            self._threads.submit(self._work, source, run)
        return await job

    def _work(self, source: str, run: Callable[[], None]) -> None:
        """A job, and what waits."""
        turn: tuple[str, Callable[[], None]] | None = source, run
        while turn is not None:
            turn[1]()
            turn = self._next(turn[0])

    def _next(self, ended: str) -> tuple[str, Callable[[], None]] | None:
        """A job of a source has ended: one that may begin now."""
        with self._lock:
            self._running[ended] -= 1
            if not self._running[ended]:
                del self._running[ended]
            if (turn := self._waiting.next(self._fits)) is not None:
                self._running[turn[0]] += 1
            return turn

    def _fits(self, source: str) -> bool:
        return self._running.total() < NUM_THREADS and self._running[source] < MAX_OWN
