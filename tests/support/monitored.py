"""Doubles of what a monitor works on: a site, its processes, and the links that ping them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from cluster.config import ClusterConfig
from cluster.control.monitor import Monitor
from cluster.control.replicas import Replica
from cluster.sites.process import (
    Links,
    Membership,
    Process,
    Record,
    Report,
    Site,
    Stage,
    Surroundings,
)
from worker.api import Member, PeerId, Role
from worker.errors import PeerLost

CONFIG = ClusterConfig(restart_backoff_s=0.01, max_restart_backoff_s=0.05, stop_timeout_s=0.3)


@dataclass
class ProcessDouble(Process):
    name: str
    incarnation: str
    address: str
    log: list[str]
    start_error: Exception | None = None
    loaded: asyncio.Event | None = None  # what `start` waits for
    idle: bool = True
    dead: bool = False
    deaf: bool = False  # to `stop`
    frozen: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)
    members: list[str] = field(default_factory=list)
    changes: list[tuple[str, str, str]] = field(default_factory=list)
    starting: list[str] = field(default_factory=list)
    roles: list[Role] = field(default_factory=list)  # that are expected
    controller: Member | None = None  # who may ping it
    pids: tuple[int, ...] = (1, 2)
    role: Role | None = None  # None: as the name says
    place = "here"

    async def start(self) -> Member:
        if self.start_error is not None:
            raise self.start_error
        if self.loaded is not None:
            await self.loaded.wait()
        return Member(self.name, self.role or role_of(self.name), self.incarnation, self.address)

    async def stage(self) -> Stage:
        return Stage("load", 0.5)

    async def run(self) -> None:
        await self.over.wait()
        if self.dead:
            raise PeerLost("its process died")

    async def update(self, membership: Membership) -> None:
        self.members = [member.name for member in membership.members]
        self.controller, self.roles = membership.controller, list(membership.roles or ())
        self.starting = [f"{s.name} {s.text}" for s in membership.starting]
        self.changes = [(c.name, c.state, c.text) for c in membership.changes]
        self.log.append(f"tell {self.name} {' '.join(self.members)}")

    async def drain(self, address_stays: bool) -> None:
        self.log.append(f"drain {self.name}" + (" others" if address_stays else ""))

    async def report(self) -> Report:
        if self.frozen:
            await asyncio.Event().wait()
        return Report(self.idle, {"pages": 0})

    async def retire(self) -> None:
        self.log.append(f"retire {self.name}")
        if not self.deaf:
            self.over.set()

    async def stop(self) -> None:
        self.log.append(f"stop {self.name}")
        if not self.deaf:
            self.over.set()

    async def kill(self) -> None:
        await asyncio.sleep(0.01)
        self.log.append(f"kill {self.name}")

    def die(self) -> None:
        self.dead = True
        self.over.set()


@dataclass
class SiteDouble(Site):
    log: list[str] = field(default_factory=list)
    made: dict[str, list[ProcessDouble]] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)  # where it is not the usual one
    start_error: Exception | None = None
    loaded: asyncio.Event | None = None  # what further processes wait for
    records: dict[str, Record] = field(default_factory=dict)

    def remember(self, record: Record) -> None:
        self.records[record.name] = record

    async def create(self, name: str, incarnation: str) -> ProcessDouble:
        usual = "tcp://routers" if role_of(name) == "router" else f"tcp://{name}"
        address = self.addresses.get(name, usual)
        process = ProcessDouble(name, incarnation, address, self.log, self.start_error)
        process.loaded = self.loaded
        self.made.setdefault(name, []).append(process)
        self.log.append(f"create {name}")
        before = self.records.get(name, Record(name, role_of(name)))
        self.remember(replace(before, incarnation=incarnation, has_process=True))
        return process

    async def turn(self, name: str, incarnation: str) -> None:
        process, record = self.made[name][-1], self.records[name]
        process.incarnation, process.role, process.over = incarnation, record.role, asyncio.Event()
        process.start_error = self.start_error
        self.log.append(f"turn {name}")
        self.remember(replace(record, incarnation=incarnation, renewing=False))

    async def release(self, name: str) -> None:
        self.log.append(f"release {name}")
        self.records.pop(name, None)


def controller(number: int) -> Member:
    return Member("controller", "controller", str(number), "", wire_key=f"key {number}")


@dataclass
class LinksDouble(Links):
    peers: set[PeerId] = field(default_factory=set)

    def connect(self, peer: PeerId, address: str, key: str) -> None:
        self.peers.add(peer)

    def disconnect(self, peer: PeerId) -> None:
        self.peers.discard(peer)


class Monitored:
    def __init__(self, *names: str, http: bool = False) -> None:
        self.site, self.links = SiteDouble(), LinksDouble()
        if http:  # addresses that answer no pings
            self.site.addresses = dict.fromkeys(names, "http://127.0.0.1:8000")
        replicas = [Replica(name, role_of(name)) for name in names]
        self.monitor = Monitor(replicas, self._around(1))
        self.log = self.site.log

    def _around(self, number: int) -> Surroundings:
        return Surroundings(self.site, self.links, CONFIG, number, controller(number))

    @classmethod
    async def started(cls, *names: str, http: bool = False) -> "Monitored":
        cluster = cls(*names, http=http)
        await cluster.monitor.start()
        return cluster

    def succeeded(self) -> None:
        """This monitor dies; the next one goes on with what it has noted, and its processes."""
        records = list(self.site.records.values())
        living = {r.name: self.last(r.name) for r in records if r.has_process}
        self._end_of(self.monitor)
        replicas = [Replica.of(record, living.get(record.name)) for record in records]
        self.links.peers.clear()
        self.log.clear()
        self.monitor = Monitor(replicas, self._around(2))
        self.monitor.adopt()

    def _end_of(self, monitor: Monitor) -> None:
        """A death: nothing that its tasks do as they end has an effect."""
        monitor._keeper._site, monitor._keeper._links = SiteDouble(), LinksDouble()
        for replica in monitor.replicas():
            replica.process = replica.member = None
        for task in monitor._tasks.values():
            task.cancel()

    def last(self, name: str) -> ProcessDouble:
        return self.site.made[name][-1]

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(300):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(self.log)


def role_of(name: str) -> Role:
    return "router" if name.startswith("router") else "decode"
