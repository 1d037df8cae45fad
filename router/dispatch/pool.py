"""Threads for what may take long, in turn between sources."""

import asyncio
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")
NUM_THREADS, NAME = 4, "kvlane-pool"
MAX_OWN = 2 if len(os.sched_getaffinity(0)) > 2 else 1  # of one source at a time, of few cores one


class Rounds:
    """Who waits, by source: all sources in turn."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, source: str) -> "asyncio.Future[None]":
        """Done when it is this one's turn."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(source, deque()).append(turn)
        return turn

    def next(self, fits: Callable[[str], bool] = lambda _: True) -> str | None:
        """Whose turn it is, of the sources that fit; None: nobody's."""
        while (source := next(filter(fits, self._waiting), None)) is not None:
            turns = self._waiting.pop(source)
            turn = turns.popleft()
            if turns:
                self._waiting[source] = turns  # behind the others
            if not turn.done():  # it was cancelled
                turn.set_result(None)
                return source
        return None


class Pool:
    """Runs work of sources, each in turn, and never as much of one that others find no thread."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, NAME)
        self._running = Counter[str]()
        self._waiting = Rounds()

    async def run(self, source: str, work: Callable[[], Result]) -> Result:
        """What `work` returns or raises."""
        loop = asyncio.get_running_loop()
        if self._fits(source):  # then none of it waits
            self._running[source] += 1
        else:
            await self._waiting.add(source)
        job: asyncio.Future[Result] = loop.create_future()

        def run() -> None:
            try:
                ended = partial(job.set_result, work())
            except Exception as error:
                ended = partial(job.set_exception, error)
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._over, source, job, ended)  # it is woken once

        self._threads.submit(run)
        return await job

    def _over(self, source: str, job: "asyncio.Future[Any]", ended: Callable[[], None]) -> None:
        self._running[source] -= 1
        if not self._running[source]:
            del self._running[source]
        if not job.done():  # nobody waits for it any more
            ended()
        self._start()

    def _fits(self, source: str) -> bool:
        return self._running.total() < NUM_THREADS and self._running[source] < MAX_OWN

    def _start(self) -> None:
        while self._waiting and (source := self._waiting.next(self._fits)) is not None:
            self._running[source] += 1
