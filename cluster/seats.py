"""The names of a cluster, and the state of the process that each of them has. No Ray, no I/O."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from cluster.config import Config
from cluster.process import Process, Report, Stage
from worker.api import Change, Member, Role

START = Stage()
NUM_CHANGES = 100  # that routers are told of


class State(StrEnum):
    """State of a name's process."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"  # dead or being killed; a new process follows unless the seat is leaving


@dataclass(slots=True, frozen=True)
class Event:
    """One line of progress."""

    name: str
    state: State
    text: str


@dataclass(slots=True, frozen=True)
class SeatStatus:
    """One row of `status`."""

    name: str
    role: Role
    state: State
    incarnation: str
    restarts: int
    node: str
    pid: int
    pids: tuple[int, ...]  # of all ranks, `pid` first; empty until it is ready
    address: str
    metrics_address: str
    counters: dict[str, int] | None  # None: it did not answer, or is not ready


@dataclass(slots=True)
class Seat:
    """One name. Its processes come one after another; each is a new incarnation.

    Invariant: `member` is set from the moment the process is ready until it is found dead or has
    stopped; `process` is set from its creation until it is gone for certain.
    """

    name: str
    role: Role
    state: State = State.STARTING
    incarnation: str = ""
    restarts: int = 0
    leaving: bool = False  # it gets no further process
    member: Member | None = None
    process: Process | None = None
    stage: Stage = START  # of the start of the process
    stopping: asyncio.Task[None] | None = None  # the call that asks the process to stop
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # stopped, and removed
    silent: asyncio.Future[str] = field(init=False)  # why it is given up, once it is

    @property
    def reachable(self) -> Process | None:
        """The process, if it is ready."""
        return self.process if self.member is not None else None

    def begin(self, incarnation: str) -> None:
        """A new incarnation starts."""
        assert self.process is None, f"{self.name} is taken"
        self.incarnation, self.state, self.stage = incarnation, State.STARTING, START
        self.silent = asyncio.get_running_loop().create_future()

    def status(self, report: Report | None) -> SeatStatus:
        """This seat as a row of `status`."""
        member = self.member
        return SeatStatus(
            name=self.name,
            role=self.role,
            state=self.state,
            incarnation=self.incarnation,
            restarts=self.restarts,
            node=member.node if member else "",
            pid=member.pid if member else 0,
            pids=self.process.pids if member and self.process else (),
            address=member.address if member else "",
            metrics_address=member.metrics_address if member else "",
            counters=report.counters if report else None,
        )


class Changes:
    """The last changes of all names: deaths and their reasons, replacements, drains."""

    def __init__(self) -> None:
        self._last: deque[tuple[float, Change]] = deque(maxlen=NUM_CHANGES)

    def add(self, seat: Seat, state: str, text: str) -> None:
        """One that happens now."""
        change = Change(seat.name, seat.role, seat.incarnation, state, text, 0.0)
        self._last.append((time.monotonic(), change))

    def last(self, name: str) -> str:
        """The last state of a name; "" if nothing is kept of it."""
        return next((each.state for _, each in reversed(self._last) if each.name == name), "")

    def told(self) -> list[Change]:
        """All of them, the oldest first, as they are told now."""
        now = time.monotonic()
        return [msgspec.structs.replace(each, ago_s=now - at) for at, each in self._last]


def seats_of(config: Config) -> list[Seat]:
    """The names that a config asks for: prefill-0, …, decode-0, …, router-0, …

    config: with devices decided.
    """
    counts: list[tuple[Role, int]] = [
        ("prefill", config.prefill.replicas),
        ("decode", config.decode.replicas),
        ("router", config.routers.num),
    ]
    return [Seat(f"{role}-{i}", role) for role, count in counts for i in range(count)]


def live_members(seats: Iterable[Seat]) -> list[Member]:
    """Those that are ready. A draining one is among them: it still serves what it has begun."""
    return [seat.member for seat in seats if seat.member is not None]


def others_there(seat: Seat, seats: Iterable[Seat]) -> bool:
    """Whether others that stay are reached at the address of a seat that is ready."""
    mine = seat.member
    assert mine is not None
    staying = [each.member for each in seats if each is not seat and not each.leaving]
    return any(m and (m.node, m.address) == (mine.node, mine.address) for m in staying)


def last_of_its_kind(name: str, seats: Sequence[Seat]) -> str:
    """A warning if requests need this name and nobody can take its place; else ''."""
    seat = next((seat for seat in seats if seat.name == name), None)
    if seat is None or seat.role == "prefill":  # decode workers can prefill
        return ""
    if any(other.role == seat.role and other is not seat and not other.leaving for other in seats):
        return ""
    kind = "router" if seat.role == "router" else "decode worker"
    return (
        f"{name} is the last {kind}: without it no request is answered "
        "(drain without a name ends the whole cluster)"
    )


def backoff_s(deaths_in_a_row: int, first_s: float, max_s: float) -> float:
    """Seconds to wait before the next incarnation: first_s, doubled with each early death."""
    return min(first_s * 2.0 ** min(deaths_in_a_row - 1, 30), max_s)
