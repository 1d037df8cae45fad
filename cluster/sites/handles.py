"""`process.Process` over Ray's actor handles: all ranks of a worker, or a router, as one process.

Rank 0 is the member: what the cluster asks or tells a worker goes to it. All ranks start at once,
as they wait for each other; the first that fails, ends or dies is the end of the worker. A process
that is given up is gone before another gets its device.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar, cast

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.sites.process import Membership, Process, Report, Stage
from cluster.sites.ray_private import RAY, reason_of
from cluster.sites.shared_port import SharedPort
from worker.api import Member
from worker.errors import PeerLost, UserError, WorldError
from worker.transfer.host import process_stat

log = logging.getLogger("kvlane.actors")
kill_log = logging.getLogger("kvlane.kill")
T = TypeVar("T")

KILL_TIMEOUT_S = 20.0


async def call(method: Any, *args: object) -> Any:
    """Call an actor's method.

    Raises PeerLost if the process is dead or its node does not answer; UserErrors of the method,
    and WorldError for whatever else it raised.
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


@dataclass(frozen=True, slots=True)
class Identity:
    """Names one process for ever: a pid is used again, a pid with its start time is not."""

    node_id: str
    node_address: str
    pid: int
    start_ticks: int

    @classmethod
    def own(cls) -> "Identity":
        """Of this process."""
        node_id, address = RAY.get_runtime_context().get_node_id(), RAY.util.get_node_ip_address()
        return cls(node_id, address, os.getpid(), process_stat(os.getpid()).start_ticks)


@dataclass(frozen=True, slots=True)
class Rank:
    """One process, by its actor."""

    actor: Any
    process: "Identity"

    async def kill(self) -> None:
        """Returns when it is gone for certain, or its node is.

        ray.kill asks it to end, which a stopped or hung one never does: so a task on its node sends
        SIGKILL. On a lost node no task runs; what may be left there uses no device that a new
        process gets, and its messages carry an old incarnation.
        """
        RAY.kill(self.actor)
        process = self.process
        where = f"pid {process.pid} on {process.node_address}"
        if process.node_id == RAY.get_runtime_context().get_node_id():
            await asyncio.to_thread(kill_for_certain, process.pid, process.start_ticks)
            return
        if process.node_id not in {row["NodeID"] for row in RAY.nodes() if row["Alive"]}:
            kill_log.warning("%s: its node is lost, so it was not killed", where)
            return
        on_node = NodeAffinitySchedulingStrategy(process.node_id, soft=False)
        task = RAY.remote(kill_for_certain).options(
            num_cpus=0, max_retries=0, scheduling_strategy=on_node
        )
        try:
            asked = task.remote(process.pid, process.start_ticks)
            if not await asyncio.wait_for(asked, KILL_TIMEOUT_S):
                kill_log.error("%s survives SIGKILL", where)
        except (RayError, TimeoutError) as error:
            kill_log.warning("%s was not killed: %s", where, reason_of(error))


def kill_for_certain(pid: int, start_ticks: int) -> bool:
    """SIGKILL a process of this node; whether it is gone within half of KILL_TIMEOUT_S.

    One that has ended and is not reaped yet is gone.
    """
    deadline = time.monotonic() + KILL_TIMEOUT_S / 2
    while time.monotonic() < deadline:
        try:
            stat = process_stat(pid)
            if stat.state in "ZX" or stat.start_ticks != start_ticks:
                return True
            os.kill(pid, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


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
            asyncio.create_task(self._named(i, _ended(rank.actor)))
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

    async def retire(self) -> None:
        await call(self.actor.retire)

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


async def _ended(actor: Any) -> None:
    """Returns when the process was stopped."""
    while not await call(actor.run):
        pass


class RouterProcess(RayProcess):
    """A router, and the port of its node. member: it listens there already."""

    def __init__(self, rank: Rank, port: SharedPort, member: Member | None = None) -> None:
        super().__init__([rank])
        self._port = port
        if member is not None:
            port.entered(self, member)

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
