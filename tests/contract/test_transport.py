"""Every transport of the table, against a real second process. The contract: worker.transfer.base.

Sources are processes that serve random bytes; killed and stopped by pid, and always reaped.
"""

import contextlib
import json
import mmap
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from tests.support import kv_sources
from tests.support.kv_sources import CONNECT_S, HOST, Row, Serves, Source, registered
from tests.support.patience import HANG_S, until
from tests.support.processes import ensure_servers
from tests.support.pulls import FAILED, OK, RUNNING, ended
from worker.cache.layout import MemoryRegion
from worker.errors import Incompatible, MissingLibrary, Unreachable, Unsupported
from worker.registry import resolve
from worker.transfer import mooncake_engine, mooncake_libraries
from worker.transfer.base import TRANSPORTS, Peer, Pull, PullState, Run
from worker.transfer.doors import GREETING, NONCE_BYTES
from worker.transfer.mooncake_gate import listens, sockets_at
from worker.transfer.sources import fastest_pull_s

ROWS = [("shm", "shm"), ("mooncake", "tcp"), ("sockets", "tcp")]
MOST = [ROWS[0], pytest.param(ROWS[1], marks=pytest.mark.whole), ROWS[2]]  # of laws; else every_row
every_row = pytest.mark.parametrize("shared", ROWS, indirect=True, ids="/".join, scope="module")
SIZES = {"target": 48 << 20, "draft": 1 << 20}
CANARY = 0xEE
REPLACE = msgspec.structs.replace


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

    def same(self, other: list[np.ndarray]) -> bool:
        return all(map(np.array_equal, self.arrays, other))


@lru_cache(2)
def content(seed: int) -> list[np.ndarray]:
    """What the source with this seed serves."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, n, np.uint8) for n in SIZES.values()]


def served(seed: int) -> Serves:
    memory = Memory()
    for array, data in zip(memory.arrays, content(seed), strict=True):
        array[:] = data
    return memory.regions, memory


class Reader:
    """Our side: memory, a transport, and a source of seed 1 that tests leave alive and well."""

    def __init__(self, row: Row) -> None:
        self.row, self.memory = row, Memory()
        self.is_shm = row[0] == "shm"
        self.transport = registered(row, self.memory.regions)
        self.source = kv_sources.source(row, served, 1)
        self.peer = self.connect(self.source)
        self.made: list[Source] = []  # by one test, which may do with them what it likes
        self.peers: list[Peer] = []  # that it has reached

    def connect(self, source: Source, timeout_s: float = CONNECT_S) -> Peer:
        return self.transport.connect(source.endpoint, timeout_s)

    def spawn(self, seed: int) -> Source:
        self.made.append(kv_sources.source(self.row, served, seed))
        return self.made[-1]

    def reach(self, seed: int) -> tuple[Source, Peer]:
        source = self.spawn(seed)
        self.peers.append(self.connect(source))
        return source, self.peers[-1]

    def pulls(self, runs: list[Run], peer: Peer | None = None, seed: int = 1) -> None:
        """Pulls well, and nothing else changes."""
        self.memory.paint()
        assert ended((peer or self.peer).pull(runs)) is OK
        assert self.memory.same(expected(runs, seed))

    def begun(self, peer: Peer, runs: list[Run]) -> Pull:
        """A pull of which some bytes are here but not all."""
        for _ in range(20):  # it may have ended before this process has its turn
            self.memory.paint()
            pull, here = peer.pull(runs), self.memory.arrays[0][:: 1 << 10]
            until(lambda here=here: (here == CANARY).mean() <= 0.98, "no start", pull.poll)
            if pull.poll() is RUNNING:
                return pull
        raise AssertionError("a pull always ends before anybody looks")

    def unchanged(self, seconds: float = 0.4) -> bool:
        """Whether nobody writes: look at the memory as it is, then at fresh canaries."""
        before = [array.copy() for array in self.memory.arrays]
        time.sleep(seconds)
        if not self.memory.same(before):
            return False
        self.memory.paint()
        time.sleep(seconds)
        return all((array == CANARY).all() for array in self.memory.arrays)


@pytest.fixture(scope="module", params=MOST, ids="/".join)
def shared(request: pytest.FixtureRequest) -> Iterator[Reader]:
    made = Reader(request.param)
    yield made
    made.peer.close()
    made.source.kill()
    made.transport.close()


@pytest.fixture
def reader(shared: Reader) -> Iterator[Reader]:
    shared.memory.paint()
    yield shared
    while shared.peers:
        shared.peers.pop().close()
    while shared.made:
        shared.made.pop().kill()


def pages(num_runs: int, num_bytes: int, seed: int = 0) -> list[Run]:
    """Runs of the first region, scattered on both sides, not overlapping."""
    rng = random.Random(seed)
    slots = range(SIZES["target"] // num_bytes)
    pairs = zip(rng.sample(slots, num_runs), rng.sample(slots, num_runs), strict=True)
    return [Run(0, here * num_bytes, there * num_bytes, num_bytes) for here, there in pairs]


def everything(num_bytes: int = 4096) -> list[Run]:
    """The whole first region in runs of `num_bytes`: long enough to be met half-way."""
    return [Run(0, at, at, num_bytes) for at in range(0, SIZES["target"], num_bytes)]


def expected(runs: list[Run], seed: int = 1) -> list[np.ndarray]:
    """Local memory after the pull from the source with this seed."""
    data, out = content(seed), [np.full(n, CANARY, np.uint8) for n in SIZES.values()]
    for region, here, there, num_bytes in runs:
        out[region][here : here + num_bytes] = data[region][there : there + num_bytes]
    return out


def test_every_transport_of_the_table_is_tested() -> None:
    made_of_others = {"mixed"}  # tests/unit/test_mixed_roads.py
    assert {name for name, _ in ROWS} | made_of_others == set(TRANSPORTS)


@every_row
@pytest.mark.parametrize(
    "runs",
    [
        *(pages(*sizes) for sizes in [(1, 1), (3000, 1000), (400, 64 << 10), (5, 9 << 20)]),
        [Run(0, 0, 0, SIZES["target"]), Run(1, 4096, 17, 100_000)],
    ],
    ids=["byte", "small", "pages", "large", "regions"],
)
def test_pulled_bytes_are_the_peers_and_no_others_change(runs: list[Run], reader: Reader) -> None:
    assert reader.peer.pull(runs).num_bytes == sum(run.num_bytes for run in runs)
    reader.pulls(runs)


def test_ok_is_never_told_before_the_last_byte(reader: Reader) -> None:
    runs = pages(300, 32 << 10, seed=3)
    want = expected(runs)
    for _ in range(5):
        reader.memory.paint()
        pull = reader.peer.pull(runs)
        while pull.poll() is RUNNING:
            pass
        assert reader.memory.same(want)


def test_nothing_moves_unless_polled_and_no_runs_are_ok(reader: Reader) -> None:
    pull = reader.peer.pull(pages(10, 4096))
    assert reader.unchanged(0.1)
    pull.cancel()
    assert ended(pull) is FAILED
    assert reader.unchanged(0.1)
    assert ended(reader.peer.pull([])) is OK


def side_by_side(pulls: list[Pull]) -> set[PullState]:
    while any([pull.poll() is RUNNING for pull in pulls]):
        pass
    return {ended(pull) for pull in pulls}


def test_pulls_of_one_peer_share_it(reader: Reader) -> None:
    runs = pages(600, 16 << 10, seed=4)
    assert side_by_side([reader.peer.pull(runs[i::6]) for i in range(6)]) == {OK}
    assert reader.memory.same(expected(runs))


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
def test_a_run_outside_a_region_is_refused(run: Run, reader: Reader) -> None:
    with pytest.raises(ValueError, match="region"):
        reader.peer.pull([Run(0, 0, 0, 1), run])


def test_pulls_are_measured(reader: Reader) -> None:
    runs = [Run(0, 0, 0, 3 << 20), Run(0, 4 << 20, 5 << 20, 1 << 20)]
    assert (4 << 20) / 1e12 < fastest_pull_s(lambda: reader.peer.pull(runs), 3) < HANG_S
    assert reader.memory.same(expected(runs))


def test_a_source_that_goes_while_it_is_measured_is_unreachable(reader: Reader) -> None:
    source, peer = reader.reach(31)
    source.kill()
    if reader.is_shm:  # keeps the memory of a source that is gone
        assert fastest_pull_s(lambda: peer.pull([Run(0, 0, 0, 4096)]), 3) > 0
    else:
        with pytest.raises(Unreachable, match="a first read failed"):
            fastest_pull_s(lambda: peer.pull([Run(0, 0, 0, 4096)]), 3)
    peer.close()
    with pytest.raises(AssertionError, match="closed peer"):
        peer.pull([Run(0, 0, 0, 1)])


@every_row
def test_after_a_cancelled_pull_is_over_nothing_is_written(reader: Reader) -> None:
    pull = reader.begun(reader.peer, everything())
    pull.cancel()
    assert ended(pull) is FAILED
    assert reader.unchanged()
    reader.pulls(pages(20, 64 << 10))


def test_closing_a_peer_ends_its_pulls(reader: Reader) -> None:
    _, peer = reader.reach(3)
    pull = reader.begun(peer, everything())
    peer.close()
    peer.close()
    assert pull.poll() is FAILED
    assert reader.unchanged()


@every_row
def test_a_source_killed_during_a_pull_ends_it_for_good(reader: Reader) -> None:
    source, peer = reader.reach(4)
    runs = everything(64 << 10)
    pull = reader.begun(peer, runs)
    source.kill()
    if ended(pull) is OK:
        assert reader.memory.same(expected(runs, seed=4))
    assert reader.unchanged()


def test_a_source_killed_before_a_pull_ends_it_and_cannot_be_connected(reader: Reader) -> None:
    source, peer = reader.reach(5)
    source.kill()
    ended(peer.pull(pages(10, 4096)))
    assert reader.unchanged()
    began = time.monotonic()
    with pytest.raises(Unreachable):
        reader.connect(source)
    assert time.monotonic() - began < CONNECT_S + 5


def test_a_cancelled_pull_from_a_dead_source_does_not_wait_for_retries(reader: Reader) -> None:
    source, peer = reader.reach(6)
    source.kill()
    pull = peer.pull(everything())
    pull.poll()
    pull.cancel()
    assert ended(pull) is FAILED


def test_a_stopped_source_ends_its_pull_and_harms_no_other_peer(reader: Reader) -> None:
    source, peer = reader.reach(7)
    source.stop()
    stuck = peer.pull(pages(100, 256 << 10, seed=1)[:8])
    stuck.poll()
    runs = pages(100, 256 << 10, seed=1)[8:]
    healthy = reader.peer.pull(runs)
    while healthy.poll() is RUNNING:
        stuck.poll()
    assert healthy.poll() is OK
    want = expected(runs)[0]
    for _, here, _, num_bytes in runs:
        there = slice(here, here + num_bytes)
        assert np.array_equal(reader.memory.arrays[0][there], want[there])
    assert ended(stuck) is (OK if reader.is_shm else FAILED)
    before = [array.copy() for array in reader.memory.arrays]
    source.signal(signal.SIGCONT)
    time.sleep(0.3)
    assert reader.memory.same(before)
    assert reader.unchanged(0.1)


def test_first_contact_with_a_stopped_source_keeps_to_its_deadline(reader: Reader) -> None:
    source = reader.spawn(8)
    source.stop()
    if reader.is_shm:  # needs nothing of the peer but its memory
        reader.connect(source, 0.5).close()
        return
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(Unreachable, match="did not answer"):
            reader.connect(source, 0.5)
    assert time.monotonic() - began < HANG_S
    assert ended(reader.peer.pull(pages(10, 4096))) is OK
    source.signal(signal.SIGCONT)

    def connects() -> bool:
        with contextlib.suppress(Unreachable):
            reader.peers.append(reader.connect(source))
        return bool(reader.peers)

    until(connects)
    assert ended(reader.peers[0].pull(pages(10, 4096))) is OK


def test_a_restarted_source_is_reached_by_connecting_afresh(reader: Reader) -> None:
    for seed in (9, 10):
        source, peer = reader.reach(seed)
        reader.pulls(pages(20, 64 << 10), peer, seed)
        source.kill()


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"transport": "pigeon"}, "pigeon"), ({"kind": "rdma"}, "rdma"), ({"regions": ()}, "regions")],
)
def test_what_cannot_fit_is_incompatible_and_says_why(change, reason, reader: Reader) -> None:
    with pytest.raises(Incompatible, match=reason):
        reader.transport.connect(REPLACE(reader.source.endpoint, **change), CONNECT_S)


def destroying() -> bool:
    """Whether an engine of mooncake is about to go."""
    return any(thread.name == "mooncake-destroy" for thread in threading.enumerate())


def counts() -> tuple[int, int]:
    """What this process has open, descriptors and threads, when no engine is about to go."""
    ensure_servers()
    until(lambda: not destroying(), "an engine stays")
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def settle(limit: tuple[int, int]) -> None:
    """`counts` comes down to `limit`: engines take their time to go."""
    until(lambda: all(a <= b for a, b in zip(counts(), limit, strict=True)), "something stays open")


@every_row
def test_connecting_and_closing_leaves_no_threads_and_descriptors(reader: Reader) -> None:
    before = counts()
    fresh = registered(reader.row, reader.memory.regions)
    at_first = counts()
    for _ in range(6):
        peer = fresh.connect(reader.source.endpoint, CONNECT_S)
        assert ended(peer.pull(pages(40, 4096))) is OK
        peer.close()
    settle(at_first)
    fresh.close()
    fresh.close()
    settle(before)


def test_sources_that_come_and_are_killed_leave_no_threads_and_descriptors(reader: Reader) -> None:
    before = counts()
    for seed in range(4):
        source = kv_sources.source(reader.row, served, seed)
        peer = reader.connect(source)
        pull = peer.pull(everything(1 << 20))
        pull.poll()
        source.kill()
        source.process.close()
        pull.cancel()  # or it would try again for seconds
        peer.close()
    settle(before)


@pytest.mark.parametrize("shared", ROWS[:1], indirect=True, ids="/".join, scope="module")
class TestShm:
    """What only the shm transport promises."""

    def test_another_host_or_namespace_is_incompatible(self, reader: Reader) -> None:
        moved = REPLACE(reader.source.endpoint, host_key="x pid:[1]")
        with pytest.raises(Incompatible, match="namespace"):
            reader.transport.connect(moved, CONNECT_S)

    def test_a_recycled_pid_is_not_the_peer(self, reader: Reader) -> None:
        good = reader.source.endpoint
        with pytest.raises(Unreachable, match="another process"):
            reader.transport.connect(REPLACE(good, start_ticks=good.start_ticks - 1), CONNECT_S)

    @pytest.mark.parametrize(
        ("change", "kind", "reason"),
        [
            ({"fd": 1}, Incompatible, "not a memfd"),
            ({"num_bytes": 1 << 40}, Incompatible, "announced"),
            ({"fd": 999}, Unreachable, "does not serve"),
        ],
    )
    def test_only_a_memfd_of_the_announced_size_is_mapped(
        self, change, kind, reason, reader: Reader
    ) -> None:
        target, draft = reader.source.endpoint.regions
        wrong = REPLACE(reader.source.endpoint, regions=(REPLACE(target, **change), draft))
        with pytest.raises(kind, match=reason):
            reader.transport.connect(wrong, CONNECT_S)

    def test_memory_without_a_memfd_and_other_kinds_are_unsupported(self, reader: Reader) -> None:
        with pytest.raises(Unsupported, match="memfd"):
            registered(reader.row, [MemoryRegion("target", 0x1000, 4096, None)])
        with pytest.raises(Unsupported, match="tcp"):
            resolve("transport", "shm", TRANSPORTS)(HOST, "tcp")


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


EVERYWHERE = ("0.0.0.0", "::")
MEMORY, MEMORY_OF = struct.Struct("9I"), 55  # SO_MEMINFO: of a socket; packets dropped are the last
# In a process of its own. It asks what any engine of mooncake's answers.
STRANGER = """
import json, socket, sys
said = {}
for port in json.loads(sys.argv[1]):
    try:
        with socket.create_connection(("127.0.0.1", port), 1.0) as connection:
            connection.sendall((3).to_bytes(8, "little") + b"\\x01{}")
            connection.shutdown(socket.SHUT_WR)
            said[port] = len(connection.recv(4096))
    except TimeoutError:
        said[port] = None
    except OSError:
        said[port] = 0
print(json.dumps(said))
"""


def listeners_of(pid: int) -> list[tuple[str, int]]:
    sockets = psutil.Process(pid).net_connections("tcp")
    return [one.laddr for one in sockets if one.status == psutil.CONN_LISTEN]


def said_to_a_stranger(ports: list[int]) -> dict[int, int | None]:
    """Bytes that each port sends to another process; None: it takes no connection."""
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, json.dumps(ports)], capture_output=True, check=True
    )
    return {int(port): said for port, said in json.loads(done.stdout).items()}


def wait_until_only(ports: set[int]) -> None:
    until(lambda: not listening() - ports, "an engine stays")


@pytest.mark.parametrize("shared", ROWS[1:2], indirect=True, ids="/".join, scope="module")
class TestMooncake:
    """What only mooncake promises: when its engines go."""

    def test_the_engine_of_a_closed_peer_goes_and_no_other(self, reader: Reader) -> None:
        wait_until_only(before := listening())
        source, peer = reader.reach(20)
        assert len(listening() - before) == 1
        source.kill()
        peer.close()
        wait_until_only(before)
        assert listening() == before
        reader.pulls(pages(50, 64 << 10))

    def test_no_byte_of_a_stranger_reaches_an_engine(self, reader: Reader) -> None:
        """Counted at its listeners: the kernel drops what would begin a connection."""
        source, peer = reader.reach(21)
        ours, theirs = os.getpid(), int(source.process.pid or 0)
        places = {pid: listeners_of(pid) for pid in (ours, theirs)}
        engines = {pid: {p for h, p in found if h in EVERYWHERE} for pid, found in places.items()}
        assert {pid: len(ports) for pid, ports in engines.items()} == {ours: 6, theirs: 2}
        said = said_to_a_stranger([port for found in places.values() for _, port in found])
        for pid, found in places.items():
            for host, port in found:
                heard = said[port]
                if host in EVERYWHERE:
                    assert heard is None, "no connection"
                else:
                    assert heard in (0, len(GREETING) + NONCE_BYTES), (pid, host, port)
        for port in engines[ours]:
            (listener,) = [sock.dup() for sock in sockets_at(port) if listens(sock)]
            with listener:
                *_, dropped = MEMORY.unpack(listener.getsockopt(socket.SOL_SOCKET, MEMORY_OF, 36))
            assert dropped
        reader.pulls(pages(10, 4096), peer, 21)

    def test_a_peer_that_is_away_costs_no_engine(self, reader: Reader) -> None:
        source = reader.spawn(22)
        source.kill()
        before = counts()
        for _ in range(20):
            with pytest.raises(Unreachable, match="refuses"):
                reader.connect(source)
        settle(before)
        assert not destroying()

    def test_a_hung_peer_keeps_nobody_from_connecting_elsewhere_or_closing(self, reader) -> None:
        hung, well = reader.spawn(23), reader.spawn(24)
        before = counts()
        fresh = registered(reader.row, reader.memory.regions)
        hung.stop()
        with pytest.raises(Unreachable, match="did not answer"):
            fresh.connect(hung.endpoint, 0.5)
        peer = fresh.connect(well.endpoint, CONNECT_S)
        assert ended(peer.pull(pages(10, 4096))) is OK
        fresh.close()
        hung.kill()  # its contact ends
        settle(before)


class TestMooncakeLibrary:
    """Environment, import and engines of mooncake."""

    @pytest.mark.parametrize(
        ("library", "package"),
        [
            ("libibverbs.so.1", "libibverbs1"),
            ("libnuma.so.1", "libnuma1"),
            ("libcurl.so.4", "libcurl4"),
            ("libmlx5.so.1", "ibverbs-providers"),
        ],
    )
    def test_a_missing_system_library_names_its_package(self, library: str, package: str) -> None:
        text = f"{library}: cannot open shared object file: No such file"
        error = mooncake_libraries.explain(ImportError(text))
        assert f"apt-get install -y --no-install-recommends {package}" in str(error)
        assert text in str(error)

    def test_a_missing_wheel_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "mooncake.engine", None)
        with pytest.raises(MissingLibrary, match=r"kvlane\[cpu\]"):
            mooncake_engine.load()

    @pytest.mark.parametrize("kind", ["tcp", "rdma", "nvlink"])
    def test_one_variable_selects_and_the_users_other_values_win(self, monkeypatch, kind) -> None:
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
