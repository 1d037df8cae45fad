"""Clocks and speeds of the device that benchmarks run on, a GPU or else the CPU."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

WARM_UP = 5  # replays that are not counted
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def best_s(work: Callable[[], object], times: int = 10) -> float:
    """Seconds of `work`, the best of several."""
    best = float("inf")
    for _ in range(times):
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def read_bandwidth() -> float:
    """Bytes per second at which this device reads memory once."""
    num_bytes = 4 << 30 if DEVICE == "cuda" else 256 << 20
    source = torch.ones(num_bytes // 8, dtype=torch.int64, device=DEVICE)
    return num_bytes / best_s(source.sum)


def product_speed() -> float:
    """Floating-point operations per second of one large product: bf16, on a CPU f32.

    Of random numbers: products of ones take less power, and their clock stays higher.
    """
    size, dtype = (8192, torch.bfloat16) if DEVICE == "cuda" else (512, torch.float32)
    a, b = (torch.randn(size, size, dtype=dtype, device=DEVICE) for _ in range(2))
    return 2 * size**3 / best_s(lambda: torch.mm(a, b))


def times_ms(
    runs: Mapping[str, Callable[[], object]], device: str, replays: int
) -> dict[str, list[float]]:
    """Milliseconds of each replay of each run, by name; on a CPU of a single call.

    On a GPU each run is captured in one graph. The graphs take turns, because a GPU at the limit of
    its power slows down the longer it works.
    """
    if device == "cpu":
        return {name: [1e3 * best_s(run, 2)] for name, run in runs.items()}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, run in runs.items():
        run()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            run()
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    for number in range(WARM_UP + replays):
        for name, graph in graphs.items():
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            graph.replay()
            ended.record()
            if number >= WARM_UP:
                marks[name].append((began, ended))
    torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) for a, b in pairs] for name, pairs in marks.items()}


def spread(times: Sequence[float]) -> dict[str, float]:
    """Median and the 10th and 90th percentile of milliseconds."""
    ordered = sorted(times)
    return {
        "median_ms": statistics.median(ordered),
        "p10_ms": ordered[len(ordered) // 10],
        "p90_ms": ordered[len(ordered) * 9 // 10],
    }


def profile(path: Path, work: Callable[[], object]) -> None:
    """Write a chrome trace of `work`, the second time that it is done."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    work()
    with torch.profiler.profile(activities=activities) as trace:
        work()
    trace.export_chrome_trace(str(path))
