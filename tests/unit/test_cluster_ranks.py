"""A worker of several ranks as one process: doubles of Ray's actor handles, real asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest

from cluster.actors import RayProcess
from cluster.config import ClusterConfig
from cluster.fence import Identity
from cluster.monitor import Monitor
from cluster.process import Process, Report
from cluster.ranks import RankedProcess
from cluster.seats import Seat, State
from tests.unit.test_cluster_monitor import FakeLinks
from worker.api import Member
from worker.errors import PeerLost, UserError, WorldError

CONFIG = ClusterConfig(restart_backoff_s=0.01, max_restart_backoff_s=0.05, stop_timeout_s=0.3)
RENDEZVOUS = "tcp://10.0.0.1:5000"


class Call(Protocol):
    def __call__(self, *args: object) -> Awaitable[object]: ...


@dataclass
class Method:
    """A method of an actor handle."""

    remote: Call


@dataclass
class Handle:
    """An actor's handle: `handle.method.remote(...)`."""

    double: object

    def __getattr__(self, name: str) -> Method:
        return Method(getattr(self.double, name))


@dataclass
class Actor:
    """What an actor's process does when it is called."""

    rank: int
    log: list[str]
    all_ranks: asyncio.Barrier
    fails: Exception | None = None  # of start
    over: asyncio.Event = field(default_factory=asyncio.Event)
    death: Exception | None = None

    async def rendezvous(self) -> str:
        assert self.rank == 0
        return RENDEZVOUS

    async def start(self, rendezvous: str) -> Member | None:
        assert rendezvous == RENDEZVOUS
        self.log.append(f"start {self.rank}")
        if self.fails:
            raise self.fails
        await self.alive(self.all_ranks.wait())  # as weights are compared: all have to be there
        return Member("decode-0", "decode", "x", "tcp://a") if self.rank == 0 else None

    async def run(self) -> None:
        await self.alive(self.over.wait())

    async def stage(self) -> None:
        await asyncio.Event().wait()

    async def report(self) -> Report:
        assert self.rank == 0
        return Report(idle=True, counters={})

    async def tell(self, news: object) -> None:
        assert self.rank == 0

    async def drain(self, others: bool) -> None:
        assert self.rank == 0

    async def stop(self) -> None:
        self.log.append(f"stop {self.rank}")
        self.over.set()

    async def alive(self, work: Coroutine[Any, Any, object]) -> None:
        """Wait for `work`, or for the death of this process."""
        task = asyncio.create_task(work)
        while not task.done() and self.death is None:
            await asyncio.wait((task,), timeout=0.005)
        task.cancel()
        if self.death is not None:
            raise self.death


class Part(RayProcess):
    """One rank, as Ray hands it out."""

    def __init__(self, double: Actor) -> None:
        super().__init__(Handle(double), Identity("n", "10.0.0.1", 7 + double.rank, 1))
        self.double = double

    async def fence(self) -> None:
        self.double.log.append(f"kill {self.double.rank}")
        self.double.death = PeerLost("it was killed")
        await asyncio.sleep(0.01)
        self.double.log.append(f"gone {self.double.rank}")


def worker(num: int, log: list[str], fails: dict[int, Exception] | None = None) -> RankedProcess:
    all_ranks = asyncio.Barrier(num)
    actors = [Actor(rank, log, all_ranks, (fails or {}).get(rank)) for rank in range(num)]
    return RankedProcess([Part(actor) for actor in actors])


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 10))


def actors_of(process: RankedProcess) -> list[Actor]:
    return [part.double for part in process.parts if isinstance(part, Part)]


def test_all_ranks_start_together_and_the_leader_is_the_member() -> None:
    async def body() -> None:
        log: list[str] = []
        process = worker(4, log)
        member = await process.start()
        assert member.name == "decode-0"
        assert sorted(log) == [f"start {rank}" for rank in range(4)]
        assert process.pids == (7, 8, 9, 10)
        assert process.place == "node 10.0.0.1, pids 7 8 9 10"

    run(body)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (UserError("model.path: there is no directory /m", "model.path"), UserError, "^model.path"),
        (PeerLost("its process died"), PeerLost, r"^rank 2 \(node 10.0.0.1, pid 9\): its process"),
        (WorldError("OSError: x"), WorldError, r"^rank 2 \(node 10.0.0.1, pid 9\): OSError: x"),
    ],
)
def test_the_failure_of_one_rank_is_that_of_the_start(
    error: Exception, kind: type[Exception], text: str
) -> None:
    """The others wait for it for ever: who waited for them would hang."""

    async def body() -> None:
        with pytest.raises(kind, match=text) as caught:
            await worker(3, [], {2: error}).start()
        assert type(caught.value) is kind

    run(body)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_any_rank_ends_start_and_run(rank: int) -> None:
    async def body() -> None:
        starting = worker(2, [])
        actors_of(starting)[1 - rank].start = hung  # type: ignore[method-assign]
        start = asyncio.create_task(starting.start())
        await asyncio.sleep(0.02)
        assert not start.done()
        actors_of(starting)[rank].death = PeerLost("its process died")
        with pytest.raises(PeerLost, match="its process died"):
            await start

        running = worker(2, [])
        await running.start()
        over = asyncio.create_task(running.run())
        await asyncio.sleep(0.02)
        assert not over.done()
        actors_of(running)[rank].death = PeerLost("its process died")
        with pytest.raises(PeerLost, match="its process died"):
            await over

    run(body)


async def hung(*_: object) -> None:
    await asyncio.Event().wait()


def test_a_death_is_told_rather_than_what_the_other_ranks_raise_because_of_it() -> None:
    async def body() -> None:
        process = worker(3, [])
        await process.start()
        leader, dead, other = actors_of(process)
        leader.death = WorldError("PeerLost: rank 1 does not answer")
        other.death = leader.death
        dead.death = PeerLost("its process died")
        with pytest.raises(PeerLost, match=r"rank 1 .*: its process died"):
            await process.run()

    run(body)


def test_a_rank_that_ends_by_itself_ends_the_worker_and_a_stop_is_no_failure() -> None:
    async def body() -> None:
        process = worker(3, [])
        await process.start()
        actors_of(process)[2].over.set()
        with pytest.raises(WorldError, match="its rank 2 stopped"):
            await process.run()

        log: list[str] = []
        process = worker(3, log)
        await process.start()
        log.clear()
        over = asyncio.create_task(process.run())
        await asyncio.sleep(0.02)
        await process.stop()
        await over
        assert log == ["stop 0", "stop 1", "stop 2"]

    run(body)


@dataclass
class Site:
    log: list[str] = field(default_factory=list)
    fails: dict[int, Exception] = field(default_factory=dict)
    made: list[RankedProcess] = field(default_factory=list)

    async def create(self, name: str, incarnation: str) -> RankedProcess:
        self.log.append("create")
        self.made.append(worker(3, self.log, self.fails))
        return self.made[-1]

    async def fence(self, process: Process) -> None:
        assert isinstance(process, RankedProcess)
        await process.fence()

    async def release(self, name: str) -> None:
        self.log.append("release")


def test_all_ranks_are_killed_at_once_and_gone_before_the_next_incarnation() -> None:
    async def body() -> None:
        site = Site()
        monitor = Monitor([Seat("decode-0", "decode")], site, FakeLinks(), CONFIG)
        await monitor.start()
        [row] = await monitor.status()
        assert row.pids == (7, 8, 9)
        site.log.clear()
        actors_of(site.made[0])[1].death = PeerLost("its process died")
        for _ in range(500):
            if len(site.made) == 2 and monitor.seats()[0].state is State.READY:
                break
            await asyncio.sleep(0.01)
        kills, gone = [[f"{what} {rank}" for rank in range(3)] for what in ("kill", "gone")]
        assert site.log[:7] == [*kills, *gone, "create"]
        await monitor.stop(0.0)

    run(body)


def test_ranks_that_wait_for_one_that_failed_are_killed() -> None:
    async def body() -> None:
        site = Site(fails={1: UserError("no such model")})
        monitor = Monitor([Seat("decode-0", "decode")], site, FakeLinks(), CONFIG)
        with pytest.raises(UserError, match="decode-0: no such model"):
            await monitor.start()
        assert [line for line in site.log if "gone" in line] == ["gone 0", "gone 1", "gone 2"]
        await monitor.stop(0.0)
        assert site.log[-1] == "release"

    run(body)
