"""Which algorithm sums a message: a function of its bytes, measured at start-up."""

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from worker.peers.peer_layout import MIB, PeerLayout, fits_one_shot

ONE_SHOT, TWO_SHOT, NCCL = "one_shot", "two_shot", "nccl"
MEASURED_BYTES = tuple(1 << power for power in range(13, 27))  # 8 KiB to 64 MiB
MEASURED_CALLS, MEASURED_REPLAYS = 40, 5

# Rows (most bytes of a message, algorithm), in order; beyond the last one it is NCCL.
Table = Sequence[tuple[int, str]]


def default_table(size: int) -> Table:
    """What holds until `calibrate` has measured: by the traffic that each algorithm makes."""
    return ((8 * MIB if size == 2 else MIB // size, ONE_SHOT), (64 * MIB, TWO_SHOT))


def choose(table: Table, num_bytes: int) -> str:
    """The algorithm for a message of so many bytes."""
    return next((name for limit, name in table if num_bytes <= limit), NCCL)


def table_of(times: Mapping[int, Mapping[str, float]]) -> Table:
    """The fastest algorithm for each size measured, sizes of one algorithm in one row.

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

    # Calls that go before, while which every host launches what is measured.
    meet = captured(ONE_SHOT, zeros(MEASURED_BYTES[0]))
    times: dict[int, dict[str, float]] = {}
    for num_bytes in (size for size in MEASURED_BYTES if size <= layout.buffer_bytes):
        ways = [TWO_SHOT, NCCL] + [ONE_SHOT] * fits_one_shot(layout, num_bytes)
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
