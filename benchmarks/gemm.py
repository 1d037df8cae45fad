"""All products of one decode step, each way to multiply in one CUDA graph, by turns.

    python -m benchmarks.gemm --model qwen3-8b --m 1,8,16,32,64 --json out.json
    python -m benchmarks.gemm --m 80,128,192,256,512 --json out.json
    python -m benchmarks.gemm --tune --m 96,128 --json worker/ops/tuned/NVIDIA_H200.json

`product` is what linear layers call (`worker.ops.product`): our kernel for few rows, then
a tuned algorithm of cuBLASLt where the table has one. `cublas` and `cublaslt` are torch's.

Every layer has weights of its own, so nothing but activations is ever found in the L2. The products
are chained: each reads the output of the one before, so overlapping launches would show as wrong
numbers, and they are checked. The floor is the weights' bytes over the read bandwidth of this run.
`layers` is the step without the head. The ways take turns, because a GPU at the limit of its power
slows down the longer it works; the first one is measured twice, so that the difference of the two
shows what the machine adds. `--tune` searches algorithms for the table: `benchmarks.gemm_tune`.
On a CPU (`--model tiny`) it checks that everything runs; the times mean nothing there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gemm_step import (
    MODELS,
    Multiply,
    Step,
    about,
    bandwidth,
    error,
    library,
    spread,
    times_by_turns,
)
from benchmarks.gemm_tune import tune
from worker.ops.product import OWN_ROWS, product

AGAIN = " again"


def measure(step: Step, m: int, replays: int, libraries: list[str]) -> dict[str, Any]:
    """Times for m rows, whole step and product by product, and how far the results differ."""
    x = torch.randn(m, max(each.k for each in step.products), device=step.device).to(step.dtype)
    ways: dict[str, Multiply] = {name: library(name) for name in libraries}
    ways |= {"product": product, libraries[0] + AGAIN: library(libraries[0])}
    row: dict[str, Any] = {"m": m, "products": {}}
    for part, head in (("layers", False), ("step", True)):
        row[part] = timed({n: partial(step.run, x, f, head=head) for n, f in ways.items()}, replays)
    for each in step.products:
        x_of = x[:, : each.k]
        runs = {n: partial(step.run_one, each.name, x_of, f) for n, f in ways.items()}
        row["products"][each.name] = timed(runs, replays)
    results = {name: step.run(x, multiply) for name, multiply in ways.items()}
    row["errors"] = {n: error(found, results[libraries[0]]) for n, found in results.items()}
    return row


def timed(runs: dict[str, Callable[[], Tensor]], replays: int) -> dict[str, dict[str, float]]:
    """Median and spread of each, by turns."""
    return {name: spread(times) for name, times in times_by_turns(runs, replays).items()}


def print_row(row: dict[str, Any]) -> None:
    """One line a way to multiply."""
    for name, took in row["step"].items():
        by_product = " ".join(
            f"{each}={1e3 * ways[name]['median_ms']:.0f}" for each, ways in row["products"].items()
        )
        print(
            f"m={row['m']:3d} {name:15s} {took['median_ms']:.3f} ms "
            f"[{took['p10_ms']:.3f}, {took['p90_ms']:.3f}] "
            f"layers {row['layers'][name]['median_ms']:.3f}  all of one product, us: {by_product}",
            flush=True,
        )
    worst = max(row["errors"].values())
    print(f"      largest difference of results: {worst:.2g}", flush=True)


def numbers(text: str) -> list[int]:
    """Those between the commas."""
    return [int(each) for each in text.split(",")]


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3-8b")
    parser.add_argument("--m", type=numbers, default="1,8,16,32,64", help="rows, by commas")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--libraries", default="cublas", help="cublas, cublaslt or both, by commas")
    parser.add_argument("--tune", action="store_true", help="write a table of algorithms to --json")
    parser.add_argument("--seconds", type=float, default=6.0, help="of --tune, a product and m")
    parser.add_argument("--products", default="qkv,o,gate_up,down", help="of --tune, by commas")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.tune and (args.device == "cpu" or args.dtype != "bfloat16" or args.json is None):
        parser.error("--tune takes a GPU, bfloat16 and --json")
    if args.tune and min(args.m) <= OWN_ROWS:
        parser.error(f"--tune is for more than {OWN_ROWS} rows")
    return args


def main() -> None:
    """Measure, print a table, write the figures."""
    args = parsed()
    step = Step(MODELS[args.model], args.device, getattr(torch, args.dtype))
    if args.tune:
        names = args.products.split(",")
        tune(step, args.m, names, args.seconds, args.replays, args.json)
        return
    read_gb_s = bandwidth(step, args.replays)
    floor_ms = step.num_bytes() / read_gb_s / 1e6 if read_gb_s else 0.0
    report = about(step) | {
        "model": args.model,
        "weights_bytes": step.num_bytes(),
        "read_gb_s": round(read_gb_s, 1),
        "floor_ms": round(floor_ms, 4),
        "rows": [],
    }
    print(json.dumps({key: value for key, value in report.items() if key != "rows"}), flush=True)
    for m in args.m:
        row = measure(step, m, args.replays, args.libraries.split(","))
        report["rows"].append(row)
        print_row(row)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
