"""The monitor against doubles: no Ray, no sockets, real asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import pytest

from cluster.config import ClusterConfig
from cluster.monitor import Monitor
from cluster.process import News, Process, Report, Stage
from cluster.seats import NUM_CHANGES, Changes, Seat, State, backoff_s, last_of_its_kind
from worker.api import Member, PeerId
from worker.errors import PeerLost, UserError, WorldError

CONFIG = ClusterConfig(restart_backoff_s=0.01, max_restart_backoff_s=0.05, stop_timeout_s=0.3)


@dataclass
class FakeProcess:
    name: str
    incarnation: str
    log: list[str]
    place: str = "here"
    pids: tuple[int, ...] = (1, 2)
    idle: bool = True
    start_error: Exception | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    dead: bool = False
    told: list[str] = field(default_factory=list)
    changes: list[tuple[str, str, str]] = field(default_factory=list)
    deaf: bool = False
    frozen: bool = False
    dead_to_reports: bool = False  # its death is known to them alone
    address: str = ""

    async def start(self) -> Member:
        if self.start_error is not None:
            raise self.start_error
        role = "router" if self.name.startswith("router") else "decode"
        address = "tcp://routers" if role == "router" else f"tcp://{self.name}"
        address = self.address or address
        return Member(self.name, role, self.incarnation, address)

    async def stage(self) -> Stage:
        return Stage("load", 0.5)

    async def run(self) -> None:
        await self.over.wait()
        if self.dead:
            raise PeerLost("its process died")

    async def tell(self, news: News) -> None:
        self.told = [member.name for member in news.members]
        self.changes = [(each.name, each.state, each.text) for each in news.changes]
        self.log.append(f"tell {self.name} {' '.join(self.told)}")

    async def drain(self, others: bool) -> None:
        self.log.append(f"drain {self.name}" + (" others" if others else ""))

    async def report(self) -> Report:
        if self.frozen:
            await asyncio.Event().wait()
        if self.dead_to_reports:
            raise PeerLost("its process died")
        return Report(self.idle, {"pages": 0})

    async def stop(self) -> None:
        self.log.append(f"stop {self.name}")
        if not self.deaf:
            self.over.set()

    def die(self) -> None:
        self.dead = True
        self.over.set()


@dataclass
class FakeSite:
    log: list[str] = field(default_factory=list)
    made: dict[str, list[FakeProcess]] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    start_error: Exception | None = None

    async def create(self, name: str, incarnation: str) -> FakeProcess:
        process = FakeProcess(name, incarnation, self.log, start_error=self.start_error)
        process.address = self.addresses.get(name, "")
        self.made.setdefault(name, []).append(process)
        self.log.append(f"create {name}")
        return process

    async def fence(self, process: Process) -> None:
        assert isinstance(process, FakeProcess)
        await asyncio.sleep(0.01)
        self.log.append(f"fence {process.name}")

    async def release(self, name: str) -> None:
        self.log.append(f"release {name}")


@dataclass
class FakeLinks:
    peers: set[PeerId] = field(default_factory=set)

    def connect(self, peer: PeerId, address: str) -> None:
        self.peers.add(peer)

    def disconnect(self, peer: PeerId) -> None:
        self.peers.discard(peer)


class Cluster:
    def __init__(self, *names: str) -> None:
        self.site, self.links = FakeSite(), FakeLinks()
        seats = [Seat(n, "router" if n.startswith("router") else "decode") for n in names]
        self.monitor = Monitor(seats, self.site, self.links, CONFIG)

    def last(self, name: str) -> FakeProcess:
        return self.site.made[name][-1]

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(300):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(self.site.log)


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 10))


def test_everybody_is_told_of_everybody() -> None:
    async def body() -> None:
        cluster = Cluster("decode-0", "decode-1", "router-0")
        await cluster.monitor.start()
        names = ["decode-0", "decode-1", "router-0"]
        await cluster.until(lambda: all(cluster.last(n).told == names for n in names))
        assert len(cluster.links.peers) == 3

    run(body)


def test_a_death_is_told_before_the_fence_and_the_fence_is_before_the_successor() -> None:
    async def body() -> None:
        cluster = Cluster("decode-0", "decode-1")
        await cluster.monitor.start()
        await asyncio.sleep(0.02)
        cluster.site.log.clear()
        first = cluster.last("decode-0")
        first.die()
        await cluster.until(lambda: len(cluster.links.peers) == 2 and len(cluster.site.log) >= 5)
        assert cluster.site.log[:3] == ["tell decode-1 decode-1", "fence decode-0",
                                        "create decode-0"]  # fmt: skip
        assert cluster.last("decode-0").incarnation != first.incarnation
        rows = {row.name: row for row in await cluster.monitor.status()}
        assert (rows["decode-0"].restarts, rows["decode-1"].restarts) == (1, 0)

    run(body)


def test_who_died_why_and_what_replaced_it_is_told() -> None:
    async def body() -> None:
        cluster = Cluster("decode-0", "router-0")
        await cluster.monitor.start()
        cluster.last("decode-0").die()
        await cluster.until(lambda: len(cluster.last("router-0").changes) == 4)
        ready, lost, again = [x for x in cluster.last("router-0").changes if x[0] == "decode-0"]
        assert lost == ("decode-0", "lost", "its process died")
        for name, state, text in (ready, again):
            assert (name, state, text) == ("decode-0", "ready", "after 0.0 s (here)")
        cluster.site.start_error = UserError("no such model")
        cluster.last("decode-0").die()
        failed = ("decode-0", "lost", "no such model")
        await cluster.until(lambda: failed in cluster.last("router-0").changes)
        await cluster.monitor.drain(["decode-0"], None)
        stopping = ("decode-0", "stopping", "it was not ready")
        await cluster.until(lambda: cluster.last("router-0").changes[-1] == stopping)

    run(body)


def test_no_more_changes_are_kept_than_are_shown() -> None:
    changes = Changes()
    for i in range(3 * NUM_CHANGES):
        changes.add(Seat(f"decode-{i}", "decode"), "lost", "why")
    told = changes.told()
    assert [told[0].name, told[-1].name, len(told)] == ["decode-200", "decode-299", NUM_CHANGES]
    assert told[0].ago_s >= told[-1].ago_s >= 0


def test_a_silent_process_is_treated_as_dead() -> None:
    async def body() -> None:
        cluster = Cluster("decode-0")
        await cluster.monitor.start()
        peer = next(iter(cluster.links.peers))
        cluster.monitor.lost("decode-0/of-another-time", "silent")
        cluster.monitor.lost(peer, "silent")
        cluster.monitor.lost(peer, "silent")
        await cluster.until(lambda: len(cluster.site.made["decode-0"]) == 2)
        assert "fence decode-0" in cluster.site.log

    run(body)


def test_a_router_that_reports_nothing_is_treated_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers no pings; and a stopped one never dies by itself."""
    monkeypatch.setattr("cluster.monitor.SILENT_S", 0.05)
    monkeypatch.setattr("cluster.monitor.ASK_S", 0.01)

    async def body() -> None:
        cluster = Cluster("router-0", "router-1")
        for name in ("router-0", "router-1"):
            cluster.site.addresses[name] = "http://127.0.0.1:8000"
        await cluster.monitor.start()
        cluster.last("router-0").frozen = True
        await cluster.until(lambda: len(cluster.site.made["router-0"]) == 2)
        assert "fence router-0" in cluster.site.log
        assert any("did not report" in event.text for event in cluster.monitor.events)
        await asyncio.sleep(0.2)
        assert len(cluster.site.made["router-0"]) == 2, "the next one reports"
        assert len(cluster.site.made["router-1"]) == 1
        await cluster.monitor.stop(0.0)

    run(body)


def test_a_death_that_a_report_finds_first_is_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.monitor.ASK_S", 0.01)

    async def body() -> None:
        cluster = Cluster("router-0")
        cluster.site.addresses["router-0"] = "http://127.0.0.1:8000"
        await cluster.monitor.start()
        cluster.last("router-0").dead_to_reports = True
        await cluster.until(lambda: len(cluster.site.made["router-0"]) == 2)
        texts = [event.text for event in cluster.monitor.events]
        assert "its process died; again in 0.01 s" in texts, texts
        await cluster.monitor.stop(0.0)

    run(body)


@pytest.mark.parametrize(
    ("error", "kind", "attempts"),
    [(UserError("bad"), UserError, 1), (PeerLost("x"), WorldError, 3)],
)
def test_a_start_that_fails_is_given_up(error: Exception, kind: type, attempts: int) -> None:
    async def body() -> None:
        cluster = Cluster("decode-0")
        cluster.site.start_error = error
        with pytest.raises(kind, match="decode-0: "):
            await cluster.monitor.start()
        assert len(cluster.site.made["decode-0"]) == attempts
        await cluster.monitor.stop(0.0)
        assert cluster.site.log[-1] == "release decode-0"
        assert cluster.site.log.count("fence decode-0") == attempts

    run(body)


def test_a_drained_name_finishes_first_and_is_not_filled_again() -> None:
    async def body() -> None:
        cluster = Cluster("decode-0", "decode-1")
        await cluster.monitor.start()
        process = cluster.last("decode-0")
        process.idle = False
        draining = asyncio.create_task(cluster.monitor.drain(["decode-0"], None))
        await cluster.until(lambda: "drain decode-0" in cluster.site.log)
        assert cluster.monitor.seats()[0].state is State.DRAINING
        told = ("decode-0", "draining", "")
        await cluster.until(lambda: cluster.last("decode-1").changes[-1] == told)
        assert "stop decode-0" not in cluster.site.log
        process.idle = True
        assert await draining
        assert [seat.name for seat in cluster.monitor.seats()] == ["decode-1"]
        assert cluster.last("decode-1").changes[-2:] == [told, ("decode-0", "stopping", "")]
        assert cluster.site.log[-1] == "release decode-0"
        with pytest.raises(UserError, match="no worker or router is called decode-0"):
            await cluster.monitor.drain(["decode-0"], None)

    run(body)


def test_stop_ends_routers_first_and_what_does_not_listen_is_fenced() -> None:
    async def body() -> None:
        cluster = Cluster("decode-0", "router-0")
        await cluster.monitor.start()
        cluster.last("decode-0").deaf = True
        cluster.last("router-0").idle = False
        assert not await cluster.monitor.stop(0.05)
        log = cluster.site.log
        assert log.index("release router-0") < log.index("drain decode-0")
        assert log.index("stop decode-0") < log.index("fence decode-0")
        assert cluster.monitor.seats() == []

    run(body)


def test_who_was_asked_to_stop_is_told_no_more() -> None:
    """It may be gone by then, and each of them would have been a line of the log."""

    async def body() -> None:
        cluster = Cluster("decode-0", "decode-1")
        await cluster.monitor.start()
        cluster.last("decode-0").deaf = True
        await cluster.monitor.stop(None)
        log = cluster.site.log
        assert not [line for line in log[log.index("stop decode-0") :] if "tell decode-0" in line]

    run(body)


def test_a_drained_process_is_told_whether_others_stay_at_its_address() -> None:
    async def body() -> None:
        cluster = Cluster("decode-0", "decode-1", "router-0", "router-1", "router-2")
        await cluster.monitor.start()
        await cluster.monitor.drain(["router-1"], None)
        await cluster.monitor.drain(["decode-1"], None)
        await cluster.monitor.stop(None)
        drains = [line for line in cluster.site.log if line.startswith("drain")]
        assert drains == [
            "drain router-1 others", "drain decode-1",
            "drain router-0", "drain router-2", "drain decode-0",
        ]  # fmt: skip

    run(body)


def test_back_off_doubles_up_to_its_limit() -> None:
    assert [backoff_s(n, 0.5, 3.0) for n in (1, 2, 3, 4, 999)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_only_the_last_decode_worker_and_the_last_router_are_warned_of() -> None:
    async def body() -> None:
        monitor = Cluster("decode-0", "decode-1", "router-0").monitor
        await monitor.start()
        assert last_of_its_kind("decode-1", monitor.seats()) == ""
        assert "router-0 is the last router" in last_of_its_kind("router-0", monitor.seats())
        await monitor.drain(["decode-1"], None)
        assert "the last decode worker" in last_of_its_kind("decode-0", monitor.seats())
        assert last_of_its_kind("nobody", monitor.seats()) == ""

    run(body)
