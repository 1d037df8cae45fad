"""Keeps a process running for every replica of the cluster: one task a replica.

Plain asyncio without Ray: the protocols in `sites.process` are all that it knows of its
surroundings. When a process dies, all members learn it first. Then the monitor makes sure that it
is really gone, because the next process uses the same devices and memory. Then it starts that one.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from typing import TypeVar

from cluster.config import ClusterConfig
from cluster.control.replicas import (
    Changes,
    Event,
    Replica,
    ReplicaStatus,
    State,
    address_stays,
    backoff_s,
)
from cluster.sites.process import Links, Membership, Process, Report, Site
from worker.api import Member, PeerId
from worker.errors import KvlaneError, PeerLost, Placement, UserError, WorldError

log = logging.getLogger("kvlane.monitor")
T = TypeVar("T")

MAX_EARLY_DEATHS = 3  # of one name while the cluster starts; then starting fails
POLL_S = 0.1
LOOK_S = 0.3  # between questions how far a start is
PINGED = "tcp://"  # scheme of the addresses that answer pings; a router's is http://
REPORT_TIMEOUT_S = 2.0
# A router has no socket that answers pings: it is asked through Ray, and killed once it is silent
# for so long. It loses all its streams, so a machine that is merely busy has to get by.
SILENT_S = 20.0
ASK_S = 2.0  # between two questions
NUM_SLICES = 10  # of the time in which a process has to answer


class Monitor:
    """All replicas of one cluster, and the tasks that keep a process running for each.

    replicas: only this object changes them from now on.
    links: their owner calls `lost` when a process does not answer pings.
    number: of the monitors that there have been; what a later one says of members counts.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        site: Site,
        links: Links,
        config: ClusterConfig,
        number: int = 1,
    ) -> None:
        self.events: list[Event] = []
        self._replicas = {replica.name: replica for replica in replicas}
        self._site = site
        self._links = links
        self._config = config
        self._changes = Changes()
        self._number, self._num_told = number, 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._background = Background()
        self._up = False
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Start all replicas at once; returns when every one of them is ready.

        Raises UserError if a process cannot work as configured, WorldError if one died or did not
        start in time, several times.
        """
        self._keep_all()
        while not all(replica.state is State.READY for replica in self._replicas.values()):
            await asyncio.wait((self._failed,), timeout=POLL_S)
            if self._failed.done():
                self._failed.result()
        self._up = True

    def adopt(self) -> None:
        """Go on where another monitor has ended: all its members are told of one another at once.

        One that has died or hangs is found as any other, and names without a process get one.
        """
        self._up = True
        for replica in self._replicas.values():
            if replica.member is not None:
                self._watch(replica)
        self._tell_members()
        self._keep_all()

    def replicas(self) -> list[Replica]:
        """All names, for reading."""
        return list(self._replicas.values())

    def lost(self, peer: PeerId, reason: str) -> None:
        """`peer` does not answer pings any more: treat it as dead."""
        for replica in self._replicas.values():
            if replica.member is not None and replica.member.peer == peer:
                replica.give_up(reason)

    async def status(self) -> list[ReplicaStatus]:
        """One row a name, with counters from those that answer quickly."""
        replicas = list(self._replicas.values())
        reports = await asyncio.gather(*(report_of(replica) for replica in replicas))
        return [replica.status(report) for replica, report in zip(replicas, reports, strict=True)]

    async def drain(self, names: Iterable[str], timeout_s: float | None) -> bool:
        """Let these names finish, then stop and remove them; whether all became idle in time.

        UserError for an unknown name.
        """
        unknown = [name for name in names if name not in self._replicas]
        if unknown:
            known = ", ".join(sorted(self._replicas)) or "none left"
            raise UserError(f"no worker or router is called {unknown[0]} (there are: {known})")
        replicas = [self._replicas[name] for name in names]
        for replica in replicas:  # all of them, before the first asks which ones go on
            replica.leaving, replica.drain_timeout_s = True, timeout_s
            self._site.remember(replica.record)
        idle = await asyncio.gather(*(self._finish(replica, timeout_s) for replica in replicas))
        await asyncio.gather(*(self._remove(replica) for replica in replicas))
        return all(idle)

    async def stop(self, drain_timeout_s: float | None) -> bool:
        """Drain for at most `drain_timeout_s` (None: no limit), then stop; routers go first."""
        self._up = True  # nothing that dies from now on is a failure to start
        idle = True
        for is_router in (True, False):
            names = [r.name for r in self._replicas.values() if (r.role == "router") is is_router]
            idle &= await self.drain(names, drain_timeout_s)
        return idle

    def _keep_all(self) -> None:
        for replica in self._replicas.values():
            self._tasks[replica.name] = asyncio.create_task(self._keep(replica), name=replica.name)

    async def _keep(self, replica: Replica) -> None:
        """Start one process after the other, until it is leaving or starting has failed."""
        deaths_in_a_row = 0
        while replica.process is not None or not replica.leaving:
            ready_at, error = await self._live(replica)
            if replica.leaving:
                return
            lived_s = time.monotonic() - ready_at if ready_at else 0.0
            if lived_s > self._config.max_restart_backoff_s:
                deaths_in_a_row = 0
            deaths_in_a_row += 1
            hopeless = isinstance(error, UserError) or deaths_in_a_row >= MAX_EARLY_DEATHS
            if hopeless and not self._up:
                if not self._failed.done():  # the same class, with the name of the process
                    kinds = (kind for kind in (UserError, Placement) if isinstance(error, kind))
                    failure = next(kinds, WorldError)(f"{replica.name}: {error}")
                    self._failed.set_exception(failure)
                return
            delay_s = backoff_s(
                deaths_in_a_row, self._config.restart_backoff_s, self._config.max_restart_backoff_s
            )
            replica.restarts += 1
            self._note(replica, f"{error}; again in {delay_s:g} s")
            if not ready_at:  # else the others know it, see `_leave`
                self._announce(replica, State.LOST, str(error))
            await asyncio.sleep(delay_s)

    async def _live(self, replica: Replica) -> tuple[float, KvlaneError]:
        """Run one incarnation to its end: when it became ready (0: never), and why it ended."""
        ready_at = time.monotonic() if replica.process is not None else 0.0  # it was adopted
        error: KvlaneError = WorldError("it stopped")
        try:
            process = replica.process or await self._begin(replica)
            ready_at = ready_at or time.monotonic()
            await until_over(replica, process, self._config.stop_timeout_s)
        except (WorldError, UserError) as e:
            error = e
        finally:
            self._leave(replica, error)
            await killed(replica)
        return ready_at, error

    async def _begin(self, replica: Replica) -> Process:
        """A new incarnation, once it is ready."""
        replica.begin(secrets.token_hex(4))
        began_at = time.monotonic()
        self._note(replica, "starting")
        process = replica.process = await self._site.create(replica.name, replica.incarnation)
        self._note(replica, f"loading ({process.place})")
        replica.member = await started(replica, process, self._config.start_timeout_s)
        replica.state = State.READY
        took = f"after {time.monotonic() - began_at:.1f} s"
        self._site.remember(replica.record)
        self._watch(replica)
        self._announce(replica, State.READY, f"{took} ({process.place})")
        self._note(replica, f"ready {took}")
        return process

    def _watch(self, replica: Replica) -> None:
        """Learn of a member that falls silent."""
        assert replica.member is not None
        if replica.member.address.startswith(PINGED):
            self._links.connect(replica.member.peer, replica.member.address)
        else:
            self._background.spawn(listen(replica), f"reports of {replica.name}")

    def _leave(self, replica: Replica, why: KvlaneError) -> None:
        """Take the replica out of the members and tell all processes at once."""
        member, replica.member, replica.state = replica.member, None, State.LOST
        if member is not None:
            self._note(replica, "stopping" if replica.leaving else "lost")
            self._site.remember(replica.record)
            self._links.disconnect(member.peer)
            state = "stopping" if replica.leaving else State.LOST
            self._announce(replica, state, "" if replica.leaving else str(why))

    def _announce(self, replica: Replica, state: str, text: str) -> None:
        self._changes.add(replica, state, text)
        self._tell_members()

    def _tell_members(self) -> None:
        self._num_told += 1
        version = self._number, self._num_told
        # A draining one is a member: it still serves what it has begun.
        members = [r.member for r in self._replicas.values() if r.member is not None]
        membership = Membership(version, members, self._changes.listed())
        log.debug("members %d.%d: %s", *version, " ".join(m.peer for m in members) or "none")
        for receiver in self._replicas.values():
            process = receiver.reachable
            if process is not None and receiver.stopping is None:  # else it may be gone by then
                self._background.spawn(process.update(membership), f"members for {receiver.name}")

    async def _finish(self, replica: Replica, timeout_s: float | None) -> bool:
        """Drain; whether it became idle in time."""
        if (process := replica.reachable) is None:
            return True
        replica.state = State.DRAINING
        self._note(replica, "draining")
        self._announce(replica, State.DRAINING, "")
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

    async def _remove(self, replica: Replica) -> None:
        """Ask the process to stop, kill it if it does not, and forget the replica."""
        task = self._tasks.pop(replica.name, None)
        if task is None:  # another call is removing it
            await replica.gone.wait()
            return
        if (process := replica.reachable) is not None:
            replica.stopping = self._background.spawn(process.stop(), f"stop of {replica.name}")
            await asyncio.wait((task,), timeout=self._config.stop_timeout_s)
        task.cancel()
        await asyncio.wait((task,))
        await self._site.release(replica.name)
        self._replicas.pop(replica.name, None)
        if process is None:  # else `_leave` has said so
            self._announce(replica, "stopping", "it was not ready")
        replica.gone.set()
        self._note(replica, "stopped")

    def _note(self, replica: Replica, text: str) -> None:
        log.debug("%s: %s", replica.name, text)  # `serve` prints the event
        self.events.append(Event(replica.name, replica.state, text))


class Background:
    """Calls that nobody waits for."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        """Run it and log a failure; a dead receiver has a task of its own."""

        async def logged() -> None:
            try:
                await work
            except WorldError as error:
                log.info("%s: %s", name, error)

        task = asyncio.create_task(logged())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def started(replica: Replica, process: Process, timeout_s: float) -> Member:
    """Start the process; meanwhile `replica.stage` follows."""

    async def look() -> None:
        with contextlib.suppress(WorldError):  # the start says it, too
            while True:
                replica.stage = await process.stage()
                await asyncio.sleep(LOOK_S)

    looking = asyncio.create_task(look())
    try:
        return await in_time(process.start(), timeout_s, "start")
    finally:
        looking.cancel()


async def until_over(replica: Replica, process: Process, stop_timeout_s: float) -> None:
    """Returns when the process was stopped; raises WorldError when it is dead or silent."""
    run = asyncio.create_task(process.run())
    try:
        await asyncio.wait((run, replica.given_up), return_when=asyncio.FIRST_COMPLETED)
        if not run.done():
            raise WorldError(replica.given_up.result())
        run.result()
        if replica.stopping is not None:  # the call returns a little after the engine has ended
            await asyncio.wait((replica.stopping,), timeout=stop_timeout_s)
    finally:
        run.cancel()


async def listen(replica: Replica) -> None:
    """Give a process up that answers no pings and falls silent; returns when it is over."""
    process, given_up = replica.reachable, replica.given_up
    while process is not None and replica.reachable is process and not given_up.done():
        try:
            await in_time(process.report(), SILENT_S, "report")
        except WorldError as error:  # a death may be known here before it is to `run`
            replica.give_up(str(error), is_dead=isinstance(error, PeerLost))
            return
        await asyncio.sleep(ASK_S)


async def killed(replica: Replica) -> None:
    """Make sure that the replica's process is gone; a cancellation waits until it is."""
    if replica.process is None:
        return
    work = asyncio.create_task(replica.process.kill())
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError:
            cancelled = True
    work.result()
    replica.process = None
    if cancelled:
        raise asyncio.CancelledError


async def report_of(replica: Replica) -> Report | None:
    """None if the process is not ready or does not answer quickly."""
    if (process := replica.reachable) is None:
        return None
    try:
        return await in_time(process.report(), REPORT_TIMEOUT_S, "report")
    except WorldError as error:
        log.info("%s: %s", replica.name, error)
        return None


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
