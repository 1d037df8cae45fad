"""Clocks and speeds of the device that benchmarks run on, a GPU or else the CPU."""

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

# Kernels by what they are for, ours and libraries'; cutlass is in the names of both.
KERNELS = {
    "attention": "_(prompt|attend|latent|merge)_kernel|sdpa|fmha|flash|BatchPrefill|BatchDecode",
    "products": "gemm|nvjet|cutlass|grouped|packed",
}
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
    speed = num_bytes / best_s(source.sum)
    print(f"reads {speed / 1e9:.1f} GB/s")
    return speed


def product_speed() -> float:
    """Floating-point operations per second of one large product: bf16, on a CPU f32.

    Of random numbers: products of ones take less power, and their clock stays higher.
    """
    size, dtype = (8192, torch.bfloat16) if DEVICE == "cuda" else (512, torch.float32)
    a, b = (torch.randn(size, size, dtype=dtype, device=DEVICE) for _ in range(2))
    speed = 2 * size**3 / best_s(lambda: torch.mm(a, b))
    print(f"products {speed / 1e12:.1f} TFLOP/s")
    return speed


def times_ms(runs: Mapping[str, Callable[[], object]], replays: int) -> dict[str, list[float]]:
    """Milliseconds of each replay of each run, by name; on a CPU of a single call.

    On a GPU each run is captured in one graph. The graphs take turns, because a GPU at the limit of
    its power slows down the longer it works.
    """
    if DEVICE == "cpu":
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


class Case(NamedTuple):
    """What is timed, in one graph, and the least that it could take."""

    name: str
    ways: Mapping[str, Callable[[], object]]  # to do it, by name; they take turns
    per: int = 1  # layers, of one of which the figures are
    floor_us: float = 0.0  # of a layer; 0: not known


def told(name: str, times: Sequence[float], unit: str, floor: float = 0.0) -> dict[str, Any]:
    """Prints what a case took, beside the least that it could take (0: not known); its figures."""
    took = sorted(times)
    median, p10, p90 = statistics.median(took), took[len(took) // 10], took[len(took) * 9 // 10]
    beside = f", floor {floor:.3f}, {floor / median:.0%} of it" if floor else ""
    print(f"{name:44} {median:10.3f} {unit} ({took[0]:.3f} to {took[-1]:.3f}){beside}", flush=True)
    spread = {f"median_{unit}": median, f"p10_{unit}": p10, f"p90_{unit}": p90}
    return spread | {f"times_{unit}": list(times), f"floor_{unit}": floor}


def timed(case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way: microseconds a layer of --replays, with --parts its kernels; printed."""
    rows: list[dict[str, Any]] = []
    for way, times in times_ms(case.ways, options.replays).items():
        took_us = [1e3 * took_ms / case.per for took_ms in times]
        row: dict[str, Any] = {"case": case.name, "way": way}
        row |= told(f"{case.name} {way}", took_us, "us", case.floor_us)
        row["parts"] = kernels_us(case.ways[way], case.per) if "parts" in options else {}
        rows.append(row)
    return rows


def kernels_us(work: Callable[[], object], num_layers: int) -> dict[str, float]:
    """Microseconds a layer of each kernel, by the profiler; printed."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        work()
        synchronize()
    kernels = (event for event in seen.key_averages() if "kernel" in event.key)
    parts = {event.key: event.device_time_total / num_layers for event in kernels}
    for kernel, took_us in parts.items():
        print(f"    {kernel:40} {took_us:10.3f}")
    return parts


def profile(path: Path, work: Callable[[], object], times: int = 1) -> None:
    """Write a chrome trace of `work`, done once before; prints what a GPU's time went to."""
    work()
    with torch.profiler.profile() as trace:
        for _ in range(times):
            work()
    trace.export_chrome_trace(str(path))
    if parts := kernel_parts(json.loads(path.read_text())["traceEvents"]):
        total = sum(parts.values())
        of = (f"{name} {us / 1e3 / times:.2f} ms ({us / total:.1%})" for name, us in parts.items())
        print(", ".join(of))


def kernel_parts(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Microseconds from the first kernel to the last one's end, by KERNELS, others and gaps.

    A kernel counts from the end of all before it: it may have begun by then, and waited.
    """
    ran = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    ran.sort(key=lambda event: event["ts"])
    parts, end = dict.fromkeys((*KERNELS, "others", "gaps"), 0.0), ran[0]["ts"] if ran else 0.0
    for event in ran:
        begin, until = max(event["ts"], end), event["ts"] + event["dur"]
        of = (name for name, pattern in KERNELS.items() if re.search(pattern, event["name"]))
        parts["gaps"] += begin - end
        parts[next(of, "others")] += max(until - begin, 0.0)
        end = max(end, until)
    return parts if ran else {}
