"""The port that the routers of one node share: who listens there, and who goes first.

The first one listens alone, which the kernel refuses where anybody listens; the others join it
(`router.http.port`). Nothing is written down that a kill could leave behind: whether a router is
the first follows from the processes that the controller knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from worker.api import Member

Listen = Callable[[int, bool], Awaitable[Member]]  # on a port, joining others there or not


class Door:
    """Routers come and go through it. Lives in the controller's event loop.

    Args:
        port: to listen on; 0: one that is free when the first router comes, and that from then on.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._first = asyncio.Lock()  # held by a router that listens alone, until it does
        self._there: set[object] = set()

    async def enter(self, router: object, listen: Listen) -> Member:
        """Let a router listen, alone if no other one does; raises what `listen` raises."""
        async with self._first:
            if not self._there:
                return self._entered(router, await listen(self._port, False))
            self._there.add(router)  # on its way: whoever comes meanwhile is not the first, either
        try:
            return self._entered(router, await listen(self._port, True))
        except BaseException:
            self._there.discard(router)
            raise

    def _entered(self, router: object, member: Member) -> Member:
        self._port = int(member.address.rpartition(":")[2])
        self._there.add(router)
        return member

    def leave(self, router: object) -> None:
        """It does not listen any more, or is about to stop; a second call does nothing."""
        self._there.discard(router)
