"""Keeps a process running for a name: `keep` is the life of the name, `_live` of one process."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable

from cluster.control.herald import Herald
from cluster.control.replicas import Replica, State, backoff_s
from cluster.control.tasks import Background, in_time
from cluster.sites.process import Process, Surroundings
from worker.api import Member
from worker.errors import KvlaneError, NoPlacement, PeerLost, UserError, WorldError

MAX_EARLY_DEATHS = 3  # of one name while the cluster starts; then starting fails
LOOK_S = 0.3  # between questions how far a start is
PINGED = "tcp://"  # scheme of the addresses that answer pings; a router's is http://
# A router has no socket that answers pings: it is asked through Ray, and killed once it is silent
# for so long. It loses all its streams, so a machine that is merely busy has to get by.
SILENT_S = 20.0
ASK_S = 2.0  # between two questions
RELINK_S = 0.2  # after a link that is over


class Keeper:
    """What the tasks of all names have in common. note: takes a line of progress."""

    def __init__(
        self,
        around: Surroundings,
        herald: Herald,
        background: Background,
        note: Callable[[Replica, str], None],
    ) -> None:
        self.up = False  # all were ready; before that, a process that cannot start is a failure
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._site, self._links, self._config = around.site, around.links, around.config
        self._herald, self._background, self._note = herald, background, note

    async def keep(self, replica: Replica) -> None:
        """Start one process after the other, until it is leaving or starting has failed."""
        deaths_in_a_row = 0
        while replica.process is not None or not replica.leaving:
            ready_at, error = await self._live(replica)
            if replica.leaving:
                return
            if replica.renewing and ready_at:
                continue
            replica.failure = None if ready_at else error
            lived_s = time.monotonic() - ready_at if ready_at else 0.0
            if lived_s > self._config.max_restart_backoff_s:
                deaths_in_a_row = 0
            deaths_in_a_row += 1
            hopeless = isinstance(error, UserError) or deaths_in_a_row >= MAX_EARLY_DEATHS
            if hopeless and not self.up:
                if not self.failed.done():  # the same class, with the name of the process
                    kinds = (kind for kind in (UserError, NoPlacement) if isinstance(error, kind))
                    failure = next(kinds, WorldError)(f"{replica.name}: {error}")
                    self.failed.set_exception(failure)
                return
            delay_s = backoff_s(
                deaths_in_a_row, self._config.restart_backoff_s, self._config.max_restart_backoff_s
            )
            replica.restarts += 1
            self._site.remember(replica.record)
            self._note(replica, f"{error}; again in {delay_s:g} s")
            if not ready_at:  # else the others know it, see `_leave`
                self._herald.announce(replica, State.LOST, str(error))
            await asyncio.sleep(delay_s)

    async def _live(self, replica: Replica) -> tuple[float, KvlaneError]:
        """Run one incarnation to its end: when it became ready (0: never), and why it ended."""
        ready_at = 0.0
        error: KvlaneError = WorldError("it stopped")
        stays = False  # its process, for another role
        try:
            if replica.member is None:  # else it was adopted
                await self._begin(replica)
            ready_at = time.monotonic()
            assert replica.process is not None
            await until_over(replica, replica.process, self._config.stop_timeout_s)
            has_retired = replica.stopping is not None and replica.stopping.done()
            stays = replica.turning and has_retired and not replica.leaving
        except (WorldError, UserError) as e:
            error = e
        finally:
            replica.turning = stays
            self._leave(replica, error)
            if not stays:
                await killed(replica)
            replica.over.set()
        return ready_at, error

    async def _begin(self, replica: Replica) -> None:
        """Make a new incarnation ready, or the one that another monitor has begun."""
        began_at = time.monotonic()
        member = await self._turned(replica) if replica.turning else None
        if replica.process is None:
            replica.begin(secrets.token_hex(4))
            self._note(replica, "starting")
            replica.process = await self._site.create(replica.name, replica.incarnation)
        process = replica.process
        if member is None:
            self._note(replica, f"loading ({process.place})")
            member = await self._started(replica, process)
        replica.member, replica.state, replica.ready_at = member, State.READY, time.time()
        took = f"after {time.monotonic() - began_at:.1f} s"
        self._site.remember(replica.record)
        self.watch(replica)
        self._herald.announce(replica, State.READY, f"{took} ({process.place})")
        self._note(replica, f"ready {took}")

    async def _turned(self, replica: Replica) -> Member | None:
        """The process that has left its role in its next one; None: it could not, and is gone."""
        assert replica.process is not None
        replica.begin(secrets.token_hex(4))
        self._note(replica, f"turning to {replica.role} ({replica.process.place})")
        try:
            await self._site.turn(replica.name, replica.incarnation)
            return await self._started(replica, replica.process)
        except (WorldError, UserError) as error:
            self._note(replica, f"a new process follows, as it cannot turn: {error}")
            await killed(replica)
            return None

    async def _started(self, replica: Replica, process: Process) -> Member:
        """Start the process; meanwhile `replica.stage` follows, and routers learn of it."""

        async def look() -> None:
            with contextlib.suppress(WorldError):  # the start says it, too
                while True:
                    replica.stage = await process.stage()
                    self._herald.progress()
                    await asyncio.sleep(LOOK_S)

        looking = asyncio.create_task(look())
        try:
            return await in_time(process.start(), self._config.start_timeout_s, "start")
        finally:
            looking.cancel()

    def watch(self, replica: Replica) -> None:
        """Learn of a member that falls silent."""
        assert replica.member is not None
        if replica.member.address.startswith(PINGED):
            self._connect(replica.member)
        else:
            self._background.spawn(listen(replica), f"reports of {replica.name}")

    async def ping_anew(self, replica: Replica) -> None:
        """After a link to a member that was not silent."""
        member = replica.member
        await asyncio.sleep(RELINK_S)
        if member is not None and replica.member is member:
            self._connect(member)

    def _connect(self, member: Member) -> None:
        self._links.connect(member.peer, member.address, member.wire_key)

    def _leave(self, replica: Replica, why: KvlaneError) -> None:
        """Take the replica out of the members and tell all processes at once."""
        member, replica.member = replica.member, None
        replica.state, text = replica.ended
        if member is not None:
            is_lost = replica.state is State.LOST
            self._note(replica, f"{replica.state} {text}".rstrip())
            self._site.remember(replica.record)
            self._links.disconnect(member.peer)
            self._herald.announce(replica, replica.state, str(why) if is_lost else text)


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
