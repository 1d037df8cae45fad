"""KV by mooncake-transfer-engine: TCP, RDMA, or NVLink inside one host.

What was measured of the engine shapes this file:

- One engine serves; pulling takes one engine per peer incarnation. First contact with a hung peer
  blocks an engine for 60 s under its own mutex, and a restarted peer of the same name is never
  found again through an engine that knew the old one.
- Over NVLink an engine maps its peer's memory, and the mapping keeps that memory allocated after
  the peer was killed: its successor would find no room on the device. So closing a peer destroys
  its engine, 1 s later and outside the engine loop (see mooncake_engine).
- One run per batch id: the status of a batch is that of its first entry. An id is freed when its
  status turns 1 or -1 and is a dangling pointer from then on; -2 is not final.
- A window of as many outstanding reads as the peer has lanes: with more, a stopped peer takes
  several progress timeouts to drain.
- A failed read is over: no byte is written afterwards, whether the source was killed or stopped.

Kinds. The transport is chosen by the environment at import, once per process; the protocol
argument chooses nothing. `rdma` fails loudly without an RDMA card; nothing falls back. `tcp` with
CUDA memory copies each slice synchronously through the host (1.6 to 1.9 GB/s): it is for tests.

Security. The engine listens on all interfaces and lets whoever connects read and write registered
memory: run it inside a cluster-internal network only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from worker.cache.layout import MemoryRegion
from worker.errors import Unreachable, Unsupported
from worker.transfer.base import (
    POLL_BUDGET_S,
    Endpoint,
    PullState,
    Run,
    check_peer,
    check_runs,
    check_same_host,
    describe,
)
from worker.transfer.mooncake_engine import Engine, Engines, configure, load

log = logging.getLogger("kvlane.transfer")

# One read is at most this long. NVLink moves 256 MiB in 0.7 ms, less than POLL_BUDGET_S, and each
# read costs a call: 16 MiB at a time it is 304 GB/s instead of 389.
MAX_PIECE_BYTES = {"tcp": 16 << 20, "rdma": 16 << 20, "nvlink": 256 << 20}
MAX_RETRIES = 3
# A lane that broke fails one read and is then refused for 1 s; the read after that is fine.
RETRY_PAUSE_S = 1.1
# A read that took this long to fail met a peer that makes no progress: no retry helps.
STALLED_S = 2.0
# Outstanding reads per peer. NVLink and RDMA have no lanes to queue behind: enough to be busy from
# one engine step to the next.
WINDOW = {"tcp": 4, "rdma": 64, "nvlink": 256}
NO_PEER_ACCESS = "; without peer access (nvidia-smi topo -p2p r) set transport.kind=tcp"


class _Piece(NamedTuple):
    """One read: absolute addresses."""

    local: int
    remote: int
    num_bytes: int


class _Read(NamedTuple):
    """A piece under way. Invariant: `batch_id` was not yet seen to end."""

    batch_id: int
    piece: _Piece
    issued_at: float


class MooncakePull:
    """A pull as a queue of pieces and the few reads that are under way."""

    def __init__(self, peer: MooncakePeer, pieces: deque[_Piece]) -> None:
        self.num_bytes = sum(piece.num_bytes for piece in pieces)
        self.error: str | None = None
        self._peer = peer
        self._pieces = pieces
        self._reads: list[_Read] = []
        self._failed: list[_Piece] = []
        self._state = PullState.RUNNING
        self._cancelled = False
        self._stalled = False
        self._num_retries = 0
        self._resume_at = 0.0

    @property
    def over(self) -> bool:
        """Whether the state is final."""
        return self._state is not PullState.RUNNING

    def poll(self) -> PullState:
        """See Pull.poll: collect what ended and issue what the window lets through, for a while."""
        if self._state is not PullState.RUNNING:
            return self._state
        deadline = time.perf_counter() + POLL_BUDGET_S
        while True:
            moved = self._collect()
            moved += self._issue(deadline)
            self._settle()
            if self.over or not moved or time.perf_counter() >= deadline:
                return self._state

    def cancel(self) -> None:
        """See Pull.cancel."""
        self._cancelled = True

    def _collect(self) -> int:
        """Look once at each read under way; how many have ended."""
        running: list[_Read] = []
        for read in self._reads:
            status = self._peer.status(read.batch_id)
            if status == 1:
                continue
            if status == -1:
                self._fail(read.piece, time.monotonic() - read.issued_at)
            else:  # 0: under way; -2: slow, but not over
                running.append(read)
        num_ended = len(self._reads) - len(running)
        self._reads = running
        return num_ended

    def _issue(self, deadline: float) -> int:
        """Start reads while nothing is wrong and the peer's window has room; how many."""
        if self._cancelled or self._failed or time.monotonic() < self._resume_at:
            return 0
        num_issued = 0
        while self._pieces and self._peer.has_room and time.perf_counter() < deadline:
            piece = self._pieces.popleft()
            batch_id = self._peer.read(piece)
            if batch_id == 0:
                self._fail(piece, 0.0)
                break
            self._reads.append(_Read(batch_id, piece, time.monotonic()))
            num_issued += 1
        return num_issued

    def _fail(self, piece: _Piece, after_s: float) -> None:
        self._failed.append(piece)
        self._stalled |= after_s >= STALLED_S

    def _settle(self) -> None:
        """Once nothing is under way: end, or put failed pieces back for another try."""
        if self._reads:
            return
        if self._cancelled:
            self._end("cancelled")
        elif self._failed and (self._stalled or self._num_retries == MAX_RETRIES):
            why = "no progress" if self._stalled else f"{MAX_RETRIES} retries failed too"
            self._end(
                f"reads of {len(self._failed)} ranges from {self._peer.name} failed ({why}); "
                "mooncake's reason is in its own log lines"
            )
        elif self._failed:
            self._num_retries += 1
            self._resume_at = time.monotonic() + RETRY_PAUSE_S
            self._pieces.extendleft(self._failed)
            self._failed.clear()
        elif not self._pieces:
            self._peer.finish()
            self._state = PullState.OK

    def _end(self, error: str) -> None:
        self._state = PullState.FAILED
        self.error = error
        self._pieces.clear()


class MooncakePeer:
    """One incarnation of one process, with an engine that nobody else uses meanwhile."""

    def __init__(self, transport: MooncakeTransport, endpoint: Endpoint, engine: Engine) -> None:
        self.name = endpoint.name
        self._transport = transport
        self._endpoint = endpoint
        self._engine: Engine | None = engine
        self._window = WINDOW[transport.kind]
        self._num_reads = 0  # under way, of all pulls together
        self._pulls: list[MooncakePull] = []

    @property
    def has_room(self) -> bool:
        """Whether one more read may be issued."""
        return self._num_reads < self._window

    def read(self, piece: _Piece) -> int:
        """Start one read; its batch id, or 0 if the engine refused."""
        assert self._engine is not None
        batch_id = self._engine.raw.batch_transfer_async_read(
            self.name, [piece.local], [piece.remote], [piece.num_bytes]
        )
        self._num_reads += batch_id != 0
        return batch_id

    def status(self, batch_id: int) -> int:
        """1 done, -1 failed: `batch_id` is dead then; 0 and -2 under way."""
        assert self._engine is not None
        status = self._engine.raw.transfer_check_status(batch_id)
        self._num_reads -= status in (1, -1)
        return status

    def finish(self) -> None:
        """Wait until the bytes of ended reads are in place."""
        self._transport.engines.finish_copies()

    def pull(self, runs: Sequence[Run]) -> MooncakePull:
        """Begin a pull; see Peer.pull."""
        assert self._engine is not None, "pull on a closed peer"
        local = self._transport.endpoint()
        check_runs(runs, local, self._endpoint)
        pull = MooncakePull(self, _pieces(runs, local, self._endpoint))
        self._pulls = [*(p for p in self._pulls if not p.over), pull]
        return pull

    def close(self) -> None:
        """See Peer.close; a stopped peer's reads end with the engine's progress timeout."""
        if self._engine is None:
            return
        running = [pull for pull in self._pulls if not pull.over]
        for pull in running:
            pull.cancel()
        while running := [p for p in running if p.poll() is PullState.RUNNING]:
            time.sleep(POLL_BUDGET_S)
        assert self._num_reads == 0
        engine, self._engine = self._engine, None
        self._transport.release(self, engine)


class _Contact:
    """First contact with a peer, in a thread that may go on when the caller has given up."""

    def __init__(self, transport: MooncakeTransport, endpoint: Endpoint) -> None:
        self._transport = transport
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._settled = threading.Event()
        self._abandoned = False
        self._engine: Engine | None = None
        self._error: Unreachable | None = None

    def run(self) -> None:
        """The thread: leaves an engine or an error, or discards the engine if nobody waits."""
        engine: Engine | None = None
        error: Unreachable | None = None
        engines, name = self._transport.engines, self._endpoint.name
        try:
            if not engines.answers(name):
                error = Unreachable(f"no mooncake engine answers at {name}")
            else:
                engine = engines.make()
                if not engine.warm(self._endpoint):
                    error = Unreachable(
                        f"{name} answers, but a first read of one byte failed"
                        + NO_PEER_ACCESS * (self._transport.kind == "nvlink")
                    )
        except Unsupported as e:  # it worked at start-up, so this machine has lost something
            error = Unreachable(f"no engine to reach {name} with: {e}")
        finally:
            with self._lock:
                wanted = engine is not None and error is None and not self._abandoned
                self._engine, self._error = engine if wanted else None, error
            if engine is not None and not wanted:
                engines.discard(engine)
            self._transport.end_contact(self._endpoint)
            self._settled.set()

    def wait(self, timeout_s: float) -> Engine:
        """The engine that reached the peer.

        Raises:
            Unreachable: it did not within `timeout_s`; the thread goes on by itself.
        """
        self._settled.wait(timeout_s)
        with self._lock:
            if self._engine is not None:
                return self._engine
            self._abandoned = True
            raise self._error or Unreachable(
                f"{self._endpoint.name} did not answer within {timeout_s} s"
            )


class MooncakeTransport:
    """One mooncake transport for this process; see the module for what it does and why.

    Args:
        host: address that peers dial to reach this process; not checked by the engine.
        kind: tcp | rdma | nvlink.

    Raises:
        Unsupported: unknown kind, a second kind in one process, or no such hardware.
        MissingLibrary: mooncake or one of its system libraries is not installed.
    """

    name = "mooncake"

    def __init__(self, host: str, kind: str) -> None:
        configure(kind)
        self.kind = kind
        self.engines = Engines(load(), host, kind)
        self._endpoint: Endpoint | None = None
        self._lock = threading.Lock()  # connect runs in threads; guards the two sets
        self._peers: set[MooncakePeer] = set()
        self._contacts: set[Endpoint] = set()

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """See KVTransport.register: starts the serving engine, all regions registered.

        Raises:
            Unsupported: the engine does not start, or refuses the memory.
        """
        assert self._endpoint is None, "register is called once"
        port = self.engines.serve(regions)
        name = f"{self.engines.host}:{port}"
        self._endpoint = describe(self.name, self.kind, name, regions)
        log.debug("mooncake serves at %s over %s", name, self.kind)

    def endpoint(self) -> Endpoint:
        """See KVTransport.endpoint."""
        assert self._endpoint is not None, "register comes first"
        return self._endpoint

    def connect(self, endpoint: Endpoint, timeout_s: float) -> MooncakePeer:
        """See KVTransport.connect: probe, then one byte read, so that connections are open.

        A peer that hangs keeps the thread of its first contact for up to 60 s; until that has
        ended, further calls for the same endpoint raise Unreachable at once.
        """
        local = self.endpoint()
        check_peer(local, endpoint)
        if self.kind == "nvlink":
            check_same_host(local, endpoint)
        with self._lock:
            if endpoint in self._contacts:
                raise Unreachable(f"{endpoint.name} still does not answer an earlier contact")
            self._contacts.add(endpoint)
        contact = _Contact(self, endpoint)
        threading.Thread(target=contact.run, name="mooncake-contact", daemon=True).start()
        peer = MooncakePeer(self, endpoint, contact.wait(timeout_s))
        with self._lock:
            self._peers.add(peer)
        return peer

    def end_contact(self, endpoint: Endpoint) -> None:
        """Called by the thread of a contact when it ends."""
        with self._lock:
            self._contacts.discard(endpoint)

    def release(self, peer: MooncakePeer, engine: Engine) -> None:
        """Called by a peer that closed; its engine has nothing under way."""
        with self._lock:
            self._peers.discard(peer)
        self.engines.discard(engine)

    def close(self) -> None:
        """Close all peers and destroy the engines, all at once: about 1 s.

        Does not wait for engines in first contact with a hung peer; they go when that contact ends.
        """
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            peer.close()
        self.engines.close()


def _pieces(runs: Sequence[Run], local: Endpoint, remote: Endpoint) -> deque[_Piece]:
    """Runs as reads of bounded size."""
    max_bytes = MAX_PIECE_BYTES[local.kind]
    pieces: deque[_Piece] = deque()
    for run in runs:
        here = local.regions[run.region].address + run.local_offset
        there = remote.regions[run.region].address + run.remote_offset
        for start in range(0, run.num_bytes, max_bytes):
            size = min(max_bytes, run.num_bytes - start)
            pieces.append(_Piece(here + start, there + start, size))
    return pieces
