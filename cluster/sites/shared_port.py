"""The port that the routers of one node share: who listens alone, and who joins.

The first one listens alone, which the kernel refuses where anybody listens; the next ones join it
(`router.http.port.listen`). Nothing is written down that a kill could leave behind: whether a
router is the first follows from the processes that the controller knows.
"""

import asyncio
from collections.abc import Awaitable, Callable

from worker.api import Member

Listen = Callable[[int, bool], Awaitable[Member]]  # on a port, joining those that listen there


class SharedPort:
    """The routers that listen on it. Lives in the controller's event loop.

    port: 0: one that is free when the first router comes, and that from then on.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._first = asyncio.Lock()  # held by a router that listens alone, until it does
        self._routers: set[object] = set()

    async def enter(self, router: object, listen: Listen) -> Member:
        """Let a router listen, alone if no other one does; raises what `listen` raises."""
        async with self._first:
            if not self._routers:
                return self.entered(router, await listen(self._port, False))
            self._routers.add(router)  # whoever comes while it is on its way is not the first
        try:
            return self.entered(router, await listen(self._port, True))
        except BaseException:
            self._routers.discard(router)
            raise

    def entered(self, router: object, member: Member) -> Member:
        """Note one that listens."""
        self._port = int(member.address.rpartition(":")[2])
        self._routers.add(router)
        return member

    def leave(self, router: object) -> None:
        """It does not listen any more, or is about to stop; a second call does nothing."""
        self._routers.discard(router)
