"""What the monitor needs from outside: a site that makes processes, and links that ping them.

`actors.RayProcess` and `controller.RaySite` implement this over Ray, tests without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from worker.api import Member, PeerId


@dataclass(slots=True, frozen=True)
class Report:
    """What a process says of itself when asked."""

    idle: bool
    counters: dict[str, int]


class Process(Protocol):
    """One incarnation of a worker or router, somewhere. Its death raises PeerLost everywhere."""

    @property
    def place(self) -> str:
        """Where it runs, for people: node and pid."""
        ...

    async def start(self) -> Member:
        """Load and listen. Raises UserError if what was asked for cannot work."""
        ...

    async def run(self) -> None:
        """Returns when it was stopped; raises PeerLost as soon as it has died."""
        ...

    async def tell(self, version: int, members: Sequence[Member]) -> None:
        """The members from now on; older versions than the last one are ignored."""
        ...

    async def drain(self) -> None:
        """Take no new work, finish what there is."""
        ...

    async def report(self) -> Report:
        """Whether it is idle, and its counters."""
        ...

    async def stop(self) -> None:
        """End threads and sockets; `run` returns then."""
        ...


class Site(Protocol):
    """Where processes come from."""

    async def create(self, name: str, incarnation: str) -> Process:
        """A new process for `name`, in its old group if that still stands.

        Raises:
            Placement, PeerLost: no room; or it died while it began.
        """
        ...

    async def fence(self, process: Process) -> None:
        """Returns when the process is gone for certain, or its node is."""
        ...

    async def release(self, name: str) -> None:
        """Give back what was reserved for `name`."""
        ...


class Links(Protocol):
    """The data plane's view of who answers."""

    def connect(self, peer: PeerId, address: str) -> None:
        """Begin to ping."""
        ...

    def disconnect(self, peer: PeerId) -> None:
        """Cease to ping."""
        ...
