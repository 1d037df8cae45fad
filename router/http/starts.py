"""In which order requests that are here begin: few in a turn of the loop, of each source in turn.

A client that sends hundreds at once would else be first with all of them: whatever came a moment
later, a probe of liveness as well, waited for them.
"""

import asyncio
from collections import OrderedDict, deque

MAX_STARTS = 2  # in a turn of the loop; a request takes it some 2 ms


class Starts:
    """Those that wait, by source. Loop only."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._num = 0  # that have begun in this turn
        self._is_due = False  # the next turn is to come

    async def turn(self, source: str) -> None:
        """Return when a request of this source may begin."""
        loop = asyncio.get_running_loop()
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._next)
        if self._num < MAX_STARTS and not self._waiting:
            self._num += 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(source, deque()).append(turn)
        await turn

    def _next(self) -> None:
        self._num = 0
        while self._waiting and self._num < MAX_STARTS:
            source, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[source] = turns  # behind the others
            if not turn.done():  # it was cancelled
                self._num += 1
                turn.set_result(None)
        self._is_due = self._num > 0
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._next)
