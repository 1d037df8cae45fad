"""KV between processes of one host: map the peer's memfd, copy with the CPU.

The peer's pool memory is a memfd; /proc/<pid>/fd/<fd> opens it from another process of the same
user and pid namespace. Nothing has a name in /dev/shm, so nothing can be left there. The kernel
frees the memory when the last process that maps it ends, so a pull from a killed peer goes on and
says OK. The mapping is read-only, so we cannot harm the peer.
"""

import mmap
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from worker.cache.layout import MemoryRegion
from worker.errors import Incompatible, Unreachable, Unsupported
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
from worker.transfer.host import process_stat
from worker.transfer.memory import bytes_of

# A poll checks its budget between copies of at most COPY_BYTES (about 0.1 ms).
COPY_BYTES = 1 << 20
MAX_POLL_BYTES = 8 << 20


class ShmPull(RunsPull):
    """A pull that copies inside poll(); between two polls nothing is under way."""

    def __init__(self, peer: "ShmPeer", runs: Sequence[Run]) -> None:
        super().__init__(runs)
        self._peer = peer
        self._pieces = pieces(runs, COPY_BYTES)  # not copied yet

    def poll(self) -> PullState:
        deadline = time.perf_counter() + POLL_BUDGET_S
        room = MAX_POLL_BYTES
        while self.state is PullState.RUNNING and room > 0 and time.perf_counter() < deadline:
            piece = next(self._pieces, None)
            if piece is None:
                self.state = PullState.OK
            else:
                self._peer.copy(piece)
                room -= piece.num_bytes
        return self.state

    def cancel(self) -> None:
        if self.state is PullState.RUNNING:
            self.state = PullState.FAILED
            self.error = "cancelled"


class ShmPeer(OpenPeer):
    """The mapped memory of one process."""

    def __init__(
        self, transport: "ShmTransport", endpoint: Endpoint, maps: Sequence[mmap.mmap]
    ) -> None:
        super().__init__(transport, endpoint)
        self._maps = maps
        self._local = transport.local
        self._remote = [np.frombuffer(mapped, np.uint8) for mapped in maps]

    def copy(self, run: Run) -> None:
        """Copy the bytes of `run` from the peer."""
        region, here, there, num_bytes = run
        local, remote = self._local[region], self._remote[region]
        local[here : here + num_bytes] = remote[there : there + num_bytes]

    def _begin(self, runs: Sequence[Run]) -> ShmPull:
        return ShmPull(self, runs)

    def _let_go(self) -> None:
        self._remote.clear()  # an mmap with a view on it cannot be closed
        for mapped in self._maps:
            mapped.close()


class ShmTransport(OpenTransport):
    """Pull from processes of this host and pid namespace; needs memfd-backed (CPU) memory."""

    name = "shm"

    def __init__(self, host: str, kind: str = "shm") -> None:
        super().__init__(kind)
        self.local: list[NDArray[np.uint8]] = []

    def _serve(self, regions: Sequence[MemoryRegion]) -> tuple[str, bytes]:
        for region in regions:
            if region.fd is None:
                text = f"region {region.name!r} has no memfd: shm serves CPU memory only"
                raise Unsupported(text)
        self.local = [np.ctypeslib.as_array(bytes_of(region)) for region in regions]
        return str(os.getpid()), b""

    def _reach(self, endpoint: Endpoint, timeout_s: float) -> ShmPeer:
        """Map the peer's memory; takes well under a millisecond, whatever `timeout_s` is."""
        with ExitStack() as opened:
            maps = [opened.enter_context(_map(endpoint.pid, region)) for region in endpoint.regions]
            _check_process(endpoint)
            opened.pop_all()
        return ShmPeer(self, endpoint, maps)

    def close(self) -> None:
        super().close()
        self.local.clear()


def _map(pid: int, region: MemoryRegion) -> mmap.mmap:
    path = f"/proc/{pid}/fd/{region.fd}"
    try:
        # Checked before opening: opening anything else, such as a pipe, might block.
        target = os.readlink(path)
        if not target.startswith("/memfd:"):
            raise Incompatible(f"region {region.name!r} of pid {pid} is {target}, not a memfd")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError) as e:
        raise Unreachable(f"pid {pid} is gone, or does not serve {region.name!r} any more") from e
    except PermissionError as e:
        raise Incompatible(
            f"no right to open the memory of pid {pid}: shm needs both workers to run as one user"
        ) from e
    try:
        if os.fstat(fd).st_size < region.num_bytes:
            raise Incompatible(
                f"region {region.name!r} of pid {pid} has {os.fstat(fd).st_size} bytes, "
                f"not the {region.num_bytes} it announced"
            )
        return mmap.mmap(fd, region.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(fd)


def _check_process(endpoint: Endpoint) -> None:
    """Make sure that the pid still is the announced process, and not a later one.

    Called after the memory was opened: if the process of that pid has the right start time now, it
    also had the pid when the memory was opened.
    """
    try:
        start_ticks = process_stat(endpoint.pid).start_ticks
    except OSError as e:
        raise Unreachable(f"pid {endpoint.pid} is gone") from e
    if start_ticks != endpoint.start_ticks:
        raise Unreachable(f"pid {endpoint.pid} is another process now; the peer is gone")
