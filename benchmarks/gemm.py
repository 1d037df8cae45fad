"""All products of one decode step, cuBLAS against `worker.kernels.skinny_gemm`, in one CUDA graph.

    python -m benchmarks.gemm --model qwen3-8b --m 1,8,16,32,64 --json out.json

Every layer has weights of its own, so nothing but activations is ever found in the L2. The products
are chained: each reads the output of the one before, so overlapping launches would show as wrong
numbers, and they are checked. The floor is the weights' bytes over the read bandwidth of this run.
On a CPU (`--model tiny`) it checks that everything runs; the times mean nothing there.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from worker.kernels.jit import HAS_TRITON, tl, triton
from worker.kernels.skinny_gemm import (
    SkinnyTile,
    SkinnyWorkspace,
    choose,
    skinny_gemm,
)

Multiply = Callable[[Tensor, Tensor, Tensor], object]  # (x, w, out)
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

    def buffers(self, m: int) -> dict[str, Tensor]:
        """An output of each product, poisoned."""
        return {
            each.name: torch.full((m, each.n), float("nan"), device=self.device, dtype=self.dtype)
            for each in self.products
        }

    def run(self, x: Tensor, outs: dict[str, Tensor], multiply: Multiply) -> Tensor:
        """The whole step; returns the head's output."""
        for product, layer in self.order:
            out = outs[product.name]
            multiply(x[:, : product.k], self.weights[product.name][layer], out)
            x = out
        return x

    def run_one(self, name: str, x: Tensor, out: Tensor, multiply: Multiply) -> Tensor:
        """One product with all its weights, one after the other; all read the same x."""
        for weight in self.weights[name]:
            multiply(x[:, : weight.shape[1]], weight, out)
        return out


@triton.jit
def _read_kernel(source, sums, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """sums[i] = sum of the i-th stretch of STEPS · BLOCK words."""
    at = source + tl.program_id(0).to(tl.int64) * (STEPS * BLOCK) + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for _ in range(STEPS):
        total += tl.load(at)
        at += BLOCK
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def times_ms(run: Callable[[], object], device: str, replays: int) -> list[float]:
    """Captured in one graph and replayed, each replay timed by itself."""
    run()
    if device == "cpu":
        began = time.perf_counter()
        run()
        return [(time.perf_counter() - began) * 1e3]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(5):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * replays)]
    for i in range(replays):
        marks[2 * i].record()
        graph.replay()
        marks[2 * i + 1].record()
    torch.cuda.synchronize()
    return [marks[2 * i].elapsed_time(marks[2 * i + 1]) for i in range(replays)]


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


def library(x: Tensor, w: Tensor, out: Tensor) -> object:
    """What cuBLAS makes of it."""
    return torch.mm(x, w.t(), out=out)


def ours(step: Step, m: int, pdl: bool, tiles: dict[str, SkinnyTile] | None = None) -> Multiply:
    """This project's kernel with its own choice of tiles, or with `tiles` by product."""
    chosen = {
        (each.n, each.k): (tiles or {}).get(each.name)
        or choose(m, each.n, each.k, product_follows=True)
        for each in step.products
    }
    workspace = SkinnyWorkspace.allocate(
        [(tile, n) for (n, _), tile in chosen.items()], step.device
    )

    def multiply(x: Tensor, w: Tensor, out: Tensor) -> object:
        return skinny_gemm(x, w, out, workspace, chosen[w.shape[0], w.shape[1]], pdl=pdl)

    return multiply


def error(got: Tensor, expected: Tensor) -> float:
    """Relative, in the 2-norm."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def measure(step: Step, m: int, replays: int) -> dict[str, Any]:
    """Times of both for m rows, whole step and product by product, and how far they differ."""
    x = torch.randn(m, max(each.k for each in step.products), device=step.device).to(step.dtype)
    on_gpu = step.device != "cpu"
    multiplies: dict[str, Multiply] = {"cublas": library, "skinny": ours(step, m, on_gpu)}
    if on_gpu:
        multiplies["skinny_no_pdl"] = ours(step, m, False)
    row: dict[str, Any] = {"m": m, "step": {}, "products": {}}
    results = {}
    for name, multiply in multiplies.items():
        outs = step.buffers(m)
        row["step"][name] = spread(
            times_ms(lambda f=multiply, o=outs: step.run(x, o, f), step.device, replays)
        )
        results[name] = outs[step.products[-1].name]
        for each in step.products:
            out = torch.empty(m, max(each.n, each.k), device=step.device, dtype=step.dtype)
            took = times_ms(
                lambda f=multiply, o=out[:, : each.n], p=each.name: step.run_one(p, x, o, f),
                step.device,
                replays,
            )
            gb_s = step.num_bytes(each.name) / statistics.median(took) / 1e6
            row["products"].setdefault(each.name, {})[name] = round(gb_s, 1)
    row["tiles"] = {
        each.name: asdict(choose(m, each.n, each.k, product_follows=True)) for each in step.products
    }
    row["error_to_cublas"] = error(results["skinny"], results["cublas"])
    if "skinny_no_pdl" in results:
        row["pdl_changes_nothing"] = bool(torch.equal(results["skinny"], results["skinny_no_pdl"]))
    return row


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


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3-8b")
    parser.add_argument("--m", default="1,8,16,32,64", help="rows, by commas")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure, print a table, write the figures."""
    args = parsed()
    step = Step(MODELS[args.model], args.device, getattr(torch, args.dtype))
    read_gb_s = bandwidth(step, args.replays)
    floor_ms = step.num_bytes() / read_gb_s / 1e6 if read_gb_s else 0.0
    report = about(step) | {
        "model": args.model,
        "weights_bytes": step.num_bytes(),
        "read_gb_s": round(read_gb_s, 1),
        "floor_ms": round(floor_ms, 4),
        "rows": [],
    }
    print(json.dumps({key: value for key, value in report.items() if key != "rows"}))
    for m in map(int, args.m.split(",")):
        row = measure(step, m, args.replays)
        report["rows"].append(row)
        for name, took in row["step"].items():
            by_product = " ".join(f"{p}={v[name]:.0f}" for p, v in row["products"].items())
            print(
                f"m={m:2d} {name:13s} {took['median_ms']:.3f} ms "
                f"[{took['p10_ms']:.3f}, {took['p90_ms']:.3f}]  GB/s {by_product}"
            )
        print(f"     error {row['error_to_cublas']:.1e} {row.get('pdl_changes_nothing', '')}")
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
