"""A worker of several ranks: a process for each of them, and one `process.Process` for all.

Rank 0 is the leader, an ordinary WorkerActor: it is the member, and what the cluster asks or tells
a worker goes to it. The others are RankActors. All start at the same time, as they wait for each
other; the first that fails or dies is the failure or death of the worker.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Sequence
from itertools import groupby
from typing import TypeVar, cast

from cluster.actors import ProcessActor, RayProcess, call, no_collections
from cluster.logs import Logs
from worker.api import Member
from worker.config import WorkerConfig
from worker.errors import PeerLost, UserError, WorldError

T = TypeVar("T")


class RankActor(ProcessActor):
    """A rank of a worker other than its leader."""

    def __init__(
        self, config: WorkerConfig, name: str, incarnation: str, host: str, logs: Logs, rank: int
    ) -> None:
        super().__init__(f"{name}.{rank}", incarnation, logs)
        self._config = config
        self._worker = name
        self._host = host
        self._rank = rank

    def start(self, rendezvous: str) -> None:
        """Load its part of the weights and join the others; may take minutes.

        rendezvous: where all ranks of the worker meet.
        """
        with no_collections():
            from worker.rank import Rank  # torch: imported in this process only
            from worker.start.build import Place

        place = Place(self._worker, self._incarnation, self._host, rendezvous, self._progress)
        self._part = Rank(self._config, place, self._rank)
        self._part.start()
        gc.collect()
        gc.freeze()

    def run(self) -> None:
        """Returns once the rank has ended."""
        self._part.join()

    def stop(self) -> None:
        """End threads and sockets."""
        self._part.stop()


class RankedProcess(RayProcess):
    """`process.Process` of a worker of several ranks. `stage`, `tell`, `drain` and `report` are the
    leader's.

    Args:
        parts: a process for each rank, in order.
    """

    def __init__(self, parts: Sequence[RayProcess]) -> None:
        super().__init__(parts[0].actor, parts[0].identity)
        self.parts = tuple(parts)
        self._is_stopping = False

    @property
    def place(self) -> str:
        """Each node and its pids."""
        nodes = groupby((part.identity for part in self.parts), lambda who: who.node_address)
        return "; ".join(
            f"node {address}, pids {' '.join(str(who.pid) for who in there)}"
            for address, there in nodes
        )

    @property
    def pids(self) -> tuple[int, ...]:
        """See process.Process."""
        return tuple(part.identity.pid for part in self.parts)

    async def start(self) -> Member:
        """See process.Process. What the first rank raises that fails ends it at once: the others
        would wait for that one, until they are fenced.
        """
        rendezvous = await call(self.actor.rendezvous)
        told = await asyncio.gather(
            *(self._of(rank, call(p.actor.start, rendezvous)) for rank, p in enumerate(self.parts))
        )
        return cast("Member", told[0])

    async def run(self) -> None:
        """See process.Process. The end of any rank is that of the worker."""
        runs = [
            asyncio.create_task(self._of(rank, call(part.actor.run)))
            for rank, part in enumerate(self.parts)
        ]
        try:
            ended, _ = await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in runs:
                each.cancel()
        failures = [error for each in ended if (error := each.exception())]
        if failures:  # a death explains what the other ranks raise because of it
            raise min(failures, key=lambda error: not isinstance(error, PeerLost))
        if runs[0] not in ended and not self._is_stopping:
            ranks = ", ".join(str(rank) for rank, each in enumerate(runs) if each in ended)
            raise WorldError(f"its rank {ranks} stopped")

    async def stop(self) -> None:
        """See process.Process. All at once, as they leave their collective together."""
        self._is_stopping = True
        await asyncio.gather(*(part.stop() for part in self.parts))

    async def fence(self) -> None:
        """See RayProcess. All at once: none is left to wait for another, or to hold memory."""
        await asyncio.gather(*(part.fence() for part in self.parts))

    async def _of(self, rank: int, work: Awaitable[T]) -> T:
        """The result of `work`; an error of a rank other than the leader names it."""
        try:
            return await work
        except (UserError, WorldError) as error:
            if rank == 0:
                raise
            who = f"rank {rank} ({self.parts[rank].place})"
            if isinstance(error, UserError):  # begins with the field's path
                raise type(error)(f"{error}: at {who}", error.param) from None
            raise type(error)(f"{who}: {error}") from None
