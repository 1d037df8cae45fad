"""The names of a cluster, and the state of their processes. No Ray, no I/O."""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import msgspec

from cluster.sites.process import Process, Record, Report, Stage
from router.observe.board import Change, Start
from worker.api import Member, Role
from worker.errors import KvlaneError

START = Stage()
NUM_CHANGES = 100  # that routers learn of


class State(StrEnum):
    """Of a replica's process."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DRAINED = "drained"  # ended or ending, as somebody wants it: the name goes, too
    RESTARTING = "restarting"  # the same, and another process follows
    TURNING = "turning"  # the same process goes on in the other role
    LOST = "lost"  # dead or being killed; a new process follows


@dataclass(slots=True, frozen=True)
class Event:
    """One line of progress."""

    name: str
    state: State
    text: str


@dataclass(slots=True, frozen=True)
class ReplicaStatus:
    """One row of `status`."""

    name: str
    role: Role
    state: State
    incarnation: str
    restarts: int
    ready_at: float = 0.0  # seconds since 1970; this and the rest: until it is ready, nothing
    model: str = ""
    node: str = ""
    pid: int = 0
    pids: tuple[int, ...] = ()  # of all ranks, `pid` first
    address: str = ""  # URL of a router, tcp:// of a worker
    metrics_address: str = ""
    counters: dict[str, int] | None = None  # None: it did not answer, either
    progress: str = ""  # of one that starts


@dataclass(slots=True)
class Replica:
    """A worker or router. Its processes come one after another, as new incarnations."""

    name: str
    role: Role
    state: State = State.STARTING
    incarnation: str = ""
    restarts: int = 0
    leaving: bool = False  # it gets no further process
    renewing: bool = False  # its process ends because another one is wanted
    drain_timeout_s: float | None = None  # of one that is leaving or renewing
    turning: bool = False  # its process leaves its role and takes another, with its model
    failure: KvlaneError | None = None  # why its last process did not become ready
    ready_at: float = 0.0  # when its process was, in seconds since 1970
    member: Member | None = None  # from ready until known to be dead, or stopped
    process: Process | None = None  # from its creation until it is gone for certain
    stage: Stage = START  # of the start of the process
    began_at: float = field(default_factory=time.monotonic)  # of that start
    stopping: asyncio.Task[None] | None = None  # the call that asks the process to stop
    over: asyncio.Event = field(default_factory=asyncio.Event)  # its process has ended
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # stopped, and removed
    given_up: asyncio.Future[str] = field(init=False)  # why it is

    @classmethod
    def of(cls, record: Record, process: Process | None) -> "Replica":
        """Of a name that another monitor has left. process: ready or starting; None: none."""
        made = cls(
            record.name, record.role, State.STARTING, record.incarnation, record.restarts,
            record.leaving, record.renewing, record.drain_timeout_s, ready_at=record.ready_at,
        )  # fmt: skip
        if process is not None:
            made.process, made.member = process, record.member
            made.state = State.READY if record.member is not None else State.STARTING
            made.given_up = asyncio.get_running_loop().create_future()
        return made

    @property
    def reachable(self) -> Process | None:
        """The process, if it is ready."""
        return self.process if self.member is not None else None

    @property
    def start(self) -> Start | None:
        """How far its process is, if it starts."""
        if self.state not in (State.STARTING, State.TURNING):
            return None
        since_s, stage = time.monotonic() - self.began_at, self.stage
        return Start(self.name, self.role, self.incarnation, stage.name, stage.part, since_s)

    @property
    def is_stopped(self) -> bool:
        """Whether its process ends, or has, because somebody wants it to."""
        return self.leaving or self.renewing

    @property
    def record(self) -> Record:
        """What another monitor has to know of it."""
        return Record(
            self.name, self.role, self.incarnation, self.restarts, self.process is not None,
            self.member, self.leaving, self.renewing, self.drain_timeout_s, self.ready_at,
        )  # fmt: skip

    @property
    def ended(self) -> tuple[State, str]:
        """The state of one whose process is no member any more, and more of it for people."""
        if self.leaving:
            return State.DRAINED, ""
        if self.turning:
            return State.TURNING, f"to {self.role}"
        return (State.RESTARTING if self.renewing else State.LOST), ""

    def begin(self, incarnation: str) -> None:
        """Start a new incarnation."""
        assert self.process is None or self.turning, f"{self.name} is taken"
        self.state = State.TURNING if self.turning else State.STARTING
        self.incarnation, self.stage = incarnation, START
        self.renewing, self.turning, self.began_at = False, False, time.monotonic()
        self.stopping, self.over = None, asyncio.Event()
        self.given_up = asyncio.get_running_loop().create_future()

    def give_up(self, reason: str, *, is_dead: bool = False) -> None:
        """The process is to be replaced: it is dead, or it does not answer."""
        if not self.given_up.done():
            self.given_up.set_result(reason if is_dead else f"it does not answer ({reason})")

    def status(self, report: Report | None) -> ReplicaStatus:
        """Its row of `status`."""
        row = ReplicaStatus(self.name, self.role, self.state, self.incarnation, self.restarts)
        if (start := self.start) is not None:
            row = replace(row, progress=start.text)
        if self.member is None or self.process is None:
            return row
        return replace(
            row,
            ready_at=self.ready_at,
            model=self.member.model,
            node=self.member.node,
            pid=self.member.pid,
            pids=self.process.pids,
            address=self.member.address,
            metrics_address=self.member.metrics_address,
            counters=report.counters if report else None,
        )


class Changes:
    """The last changes of all replicas: deaths and their reasons, replacements, drains."""

    def __init__(self) -> None:
        self._last: deque[tuple[float, Change]] = deque(maxlen=NUM_CHANGES)

    def add(self, replica: Replica, state: str, text: str) -> None:
        """One that happens now."""
        change = Change(replica.name, replica.role, replica.incarnation, state, text, 0.0)
        self._last.append((time.monotonic(), change))

    def listed(self) -> list[Change]:
        """All of them, the oldest first, with their ages of now."""
        now = time.monotonic()
        return [msgspec.structs.replace(change, ago_s=now - at) for at, change in self._last]


def address_stays(leaving: Replica, replicas: Iterable[Replica]) -> bool:
    """Whether replicas that stay are reached at the address of a ready one that leaves."""
    mine = leaving.member
    assert mine is not None
    staying = [r.member for r in replicas if r is not leaving and not r.leaving]
    return any(m and (m.node, m.address) == (mine.node, mine.address) for m in staying)


def last_of_its_kind(name: str, replicas: Sequence[Replica]) -> str:
    """A warning if requests need this replica and nobody can take its place; else ''."""
    replica = next((r for r in replicas if r.name == name), None)
    if replica is None or replica.role == "prefill":  # decode workers can prefill
        return ""
    if any(r.role == replica.role and r is not replica and not r.leaving for r in replicas):
        return ""
    kind = "router" if replica.role == "router" else "decode worker"
    remedy = "scale starts others, drain without a name ends the whole cluster"
    return f"{name} is the last {kind}: without it no request is answered ({remedy})"


def backoff_s(deaths_in_a_row: int, first_s: float, max_s: float) -> float:
    """Seconds to wait before the next incarnation: first_s, doubled after an early death."""
    return min(first_s * 2.0 ** min(deaths_in_a_row - 1, 30), max_s)
