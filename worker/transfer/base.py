"""The contract of a transport of KV, on which a caller may rely, whichever one runs.

Only the puller's own process writes the puller's memory: every transfer is a read that the owner of
the destination started. So a page may be used again as soon as the pull into it is over, even if
the peer is dead, hung or cut off.

Threads. `connect` may block and belongs in a thread of its own. A peer's methods belong to one
thread at a time. No transport has a polling thread: `poll` begins a pull and drives it, unless
threads of the transport's own move its bytes (sockets).
"""

import os
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import msgspec

from worker.cache.layout import MemoryRegion
from worker.errors import Incompatible, Unsupported
from worker.transfer.host import host_key, process_stat

TRANSPORTS = {
    "mooncake": "worker.transfer.mooncake:MooncakeTransport",
    "shm": "worker.transfer.shm:ShmTransport",
    "sockets": "worker.transfer.sockets:SocketTransport",
    "mixed": "worker.transfer.mixed:MixedTransport",
}
KINDS: Mapping[str, Sequence[str]] = {
    "mooncake": ("tcp", "rdma", "nvlink"),
    "shm": ("shm",),
    "sockets": ("tcp",),
    "mixed": ("shm", "nvlink"),  # within a host
}

# One poll() gives way after this long, so that a large copy cannot delay an engine step for more.
POLL_BUDGET_S = 1e-3


class Run(NamedTuple):
    """A range of bytes to pull, at offsets in a region; regions count by order of registration."""

    region: int
    local_offset: int
    remote_offset: int
    num_bytes: int


def pieces(runs: Sequence[Run], max_bytes: int) -> Iterator[Run]:
    """The bytes of `runs` in their order, as runs of at most `max_bytes`."""
    for region, local_offset, remote_offset, num_bytes in runs:
        for at in range(0, num_bytes, max_bytes):
            size = min(max_bytes, num_bytes - at)
            yield Run(region, local_offset + at, remote_offset + at, size)


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """How to reach one transport of one process; travels as msgpack on the control channel.

    (host_key, pid, start_ticks) names one process for all time, whatever pids and ports come back.
    """

    transport: str  # key of TRANSPORTS
    kind: str  # of the way of its bytes: shm | tcp | rdma | nvlink
    name: str  # the address that a peer dials
    host_key: str  # host_key() of the owner
    pid: int
    start_ticks: int  # process_stat() of the owner
    regions: tuple[MemoryRegion, ...]
    secret: bytes = b""  # who knows it may read; on the control channel alone
    parts: tuple["Endpoint", ...] = ()  # where a transport is made of others

    def __repr__(self) -> str:
        return f"Endpoint({self.transport}/{self.kind} at {self.name})"  # logs show no secret


class PullState(Enum):
    """RUNNING until the pull is quiescent; OK and FAILED are final."""

    RUNNING = "running"
    OK = "ok"
    FAILED = "failed"


class Pull(Protocol):
    """One transfer into our memory. No method raises: a failure is a state, with `error`."""

    num_bytes: int  # of all runs together
    error: str | None  # why the state is FAILED; None in the other two

    def poll(self) -> PullState:
        """Move the pull on, for about POLL_BUDGET_S at most, and return its state.

        The state leaves RUNNING only when the pull is quiescent: after OK or FAILED not one byte is
        written to local memory any more. OK says that all bytes arrived; it proves nothing about
        the peer's life or its right to the pages, which is for the caller's lease to check. A pull
        moves only while it is polled, a cancelled one too, but for one that threads move.
        """
        ...

    def cancel(self) -> None:
        """Issue no further reads; a RUNNING pull is FAILED once those under way have ended."""


class Peer(Protocol):
    """A connected source of KV: one incarnation of one process."""

    _endpoint: Endpoint

    @property
    def transport(self) -> str:
        """Name and kind of the transport that moves its bytes, e.g. "mooncake/tcp"."""
        return f"{self._endpoint.transport}/{self._endpoint.kind}"

    def pull(self, runs: Sequence[Run]) -> Pull:
        """Begin to copy `runs` from the peer; an empty list is OK at the first poll.

        Raises ValueError if a run leaves a region on either side: our own bug, nothing was issued.
        """
        ...

    def close(self) -> None:
        """Let go of the peer; a second call does nothing.

        Returns at once when no pull is RUNNING. Otherwise cancels the pulls and blocks until they
        are over, so a loop that cares cancels and polls them first.
        """


class KVTransport(Protocol):
    """One transport of one process. Built as `cls(host, kind)`: the address that peers dial, or,
    for sockets, several with commas between them, and a kind.

    Raises from the constructor: Unsupported (kind), MissingLibrary.
    """

    name: str  # key of TRANSPORTS
    kind: str
    _endpoint: Endpoint | None  # since `register`

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Take the memory that may be pulled from and into: once, before anything else.

        The caller keeps it alive until `close` has returned. Raises Unsupported for other memory.
        """

    def endpoint(self) -> Endpoint:
        """The record by which peers `connect`."""
        assert self._endpoint is not None, "register comes first"
        return self._endpoint

    def connect(self, endpoint: Endpoint, timeout_s: float) -> Peer:
        """Reach the peer and warm the way to it, so that the first pull is like any other.

        Blocks up to `timeout_s`: call it in a thread of its own, never on the hot path.
        Raises Unreachable without an answer in time; Incompatible for another transport, kind, host
        or set of regions, and without access.
        """
        ...

    def close(self) -> None:
        """Close all peers and give everything back; a second call does nothing."""


class RunsPull(Pull):
    """A pull of a peer's, which sets `state`."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.num_bytes = sum(run.num_bytes for run in runs)
        self.error: str | None = None
        self.state = PullState.RUNNING


class OpenPeer(Peer):
    """A peer of an `OpenTransport`; it checks runs, and its pulls are over once it is closed."""

    def __init__(self, transport: "OpenTransport", endpoint: Endpoint) -> None:
        self._transport, self._endpoint = transport, endpoint
        self._pulls: list[RunsPull] = []
        self._is_closed = False

    def pull(self, runs: Sequence[Run]) -> RunsPull:
        assert not self._is_closed, "pull on a closed peer"
        check_runs(runs, self._transport.endpoint(), self._endpoint)
        pull = self._begin(runs)
        self._pulls = [*(p for p in self._pulls if p.state is PullState.RUNNING), pull]
        return pull

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for pull in self._pulls:
            pull.cancel()
        while [pull for pull in self._pulls if pull.poll() is PullState.RUNNING]:
            time.sleep(POLL_BUDGET_S)
        self._pulls.clear()
        self._let_go()
        self._transport.forget(self)

    @abstractmethod
    def _begin(self, runs: Sequence[Run]) -> RunsPull: ...

    @abstractmethod
    def _let_go(self) -> None:
        """Give back the peer's resources; no pull runs."""


class OpenTransport(KVTransport):
    """A transport that knows its peers; a subclass names it, serves memory and reaches peers."""

    def __init__(self, kind: str) -> None:
        check_kind(self.name, kind)
        self.kind, self._endpoint = kind, None
        self._lock = threading.Lock()  # connect runs in threads; guards the set
        self._peers: set[OpenPeer] = set()

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        assert self._endpoint is None, "register is called once"
        name, secret = self._serve(regions)
        self._endpoint = describe(self.name, self.kind, name, regions, secret)

    def connect(self, endpoint: Endpoint, timeout_s: float) -> OpenPeer:
        check_peer(self.endpoint(), endpoint, same_host=self.kind in ("shm", "nvlink"))
        peer = self._reach(endpoint, timeout_s)
        with self._lock:
            self._peers.add(peer)
        return peer

    def forget(self, peer: OpenPeer) -> None:
        """`peer` is closed."""
        with self._lock:
            self._peers.discard(peer)

    def close(self) -> None:
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            peer.close()

    @abstractmethod
    def _serve(self, regions: Sequence[MemoryRegion]) -> tuple[str, bytes]:
        """Let peers read the regions; the endpoint's name and secret. Raises Unsupported."""

    @abstractmethod
    def _reach(self, endpoint: Endpoint, timeout_s: float) -> OpenPeer:
        """Connect to an endpoint that fits ours; raises Unreachable or Incompatible."""


def check_kind(transport: str, kind: str) -> None:
    """Raise Unsupported unless the transport has this kind."""
    if kind not in KINDS[transport]:
        known = ", ".join(KINDS[transport])
        raise Unsupported(f"transport {transport} has no kind {kind!r}, only {known}")


def describe(
    transport: str, kind: str, name: str, regions: Sequence[MemoryRegion], secret: bytes = b""
) -> Endpoint:
    """The endpoint of the calling process with `regions` registered."""
    pid, start_ticks = os.getpid(), process_stat(os.getpid()).start_ticks
    return Endpoint(transport, kind, name, host_key(), pid, start_ticks, tuple(regions), secret)


def check_peer(local: Endpoint, remote: Endpoint, *, same_host: bool) -> None:
    """Check that `local` can pull from `remote` in principle; Incompatible names the difference.

    Regions pair up by position: their names must be equal, their sizes need not be. same_host: only
    processes of one host and pid namespace can.
    """
    if (remote.transport, remote.kind) != (local.transport, local.kind):
        raise Incompatible(
            f"peer moves KV by {remote.transport}/{remote.kind}, we by "
            f"{local.transport}/{local.kind}; all workers must use one transport"
        )
    theirs, ours = [r.name for r in remote.regions], [r.name for r in local.regions]
    if theirs != ours:
        raise Incompatible(f"peer registered regions {theirs}, we {ours}")
    if same_host and remote.host_key != local.host_key:
        raise Incompatible(
            f"{local.transport}/{local.kind} works inside one host and pid namespace; the peer's "
            f"(boot id, pid namespace) is ({remote.host_key}), ours ({local.host_key})"
        )


def check_runs(runs: Sequence[Run], local: Endpoint, remote: Endpoint) -> None:
    """Raise ValueError unless every run lies inside its region on both sides."""
    for run in runs:
        region, local_offset, remote_offset, num_bytes = run
        if not 0 <= region < len(local.regions):
            raise ValueError(f"{run}: there are {len(local.regions)} regions")
        here, there = local.regions[region], remote.regions[region]
        if (
            num_bytes <= 0
            or not 0 <= local_offset <= here.num_bytes - num_bytes
            or not 0 <= remote_offset <= there.num_bytes - num_bytes
        ):
            raise ValueError(
                f"{run} leaves region {here.name!r}: {here.num_bytes} bytes here, "
                f"{there.num_bytes} at the peer"
            )
