"""KV by mooncake-transfer-engine: TCP, RDMA, or NVLink inside one host.

Measurements of the engine shape this file. First contact with a hung peer blocks an engine
for 60 s under its own mutex, and an engine that knew a name never reaches another process of that
name. So one engine serves, and a peer's incarnation is pulled from by an engine of its own.

Security. An engine listens at all addresses and lets whoever connects read and write registered
memory; so members alone are heard there (mooncake_gate).
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from worker.cache.layout import MemoryRegion
from worker.errors import Unreachable, Unsupported
from worker.peers.deaf import deafen
from worker.transfer.base import (
    POLL_BUDGET_S,
    Endpoint,
    OpenPeer,
    OpenTransport,
    PullState,
    Run,
    RunsPull,
    pieces,
)
from worker.transfer.mooncake_engine import Engine, Engines, configure, load
from worker.transfer.mooncake_gate import Gate, Way
from worker.transfer.sockets import SECRET_BYTES

# One read is at most this long. NVLink moves 256 MiB in 0.7 ms, less than POLL_BUDGET_S, and a
# read costs a call: 16 MiB at a time it is 304 GB/s instead of 389.
MAX_PIECE_BYTES = {"tcp": 16 << 20, "rdma": 16 << 20, "nvlink": 256 << 20}
MAX_RETRIES = 3
# A lane that broke fails one read and is then refused for 1 s; the read after that is fine.
RETRY_PAUSE_S = 1.1
# A read that took this long to fail met a peer that makes no progress: no retry helps.
STALLED_S = 2.0
# Outstanding reads per peer. TCP: its lanes; with more, a stopped peer takes several progress
# timeouts to drain. NVLink and RDMA have no lanes: enough to be busy between two engine steps.
MAX_READS = {"tcp": 4, "rdma": 64, "nvlink": 256}
NO_PEER_ACCESS = "; without peer access (nvidia-smi topo -p2p r) set transport.kind=tcp"


class _Read(NamedTuple):
    """A piece under way. Invariant: `batch_id` was not yet seen to end."""

    batch_id: int
    piece: Run
    issued_at: float


class MooncakePull(RunsPull):
    """A pull as a queue of pieces and the few reads that are under way."""

    def __init__(self, peer: "MooncakePeer", runs: Sequence[Run], max_bytes: int) -> None:
        """max_bytes: of one read."""
        super().__init__(runs)
        self._peer = peer
        self._pieces = deque(pieces(runs, max_bytes))  # not issued
        self._reads: list[_Read] = []
        self._failed: list[Run] = []
        self._cancelled = False
        self._stalled = False
        self._num_retries = 0
        self._resume_at = 0.0

    def poll(self) -> PullState:
        if self.state is not PullState.RUNNING:
            return self.state
        deadline = time.perf_counter() + POLL_BUDGET_S
        while True:
            moved = self._collect()
            moved += self._issue(deadline)
            self._settle()
            if self.state is not PullState.RUNNING or not moved or time.perf_counter() >= deadline:
                return self.state

    def cancel(self) -> None:
        self._cancelled = True

    def _collect(self) -> int:
        """Look once at the reads under way; how many have ended."""
        running: list[_Read] = []
        for read in self._reads:
            status = self._peer.status(read.batch_id)
            if status == -1:  # not one byte of it is written any more
                self._fail(read.piece, time.monotonic() - read.issued_at)
            elif status != 1:  # 0: under way; -2: slow, but not over
                running.append(read)
        num_ended = len(self._reads) - len(running)
        self._reads = running
        return num_ended

    def _issue(self, deadline: float) -> int:
        """Start reads while none has failed and the peer has room; their number."""
        if self._cancelled or self._failed or time.monotonic() < self._resume_at:
            return 0
        num_issued = 0
        while self._pieces and self._peer.num_free_reads and time.perf_counter() < deadline:
            piece = self._pieces.popleft()
            batch_id = self._peer.read(piece)
            if batch_id == 0:
                self._fail(piece, 0.0)
                break
            self._reads.append(_Read(batch_id, piece, time.monotonic()))
            num_issued += 1
        return num_issued

    def _fail(self, piece: Run, after_s: float) -> None:
        self._failed.append(piece)
        self._stalled |= after_s >= STALLED_S

    def _settle(self) -> None:
        """Once nothing is under way: end, or put failed pieces back for another try."""
        if self._reads:
            return
        if self._cancelled:
            self._give_up("cancelled")
        elif self._failed and (self._stalled or self._num_retries == MAX_RETRIES):
            why = "no progress" if self._stalled else f"{MAX_RETRIES} retries failed too"
            self._give_up(
                f"reads of {len(self._failed)} ranges from {self._peer.name} failed ({why}); "
                "mooncake's reason is in its own log lines"
            )
        elif self._failed:
            self._num_retries += 1
            self._resume_at = time.monotonic() + RETRY_PAUSE_S
            self._pieces.extendleft(self._failed)
            self._failed.clear()
        elif not self._pieces:
            self._peer.finish_copies()
            self.state = PullState.OK

    def _give_up(self, error: str) -> None:
        self.state = PullState.FAILED
        self.error = error
        self._pieces.clear()


class MooncakePeer(OpenPeer):
    """One incarnation of one process, with an engine that nobody else uses.

    Over NVLink the engine maps the peer's memory, and the mapping keeps that memory allocated after
    the peer was killed: its successor would lack room on the device. So the engine is destroyed
    with the peer, 1 s later and outside the engine loop (see mooncake_engine). A stopped peer's
    reads, for which `close` waits, end with the engine's progress timeout.
    """

    def __init__(
        self,
        transport: "MooncakeTransport",
        endpoint: Endpoint,
        engine: Engine,
        way: Way,
    ) -> None:
        super().__init__(transport, endpoint)
        self.name, self._engine, self._kind = endpoint.name, engine, transport.kind
        self._way = way
        self._discard = transport.engines.discard
        self.finish_copies = transport.engines.finish_copies
        self.num_free_reads = MAX_READS[transport.kind]  # how many more may be issued

    def read(self, piece: Run) -> int:
        """Start one read, in a batch of its own, whose status is the read's; its id, 0: refused."""
        here = self._transport.endpoint().regions[piece.region].address + piece.local_offset
        there = self._endpoint.regions[piece.region].address + piece.remote_offset
        batch_id = self._engine.raw.batch_transfer_async_read(
            self._way.name, [here], [there], [piece.num_bytes]
        )
        self.num_free_reads -= batch_id != 0
        return batch_id

    def status(self, batch_id: int) -> int:
        """1 done, -1 failed: `batch_id` is a dangling pointer then; 0 and -2 under way."""
        status = self._engine.raw.transfer_check_status(batch_id)
        self.num_free_reads += status in (1, -1)
        return status

    def _begin(self, runs: Sequence[Run]) -> MooncakePull:
        return MooncakePull(self, runs, MAX_PIECE_BYTES[self._kind])

    def _let_go(self) -> None:
        assert self.num_free_reads == MAX_READS[self._kind]
        self._way.close()
        self._discard(self._engine)


class MooncakeTransport(OpenTransport):
    """The mooncake transport of this process.

    `host`, which peers dial, is not checked by the engine. `rdma` fails loudly without a card;
    nothing falls back. `tcp` takes CUDA memory by way of the host, 1.6 to 2.2 GB/s.
    """

    name = "mooncake"

    def __init__(self, host: str, kind: str) -> None:
        super().__init__(kind)
        configure(kind)
        self.engines = Engines(load(), host.partition(",")[0], kind)  # it has one network
        self._gate: Gate | None = None

    def _serve(self, regions: Sequence[MemoryRegion]) -> tuple[str, bytes]:
        """Start the serving engine; Unsupported if it does not start, or refuses the memory."""
        secret, listeners = secrets.token_bytes(SECRET_BYTES), self.engines.serve(regions)
        try:
            self._gate = Gate(self.engines.host, secret, listeners)
        except OSError as e:
            raise Unsupported(f"nobody can listen at {self.engines.host}: {e}") from e
        return f"{self.engines.host}:{self._gate.port}", secret

    def _reach(self, endpoint: Endpoint, timeout_s: float) -> MooncakePeer:
        """Probe, then read one byte, so that connections are open (see KVTransport.connect)."""
        way = Way(endpoint, timeout_s)
        patience = threading.Timer(timeout_s, way.cut)
        patience.start()
        try:
            engine = self._engine_to(endpoint, way.name)
        finally:
            patience.cancel()
        if self.kind == "rdma":  # the peer's engine asks ours who that is
            deafen(engine.listeners[0], but=[(way.host, 0)])
        return MooncakePeer(self, endpoint, engine, way)

    def _engine_to(self, endpoint: Endpoint, name: str) -> Engine:
        """Make an engine that has read a byte from the peer, at a name of ours."""
        if not self.engines.answers(name):
            raise Unreachable(f"the mooncake engine of {endpoint.name} did not answer")
        try:
            engine = self.engines.make()
        except Unsupported as e:  # it worked at start-up, so this machine has lost something
            raise Unreachable(f"no engine to reach {endpoint.name} with: {e}") from e
        if not engine.warm(name, endpoint):
            self.engines.discard(engine)
            advice = NO_PEER_ACCESS if self.kind == "nvlink" else ""
            raise Unreachable(
                f"{endpoint.name} answers, but a first read of one byte failed{advice}"
            )
        return engine

    def close(self) -> None:
        """Close all peers and destroy the engines, all at once: about 1 s.

        Does not wait for engines in first contact with a hung peer; they go when it ends.
        """
        super().close()
        if self._gate is not None:
            self._gate.close()
        self.engines.close()
