"""In which order requests that are here begin: few in a turn of the loop, of all sources in turn.

A client that sends hundreds at once would else be first with all of them: whatever came a moment
later, a probe of liveness as well, waited for them.
"""

import asyncio

from router.dispatch.pool import Rounds

MAX_STARTS = 2  # in a turn of the loop; a request takes it some 2 ms


class Starts:
    """Loop only."""

    def __init__(self) -> None:
        self._waiting = Rounds[asyncio.Future[None]]()
        self._num = 0  # that have begun in this turn
        self._is_due = False  # the next turn is to come

    async def turn(self, source: str) -> None:
        """Return when a request of this source may begin."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next)
        if self._num < MAX_STARTS and not self._waiting:
            self._num += 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(source, turn)
            await turn

    def _next(self) -> None:
        self._num = 0
        while self._num < MAX_STARTS and (waiting := self._waiting.next()) is not None:
            if not waiting[1].done():  # it was cancelled
                waiting[1].set_result(None)
                self._num += 1
        self._is_due = self._num > 0
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._next)
