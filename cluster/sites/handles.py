"""`process.Process` over Ray's actor handles: all ranks of a worker, or a router, as one process.

Rank 0 is the member: what the cluster asks or tells a worker goes to it. All ranks start at once,
as they wait for each other; the first that fails, ends or dies is the end of the worker.
"""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from itertools import groupby
from typing import Any, TypeVar, cast

from ray.exceptions import RayActorError, RayTaskError

from cluster.sites.kill import Rank
from cluster.sites.process import Membership, Process, Report, Stage
from cluster.sites.ray_private import reason_of
from cluster.sites.shared_port import SharedPort
from worker.api import Member
from worker.errors import PeerLost, UserError, WorldError

log = logging.getLogger("kvlane.actors")
T = TypeVar("T")


async def call(method: Any, *args: object) -> Any:
    """Call an actor's method.

    Raises:
        PeerLost: the process is dead or its node does not answer.
        UserError, WorldError: raised by the method, the latter for whatever else it raised.
    """
    try:
        return await method.remote(*args)
    except RayActorError as error:
        raise PeerLost(reason_of(error)) from None
    except RayTaskError as error:
        cause = cast("BaseException", error.cause)  # pyright: ignore[reportUnknownMemberType]
        if isinstance(cause, UserError):
            raise cause from None
        log.error("%s", error)
        raise WorldError(f"{type(cause).__name__}: {cause}") from None


class RayProcess(Process):
    """A worker with all of its ranks, in order."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = tuple(ranks)
        self.actor = ranks[0].actor
        self._is_stopping = False

    @property
    def place(self) -> str:
        nodes = groupby((rank.process for rank in self.ranks), lambda who: who.node_address)
        pids = "pid" if len(self.ranks) == 1 else "pids"
        return "; ".join(
            f"node {address}, {pids} {' '.join(str(process.pid) for process in there)}"
            for address, there in nodes
        )

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(rank.process.pid for rank in self.ranks)

    async def start(self) -> Member:
        # The first failure ends it: the other ranks wait for that one until they are killed.
        where = [await call(self.actor.rendezvous)] if len(self.ranks) > 1 else []
        starts = [
            self._named(i, call(rank.actor.start, *where)) for i, rank in enumerate(self.ranks)
        ]
        return cast("Member", (await asyncio.gather(*starts))[0])

    async def stage(self) -> Stage:
        return cast("Stage", await call(self.actor.stage))

    async def run(self) -> None:
        runs = [
            asyncio.create_task(self._named(i, call(rank.actor.run)))
            for i, rank in enumerate(self.ranks)
        ]
        try:
            ended, _ = await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for run in runs:
                run.cancel()
        failures = [error for run in ended if (error := run.exception())]
        if failures:  # a death explains what the other ranks raise because of it
            raise min(failures, key=lambda error: not isinstance(error, PeerLost))
        if runs[0] not in ended and not self._is_stopping:
            ranks = ", ".join(str(i) for i, run in enumerate(runs) if run in ended)
            raise WorldError(f"its rank {ranks} stopped")

    async def update(self, membership: Membership) -> None:
        await call(self.actor.update, membership)

    async def drain(self, address_stays: bool) -> None:
        await call(self.actor.drain, address_stays)

    async def report(self) -> Report:
        return cast("Report", await call(self.actor.report))

    async def stop(self) -> None:
        """All ranks at once, as they leave their collective together."""
        self._is_stopping = True
        await asyncio.gather(*(call(rank.actor.stop) for rank in self.ranks))

    async def kill(self) -> None:
        """All ranks at once: none is left to wait for another, or to hold memory."""
        await asyncio.gather(*(rank.kill() for rank in self.ranks))

    async def _named(self, i: int, work: Awaitable[T]) -> T:
        """The result of `work`; an error of a rank above 0 names the rank."""
        try:
            return await work
        except (UserError, WorldError) as error:
            if i == 0:
                raise
            process = self.ranks[i].process
            where = f"rank {i} (node {process.node_address}, pid {process.pid})"
            if isinstance(error, UserError):  # begins with the field's path
                raise type(error)(f"{error}: at {where}", error.param) from None
            raise type(error)(f"{where}: {error}") from None


class RouterProcess(RayProcess):
    """A router, and the port of its node."""

    def __init__(self, rank: Rank, port: SharedPort) -> None:
        super().__init__([rank])
        self._port = port

    async def start(self) -> Member:
        await call(self.actor.load)
        return await self._port.enter(self, lambda port, joins: call(self.actor.start, port, joins))

    async def drain(self, address_stays: bool) -> None:
        if address_stays:
            self._port.leave(self)
        await super().drain(address_stays)

    async def kill(self) -> None:
        await super().kill()
        self._port.leave(self)
