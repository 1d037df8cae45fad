"""Every transport of the table, against a real second process. The contract: worker.transfer.base.

Sources are processes that serve random bytes; killed and stopped by pid, and always reaped.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.support.patience import HANG_S
from tests.support.processes import FORKED, ensure_servers, fork
from worker.cache.layout import MemoryRegion
from worker.errors import Incompatible, MissingLibrary, Unreachable, Unsupported
from worker.registry import resolve
from worker.transfer import mooncake_engine, mooncake_libraries
from worker.transfer.base import TRANSPORTS, Endpoint, KVTransport, Peer, Pull, PullState, Run
from worker.transfer.sources import measured_rate

ROWS = [("shm", "shm"), ("mooncake", "tcp")]
HOST = "127.0.0.1"
SIZES = {"target": 48 << 20, "draft": 1 << 20}
CONNECT_S = 10.0  # generous: the machine may be loaded
CANARY = 0xEE


class Memory:
    """memfd-backed regions, as the pool makes them."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self.regions: list[MemoryRegion] = []
        for name, num_bytes in SIZES.items():
            fd = os.memfd_create(f"test-{name}", os.MFD_CLOEXEC)
            os.ftruncate(fd, num_bytes)
            array = np.frombuffer(mmap.mmap(fd, num_bytes), np.uint8)
            self.arrays.append(array)
            self.regions.append(MemoryRegion(name, array.ctypes.data, num_bytes, fd))

    def paint(self) -> None:
        for array in self.arrays:
            array[:] = CANARY

    def copy(self) -> list[np.ndarray]:
        return [array.copy() for array in self.arrays]

    def same(self, other: list[np.ndarray]) -> bool:
        return all(map(np.array_equal, self.arrays, other))


def content(seed: int) -> list[np.ndarray]:
    """What the source with this seed serves."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, n, np.uint8) for n in SIZES.values()]


def serve(transport: str, kind: str, seed: int, conn: Connection) -> None:
    """Main function of a source: serve until told to end, or until the test process is gone."""
    memory = Memory()
    for array, data in zip(memory.arrays, content(seed), strict=True):
        array[:] = data
    served = resolve("transport", transport, TRANSPORTS)(HOST, kind)
    served.register(memory.regions)
    conn.send_bytes(msgspec.msgpack.encode(served.endpoint()))
    with contextlib.suppress(EOFError):
        conn.recv_bytes()
    os._exit(0)


@dataclass
class Source:
    process: ForkServerProcess
    conn: Connection
    endpoint: Endpoint
    data: list[np.ndarray]

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        """SIGSTOP, and wait for it to arrive: on a busy machine threads serve on for a while."""
        self.signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        deadline = time.monotonic() + HANG_S
        while any(not _is_stopped(task) for task in tasks.iterdir()):
            assert time.monotonic() < deadline, "the source does not stop"
            time.sleep(0.001)

    def kill(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGKILL)
        self.process.join(HANG_S)
        self.conn.close()


def _is_stopped(task: Path) -> bool:
    """Whether a thread is in state T: proc(5), the field after the name in parentheses."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it ended meanwhile; the others are looked at once more
        return False


Spawn = Callable[[int], Source]


def spawn(row: tuple[str, str], seed: int) -> Source:
    ours, theirs = FORKED.Pipe()
    process = fork(serve, *row, seed, theirs)
    theirs.close()
    assert ours.poll(HANG_S), "the source did not start"
    endpoint = msgspec.msgpack.decode(ours.recv_bytes(), type=Endpoint)
    return Source(process, ours, endpoint, content(seed))


@pytest.fixture(scope="module", params=ROWS, ids="/".join)
def row(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture(scope="module")
def memory() -> Memory:
    return Memory()


@pytest.fixture(scope="module")
def transport(row: tuple[str, str], memory: Memory) -> Iterator[KVTransport]:
    made = resolve("transport", row[0], TRANSPORTS)(HOST, row[1])
    made.register(memory.regions)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared_source(row: tuple[str, str]) -> Iterator[Source]:
    """A source that tests leave alive and well."""
    made = spawn(row, 1)
    yield made
    made.kill()


@pytest.fixture(scope="module")
def shared_peer(transport: KVTransport, shared_source: Source) -> Iterator[Peer]:
    peer = transport.connect(shared_source.endpoint, CONNECT_S)
    yield peer
    peer.close()


@pytest.fixture
def sources(row: tuple[str, str]) -> Iterator[Spawn]:
    """Makes sources of one test, which may do with them what it likes."""
    made: list[Source] = []

    def make(seed: int) -> Source:
        made.append(spawn(row, seed))
        return made[-1]

    yield make
    for source in made:
        source.kill()


@pytest.fixture(autouse=True)
def painted(memory: Memory) -> None:
    memory.paint()


def finish(pull: Pull) -> PullState:
    """Poll until the pull is over."""
    deadline = time.monotonic() + HANG_S
    while (state := pull.poll()) is PullState.RUNNING:
        assert time.monotonic() < deadline, "the pull hangs"
        time.sleep(0.0002)
    assert pull.poll() is state
    assert (pull.error is None) == (state is PullState.OK)
    return state


def start(pull: Pull, memory: Memory) -> None:
    """Poll until some bytes are there but not all."""
    deadline = time.monotonic() + HANG_S
    while (memory.arrays[0][:: 1 << 10] == CANARY).mean() > 0.98:
        assert pull.poll() is PullState.RUNNING
        assert time.monotonic() < deadline, "the pull does not start"


def pages(num_runs: int, num_bytes: int, seed: int = 0) -> list[Run]:
    """Runs of the first region, scattered on both sides, not overlapping."""
    rng = random.Random(seed)
    slots = range(SIZES["target"] // num_bytes)
    pairs = zip(rng.sample(slots, num_runs), rng.sample(slots, num_runs), strict=True)
    return [Run(0, here * num_bytes, there * num_bytes, num_bytes) for here, there in pairs]


def everything(num_bytes: int = 4096) -> list[Run]:
    """The whole first region in runs of `num_bytes`: long enough to be met half-way."""
    return [Run(0, at, at, num_bytes) for at in range(0, SIZES["target"], num_bytes)]


def expected(runs: list[Run], data: list[np.ndarray]) -> list[np.ndarray]:
    """Local memory after the pull."""
    out = [np.full(n, CANARY, np.uint8) for n in SIZES.values()]
    for region, here, there, num_bytes in runs:
        out[region][here : here + num_bytes] = data[region][there : there + num_bytes]
    return out


def unchanged(memory: Memory, seconds: float = 0.4) -> bool:
    """Whether nobody writes: look at the memory as it is, then at fresh canaries."""
    before = memory.copy()
    time.sleep(seconds)
    if not memory.same(before):
        return False
    memory.paint()
    time.sleep(seconds)
    return all((array == CANARY).all() for array in memory.arrays)


def test_every_transport_of_the_table_is_tested() -> None:
    assert {name for name, _ in ROWS} == set(TRANSPORTS)


@pytest.mark.parametrize(
    ("num_runs", "num_bytes"), [(1, 1), (3000, 1000), (400, 64 << 10), (5, 9 << 20)]
)
def test_pulled_bytes_are_the_peers_and_no_others_change(
    shared_peer: Peer, shared_source: Source, memory: Memory, num_runs: int, num_bytes: int
) -> None:
    runs = pages(num_runs, num_bytes)
    pull = shared_peer.pull(runs)
    assert pull.num_bytes == num_runs * num_bytes
    assert finish(pull) is PullState.OK
    assert memory.same(expected(runs, shared_source.data))


def test_one_run_as_large_as_the_region_and_another_region(
    shared_peer: Peer, shared_source: Source, memory: Memory
) -> None:
    runs = [Run(0, 0, 0, SIZES["target"]), Run(1, 4096, 17, 100_000)]
    assert finish(shared_peer.pull(runs)) is PullState.OK
    assert memory.same(expected(runs, shared_source.data))


def test_ok_is_never_told_before_the_last_byte(
    shared_peer: Peer, shared_source: Source, memory: Memory
) -> None:
    runs = pages(300, 32 << 10, seed=3)
    want = expected(runs, shared_source.data)
    for _ in range(5):
        memory.paint()
        pull = shared_peer.pull(runs)
        while pull.poll() is PullState.RUNNING:
            pass
        assert memory.same(want)


def test_nothing_moves_unless_polled_and_no_runs_are_ok(shared_peer: Peer, memory: Memory) -> None:
    pull = shared_peer.pull(pages(10, 4096))
    assert unchanged(memory, 0.1)
    pull.cancel()
    assert finish(pull) is PullState.FAILED
    assert unchanged(memory, 0.1)
    assert finish(shared_peer.pull([])) is PullState.OK


def test_pulls_of_one_peer_share_it(
    shared_peer: Peer, shared_source: Source, memory: Memory
) -> None:
    runs = pages(600, 16 << 10, seed=4)
    pulls = [shared_peer.pull(runs[i::6]) for i in range(6)]
    while any([pull.poll() is PullState.RUNNING for pull in pulls]):
        pass
    assert {finish(pull) for pull in pulls} == {PullState.OK}
    assert memory.same(expected(runs, shared_source.data))


@pytest.mark.parametrize(
    "run",
    [
        Run(2, 0, 0, 1),
        Run(-1, 0, 0, 1),
        Run(0, -1, 0, 1),
        Run(0, 0, -1, 1),
        Run(0, 0, 0, 0),
        Run(0, SIZES["target"], 0, 1),
        Run(0, 0, SIZES["target"] - 1, 2),
        Run(1, 0, 0, SIZES["draft"] + 1),
    ],
)
def test_a_run_outside_a_region_is_refused(shared_peer: Peer, run: Run) -> None:
    with pytest.raises(ValueError, match="region"):
        shared_peer.pull([Run(0, 0, 0, 1), run])


def test_a_link_is_measured_by_reads(
    shared_peer: Peer, shared_source: Source, memory: Memory
) -> None:
    runs = [Run(0, 0, 0, 3 << 20), Run(0, 4 << 20, 5 << 20, 1 << 20)]
    assert 0 < measured_rate(shared_peer, runs) < 1e12
    assert memory.same(expected(runs, shared_source.data))


def test_a_link_that_breaks_while_it_is_measured_is_closed(
    transport: KVTransport, row: tuple[str, str], sources: Spawn
) -> None:
    source = sources(31)
    peer = transport.connect(source.endpoint, CONNECT_S)
    source.kill()
    if row[0] == "shm":  # keeps the memory of a source that is gone
        assert measured_rate(peer, [Run(0, 0, 0, 4096)]) > 0
        peer.close()
        return
    with pytest.raises(Unreachable, match="a first read failed"):
        measured_rate(peer, [Run(0, 0, 0, 4096)])
    with pytest.raises(AssertionError, match="closed peer"):
        peer.pull([Run(0, 0, 0, 1)])


def test_two_peers_at_once(
    transport: KVTransport,
    shared_peer: Peer,
    shared_source: Source,
    sources: Spawn,
    memory: Memory,
) -> None:
    other = sources(2)
    peer = transport.connect(other.endpoint, CONNECT_S)
    runs = pages(400, 32 << 10, seed=5)
    pulls = [shared_peer.pull(runs[:200]), peer.pull(runs[200:])]
    while any([pull.poll() is PullState.RUNNING for pull in pulls]):
        pass
    assert {pull.poll() for pull in pulls} == {PullState.OK}
    want = expected(runs[:200], shared_source.data)
    for _, here, there, num_bytes in runs[200:]:
        want[0][here : here + num_bytes] = other.data[0][there : there + num_bytes]
    assert memory.same(want)
    peer.close()


def test_after_a_cancelled_pull_is_over_nothing_is_written(
    shared_peer: Peer, shared_source: Source, memory: Memory
) -> None:
    pull = shared_peer.pull(everything())
    start(pull, memory)
    pull.cancel()
    assert finish(pull) is PullState.FAILED
    assert unchanged(memory)
    again = pages(20, 64 << 10)
    assert finish(shared_peer.pull(again)) is PullState.OK
    assert memory.same(expected(again, shared_source.data))


def test_cancelling_a_finished_pull_changes_nothing(shared_peer: Peer) -> None:
    pull = shared_peer.pull(pages(2, 4096))
    assert finish(pull) is PullState.OK
    pull.cancel()
    assert finish(pull) is PullState.OK


def test_closing_a_peer_ends_its_pulls(
    transport: KVTransport, sources: Spawn, memory: Memory
) -> None:
    peer = transport.connect(sources(3).endpoint, CONNECT_S)
    pull = peer.pull(everything())
    start(pull, memory)
    peer.close()
    peer.close()
    assert pull.poll() is PullState.FAILED
    assert unchanged(memory)


def test_a_source_killed_during_a_pull_ends_it_for_good(
    transport: KVTransport, sources: Spawn, memory: Memory
) -> None:
    source = sources(4)
    peer = transport.connect(source.endpoint, CONNECT_S)
    pull = peer.pull(everything(64 << 10))
    start(pull, memory)
    source.kill()
    state = finish(pull)
    if state is PullState.OK:
        assert memory.same(expected(everything(64 << 10), source.data))
    assert unchanged(memory)
    peer.close()


def test_a_source_killed_before_a_pull_ends_it_and_cannot_be_connected(
    transport: KVTransport, sources: Spawn, memory: Memory
) -> None:
    source = sources(5)
    peer = transport.connect(source.endpoint, CONNECT_S)
    source.kill()
    finish(peer.pull(pages(10, 4096)))
    assert unchanged(memory)
    peer.close()
    began = time.monotonic()
    with pytest.raises(Unreachable):
        transport.connect(source.endpoint, CONNECT_S)
    assert time.monotonic() - began < CONNECT_S + 5


def test_a_cancelled_pull_from_a_dead_source_does_not_wait_for_retries(
    transport: KVTransport, sources: Spawn, memory: Memory
) -> None:
    source = sources(6)
    peer = transport.connect(source.endpoint, CONNECT_S)
    source.kill()
    pull = peer.pull(everything())
    pull.poll()
    pull.cancel()
    assert finish(pull) is PullState.FAILED
    peer.close()


def test_a_stopped_source_ends_its_pull_and_harms_no_other_peer(
    transport: KVTransport,
    shared_peer: Peer,
    shared_source: Source,
    sources: Spawn,
    memory: Memory,
) -> None:
    source = sources(7)
    peer = transport.connect(source.endpoint, CONNECT_S)
    source.stop()
    stuck = peer.pull(pages(100, 256 << 10, seed=1)[:8])
    stuck.poll()
    runs = pages(100, 256 << 10, seed=1)[8:]
    healthy = shared_peer.pull(runs)
    while healthy.poll() is PullState.RUNNING:
        stuck.poll()
    assert healthy.poll() is PullState.OK
    want = expected(runs, shared_source.data)
    for _, here, _, num_bytes in runs:
        there = slice(here, here + num_bytes)
        assert np.array_equal(memory.arrays[0][there], want[0][there])
    assert finish(stuck) is (PullState.OK if transport.name == "shm" else PullState.FAILED)
    before = memory.copy()
    source.signal(signal.SIGCONT)
    time.sleep(0.3)
    assert memory.same(before)
    assert unchanged(memory, 0.1)
    peer.close()


def test_first_contact_with_a_stopped_source_keeps_to_its_deadline(
    transport: KVTransport,
    row: tuple[str, str],
    shared_peer: Peer,
    sources: Spawn,
) -> None:
    source = sources(8)
    source.stop()
    if row[0] == "shm":  # needs nothing of the peer but its memory
        transport.connect(source.endpoint, 0.5).close()
        return
    began = time.monotonic()
    with pytest.raises(Unreachable, match="did not answer within"):
        transport.connect(source.endpoint, 0.5)
    with pytest.raises(Unreachable, match="earlier contact"):
        transport.connect(source.endpoint, 0.5)
    assert time.monotonic() - began < HANG_S
    assert finish(shared_peer.pull(pages(10, 4096))) is PullState.OK
    source.signal(signal.SIGCONT)
    deadline = time.monotonic() + HANG_S
    while True:
        try:
            peer = transport.connect(source.endpoint, CONNECT_S)
            break
        except Unreachable:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert finish(peer.pull(pages(10, 4096))) is PullState.OK
    peer.close()


def test_a_restarted_source_is_reached_by_connecting_afresh(
    transport: KVTransport, sources: Spawn, memory: Memory
) -> None:
    runs = pages(20, 64 << 10)
    for seed in (9, 10):
        source = sources(seed)
        peer = transport.connect(source.endpoint, CONNECT_S)
        memory.paint()
        assert finish(peer.pull(runs)) is PullState.OK
        assert memory.same(expected(runs, source.data))
        source.kill()
        peer.close()


def test_what_cannot_fit_is_incompatible_and_says_why(
    transport: KVTransport, shared_source: Source
) -> None:
    good = shared_source.endpoint
    replace = msgspec.structs.replace
    with pytest.raises(Incompatible, match="pigeon"):
        transport.connect(replace(good, transport="pigeon"), CONNECT_S)
    with pytest.raises(Incompatible, match="rdma"):
        transport.connect(replace(good, kind="rdma"), CONNECT_S)
    with pytest.raises(Incompatible, match="regions"):
        transport.connect(replace(good, regions=good.regions[:1]), CONNECT_S)


def counts() -> tuple[int, int]:
    """What this process has open, descriptors and threads, when no engine is about to go."""
    ensure_servers()
    deadline = time.monotonic() + HANG_S
    while any(each.name == "mooncake-destroy" for each in threading.enumerate()):
        assert time.monotonic() < deadline, "an engine stays"
        time.sleep(0.02)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def settled(limit: tuple[int, int]) -> bool:
    """Whether `counts` comes down to `limit`: engines take their time to go."""
    deadline = time.monotonic() + HANG_S
    while any(a > b for a, b in zip(counts(), limit, strict=True)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_connecting_and_closing_leaves_no_threads_and_descriptors(
    transport: KVTransport, row: tuple[str, str], shared_source: Source, memory: Memory
) -> None:
    before = counts()
    fresh = resolve("transport", row[0], TRANSPORTS)(HOST, row[1])
    fresh.register(memory.regions)
    registered = counts()
    for _ in range(6):
        peer = fresh.connect(shared_source.endpoint, CONNECT_S)
        assert finish(peer.pull(pages(40, 4096))) is PullState.OK
        peer.close()
    assert settled(registered)
    fresh.close()
    fresh.close()
    assert settled(before)


def test_sources_that_come_and_are_killed_leave_no_threads_and_descriptors(
    transport: KVTransport, row: tuple[str, str]
) -> None:
    before = counts()
    for seed in range(4):
        source = spawn(row, seed)
        peer = transport.connect(source.endpoint, CONNECT_S)
        pull = peer.pull(everything(1 << 20))
        pull.poll()
        source.kill()
        source.process.close()
        pull.cancel()  # or it would try again for seconds
        peer.close()
    assert settled(before)


@pytest.mark.parametrize("row", ROWS[:1], indirect=True, ids="/".join, scope="module")
class TestShm:
    """What only the shm transport promises."""

    def test_another_host_or_namespace_is_incompatible(
        self, transport: KVTransport, shared_source: Source
    ) -> None:
        moved = msgspec.structs.replace(shared_source.endpoint, host_key="x pid:[1]")
        with pytest.raises(Incompatible, match="namespace"):
            transport.connect(moved, CONNECT_S)

    def test_a_recycled_pid_is_not_the_peer(
        self, transport: KVTransport, shared_source: Source
    ) -> None:
        good = shared_source.endpoint
        other = msgspec.structs.replace(good, start_ticks=good.start_ticks - 1)
        with pytest.raises(Unreachable, match="another process"):
            transport.connect(other, CONNECT_S)

    def test_only_a_memfd_of_the_announced_size_is_mapped(
        self, transport: KVTransport, shared_source: Source
    ) -> None:
        good = shared_source.endpoint
        target, draft = good.regions
        replace = msgspec.structs.replace
        pipe = replace(good, regions=(replace(target, fd=1), draft))
        with pytest.raises(Incompatible, match="not a memfd"):
            transport.connect(pipe, CONNECT_S)
        large = replace(good, regions=(replace(target, num_bytes=1 << 40), draft))
        with pytest.raises(Incompatible, match="announced"):
            transport.connect(large, CONNECT_S)
        closed = replace(good, regions=(replace(target, fd=999), draft))
        with pytest.raises(Unreachable, match="does not serve"):
            transport.connect(closed, CONNECT_S)

    def test_memory_without_a_memfd_and_other_kinds_are_unsupported(
        self, row: tuple[str, str]
    ) -> None:
        shm = resolve("transport", row[0], TRANSPORTS)
        with pytest.raises(Unsupported, match="memfd"):
            shm(HOST, "shm").register([MemoryRegion("target", 0x1000, 4096, None)])
        with pytest.raises(Unsupported, match="tcp"):
            shm(HOST, "tcp")


def listening() -> set[int]:
    """TCP ports over IPv4 that this process listens on."""
    ours: set[str] = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            ours.add(os.readlink(f"/proc/self/fd/{fd}"))
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {
        int(row[1].partition(":")[2], 16)
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in ours
    }


def wait_until_only(ports: set[int]) -> None:
    """Until none but `ports` is listened on."""
    deadline = time.monotonic() + HANG_S
    while listening() - ports:
        assert time.monotonic() < deadline, "an engine stays"
        time.sleep(0.02)


@pytest.mark.parametrize("row", ROWS[1:], indirect=True, ids="/".join, scope="module")
class TestMooncake:
    """What only mooncake promises: when its engines go."""

    def test_the_engine_of_a_closed_peer_goes_and_no_other(
        self,
        transport: KVTransport,
        shared_peer: Peer,
        shared_source: Source,
        sources: Spawn,
        memory: Memory,
    ) -> None:
        wait_until_only(before := listening())
        source = sources(20)
        peer = transport.connect(source.endpoint, CONNECT_S)
        assert len(listening() - before) == 1
        source.kill()
        peer.close()
        wait_until_only(before)
        assert listening() == before
        runs = pages(50, 64 << 10)
        assert finish(shared_peer.pull(runs)) is PullState.OK
        assert memory.same(expected(runs, shared_source.data))

    def test_closing_waits_for_no_engine_and_an_engine_that_serves_somebody_is_left_alone(
        self, transport: KVTransport, shared_peer: Peer, sources: Spawn
    ) -> None:
        """Its destruction would hold the GIL until the connection ends or times out."""
        before = listening()
        peer = transport.connect(sources(21).endpoint, CONNECT_S)
        (port,) = listening() - before
        with socket.create_connection((HOST, port)):
            peer.close()
            assert finish(shared_peer.pull(pages(10, 4096))) is PullState.OK
            time.sleep(2 * mooncake_engine.ACCEPT_S)
            assert finish(shared_peer.pull(pages(10, 4096))) is PullState.OK
            assert port in listening()
        wait_until_only(before)

    def test_a_peer_that_is_away_costs_no_engine(
        self, transport: KVTransport, sources: Spawn
    ) -> None:
        source = sources(22)
        source.kill()
        before = counts()
        for _ in range(20):
            with pytest.raises(Unreachable, match="no mooncake engine answers"):
                transport.connect(source.endpoint, CONNECT_S)
        assert settled(before)
        assert not [each for each in threading.enumerate() if each.name == "mooncake-destroy"]

    def test_a_hung_peer_keeps_nobody_from_connecting_elsewhere_or_closing(
        self, transport: KVTransport, row: tuple[str, str], sources: Spawn, memory: Memory
    ) -> None:
        hung, well = sources(23), sources(24)
        before = counts()
        fresh = resolve("transport", row[0], TRANSPORTS)(HOST, row[1])
        fresh.register(memory.regions)
        hung.stop()
        with pytest.raises(Unreachable, match="did not answer within"):
            fresh.connect(hung.endpoint, 0.5)
        peer = fresh.connect(well.endpoint, CONNECT_S)
        assert finish(peer.pull(pages(10, 4096))) is PullState.OK
        fresh.close()
        hung.kill()  # its contact ends
        assert settled(before)


class TestMooncakeLibrary:
    """Environment, import and engines of mooncake."""

    @pytest.mark.parametrize(
        ("text", "package"),
        [
            ("libibverbs.so.1: cannot open shared object file: No such file", "libibverbs1"),
            ("libnuma.so.1: cannot open shared object file: No such file", "libnuma1"),
            ("libcurl.so.4: cannot open shared object file: No such file", "libcurl4"),
            ("libmlx5.so.1: cannot open shared object file: No such file", "ibverbs-providers"),
        ],
    )
    def test_a_missing_system_library_names_its_package(self, text: str, package: str) -> None:
        error = mooncake_libraries.explain(ImportError(text))
        assert f"apt-get install -y --no-install-recommends {package}" in str(error)
        assert text in str(error)

    def test_a_missing_wheel_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "mooncake.engine", None)
        with pytest.raises(MissingLibrary, match=r"kvlane\[cpu\]"):
            mooncake_engine.load()

    @pytest.mark.parametrize("kind", ["tcp", "rdma", "nvlink"])
    def test_one_variable_selects_and_the_users_other_values_win(
        self, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        monkeypatch.setattr(mooncake_engine, "_chosen", None)
        monkeypatch.setattr(os, "environ", {"MC_USE_TENT": "1", "MC_TCP_SLICE_SIZE": "7"})
        for variable in mooncake_engine.SELECTION.values():
            os.environ[variable] = "0"
        settings = mooncake_engine.configure(kind)
        assert dict(os.environ) == settings
        assert settings["MC_TCP_SLICE_SIZE"] == "7"
        assert settings[mooncake_engine.SELECTION[kind]] == "1"
        assert len(set(mooncake_engine.SELECTION.values()) & set(settings)) == 1
        with pytest.raises(Unsupported, match="already"):
            mooncake_engine.configure("rdma" if kind == "tcp" else "tcp")

    def test_an_unknown_kind_is_unsupported(self) -> None:
        with pytest.raises(Unsupported, match="carrier"):
            mooncake_engine.configure("carrier")

    def test_a_start_is_silent_until_it_has_failed_once(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(mooncake_engine, "_chosen", None)
        mooncake_engine.configure("tcp")
        memory = mmap.mmap(-1, mmap.PAGESIZE)
        address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        region = MemoryRegion("target", address, mmap.PAGESIZE, None)
        real = mooncake_engine.load()
        engines = mooncake_engine.Engines(real, "127.0.0.1", "tcp")
        engines.serve([region])
        assert capfd.readouterr().err == ""
        engines.close()

        class Refusing:
            def initialize(self, *how: str) -> int:
                real().initialize(*how)  # logs an error, though it succeeds
                return -1

        with pytest.raises(Unsupported, match="its log lines on stderr say why"):
            mooncake_engine.Engines(Refusing, "127.0.0.1", "tcp").serve([region])
        lines = capfd.readouterr().err.splitlines()
        assert sum(line.startswith("E") for line in lines) == 1
