"""All products of one decode step, cuBLAS against this project's kernel, in one CUDA graph.

    python -m benchmarks.gemm --model qwen3-8b --m 1,8,16,32,64 --json out.json
    python -m benchmarks.gemm --m 512,1024,2048,8192 --libraries cublas,cublaslt --names
    python -m benchmarks.gemm --sweep --m 64,96,128 --json out.json
    python -m benchmarks.gemm --tune --m 96,128 --json worker/kernels/gemm/tuned/NVIDIA_H200.json

Every layer has weights of its own, so nothing but activations is ever found in the L2. The products
are chained: each reads the output of the one before, so overlapping launches would show as wrong
numbers, and they are checked. The floor is the weights' bytes over the read bandwidth of this run.
More rows than this project's kernel computes are the libraries' alone; "layers" is the step without
the head, of which a prompt needs one row. `--sweep` times many tiles: `benchmarks.gemm_sweep`;
`--tune` searches cuBLASLt's algorithms for the table of `worker.kernels.gemm.lt_gemm`:
`benchmarks.gemm_tune`.
On a CPU (`--model tiny`) it checks that everything runs; the times mean nothing there.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict
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
    kernel_names,
    library,
    ours,
    own_tiles,
    spread,
    times_ms,
)
from benchmarks.gemm_sweep import MAX_SWEPT_ROWS, sweep
from benchmarks.gemm_tune import tune
from worker.kernels.gemm.product import OWN_ROWS

LARGE = 512  # rows from which on fewer replays do


def own_multiplies(step: Step, m: int) -> tuple[dict[str, Multiply], dict[str, Any]]:
    """This project's kernel with its own choice of tiles, with and without early launches."""
    tiles = own_tiles(step, m)
    found = {"skinny": ours(step, tiles, step.device != "cpu")}
    if step.device != "cpu":
        found["skinny_no_pdl"] = ours(step, tiles, False)
    return found, {name: asdict(tile) for name, tile in tiles.items()}


def measure(
    step: Step, m: int, replays: int, libraries: list[str], names: bool = False
) -> dict[str, Any]:
    """Times for m rows, whole step and product by product, and how far the results differ."""
    x = torch.randn(m, max(each.k for each in step.products), device=step.device).to(step.dtype)
    replays = max(5, replays * LARGE // max(m, LARGE))
    multiplies: dict[str, Multiply] = {name: library(name) for name in libraries}
    row: dict[str, Any] = {"m": m, "step": {}, "layers": {}, "products": {}}
    if m <= OWN_ROWS:
        own, row["tiles"] = own_multiplies(step, m)
        multiplies |= own
    results = {}
    for name, multiply in multiplies.items():
        outs = step.buffers(m)
        for part, head in (("layers", False), ("step", True)):
            row[part][name] = spread(
                times_ms(
                    lambda f=multiply, o=outs, h=head: step.run(x, o, f, head=h),
                    step.device,
                    replays,
                )
            )
        results[name] = outs[step.products[-1].name]
        if names:
            row.setdefault("kernels", {})[name] = {}
        for each in step.products:
            took, kernels = of_product(step, each.name, x, multiply, replays, names)
            gb_s = step.num_bytes(each.name) / took / 1e6
            row["products"].setdefault(each.name, {})[name] = round(gb_s, 1)
            if names:
                row["kernels"][name][each.name] = kernels
    first, *others = results
    row["errors"] = {name: error(results[name], results[first]) for name in others}
    if "skinny_no_pdl" in results:
        row["pdl_changes_nothing"] = bool(torch.equal(results["skinny"], results["skinny_no_pdl"]))
    return row


def of_product(
    step: Step, name: str, x: Tensor, multiply: Multiply, replays: int, names: bool
) -> tuple[float, list[str]]:
    """Median ms of all of one product's weights, and the kernels that compute one."""
    each = next(each for each in step.products if each.name == name)
    out = torch.empty(x.shape[0], max(each.n, each.k), device=step.device, dtype=step.dtype)
    out = out[:, : each.n]
    took = times_ms(lambda: step.run_one(name, x, out, multiply), step.device, replays)
    weight = step.weights[name][0]
    kernels = (
        kernel_names(lambda: multiply(x[:, : each.k], weight, out), step.device) if names else []
    )
    return statistics.median(took), kernels


def print_row(row: dict[str, Any]) -> None:
    """One line a way to multiply."""
    for name, took in row["step"].items():
        by_product = " ".join(f"{p}={v[name]:.0f}" for p, v in row["products"].items())
        print(
            f"m={row['m']:2d} {name:13s} {took['median_ms']:.3f} ms "
            f"[{took['p10_ms']:.3f}, {took['p90_ms']:.3f}] "
            f"layers {row['layers'][name]['median_ms']:.3f}  GB/s {by_product}",
            flush=True,
        )
        for product, kernels in row.get("kernels", {}).get(name, {}).items():
            print(f"     {product}: {', '.join(each[:100] for each in kernels)}")
    print(f"     errors {row['errors']} {row.get('pdl_changes_nothing', '')}", flush=True)


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
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--libraries", default="cublas", help="cublas, cublaslt or both, by commas")
    parser.add_argument("--names", action="store_true", help="of the kernels, by the profiler")
    parser.add_argument("--sweep", action="store_true", help="of tiles, up to 128 rows")
    parser.add_argument("--tune", action="store_true", help="write a table of algorithms to --json")
    parser.add_argument("--seconds", type=float, default=6.0, help="of --tune, a product and m")
    parser.add_argument("--products", default="qkv,o,gate_up,down", help="of --tune, by commas")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.sweep and max(args.m) > MAX_SWEPT_ROWS:
        parser.error(f"--sweep takes up to {MAX_SWEPT_ROWS} rows")
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

    def write() -> None:
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")

    if args.sweep:
        sweep(step, args.m, args.replays, report, write)
        return
    for m in args.m:
        row = measure(step, m, args.replays, args.libraries.split(","), args.names)
        report["rows"].append(row)
        print_row(row)
        write()


if __name__ == "__main__":
    main()
