"""All names of a cluster: started, told of one another, drained, and taken over from one that died.

Plain asyncio without Ray: the protocols in `sites.process` are all that it knows of its
surroundings. When a process dies, all members learn it first. Then its keeper makes sure that it is
really gone, because the next process uses the same devices and memory. Then it starts that one.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Sequence
from functools import partial

from cluster.config import WorkerRole
from cluster.control.herald import Herald
from cluster.control.keeper import MAX_EARLY_DEATHS, Keeper
from cluster.control.replicas import Event, Replica, ReplicaStatus, State, address_stays
from cluster.control.tasks import Background, in_time
from cluster.sites.process import Record, Report, Surroundings
from worker.api import Lost, PeerId
from worker.errors import UserError, WorldError

log = logging.getLogger("kvlane.monitor")

POLL_S = 0.1
REPORT_TIMEOUT_S = 2.0


class Monitor:
    """All replicas of one cluster, and the tasks that keep a process of every name running.

    replicas: only this object changes them from now on.
    """

    def __init__(self, replicas: Sequence[Replica], around: Surroundings) -> None:
        self.events: list[Event] = []
        self._note = partial(_noted, self.events)
        self._replicas = {replica.name: replica for replica in replicas}
        self._site, self._config = around.site, around.config
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._background = Background()
        self._herald = Herald(self._replicas, self._background, around)
        self._keeper = Keeper(around, self._herald, self._background, self._note)

    async def start(self) -> None:
        """Start all replicas at once; returns when every one of them is ready.

        Raises UserError if a process cannot work as configured, WorldError if one died or did not
        start in time, several times.
        """
        self._keep(self._replicas.values())
        while not all(replica.state is State.READY for replica in self._replicas.values()):
            await asyncio.wait((self._keeper.failed,), timeout=POLL_S)
            if self._keeper.failed.done():
                self._keeper.failed.result()
        self._keeper.up = True

    def adopt(self) -> None:
        """Go on where another monitor has ended: all its members are told of one another at once.

        One that has died or hangs is found as any other, and names without a process get one.
        """
        self._keeper.up = True
        for replica in self._replicas.values():
            if replica.member is not None:
                self._keeper.watch(replica)
        self._herald.tell()
        self._keep(self._replicas.values())

    def replicas(self) -> list[Replica]:
        """All names, for reading."""
        return list(self._replicas.values())

    def replica(self, name: str) -> Replica:
        """Raises UserError if there is none of this name."""
        if name not in self._replicas:
            known = ", ".join(sorted(self._replicas)) or "none left"
            raise UserError(f"no worker or router is called {name} (there are: {known})")
        return self._replicas[name]

    async def renew(
        self, name: str, timeout_s: float | None, role: WorkerRole | None = None
    ) -> None:
        """Let a name finish for so long (None: no limit), then replace its process.

        role: of the next one, if it is another; a process of one rank takes it itself if it can.
        Returns when that is ready. Raises as `replica`, and WorldError or UserError where a new
        process fails: it is tried again, in the role before.
        """
        replica = self.replica(name)
        role_before = replica.role
        replica.renewing, replica.drain_timeout_s, replica.failure = True, timeout_s, None
        before = replica.incarnation
        self._site.remember(replica.record)
        await self._finish(replica, timeout_s)
        if replica.leaving:
            raise WorldError(f"{name} is being drained")
        replica.role = role or role_before
        process = replica.reachable
        replica.turning = role is not None and process is not None and len(process.pids) == 1
        self._site.remember(replica.record)
        await self._end(replica)
        if replica.incarnation == before and not replica.given_up.done():
            replica.give_up("it does not stop", is_dead=True)
        while replica.incarnation == before or replica.state is not State.READY:
            if replica.leaving:
                raise WorldError(f"{name} is being drained")
            if replica.failure is not None:
                replica.role = role_before
                self._site.remember(replica.record)
                raise type(replica.failure)(f"{name}: {replica.failure}")
            await asyncio.sleep(POLL_S)

    async def add(self, records: Iterable[Record]) -> None:
        """Keep further names, for which there is room; returns when they are ready.

        A process that cannot be started, or has died as often as a start allows, is the end of all
        of them: they are removed, and what it raised is raised.
        """
        added = [Replica.of(record, None) for record in records]
        self._replicas |= {replica.name: replica for replica in added}
        self._keep(added)
        self._herald.tell()  # from now on requests wait for them
        while not all(replica.state is State.READY or replica.leaving for replica in added):
            for replica in added:
                failure, many = replica.failure, replica.restarts >= MAX_EARLY_DEATHS
                if isinstance(failure, UserError) or (failure is not None and many):
                    await self.drain((r.name for r in added if not r.gone.is_set()), 0.0)
                    raise type(failure)(f"{replica.name}: {failure}")
            await asyncio.sleep(POLL_S)

    def lost(self, peer: PeerId, lost: Lost) -> None:
        """A link is over. Who is silent is treated as dead.

        Who has closed it lives, and has given us up: it is pinged anew. Where it has ended, that is
        known otherwise.
        """
        for replica in self._replicas.values():
            if replica.member is None or replica.member.peer != peer:
                continue
            if lost.is_silent:
                replica.give_up(lost.reason)
            else:
                self._background.spawn(self._keeper.ping_anew(replica), f"pings of {replica.name}")

    async def status(self) -> list[ReplicaStatus]:
        """One row a name, with counters from those that answer quickly."""
        replicas = list(self._replicas.values())
        reports = await asyncio.gather(*(report_of(replica) for replica in replicas))
        return [replica.status(report) for replica, report in zip(replicas, reports, strict=True)]

    async def drain(self, names: Iterable[str], timeout_s: float | None) -> bool:
        """Let these names finish, then stop and remove them; whether all became idle in time.

        UserError for an unknown name.
        """
        replicas = [self.replica(name) for name in names]
        for replica in replicas:  # all of them, before the first asks which ones go on
            replica.leaving, replica.drain_timeout_s = True, timeout_s
            self._site.remember(replica.record)
        idle = await asyncio.gather(*(self._finish(replica, timeout_s) for replica in replicas))
        await asyncio.gather(*(self._remove(replica) for replica in replicas))
        return all(idle)

    async def stop(self, drain_timeout_s: float | None) -> bool:
        """Drain for at most `drain_timeout_s` (None: no limit), then stop; routers go first."""
        self._keeper.up = True  # nothing that dies from now on is a failure to start
        idle = True
        for is_router in (True, False):
            names = [r.name for r in self._replicas.values() if (r.role == "router") is is_router]
            idle &= await self.drain(names, drain_timeout_s)
        return idle

    def _keep(self, replicas: Iterable[Replica]) -> None:
        for replica in replicas:
            self._tasks[replica.name] = asyncio.create_task(
                self._keeper.keep(replica), name=replica.name
            )

    async def _finish(self, replica: Replica, timeout_s: float | None) -> bool:
        """Drain; whether it became idle in time."""
        if (process := replica.reachable) is None:
            return True
        replica.state = State.DRAINING
        self._note(replica, "draining")
        self._herald.announce(replica, State.DRAINING, "")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            stays = address_stays(replica, self._replicas.values())
            await in_time(process.drain(stays), REPORT_TIMEOUT_S, "drain")
            while replica.reachable is process:
                if (await in_time(process.report(), REPORT_TIMEOUT_S, "report")).idle:
                    return True
                if deadline is not None and time.monotonic() > deadline:
                    return False
                await asyncio.sleep(POLL_S)
        except WorldError as error:
            self._note(replica, f"while draining: {error}")
            return False
        return True  # it died; nothing is left to wait for

    async def _end(self, replica: Replica) -> None:
        """Ask its process to stop or retire, and wait for that as long as it may take."""
        if (process := replica.reachable) is None:
            return
        stop = process.retire() if replica.turning else process.stop()
        replica.stopping = self._background.spawn(stop, f"stop of {replica.name}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(replica.over.wait(), self._config.stop_timeout_s)

    async def _remove(self, replica: Replica) -> None:
        """Ask the process to stop, kill it if it does not, and forget the replica."""
        task = self._tasks.pop(replica.name, None)
        if task is None:  # another call is removing it
            await replica.gone.wait()
            return
        process = replica.reachable
        await self._end(replica)
        task.cancel()
        await asyncio.wait((task,))
        await self._site.release(replica.name)
        self._replicas.pop(replica.name, None)
        if process is None:  # else `_leave` has said so
            self._herald.announce(replica, State.DRAINED, "it was not ready")
        replica.gone.set()
        self._note(replica, "removed")


def _noted(events: list[Event], replica: Replica, text: str) -> None:
    log.debug("%s: %s", replica.name, text)  # `serve` prints the event
    events.append(Event(replica.name, replica.state, text))


async def report_of(replica: Replica) -> Report | None:
    """None if the process is not ready or does not answer quickly."""
    if (process := replica.reachable) is None:
        return None
    try:
        return await in_time(process.report(), REPORT_TIMEOUT_S, "report")
    except WorldError as error:
        log.info("%s: %s", replica.name, error)
        return None
