"""Tensor parallelism on the GPUs of one host: our kernels over peer memory, NCCL beside them."""

import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from worker.errors import PeerLost, Unsupported, WorldError
from worker.peers.all_reduce_triton import DTYPES, gather, one_shot, one_shot_rms_norm, two_shot
from worker.peers.base import Collective, join_parts
from worker.peers.mapped import PeerRegions
from worker.peers.nccl import NcclCollective
from worker.peers.peer_layout import (
    CHUNK_BYTES,
    CONTROL_WORDS,
    FAULT,
    LIMIT_NS,
    MIB,
    NUM_BUFFERS,
    PeerLayout,
    PeerMemory,
)
from worker.peers.rank_group import TIMEOUT_S, Meeting, exchange

log = logging.getLogger("kvlane.comm")

MAX_SIZE = 8  # ranks
CLOSE_S = 2.0  # for peers to be done with this rank's memory
ONE_SHOT, TWO_SHOT, NCCL = "one_shot", "two_shot", "nccl"
MEASURED_BYTES = tuple(1 << power for power in range(13, 27))  # 8 KiB to 64 MiB
MEASURED_CALLS, MEASURED_REPLAYS = 40, 5

# Rows (most bytes of a message, algorithm), in order; beyond the last one it is NCCL.
Table = Sequence[tuple[int, str]]


def pinned_zeros(count: int) -> Tensor:
    """i64 [count], which host and device see under one address."""
    return torch.zeros(count, dtype=torch.int64).pin_memory()


def synchronize(device: torch.device) -> None:
    """Wait for all that the device has been given."""
    torch.cuda.synchronize(device)


class CustomCollective(Collective):
    """One-shot, two-shot and NCCL, chosen by the bytes of a message alone (all_reduce_triton.py).

    All calls go to the current stream of the current device; a rank has one stream. Launched by
    themselves and in graphs of any kind they are the same kernels with the same arguments. One shot
    reads its input wherever it lies. For two shots an input that is not in one of `buffer` is
    copied into the next, and the sum is returned there.

    Raises Unsupported, at all ranks together, for more than 8 ranks, ranks on different hosts, and
    GPUs that cannot map each other's memory: NCCL can do all that. UserError: the device is not a
    GPU. PeerLost: not all ranks came in time.
    """

    capturable: ClassVar[bool] = True

    def __init__(self, rank: int, size: int, device: torch.device | str, init_method: str) -> None:
        if not 2 <= size <= MAX_SIZE:
            raise Unsupported(f"collective 'custom' is for 2 to {MAX_SIZE} ranks, not {size}")
        self.rank, self.size = rank, size
        meeting = Meeting(rank, size, init_method)
        self.device, self._store = torch.device(device), meeting.store
        self._nccl = NcclCollective(rank, size, self.device, init_method, meeting)
        layout = PeerLayout(size)
        try:
            self._regions = PeerRegions(rank, size, layout, self.device, self._store)
        except (WorldError, Unsupported):
            self._nccl.close()
            raise
        self._control = pinned_zeros(CONTROL_WORDS)
        self.set_timeout(TIMEOUT_S)
        control = self._control.data_ptr()
        self.memory = PeerMemory(rank, layout, tuple(self._regions.addresses), control)
        self.table = default_table(size)
        self._next_buffer = self._num_calibrations = 0
        self._closed = False

    def set_timeout(self, timeout_s: float) -> None:
        """How late a peer may be in a call; may be changed at any time, for captured calls too."""
        self._control[LIMIT_NS] = int(timeout_s * 1e9)

    def algorithm(self, num_bytes: int, dtype: torch.dtype) -> str:
        if dtype not in DTYPES or num_bytes % CHUNK_BYTES:
            return NCCL
        chosen = choose(self.table, num_bytes)
        if chosen == ONE_SHOT and not self.memory.layout.fits_one_shot(num_bytes):
            chosen = TWO_SHOT
        if chosen == TWO_SHOT and num_bytes > self.memory.layout.buffer_bytes:
            chosen = NCCL
        return chosen

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.all_reduce_by(self.algorithm(x.nbytes, x.dtype), x) if x.nbytes else x

    def all_reduce_by(self, algorithm: str, x: Tensor) -> Tensor:
        """all_reduce by the algorithm named, which has to take such a message."""
        if algorithm == ONE_SHOT:
            return one_shot(self.memory, x)
        if algorithm == TWO_SHOT:
            if self.memory.offset(x) is None:
                x = self.buffer(tuple(x.shape), x.dtype).copy_(x)
            return two_shot(self.memory, x)
        return self._nccl.all_reduce(x)

    def all_reduce_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        fused = self.memory.layout.fits_fused(x.shape[0], x.shape[-1] * x.element_size())
        fused = fused and weight.dtype == x.dtype
        if x.nbytes and fused and self.algorithm(x.nbytes, x.dtype) == ONE_SHOT:
            return one_shot_rms_norm(self.memory, x, residual, weight, eps, total)
        return super().all_reduce_rms_norm(x, residual, weight, eps, total)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        x = x.contiguous()
        if not self.memory.layout.fits_gather(x.nbytes):
            return self._nccl.all_gather(x, dim)
        return join_parts(gather(self.memory, x), dim)

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        layout, num_bytes = self.memory.layout, math.prod(shape) * dtype.itemsize
        if num_bytes > layout.buffer_bytes:
            return super().buffer(shape, dtype)
        start = layout.buffers + self._next_buffer * layout.buffer_bytes
        self._next_buffer = (self._next_buffer + 1) % NUM_BUFFERS
        return self._regions.region[start : start + num_bytes].view(dtype).view(shape)

    def check(self) -> None:
        if self._control[FAULT]:
            raise PeerLost(f"custom rank {self.rank} of {self.size}: a peer did not come in time")
        self._nccl.check()

    def close(self) -> None:
        """Wait for the device, and a little for peers that are not lost."""
        if self._closed:
            return
        self._closed = True
        synchronize(self.device)
        if not self._control[FAULT]:
            self._part()
        self._nccl.close()
        self._regions.close()

    def _part(self) -> None:
        """Wait until no peer has calls in flight that touch this rank's memory, or for CLOSE_S."""
        try:
            self._store.set(f"closed/{self.rank}", "")
            keys = [f"closed/{rank}" for rank in range(self.size)]
            until = time.monotonic() + CLOSE_S
            while not self._store.check(keys) and time.monotonic() < until:
                time.sleep(0.01)
        except RuntimeError as e:
            log.info("the store of rank %d's group is gone: %s", self.rank, e)

    def calibrate(self) -> None:
        """Rank 0's figures hold for all; PeerLost if a rank did not come in time."""
        times = measure(self.all_reduce_by, self.buffer, self.memory.layout)
        self.check()
        self._num_calibrations += 1
        key = f"table {self._num_calibrations}"
        tables = exchange(self._store, key, self.rank, self.size, json.dumps(table_of(times)))
        self.table = tuple((limit, name) for limit, name in json.loads(tables[0]))
        rows = ", ".join(f"{name} to {limit >> 10} KiB" for limit, name in self.table)
        log.info("all-reduce of %d ranks: %s, then %s", self.size, rows, NCCL)


def default_table(size: int) -> Table:
    """The table until `calibrate` has measured: by the traffic that the algorithms make."""
    return ((8 * MIB if size == 2 else MIB // size, ONE_SHOT), (64 * MIB, TWO_SHOT))


def choose(table: Table, num_bytes: int) -> str:
    """The algorithm for a message of so many bytes."""
    return next((name for limit, name in table if num_bytes <= limit), NCCL)


def table_of(times: Mapping[int, Mapping[str, float]]) -> Table:
    """The fastest algorithm by size measured, sizes of one algorithm in one row.

    times: bytes -> algorithm -> seconds. A size stands for those up to it, from the one before on.
    """
    rows: list[tuple[int, str]] = []
    for num_bytes, took in sorted(times.items()):
        best = min(took, key=lambda name: (took[name], name))
        if rows and rows[-1][1] == best:
            rows.pop()
        rows.append((num_bytes, best))
    return tuple(rows)


def measure(
    all_reduce_by: Callable[[str, Tensor], Tensor],
    buffer: Callable[[tuple[int, ...], torch.dtype], Tensor],
    layout: PeerLayout,
) -> dict[int, dict[str, float]]:
    """Bytes -> algorithm -> seconds of a call, among others in a graph; all ranks together."""

    def captured(algorithm: str, x: Tensor) -> torch.cuda.CUDAGraph:
        all_reduce_by(algorithm, x)  # compiled, before the capture
        torch.cuda.synchronize(x.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(MEASURED_CALLS):
                all_reduce_by(algorithm, x)
        return graph

    def zeros(num_bytes: int) -> Tensor:
        return buffer((num_bytes // 2,), torch.bfloat16).zero_()

    # Calls that go before: while they run, all hosts launch the calls that are measured.
    meet = captured(ONE_SHOT, zeros(MEASURED_BYTES[0]))
    times: dict[int, dict[str, float]] = {}
    for num_bytes in (size for size in MEASURED_BYTES if size <= layout.buffer_bytes):
        ways = [TWO_SHOT, NCCL] + [ONE_SHOT] * layout.fits_one_shot(num_bytes)
        x = zeros(num_bytes)
        times[num_bytes] = {name: _seconds(captured(name, x), meet.replay) for name in ways}
    return times


def _seconds(graph: torch.cuda.CUDAGraph, meet: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    took: list[float] = []
    for _ in range(MEASURED_REPLAYS):
        meet()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end) / 1e3 / MEASURED_CALLS)
    return statistics.median(took[1:])
