"""The controller: the actor that keeps all others running, and the only one with a name in Ray.

It may die: `serve` owns what it has made (`sites.estate`), and the next controller goes on with it.
When `serve` ends, in whatever way, Ray ends them all.
"""

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster import logs
from cluster.control.commands import Commands, urls
from cluster.control.monitor import Monitor
from cluster.control.replicas import Event, Replica, State
from cluster.control.tasks import Background
from cluster.sites.estate import Done, Legacy, Order, Orders
from cluster.sites.handles import Identity
from cluster.sites.process import Process, Record, Stage, Surroundings
from cluster.sites.ray_private import CONTROLLER
from cluster.sites.ray_site import Home, RaySite
from worker.api import Lost, Member
from worker.keyring import keyring
from worker.wire import Event as WireEvent
from worker.wire import Wire

NAME, NAMESPACE = CONTROLLER
BEAT_S = 1.0
POLL_S = 0.2  # for which `progress` waits for an order


@dataclass(frozen=True, slots=True)
class Progress:
    """What `serve` shows and waits for."""

    orders: tuple[Order, ...]
    events: tuple[Event, ...]  # those that `serve` has not seen
    starting: dict[str, Stage]  # of the names that are not ready
    waiting: str  # what placement waits for, or ""
    urls: tuple[str, ...]  # of the routers that are ready: one a node
    drained: bool  # nothing is left to serve


class Controller(Commands):
    """Ray actor around a Monitor and the Wire that pings for it. Every method is a coroutine."""

    def __init__(self, home: Home, legacy: Legacy) -> None:
        logs.begin("controller", legacy.given.cluster)
        orders = Orders()
        super().__init__(RaySite(legacy, home, orders), orders)
        self._legacy = legacy
        self._wire: Wire | None = None
        self._background = Background()

    def __repr__(self) -> str:
        return "controller"

    async def identify(self) -> Identity:
        """Which process this is."""
        return Identity.own()

    async def start(self) -> None:
        """Place and start everything; returns when all of it is ready.

        NoPlacement, UserError, WorldError: it cannot start; the message is for the user.
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
            if replica.renewing and replica.reachable is not None:
                self._background.spawn(self._go_on(replica), f"restart of {replica.name}")
            if replica.leaving and not self._legacy.ends:
                drain = self.drain(replica.name, replica.drain_timeout_s)
                self._background.spawn(drain, f"drain of {replica.name}")
        return sum(replica.member is not None for replica in replicas)

    async def _go_on(self, replica: Replica) -> None:
        """With a restart that another controller has begun; no other one begins meanwhile."""
        async with self._restarting:
            assert self._monitor is not None
            await self._monitor.renew(replica.name, replica.drain_timeout_s)

    def _monitored(self, found: Iterable[tuple[Record, Process | None]]) -> Monitor:
        """Who keeps these names, and a wire that pings for it."""
        loop = asyncio.get_running_loop()

        def deliver(events: Sequence[WireEvent]) -> None:
            for peer, message in events:
                if isinstance(message, Lost):
                    loop.call_soon_threadsafe(monitor.lost, peer, message)

        given, incarnation = self._site.given, secrets.token_hex(4)
        own = keyring(given.transport.authentication)
        wire = Wire(f"controller/{incarnation}", given.ping, deliver, keyring=own)
        # Workers know it before it pings them, and they are announced.
        me = Member("controller", "controller", incarnation, "", wire_key=wire.key)
        self._site.controller = me
        replicas = [Replica.of(record, process) for record, process in found]
        around = Surroundings(self._site, wire, given.cluster, self._legacy.number, me)
        monitor = Monitor(replicas, around)
        self._wire, self._monitor = wire, monitor
        wire.start()
        _beat(loop, wire)
        return monitor

    async def progress(self, num_seen: int, done: Sequence[Done] = ()) -> Progress:
        """What has happened after the first `num_seen` events, and what `serve` shall do.

        done: the results of orders.
        """
        orders = await self._orders.exchange(done, POLL_S)
        return Progress(
            orders=orders,
            events=() if self._monitor is None else tuple(self._monitor.events[num_seen:]),
            starting={r.name: r.stage for r in self.replicas() if r.state is State.STARTING},
            waiting=self._site.waiting,
            urls=urls(self.replicas()),
            drained=self._drained,
        )

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
