"""Keeps a process running for every name of the cluster: one task a name.

Plain asyncio without Ray: the protocols in `process` are all that it knows of its surroundings.

When a process dies, the others are told first. Then the monitor makes sure that it is really gone
(the fence), because the next process uses the same devices and memory. Then it starts that one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from typing import TypeVar

from cluster.config import ClusterConfig
from cluster.process import Links, News, Process, Report, Site
from cluster.seats import (
    Changes,
    Event,
    Seat,
    SeatStatus,
    State,
    backoff_s,
    live_members,
    others_there,
)
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


class Monitor:
    """All seats of one cluster, and the tasks that keep a process running in each.

    Args:
        seats: one for every name; from now on only this object changes them.
        site: starts processes.
        links: pings them; its owner calls `lost` when one does not answer.
        config: timeouts and back-off.
    """

    def __init__(
        self, seats: Sequence[Seat], site: Site, links: Links, config: ClusterConfig
    ) -> None:
        self.events: list[Event] = []
        self._seats = {seat.name: seat for seat in seats}
        self._site = site
        self._links = links
        self._config = config
        self._changes = Changes()
        self._version = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._background = Background()
        self._up = False
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Fill all seats at once; returns when every one of them is ready.

        Raises:
            UserError: a process said that it cannot work as configured.
            WorldError: one died or did not start in time, several times.
        """
        for seat in self._seats.values():
            self._tasks[seat.name] = asyncio.create_task(self._keep(seat), name=seat.name)
        while not all(seat.state is State.READY for seat in self._seats.values()):
            await asyncio.wait((self._failed,), timeout=POLL_S)
            if self._failed.done():
                self._failed.result()
        self._up = True

    def seats(self) -> list[Seat]:
        """All names, for reading."""
        return list(self._seats.values())

    def lost(self, peer: PeerId, reason: str) -> None:
        """`peer` does not answer pings any more: treat it as dead."""
        for seat in self._seats.values():
            is_meant = seat.member is not None and seat.member.peer == peer
            if is_meant and not seat.silent.done():
                seat.silent.set_result(f"it does not answer ({reason})")

    async def status(self) -> list[SeatStatus]:
        """One row a name, with counters from those that answer quickly."""
        seats = list(self._seats.values())
        reports = await asyncio.gather(*(report_of(seat) for seat in seats))
        return [seat.status(report) for seat, report in zip(seats, reports, strict=True)]

    async def drain(self, names: Iterable[str], timeout_s: float | None) -> bool:
        """Let these names finish their work, then stop and remove them.

        Returns whether all of them became idle in time.

        Raises:
            UserError: no such name.
        """
        unknown = [name for name in names if name not in self._seats]
        if unknown:
            known = ", ".join(sorted(self._seats)) or "none left"
            raise UserError(f"no worker or router is called {unknown[0]} (there are: {known})")
        seats = [self._seats[name] for name in names]
        for seat in seats:  # all of them, before the first is told which others go on
            seat.leaving = True
        idle = await asyncio.gather(*(self._finish(seat, timeout_s) for seat in seats))
        await asyncio.gather(*(self._remove(seat) for seat in seats))
        return all(idle)

    async def stop(self, drain_timeout_s: float | None) -> bool:
        """Drain for at most `drain_timeout_s` (None: no limit), then stop; routers go first."""
        self._up = True  # nothing that dies from now on is a failure to start
        idle = True
        for is_router in (True, False):
            names = [s.name for s in self._seats.values() if (s.role == "router") is is_router]
            idle &= await self.drain(names, drain_timeout_s)
        return idle

    # One seat.

    async def _keep(self, seat: Seat) -> None:
        """Start one process after the other, until the seat is leaving or starting has failed."""
        deaths_in_a_row = 0
        while not seat.leaving:
            ready_at, error = await self._live(seat)
            if seat.leaving:
                return
            lived_s = time.monotonic() - ready_at if ready_at else 0.0
            if lived_s > self._config.max_restart_backoff_s:
                deaths_in_a_row = 0
            deaths_in_a_row += 1
            hopeless = isinstance(error, UserError) or deaths_in_a_row >= MAX_EARLY_DEATHS
            if hopeless and not self._up:
                if not self._failed.done():
                    self._failed.set_exception(start_failure(seat, error))
                return
            delay_s = backoff_s(
                deaths_in_a_row, self._config.restart_backoff_s, self._config.max_restart_backoff_s
            )
            seat.restarts += 1
            self._note(seat, f"{error}; again in {delay_s:g} s")
            if not ready_at:  # else the others know it, see `_leave`
                self._changes.add(seat, State.LOST, str(error))
                self._publish()
            await asyncio.sleep(delay_s)

    async def _live(self, seat: Seat) -> tuple[float, KvlaneError]:
        """Run one incarnation until its process is gone.

        Returns when it became ready (0: never), and why it ended.
        """
        seat.begin(secrets.token_hex(4))
        began_at, ready_at = time.monotonic(), 0.0
        error: KvlaneError = WorldError("it stopped")
        try:
            self._note(seat, "starting")
            process = seat.process = await self._site.create(seat.name, seat.incarnation)
            self._note(seat, f"loading ({process.place})")
            member = await started(seat, process, self._config.start_timeout_s)
            ready_at = time.monotonic()
            took = f"after {ready_at - began_at:.1f} s"
            self._changes.add(seat, State.READY, f"{took} ({process.place})")
            self._join(seat, member)
            self._note(seat, f"ready {took}")
            await until_over(seat, process, self._config.stop_timeout_s)
        except (WorldError, UserError) as e:
            error = e
        finally:
            self._leave(seat, error)
            await fence(self._site, seat)
        return ready_at, error

    def _join(self, seat: Seat, member: Member) -> None:
        seat.member, seat.state = member, State.READY
        if member.address.startswith(PINGED):
            self._links.connect(member.peer, member.address)
        else:
            self._background.spawn(listen(seat), f"reports of {seat.name}")
        self._publish()

    def _leave(self, seat: Seat, why: KvlaneError) -> None:
        """Take the seat out of the members and tell all others at once."""
        member, seat.member, seat.state = seat.member, None, State.LOST
        if member is not None:
            self._note(seat, "stopping" if seat.leaving else "lost")
            state = "stopping" if seat.leaving else State.LOST
            self._changes.add(seat, state, "" if seat.leaving else str(why))
            self._links.disconnect(member.peer)
            self._publish()

    def _publish(self) -> None:
        self._version += 1
        members = live_members(self._seats.values())
        news = News(self._version, members, self._changes.told())
        log.debug("members %d: %s", self._version, " ".join(m.peer for m in members) or "none")
        for seat in self._seats.values():
            if seat.reachable is not None and seat.stopping is None:  # else it may be gone by then
                self._background.spawn(seat.reachable.tell(news), f"members for {seat.name}")

    # The end of a seat.

    async def _finish(self, seat: Seat, timeout_s: float | None) -> bool:
        """Drain; False if it did not become idle in time."""
        process = seat.reachable
        if process is None:
            return True
        seat.state = State.DRAINING
        self._note(seat, "draining")
        self._changes.add(seat, State.DRAINING, "")
        self._publish()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            others = others_there(seat, self._seats.values())
            await in_time(process.drain(others), REPORT_TIMEOUT_S, "drain")
            while seat.reachable is process:
                if (await in_time(process.report(), REPORT_TIMEOUT_S, "report")).idle:
                    return True
                if deadline is not None and time.monotonic() > deadline:
                    return False
                await asyncio.sleep(POLL_S)
        except WorldError as error:
            self._note(seat, f"while draining: {error}")
            return False
        return True  # it died; nothing is left to wait for

    async def _remove(self, seat: Seat) -> None:
        """Ask the process to stop, kill it if it does not, and forget the seat."""
        task = self._tasks.pop(seat.name, None)
        if task is None:  # another call is removing it
            await seat.gone.wait()
            return
        if seat.reachable is not None:
            seat.stopping = self._background.spawn(seat.reachable.stop(), f"stop of {seat.name}")
            await asyncio.wait((task,), timeout=self._config.stop_timeout_s)
        task.cancel()
        await asyncio.wait((task,))
        await self._site.release(seat.name)
        self._seats.pop(seat.name, None)
        if self._changes.last(seat.name) != "stopping":  # it was not ready, see `_leave`
            self._changes.add(seat, "stopping", "it was not ready")
            self._publish()
        seat.gone.set()
        self._note(seat, "stopped")

    def _note(self, seat: Seat, text: str) -> None:
        log.debug("%s: %s", seat.name, text)  # `serve` prints the event
        self.events.append(Event(seat.name, seat.state, text))


class Background:
    """Calls that nobody waits for."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, None], what: str) -> asyncio.Task[None]:
        """Run it in the background and log a failure; a dead receiver has a task of its own."""

        async def logged() -> None:
            try:
                await work
            except WorldError as error:
                log.info("%s: %s", what, error)

        task = asyncio.create_task(logged())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def started(seat: Seat, process: Process, timeout_s: float) -> Member:
    """Start the process; meanwhile the seat shows how far it is."""

    async def look() -> None:
        with contextlib.suppress(WorldError):  # the start says it, too
            while True:
                seat.stage = await process.stage()
                await asyncio.sleep(LOOK_S)

    looking = asyncio.create_task(look())
    try:
        return await in_time(process.start(), timeout_s, "start")
    finally:
        looking.cancel()


async def until_over(seat: Seat, process: Process, stop_timeout_s: float) -> None:
    """Returns when the process was stopped; raises WorldError when it is dead or silent."""
    run = asyncio.create_task(process.run())
    try:
        await asyncio.wait((run, seat.silent), return_when=asyncio.FIRST_COMPLETED)
        if not run.done():
            raise WorldError(seat.silent.result())
        run.result()
        if seat.stopping is not None:  # the call returns a little after the engine has ended
            await asyncio.wait((seat.stopping,), timeout=stop_timeout_s)
    finally:
        run.cancel()


async def listen(seat: Seat) -> None:
    """Notice when a process that answers no pings falls silent; returns when it is over."""
    process, silent = seat.reachable, seat.silent
    while process is not None and seat.reachable is process and not silent.done():
        try:
            await in_time(process.report(), SILENT_S, "report")
        except WorldError as error:
            if not silent.done():  # a death is known here before it is to whoever waits for its end
                dead = isinstance(error, PeerLost)
                silent.set_result(str(error) if dead else f"it does not answer ({error})")
            return
        await asyncio.sleep(ASK_S)


async def fence(site: Site, seat: Seat) -> None:
    """Make sure that the seat's process is gone; a cancellation waits until it is."""
    if seat.process is None:
        return
    work = asyncio.create_task(site.fence(seat.process))
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError:
            cancelled = True
    work.result()
    seat.process = None
    if cancelled:
        raise asyncio.CancelledError


async def report_of(seat: Seat) -> Report | None:
    """The process's report; None if it is not ready or does not answer quickly."""
    process = seat.reachable
    if process is None:
        return None
    try:
        return await in_time(process.report(), REPORT_TIMEOUT_S, "report")
    except WorldError as error:
        log.info("%s: %s", seat.name, error)
        return None


async def in_time(work: Awaitable[T], timeout_s: float, what: str) -> T:
    """The result of `work`. Raises WorldError if there is none after `timeout_s`."""
    try:
        return await asyncio.wait_for(work, timeout_s)
    except TimeoutError:
        raise WorldError(f"it did not {what} within {timeout_s:g} s") from None


def start_failure(seat: Seat, error: KvlaneError) -> KvlaneError:
    """The error that ends `serve`: of the same class, with the name of the process."""
    for kind in (UserError, Placement):
        if isinstance(error, kind):
            return kind(f"{seat.name}: {error}")
    return WorldError(f"{seat.name}: {error}")
