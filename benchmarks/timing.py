"""Clocks and speeds of the device that benchmarks run on, a GPU or else the CPU."""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


class Layers(NamedTuple):
    """What is timed of some layers, in one graph, and the least that a layer could take."""

    name: str
    work: Callable[[], object]  # all layers
    floor_us: float = 0.0  # of a layer; 0: not known


def layers_times(case: Layers, num_layers: int, options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of a layer, of --replays, and with --parts of its kernels; prints them."""
    times = times_ms({"": case.work}, DEVICE, options.replays)[""]
    layer_us = [1e3 * took_ms / num_layers for took_ms in times]
    median, floor_us = statistics.median(layer_us), case.floor_us
    beside = f", floor {floor_us:.1f}, {floor_us / median:.0%} of it" if floor_us else ""
    between = f"{min(layer_us):.1f} to {max(layer_us):.1f}"
    print(f"{case.name:32} {median:9.1f} us a layer ({between}){beside}", flush=True)
    parts = kernels_us(case.work, num_layers) if options.parts else {}
    for kernel, took_us in parts.items():
        print(f"    {kernel:30} {took_us:9.1f}")
    return {"case": case.name, "layer_us": layer_us, "floor_us": floor_us, "parts": parts}


def kernels_us(work: Callable[[], object], num_layers: int) -> dict[str, float]:
    """Microseconds a layer of each kernel, by the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        work()
        synchronize()
    return {
        event.key: event.device_time_total / num_layers
        for event in seen.key_averages()
        if "kernel" in event.key
    }


def profile(path: Path, work: Callable[[], object]) -> None:
    """Write a chrome trace of `work`, the second time that it is done."""
    work()
    with torch.profiler.profile() as trace:
        work()
    trace.export_chrome_trace(str(path))
