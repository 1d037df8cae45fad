"""What the monitor needs from outside: a site that makes processes, and links that ping them.

`sites.handles` and `sites.ray_site` implement this over Ray, tests without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.config import ClusterConfig
from router.observe.board import Change, Start
from worker.api import Member, PeerId, Role


@dataclass(slots=True, frozen=True)
class Report:
    """What a process says of itself when asked."""

    idle: bool
    counters: dict[str, int]


@dataclass(slots=True, frozen=True)
class Stage:
    """How far a process is with its start."""

    name: str = "load"  # or "capture": graphs of a worker
    part: float = 0.0  # done of it, of 1


@dataclass(slots=True, frozen=True)
class Membership:
    """What every process learns whenever a member comes or goes."""

    version: tuple[int, int]  # ascends; the first one is the number of the controller
    members: Sequence[Member]  # all of them
    changes: Sequence[Change]  # the last ones, the oldest first
    controller: Member | None = None  # who pings workers; it is among no members
    starting: Sequence[Start] = ()  # who will be one
    roles: Sequence[Role] | None = None  # of names that stay, whatever their processes do


@dataclass(slots=True, frozen=True)
class Record:
    """What another monitor has to know of a name to go on with it. The monitor fills it."""

    name: str
    role: Role
    incarnation: str = ""
    restarts: int = 0
    has_process: bool = False  # one that is ready or starts
    member: Member | None = None  # of a process that is ready
    leaving: bool = False
    renewing: bool = False
    drain_timeout_s: float | None = None  # of a name that is leaving or renewing
    ready_at: float = 0.0  # of its last process, in seconds since 1970


class Process(Protocol):
    """One incarnation of a worker or router. Once it is dead, every call raises PeerLost."""

    @property
    def place(self) -> str:
        """Where it runs, for people: node and pid."""
        ...

    @property
    def pids(self) -> tuple[int, ...]:
        """Of its ranks, in order; a router has one."""
        ...

    async def start(self) -> Member:
        """Load and listen. Raises UserError if what was asked for cannot work."""
        ...

    async def stage(self) -> Stage:
        """How far `start` is."""
        ...

    async def run(self) -> None:
        """Returns when it was stopped; raises PeerLost as soon as it has died."""

    async def update(self, membership: Membership) -> None:
        """Give it the list of members; a version older than the last one is ignored."""

    async def drain(self, address_stays: bool) -> None:
        """Let it take no new work and finish what it has.

        address_stays: processes at the same address go on, as routers that share a port.
        """

    async def report(self) -> Report:
        """Whether it is idle, and its counters."""
        ...

    async def retire(self) -> None:
        """As `stop`, but keep the model for `Site.turn`; for a worker of one process."""

    async def stop(self) -> None:
        """End its threads and sockets; `run` returns then."""

    async def kill(self) -> None:
        """Returns when it is gone for certain, or its node is."""


class Site(Protocol):
    """Where processes come from."""

    async def create(self, name: str, incarnation: str) -> Process:
        """Start a process for `name`, in the placement group of the one before if that exists.

        Raises NoPlacement if there is no room, PeerLost if it died while it started.
        """
        ...

    async def turn(self, name: str, incarnation: str) -> None:
        """Give a process that has retired the role that the name has now; `Process.start` follows.

        That raises UserError, too, if the process cannot keep its model in this role.
        """

    def remember(self, record: Record) -> None:
        """Note what has become of a name."""

    async def release(self, name: str) -> None:
        """Give back what was reserved for a name, and forget it."""


class Links(Protocol):
    """Pings processes; `worker.wire.Wire` is one."""

    def connect(self, peer: PeerId, address: str, key: str) -> None:
        """Start to ping."""

    def disconnect(self, peer: PeerId) -> None:
        """Stop pinging."""


@dataclass(slots=True, frozen=True)
class Surroundings:
    """All that a monitor needs from outside."""

    site: Site
    links: Links  # their owner calls `Monitor.lost` when one to a process is over
    config: ClusterConfig
    number: int = 1  # of the monitors that there have been; what a later one says of members counts
    controller: Member | None = None  # the process that it is in, whom workers answer
