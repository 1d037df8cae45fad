"""Calls that nobody waits for, and calls that may not take long."""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import TypeVar

from worker.errors import KvlaneError, WorldError

log = logging.getLogger("kvlane.monitor")
T = TypeVar("T")

NUM_SLICES = 10  # of the time in which a process has to answer


class Background:
    """Calls that nobody waits for."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, object], name: str) -> asyncio.Task[None]:
        """Run it and log a failure; a dead receiver has a task of its own."""

        async def logged() -> None:
            try:
                await work
            except KvlaneError as error:
                log.info("%s: %s", name, error)

        task = asyncio.create_task(logged())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def in_time(work: Awaitable[T], timeout_s: float, verb: str) -> T:
    """The result of `work`. Raises WorldError if there is none after `timeout_s`.

    Time in which this process was stopped is a slice of that at most: it judges nobody.
    """
    task = asyncio.ensure_future(work)
    try:
        for _ in range(NUM_SLICES):
            await asyncio.wait((task,), timeout=timeout_s / NUM_SLICES)
            if task.done():
                return task.result()
        raise WorldError(f"it did not {verb} within {timeout_s:g} s")
    finally:
        task.cancel()
