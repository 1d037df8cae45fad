"""The products of one decode step of a model: weights, chains of them, how to time them.

For `benchmarks.gemm` and `benchmarks.gemm_tune`.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.ops.jit import HAS_TRITON, tl, triton

Multiply = Callable[[Tensor, Tensor], Tensor]  # x @ w.T
BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Product:
    """out [m, n] = x [m, k] @ w.T, once a layer or once a step."""

    name: str
    n: int
    k: int
    count: int


def products_of(
    layers: int, hidden: int, q_width: int, kv_width: int, mlp: int, vocab: int
) -> list[Product]:
    """In the order of a step; the last one, the head, is not part of a layer."""
    return [
        Product("qkv", q_width + 2 * kv_width, hidden, layers),
        Product("o", hidden, q_width, layers),
        Product("gate_up", 2 * mlp, hidden, layers),
        Product("down", hidden, mlp, layers),
        Product("head", vocab, hidden, 1),
    ]


MODELS = {
    "qwen3-8b": products_of(36, 4096, 4096, 1024, 12288, 151936),
    "tiny": products_of(2, 128, 128, 32, 256, 300),
}


class Step:
    """The weights and activations of one decode step."""

    def __init__(self, products: list[Product], device: str, dtype: torch.dtype) -> None:
        self.products, self.device, self.dtype = products, device, dtype
        generator = torch.Generator(device).manual_seed(0)
        self.slab = torch.empty(
            sum(each.n * each.k * each.count for each in products), device=device, dtype=dtype
        )
        self.weights: dict[str, list[Tensor]] = {}
        at = 0
        for each in products:
            self.weights[each.name] = []
            for _ in range(each.count):
                weight = self.slab[at : at + each.n * each.k].view(each.n, each.k)
                weight.normal_(0, each.k**-0.5, generator=generator)
                self.weights[each.name].append(weight)
                at += weight.numel()
        self.order = [
            (each, layer) for layer in range(products[0].count) for each in products[:-1]
        ] + [(products[-1], 0)]

    def num_bytes(self, name: str | None = None) -> int:
        """Bytes of all weights, or of one product's."""
        return sum(w.nbytes for key, ws in self.weights.items() for w in ws if name in (None, key))

    def run(self, x: Tensor, multiply: Multiply, *, head: bool = True) -> Tensor:
        """The whole step, or all of it but the head; returns the last output."""
        for each, layer in self.order if head else self.order[:-1]:
            x = multiply(x[:, : each.k], self.weights[each.name][layer])
        return x

    def run_one(self, name: str, x: Tensor, multiply: Multiply) -> Tensor:
        """One product with all its weights, one after the other; all read the same x."""
        return [multiply(x, weight) for weight in self.weights[name]][-1]


@triton.jit
def _read_kernel(source, sums, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """sums[i] = sum of the i-th stretch of STEPS · BLOCK words."""
    at = source + tl.program_id(0).to(tl.int64) * (STEPS * BLOCK) + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for _ in range(STEPS):
        total += tl.load(at)
        at += BLOCK
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def times_ms(run: Callable[[], object], device: str, replays: int, warm_up: int = 5) -> list[float]:
    """Captured in one graph and replayed, each replay timed by itself."""
    if device == "cpu":
        return [_ms(run)]
    return times_by_turns({"": run}, replays, warm_up)[""]


def times_by_turns(
    runs: Mapping[str, Callable[[], object]],
    replays: int,
    warm_up: int = 5,
    *,
    on_cpu: bool = False,
) -> dict[str, list[float]]:
    """Each captured in one graph; all replayed by turns, each replay timed by itself."""
    if on_cpu or not torch.cuda.is_available():
        return {name: [_ms(run)] for name, run in runs.items()}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, run in runs.items():
        run()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            run()
    marks: dict[str, list[tuple[torch.cuda.Event, ...]]] = {name: [] for name in runs}
    for number in range(warm_up + replays):
        for name, graph in graphs.items():
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            graph.replay()
            ended.record()
            if number >= warm_up:
                marks[name].append((began, ended))
    torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) for a, b in pairs] for name, pairs in marks.items()}


def _ms(run: Callable[[], object]) -> float:
    run()
    began = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - began)


def spread(times: list[float]) -> dict[str, float]:
    """Median and the 10th and 90th percentile, in ms."""
    ordered = sorted(times)
    return {
        "median_ms": statistics.median(ordered),
        "p10_ms": ordered[len(ordered) // 10],
        "p90_ms": ordered[len(ordered) * 9 // 10],
    }


def bandwidth(step: Step, replays: int) -> float:
    """GB/s of one plain streaming read of all weights; the best of a few lengths of stretch."""
    if step.device == "cpu" or not HAS_TRITON:
        return 0.0
    words = step.slab.view(torch.int32)
    best = 0.0
    for steps in (2, 4, 8, 16):
        count = words.numel() // (steps * BLOCK)
        sums = torch.empty(count, dtype=torch.int32, device=step.device)

        constants: dict[str, Any] = {"STEPS": steps, "BLOCK": BLOCK, "num_warps": 8}

        def read(
            count: int = count, sums: Tensor = sums, constants: dict[str, Any] = constants
        ) -> None:
            _read_kernel[(count,)](words, sums, **constants)

        took = statistics.median(times_ms(read, step.device, replays))
        best = max(best, count * steps * BLOCK * 4 / took / 1e6)
    return best


def library(name: str) -> Multiply:
    """torch's product through "cublas" or "cublaslt"; on the CPU through whatever there is."""

    def multiply(x: Tensor, w: Tensor) -> Tensor:
        if x.is_cuda:
            torch.backends.cuda.preferred_blas_library(name)
        return torch.mm(x, w.t())

    return multiply


def error(got: Tensor, expected: Tensor) -> float:
    """Relative, in the 2-norm."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def about(step: Step) -> dict[str, Any]:
    """Machine and versions, for whoever reads the figures later."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    on_gpu = step.device != "cpu"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__ if HAS_TRITON else None,
        "commit": commit.stdout.strip(),
    }
