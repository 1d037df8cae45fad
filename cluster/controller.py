"""The controller: the one actor that owns all others, and the only one with a name in Ray.

It is not detached: when `serve` ends, in whatever way, Ray ends the controller, and with it
everything that it created.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.actors import (
    LOCAL_HOST,
    ProcessActor,
    RayProcess,
    RouterActor,
    RouterProcess,
    WorkerActor,
    call,
    create,
)
from cluster.config import Config, differences
from cluster.doctor.running import Examined, Patient
from cluster.door import Door
from cluster.fence import Identity
from cluster.logs import Logs
from cluster.monitor import Monitor, in_time
from cluster.placement import SPANS, Ask, Group, live_nodes, place, remove
from cluster.process import Process, Stage
from cluster.ranks import RankActor, RankedProcess
from cluster.ray_private import RAY
from cluster.resolve import (
    bundle_of,
    num_ranks,
    with_collective,
    with_devices,
    with_transport,
)
from cluster.seats import Event, Seat, SeatStatus, State, last_of_its_kind, seats_of
from worker.api import Lost
from worker.errors import UserError, WorldError
from worker.wire import Event as WireEvent
from worker.wire import Wire

log = logging.getLogger("kvlane.controller")

NAME = "kvlane-controller"
NAMESPACE = "kvlane"
BEAT_S = 1.0
EXAMINE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Home:
    """Where `serve` runs."""

    node_id: str
    address: str  # of the node
    local: bool  # `serve` started this Ray: no other node will join


@dataclass(frozen=True, slots=True)
class Progress:
    """What `serve` shows and waits for."""

    events: tuple[Event, ...]  # those that `serve` has not seen
    starting: dict[str, Stage]  # of the names that are not ready
    waiting: str  # what placement waits for, or ""
    urls: tuple[str, ...]  # of the routers that are ready: one for each node that has some
    drained: bool  # nothing is left to serve


class RaySite:
    """`process.Site` over Ray. Not thread-safe; lives in the controller's event loop."""

    def __init__(self, config: Config, home: Home) -> None:
        self.config = config
        self.waiting = ""
        self.closing = False
        self._home = home
        self._groups: dict[str, Group] = {}
        self._seats: dict[str, Seat] = {}
        self._doors: dict[str, Door] = {}  # by id of the node

    async def open(self) -> None:
        """Reserve room for all seats, and decide what depends on where they are.

        Raises:
            Placement: something does not fit; nothing stays reserved.
            WorldError: it was set to `closing` meanwhile; nothing stays reserved.
        """
        nodes = await asyncio.to_thread(live_nodes)
        num_gpus = sum(node.total.get("GPU", 0) for node in nodes)
        self.config = with_devices(
            self.config,
            has_gpus=num_gpus > 0,
            local_gpus=num_gpus if self._home.local else None,
        )
        self._seats = {seat.name: seat for seat in seats_of(self.config)}
        self._groups = await self._place(list(self._seats.values()))
        if self.closing:
            for name in list(self._groups):
                await self.release(name)
            raise WorldError("stopped before anything was started")
        self.config = with_transport(self.config, self._worker_nodes())

    async def create(self, name: str, incarnation: str) -> RayProcess:
        """See process.Site. A group whose node is gone is replaced by a new one."""
        seat = self._seats[name]
        await self._renew_group(seat)
        group = self._groups.get(name)
        actors = [
            create(
                kind,
                args,
                name=name,
                group=group,
                rank=rank,
                bundle=bundle_of(self.config, seat),
                home=self._home.node_id,
            )
            for rank, (kind, args) in enumerate(self._recipes(seat, incarnation, group))
        ]
        try:
            found: list[Identity] = await asyncio.wait_for(
                asyncio.gather(*(call(actor.identify) for actor in actors)),
                self.config.cluster.start_timeout_s,
            )
        except BaseException:
            for actor in actors:
                RAY.kill(actor)
            raise
        if seat.role == "router":
            door = self._doors.setdefault(found[0].node_id, Door(self.config.cluster.port))
            return RouterProcess(actors[0], found[0], door)
        parts = [RayProcess(actor, who) for actor, who in zip(actors, found, strict=True)]
        return RankedProcess(parts) if len(parts) > 1 else parts[0]

    async def fence(self, process: Process) -> None:
        """See process.Site."""
        assert isinstance(process, RayProcess)
        await process.fence()

    async def release(self, name: str) -> None:
        """See process.Site."""
        group = self._groups.pop(name, None)
        if group is not None:
            await asyncio.to_thread(remove, group.pg)

    async def _renew_group(self, seat: Seat) -> None:
        group = self._groups.get(seat.name)
        if group is None:
            if not bundle_of(self.config, seat):
                return
        else:
            alive = {node.node_id for node in await asyncio.to_thread(live_nodes)}
            gone = {node.address for node in group.nodes if node.node_id not in alive}
            if not gone:
                return
            log.warning("%s: node %s is gone, placing it anew", seat.name, ", ".join(gone))
            await self.release(seat.name)
        self._groups |= await self._place([seat])
        nodes = self._worker_nodes()
        transport = self.config.transport
        if len(nodes) > 1 and (transport.name == "shm" or transport.kind == "nvlink"):
            log.warning(
                "%s is on another node now, which transport %s does not reach: decode workers "
                "prefill by themselves; start again with --set transport.name=mooncake "
                "--set transport.kind=tcp",
                seat.name,
                transport.name if transport.name == "shm" else transport.kind,
            )

    async def _place(self, seats: Sequence[Seat]) -> dict[str, Group]:
        asks = [self._ask(seat) for seat in seats]
        try:
            return await asyncio.to_thread(
                place,
                [ask for ask in asks if ask.bundle],
                self.config.cluster.placement_timeout_s,
                can_grow=not self._home.local,
                waiting=self._wait,
            )
        finally:
            self.waiting = ""

    def _ask(self, seat: Seat) -> Ask:
        bundle = bundle_of(self.config, seat)
        if seat.role == "router" or seat.role == "controller":
            return Ask(seat.name, bundle)
        part = self.config.role(seat.role)
        return Ask(seat.name, bundle, part.tp, SPANS[part.engine.collective])

    def _wait(self, text: str) -> None:
        """Called now and then while groups are placed; an error gives them back."""
        if self.closing:
            raise WorldError("stopped while there was no room yet")
        self.waiting = text

    def _worker_nodes(self) -> set[str]:
        workers = [name for name, seat in self._seats.items() if seat.role != "router"]
        found: set[str] = set()
        for group in map(self._groups.get, workers):
            found |= {node.node_id for node in group.nodes} if group else {self._home.node_id}
        return found

    def _recipes(
        self, seat: Seat, incarnation: str, group: Group | None
    ) -> list[tuple[type[ProcessActor], list[object]]]:
        """Class and arguments of each actor of a seat."""
        if seat.role == "router":
            return [(RouterActor, [self.config, seat.name, incarnation])]
        assert seat.role != "controller"
        num = num_ranks(self.config, seat)
        hosts = [node.address for node in group.nodes] if group else [self._home.address] * num
        if self._home.local:
            hosts = [LOCAL_HOST] * num
        worker = with_collective(self.config.worker(seat.role), hosts)
        cluster = self.config.cluster
        logs, port = Logs.of(cluster), cluster.worker_metrics_port
        found: list[tuple[type[ProcessActor], list[object]]] = []
        for rank, host in enumerate(hosts):
            args: list[object] = [worker, seat.name, incarnation, host]
            if rank == 0:
                found.append((WorkerActor, [*args, port, logs]))
            else:
                found.append((RankActor, [*args, logs, rank]))
        return found


class Controller:
    """Ray actor around a Monitor and the Wire that pings for it. Every method is a coroutine."""

    def __init__(self, config: Config, home: Home) -> None:
        Logs.of(config.cluster).begin("controller")
        self._config = config
        self._site = RaySite(config, home)
        self._monitor: Monitor | None = None
        self._wire: Wire | None = None
        self._drained = False
        self._placed = asyncio.Event()  # room is reserved, or there is none
        self._ready = asyncio.Event()

    def __repr__(self) -> str:
        return "controller"

    async def start(self) -> None:
        """Place and start everything; returns when all of it is ready.

        Raises:
            Placement, UserError, WorldError: the cluster cannot start; the message is for the user.
        """
        try:
            await self._site.open()
        finally:
            self._placed.set()
        loop = asyncio.get_running_loop()

        def deliver(events: Sequence[WireEvent]) -> None:
            for peer, message in events:
                if isinstance(message, Lost):
                    loop.call_soon_threadsafe(monitor.lost, peer, message.reason)

        wire = Wire(f"controller/{secrets.token_hex(4)}", self._config.ping, deliver)
        seats = seats_of(self._site.config)
        monitor = Monitor(seats, self._site, wire, self._config.cluster)
        self._wire, self._monitor = wire, monitor
        wire.start()
        self._beat(loop, wire)
        await monitor.start()
        self._ready.set()

    def _beat(self, loop: asyncio.AbstractEventLoop, wire: Wire) -> None:
        """Tell the wire that this loop runs; after ping.stall_s without a beat it stops pinging."""
        wire.beat()
        loop.call_later(BEAT_S, self._beat, loop, wire)

    async def progress(self, num_seen: int) -> Progress:
        """What has happened after the first `num_seen` events."""
        monitor = self._monitor
        if monitor is None:
            return Progress((), {}, self._site.waiting, (), False)
        return Progress(
            events=tuple(monitor.events[num_seen:]),
            starting={s.name: s.stage for s in monitor.seats() if s.state is State.STARTING},
            waiting=self._site.waiting,
            urls=tuple(
                dict.fromkeys(
                    s.member.address
                    for s in monitor.seats()
                    if s.role == "router" and s.member is not None
                )
            ),
            drained=self._drained,
        )

    async def status(self) -> list[SeatStatus]:
        """One row a name."""
        return [] if self._monitor is None else await self._monitor.status()

    async def examine(self) -> Examined:
        """What `doctor` judges. One worker after another: each measures its paths alone."""
        seats = [] if self._monitor is None else self._monitor.seats()
        patients = [await _examined(seat) for seat in seats if seat.role != "router"]
        return Examined(self._config, self._site.config, tuple(patients))

    async def join(self, config: Config) -> tuple[str, ...]:
        """For a second `serve`: waits until this cluster is ready; URLs of its routers.

        Raises:
            UserError: it runs with another configuration.
        """
        if others := differences(self._config, config):
            raise UserError(
                "kvlane runs on this Ray cluster already, with another value of "
                f"{', '.join(others)}; end it first: kvlane down"
            )
        await self._ready.wait()
        return (await self.progress(0)).urls

    async def warning(self, name: str) -> str:
        """What to say before `name` is drained, or ''."""
        return "" if self._monitor is None else last_of_its_kind(name, self._monitor.seats())

    async def drain(self, name: str | None, timeout_s: float | None) -> bool:
        """Drain one name, or everything, in which case `serve` ends too.

        Returns whether all work was finished in time.

        Raises:
            UserError: no such name, or the cluster is still being placed.
        """
        if self._monitor is None:
            raise UserError("the cluster is still being placed")
        if name is not None:
            if warning := last_of_its_kind(name, self._monitor.seats()):
                log.warning("%s", warning)
            return await self._monitor.drain([name], timeout_s)
        idle = await self._monitor.stop(timeout_s)
        self._drained = True
        return idle

    async def down(self) -> bool:
        """End everything, and `serve` too, as Ctrl-C there does; whether no request was cut off."""
        if self._monitor is None:  # it is being placed: `start` fails, and so does `serve`
            self._site.closing = True
            await self._placed.wait()
            return True
        return await self.drain(None, self._config.cluster.drain_timeout_s)

    async def stop(self, drain_timeout_s: float) -> bool:
        """End everything; returns whether all requests were finished in `drain_timeout_s`."""
        idle = True
        self._site.closing = True
        if self._monitor is None:  # else groups that are being placed would stay in Ray
            await self._placed.wait()
        if self._monitor is not None:
            idle = await self._monitor.stop(drain_timeout_s)
        if self._wire is not None:
            await asyncio.to_thread(self._wire.close)
        return idle


async def _examined(seat: Seat) -> Patient:
    """What a worker tells the doctor, or why it does not."""
    process, asked_at = seat.reachable, time.time()
    told, error = None, f"it is {seat.state}"
    if isinstance(process, RayProcess):
        try:
            asked = call(process.actor.examine)
            told = await in_time(asked, EXAMINE_TIMEOUT_S, "answer the doctor")
        except WorldError as e:
            error = str(e)
    return Patient(seat.name, seat.role, asked_at, time.time(), told, "" if told else error)
