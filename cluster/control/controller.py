"""The controller: the actor that keeps all others running, and the only one with a name in Ray.

It may die: `serve` owns what it has made (`sites.estate`), and the next controller goes on with it.
When `serve` ends, in whatever way, Ray ends them all.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster import logs
from cluster.config import Config, differences
from cluster.control.monitor import Monitor
from cluster.control.replicas import Event, Replica, ReplicaStatus, State, last_of_its_kind
from cluster.control.tasks import Background, in_time
from cluster.diagnose.running import ClusterExamination, WorkerAnswer
from cluster.sites.estate import Done, Legacy, Order, Orders
from cluster.sites.handles import Identity, RayProcess, call
from cluster.sites.process import Process, Record, Stage
from cluster.sites.ray_site import Home, RaySite
from worker.api import Lost
from worker.errors import UserError, WorldError
from worker.wire import Event as WireEvent
from worker.wire import Wire

log = logging.getLogger("kvlane.controller")

NAME = "kvlane-controller"
NAMESPACE = "kvlane"
BEAT_S = 1.0
EXAMINE_TIMEOUT_S = 120.0
POLL_S = 0.2  # for which `progress` waits for an order


@dataclass(frozen=True, slots=True)
class Progress:
    """What `serve` shows and waits for."""

    orders: tuple[Order, ...]
    events: tuple[Event, ...]  # those that `serve` has not seen
    starting: dict[str, Stage]  # of the names that are not ready
    waiting: str  # what placement waits for, or ""
    urls: tuple[str, ...]  # of the routers that are ready: one for each node that has some
    drained: bool  # nothing is left to serve


class Controller:
    """Ray actor around a Monitor and the Wire that pings for it. Every method is a coroutine."""

    def __init__(self, config: Config, home: Home, legacy: Legacy) -> None:
        logs.begin("controller", config.cluster)
        self._config = config
        self._legacy = legacy
        self._orders = Orders()
        self._site = RaySite(legacy, home, self._orders)
        self._monitor: Monitor | None = None
        self._wire: Wire | None = None
        self._drained = False
        self._background = Background()
        self._placed = asyncio.Event()  # room is reserved, or there is none
        self._ready = asyncio.Event()

    def __repr__(self) -> str:
        return "controller"

    async def identify(self) -> Identity:
        """Which process this is."""
        return Identity.own()

    async def start(self) -> None:
        """Place and start everything; returns when all of it is ready.

        Placement, UserError, WorldError: it cannot start; the message is for the user.
        """
        try:
            records = await self._site.open()
        finally:
            self._placed.set()
        monitor = self._monitored([(record, None) for record in records])
        await monitor.start()
        self._ready.set()

    async def adopt(self) -> int:
        """Go on where the last controller has ended; how many processes are members."""
        found = await self._site.inherited()
        monitor = self._monitored(found)
        monitor.adopt()
        self._placed.set()
        self._ready.set()
        replicas = monitor.replicas()
        if self._legacy.ends:
            drain = self.drain(None, self._legacy.drain_timeout_s)
            self._background.spawn(drain, "drain of everything")
        for replica in replicas:
            if replica.leaving and not self._legacy.ends:
                drain = self.drain(replica.name, replica.drain_timeout_s)
                self._background.spawn(drain, f"drain of {replica.name}")
        return sum(replica.member is not None for replica in replicas)

    def _monitored(self, found: Iterable[tuple[Record, Process | None]]) -> Monitor:
        """Who keeps these names, and a wire that pings for it."""
        loop = asyncio.get_running_loop()

        def deliver(events: Sequence[WireEvent]) -> None:
            for peer, message in events:
                if isinstance(message, Lost):
                    loop.call_soon_threadsafe(monitor.lost, peer, message.reason)

        wire = Wire(f"controller/{secrets.token_hex(4)}", self._config.ping, deliver)
        replicas = [Replica.of(record, process) for record, process in found]
        monitor = Monitor(replicas, self._site, wire, self._config.cluster, self._legacy.number)
        self._wire, self._monitor = wire, monitor
        wire.start()
        _beat(loop, wire)
        return monitor

    def _replicas(self) -> list[Replica]:
        return [] if self._monitor is None else self._monitor.replicas()

    async def progress(self, num_seen: int, done: Sequence[Done] = ()) -> Progress:
        """What has happened after the first `num_seen` events, and what `serve` shall do.

        done: the results of orders.
        """
        orders = await self._orders.exchange(done, POLL_S)
        return Progress(
            orders=orders,
            events=() if self._monitor is None else tuple(self._monitor.events[num_seen:]),
            starting={r.name: r.stage for r in self._replicas() if r.state is State.STARTING},
            waiting=self._site.waiting,
            urls=_urls(self._replicas()),
            drained=self._drained,
        )

    async def status(self) -> list[ReplicaStatus]:
        """One row a name."""
        return [] if self._monitor is None else await self._monitor.status()

    async def examine(self) -> ClusterExamination:
        """What `doctor` judges. One worker after another: each measures its paths alone."""
        workers = [replica for replica in self._replicas() if replica.role != "router"]
        answers = [await _examined(worker) for worker in workers]
        return ClusterExamination(self._config, self._site.config, tuple(answers))

    async def join(self, config: Config) -> tuple[str, ...]:
        """For a second `serve`: waits until this cluster is ready; URLs of its routers.

        Raises UserError if it runs with another configuration.
        """
        if paths := differences(self._config, config):
            raise UserError(
                "kvlane runs on this Ray cluster already, with another value of "
                f"{', '.join(paths)}; end it first: kvlane down"
            )
        await self._ready.wait()
        return _urls(self._replicas())

    async def warning(self, name: str) -> str:
        """As `last_of_its_kind`."""
        return last_of_its_kind(name, self._replicas())

    async def drain(self, name: str | None, timeout_s: float | None) -> bool:
        """Drain one name, or everything, in which case `serve` ends too.

        Returns whether all work was finished in time. Raises UserError for an unknown name.
        """
        if self._monitor is None:
            raise UserError("the cluster is still being placed")
        if name is not None:
            if warning := last_of_its_kind(name, self._replicas()):
                log.warning("%s", warning)
            return await self._monitor.drain([name], timeout_s)
        self._orders.tell("end", timeout_s)
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
        self._site.closing = True
        if self._monitor is None:  # else groups that are being placed would stay in Ray
            await self._placed.wait()
        idle = self._monitor is None or await self._monitor.stop(drain_timeout_s)
        if self._wire is not None:
            await asyncio.to_thread(self._wire.close)
        return idle


def _beat(loop: asyncio.AbstractEventLoop, wire: Wire) -> None:
    """Tell the wire that this loop runs; after ping.stall_s without a beat it stops pinging."""
    wire.beat()
    loop.call_later(BEAT_S, _beat, loop, wire)


def _urls(replicas: Iterable[Replica]) -> tuple[str, ...]:
    """Of the routers that are ready."""
    members = [r.member for r in replicas if r.role == "router" and r.member]
    return tuple(dict.fromkeys(member.address for member in members))


async def _examined(replica: Replica) -> WorkerAnswer:
    process, asked_at = replica.reachable, time.time()
    examination, error = None, "" if process else f"it is {replica.state}"
    try:
        if isinstance(process, RayProcess):
            asked = call(process.actor.examine)
            examination = await in_time(asked, EXAMINE_TIMEOUT_S, "answer the doctor")
    except WorldError as e:
        error = str(e)
    return WorkerAnswer(replica.name, asked_at, time.time(), examination, error)
