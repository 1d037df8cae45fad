"""A worker of several ranks as one process: doubles of Ray's actor handles, real asyncio."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.control.monitor import Monitor
from cluster.control.replicas import Replica, State
from cluster.sites.handles import Identity, Rank, RayProcess
from cluster.sites.process import Report, Surroundings
from tests.support.asynchronous import asynchronous
from tests.support.monitored import CONFIG, LinksDouble, SiteDouble
from worker.api import Member
from worker.errors import PeerLost, UserError, WorldError

RENDEZVOUS = "tcp://10.0.0.1:5000"
DEATH = PeerLost("its process died")


@dataclass
class Actor:
    """What an actor's process does when it is called."""

    rank: int
    log: list[str]
    all_there: asyncio.Barrier
    fails: Exception | None = None  # of start
    hangs: bool = False  # in its start
    over: asyncio.Event = field(default_factory=asyncio.Event)
    death: Exception | None = None

    def __getattr__(self, name: str) -> SimpleNamespace:
        """As of a handle: `handle.method.remote(...)`."""
        return SimpleNamespace(remote=getattr(type(self), f"on_{name}").__get__(self))

    async def on_rendezvous(self) -> str:
        assert self.rank == 0
        return RENDEZVOUS

    async def on_start(self, rendezvous: str = "") -> Member | None:
        assert rendezvous == (RENDEZVOUS if self.all_there.parties > 1 else "")
        self.log.append(f"start {self.rank}")
        if self.fails:
            raise self.fails
        # As weights are compared: all have to be there.
        await self.alive(asyncio.Event().wait() if self.hangs else self.all_there.wait())
        return Member("decode-0", "decode", "x", "tcp://a") if self.rank == 0 else None

    async def on_run(self) -> bool:
        await self.alive(self.over.wait())
        return True

    async def on_stage(self) -> None:
        await asyncio.Event().wait()

    async def on_report(self) -> Report:
        assert self.rank == 0
        return Report(idle=True, counters={})

    async def on_update(self, membership: object) -> None:
        assert self.rank == 0

    async def on_drain(self, address_stays: bool) -> None:
        assert self.rank == 0

    async def on_stop(self) -> None:
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


class Killed(Rank):
    async def kill(self) -> None:
        self.actor.log.append(f"kill {self.actor.rank}")
        self.actor.death = PeerLost("it was killed")
        await asyncio.sleep(0.01)
        self.actor.log.append(f"gone {self.actor.rank}")


def worker(num: int, log: list[str], fails: dict[int, Exception] | None = None) -> RayProcess:
    barrier = asyncio.Barrier(num)
    actors = [Actor(rank, log, barrier, (fails or {}).get(rank)) for rank in range(num)]
    return RayProcess([Killed(a, Identity("n", "10.0.0.1", 7 + a.rank, 1)) for a in actors])


def actors_of(process: RayProcess) -> list[Actor]:
    return [rank.actor for rank in process.ranks]


async def under_way(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = asyncio.create_task(work)
    await asyncio.sleep(0.02)
    assert not task.done()
    return task


@pytest.mark.parametrize(("num", "place"), [(1, "pid 7"), (4, "pids 7 8 9 10")])
@asynchronous
async def test_all_ranks_start_together_and_the_leader_is_the_member(num: int, place: str) -> None:
    log: list[str] = []
    process = worker(num, log)
    member = await process.start()
    assert member.name == "decode-0"
    assert sorted(log) == [f"start {rank}" for rank in range(num)]
    assert process.pids == tuple(range(7, 7 + num))
    assert process.place == f"node 10.0.0.1, {place}"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (UserError("model.path: there is no directory /m", "model.path"), "^model.path"),
        (PeerLost("its process died"), r"^rank 2 \(node 10.0.0.1, pid 9\): its process"),
        (WorldError("OSError: x"), r"^rank 2 \(node 10.0.0.1, pid 9\): OSError: x"),
    ],
)
@asynchronous
async def test_the_failure_of_one_rank_is_that_of_the_start(error: Exception, text: str) -> None:
    """The others wait for it for ever: who waited for them would hang."""
    with pytest.raises(type(error), match=text) as caught:
        await worker(3, [], {2: error}).start()
    assert type(caught.value) is type(error)


@pytest.mark.parametrize("rank", [0, 1])
@asynchronous
async def test_the_death_of_any_rank_ends_start_and_run(rank: int) -> None:
    process = worker(2, [])
    actors_of(process)[1 - rank].hangs = True
    start = await under_way(process.start())
    actors_of(process)[rank].death = DEATH
    with pytest.raises(PeerLost, match="its process died"):
        await start
    process = worker(2, [])
    await process.start()
    run = await under_way(process.run())
    actors_of(process)[rank].death = DEATH
    with pytest.raises(PeerLost, match="its process died"):
        await run


@asynchronous
async def test_a_death_is_told_rather_than_what_the_other_ranks_raise_because_of_it() -> None:
    process = worker(3, [])
    await process.start()
    leader, dead, other = actors_of(process)
    leader.death = other.death = WorldError("PeerLost: rank 1 does not answer")
    dead.death = DEATH
    with pytest.raises(PeerLost, match=r"rank 1 .*: its process died"):
        await process.run()


@asynchronous
async def test_a_rank_that_ends_by_itself_ends_the_worker_and_a_stop_is_no_failure() -> None:
    process = worker(3, [])
    await process.start()
    actors_of(process)[2].over.set()
    with pytest.raises(WorldError, match="its rank 2 stopped"):
        await process.run()

    log: list[str] = []
    process = worker(3, log)
    await process.start()
    log.clear()
    run = await under_way(process.run())
    await process.stop()
    await run
    assert log == ["stop 0", "stop 1", "stop 2"]


@dataclass
class RankedSite(SiteDouble):
    fails: dict[int, Exception] = field(default_factory=dict)
    ranked: list[RayProcess] = field(default_factory=list)

    async def create(self, name: str, incarnation: str) -> RayProcess:  # type: ignore[override]
        self.log.append(f"create {name}")
        self.ranked.append(worker(3, self.log, self.fails))
        return self.ranked[-1]


def monitor_of(site: RankedSite) -> Monitor:
    return Monitor([Replica("decode-0", "decode")], Surroundings(site, LinksDouble(), CONFIG))


@asynchronous
async def test_all_ranks_are_killed_at_once_and_gone_before_the_next_incarnation() -> None:
    site = RankedSite()
    monitor = monitor_of(site)
    await monitor.start()
    [row] = await monitor.status()
    assert row.pids == (7, 8, 9)
    site.log.clear()
    actors_of(site.ranked[0])[1].death = DEATH
    for _ in range(500):
        if len(site.ranked) == 2 and monitor.replicas()[0].state is State.READY:
            break
        await asyncio.sleep(0.01)
    kills, gone = [[f"{what} {rank}" for rank in range(3)] for what in ("kill", "gone")]
    assert site.log[:7] == [*kills, *gone, "create decode-0"]
    await monitor.stop(0.0)


@asynchronous
async def test_ranks_that_wait_for_one_that_failed_are_killed() -> None:
    site = RankedSite(fails={1: UserError("no such model")})
    monitor = monitor_of(site)
    with pytest.raises(UserError, match="decode-0: no such model"):
        await monitor.start()
    assert [line for line in site.log if "gone" in line] == ["gone 0", "gone 1", "gone 2"]
    await monitor.stop(0.0)
    assert site.log[-1] == "release decode-0"
