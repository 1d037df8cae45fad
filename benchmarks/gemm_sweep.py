"""Which tile is best for each product and number of rows: `python -m benchmarks.gemm --sweep`.

For every number of rows: each candidate over all the layers' weights in one graph with overlapping
launches; then whole chained steps, which begin with the best tile of each product and take another
one of the best where the chain gets faster with it. Both libraries are timed the same way. What a
candidate computes is compared with the library's result.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gemm_step import (
    Multiply,
    Product,
    Step,
    error,
    library,
    ours,
    own_tiles,
    spread,
    times_ms,
)
from worker.kernels.gemm.skinny_gemm import (
    AT_ONCE,
    MAX_ROWS,
    SkinnyTile,
    SkinnyWorkspace,
    choose,
    compile_for,
)
from worker.kernels.jit import triton

LIBRARIES = ("cublas", "cublaslt")
MAX_SWEPT_ROWS = 128  # with 256 the kernel spills registers
FINALISTS = 4  # of a product: tried in the chain
BOUND = 1e-2  # relative difference to the library's result; bf16 rounds by 2e-3
COMPILERS = 16  # threads
SPLIT_BELOW = 6144  # columns: fewer do not fill the GPU in whole tiles

# By block_m: block_n, block_k, warps, stages.
SHAPES: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    64: ((64, 128, 4, 4), (64, 64, 4, 6), (128, 64, 8, 6), (128, 64, 4, 4)),
    128: ((64, 64, 4, 6), (128, 64, 8, 6), (128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 4)),
}


@dataclass(slots=True)
class Timed:
    """One candidate for one product: what a launch takes, in us; NaN if it failed."""

    tile: SkinnyTile
    us: float = float("nan")
    failed: str = ""

    def as_json(self) -> dict[str, Any]:
        """The tile, and its time or why there is none."""
        found: dict[str, Any] = {"tile": asdict(self.tile)}
        return found | ({"failed": self.failed} if self.failed else {"us": round(self.us, 3)})


def candidates(each: Product, m: int) -> list[SkinnyTile]:
    """The kernel's own choice for up to 64 rows, and larger blocks; m <= `MAX_SWEPT_ROWS`."""
    found = [choose(m, each.n, each.k, product_follows=True)] if m <= MAX_ROWS else []
    block_m = next(rows for rows in SHAPES if m <= rows)
    for block_n, block_k, warps, stages in SHAPES[block_m]:
        for split in (2, 4) if each.n < SPLIT_BELOW else (1,):
            found.append(SkinnyTile(block_m, block_n, block_k, split, warps, stages, AT_ONCE))
    return list(dict.fromkeys(found))


def compile_all(step: Step, m: int, tiles: dict[str, list[SkinnyTile]]) -> float:
    """Compile what is not yet, in threads; returns how many seconds that took."""
    began = time.monotonic()
    if step.device == "cpu":
        return 0.0
    x = torch.empty(m, max(each.k for each in step.products), device=step.device, dtype=step.dtype)
    with (
        ThreadPoolExecutor(COMPILERS) as executor,
        triton.AsyncCompileMode(executor, ignore_errors=True),
    ):
        for each in step.products:
            out = torch.empty(m, each.n, device=step.device, dtype=step.dtype)
            weight = step.weights[each.name][0]
            workspace = SkinnyWorkspace.allocate(
                [(tile, each.n) for tile in tiles[each.name]], step.device
            )
            for tile in tiles[each.name]:
                compile_for(x[:, : each.k], weight, out, workspace, tile, pdl=True)
    return time.monotonic() - began


class Sweep:
    """All measurements for m rows.

    Args:
        step: the weights.
        m: rows.
        replays: of each graph.
    """

    def __init__(self, step: Step, m: int, replays: int) -> None:
        self.step, self.m, self.replays = step, m, replays
        self.pdl = step.device != "cpu"
        width = max(each.k for each in step.products)
        self.x = torch.randn(m, width, device=step.device).to(step.dtype)

    def product_us(self, each: Product, multiply: Multiply, out: Tensor) -> float:
        """Median of one launch, in a graph of all layers'."""
        took = times_ms(
            lambda: self.step.run_one(each.name, self.x, out, multiply),
            self.step.device,
            self.replays,
            warm_up=2,
        )
        return statistics.median(took) / each.count * 1e3

    def time_product(
        self, each: Product, tiles: list[SkinnyTile]
    ) -> tuple[dict[str, float], list[Timed]]:
        """us of the libraries and of the candidates, the best of those first."""
        expected = torch.empty(self.m, each.n, device=self.step.device, dtype=self.step.dtype)
        libraries = {name: self.product_us(each, library(name), expected) for name in LIBRARIES}
        found = [self._timed(each, tile, expected) for tile in tiles]
        return libraries, sorted(found, key=lambda timed: (bool(timed.failed), timed.us))

    def _timed(self, each: Product, tile: SkinnyTile, expected: Tensor) -> Timed:
        out = torch.full_like(expected, float("nan"))
        try:
            us = self.product_us(each, ours(self.step, {each.name: tile}, self.pdl), out)
        except Exception as failure:  # too much shared memory, or whatever the compiler dislikes
            return Timed(tile, failed=f"{type(failure).__name__}: {failure}"[:200])
        difference = error(out, expected)
        if not difference < BOUND:
            return Timed(tile, failed=f"error {difference:.1e}")
        return Timed(tile, us)

    def step_times(self, multiply: Multiply) -> tuple[list[float], Tensor]:
        """ms of the whole chain, and what it computes."""
        outs = self.step.buffers(self.m)
        took = times_ms(
            lambda: self.step.run(self.x, outs, multiply), self.step.device, self.replays
        )
        return took, outs[self.step.products[-1].name]

    def best_in_chain(self, found: dict[str, list[Timed]]) -> dict[str, SkinnyTile]:
        """A tile for each product, of those that worked, the best first."""

        def took(tiles: dict[str, SkinnyTile]) -> float:
            times, _ = self.step_times(ours(self.step, tiles, self.pdl))
            return statistics.median(times)

        best = {name: timed[0].tile for name, timed in found.items()}
        fastest = took(best)
        for name, timed in found.items():
            for other in timed[1:FINALISTS]:
                changed = best | {name: other.tile}
                if (ms := took(changed)) < fastest:
                    fastest, best = ms, changed
        return best

    def chain(self, best: dict[str, SkinnyTile]) -> dict[str, Any]:
        """Times of whole steps, and how far the results differ."""
        ways: dict[str, Multiply] = {name: library(name) for name in LIBRARIES}
        ways["best"] = ours(self.step, best, self.pdl)
        if self.m <= MAX_ROWS:
            ways["skinny"] = ours(self.step, own_tiles(self.step, self.m), self.pdl)
        if self.pdl:
            ways["best_no_pdl"] = ours(self.step, best, False)
        steps: dict[str, Any] = {}
        results = {}
        for name, multiply in ways.items():
            times, results[name] = self.step_times(multiply)
            steps[name] = spread(times)
        steps["error_to_cublas"] = error(results["best"], results["cublas"])
        if self.pdl:
            steps["pdl_changes_nothing"] = torch.equal(results["best"], results["best_no_pdl"])
        return steps


def sweep(
    step: Step, ms: list[int], replays: int, report: dict[str, Any], write: Callable[[], None]
) -> None:
    """Fill report["rows"], a row for each of `ms`, and print the best; `write` after each row."""
    for m in ms:
        tiles = {each.name: candidates(each, m) for each in step.products}
        compiling = compile_all(step, m, tiles)
        run = Sweep(step, m, replays)
        row: dict[str, Any] = {"m": m, "compile_s": round(compiling, 1), "products": {}}
        found: dict[str, list[Timed]] = {}
        for each in step.products:
            libraries, timed = run.time_product(each, tiles[each.name])
            row["products"][each.name] = libraries | {"candidates": [t.as_json() for t in timed]}
            found[each.name] = [one for one in timed if not one.failed]
            print_product(each, m, step, libraries, timed)
        if all(found.values()):
            best = run.best_in_chain(found)
            row["tiles"] = {name: asdict(tile) for name, tile in best.items()}
            row["step"] = run.chain(best)
            print_step(m, row["step"], best)
        report["rows"].append(row)
        write()


def print_product(
    each: Product, m: int, step: Step, libraries: dict[str, float], timed: list[Timed]
) -> None:
    """All candidates, the best first."""
    num_bytes = step.num_bytes(each.name) / each.count
    shown = " ".join(f"{name} {us:.2f}" for name, us in libraries.items())
    print(f"m={m} {each.name}: us a launch: {shown}", flush=True)
    for one in timed:
        if one.failed:
            print(f"    failed: {one.tile}: {one.failed}")
        else:
            print(f"    {one.us:7.2f} us {num_bytes / one.us / 1e3:5.0f} GB/s  {one.tile}")


def print_step(m: int, steps: dict[str, Any], best: dict[str, SkinnyTile]) -> None:
    """Whole chains, and the tiles of the best one."""
    for name, took in steps.items():
        if isinstance(took, dict):
            print(f"m={m} step {name:12s} {took['median_ms']:.3f} ms "
                  f"[{took['p10_ms']:.3f}, {took['p90_ms']:.3f}]")  # fmt: skip
        else:
            print(f"m={m} step {name} {took}")
    for name, tile in best.items():
        print(f"m={m} best {name}: {tile}", flush=True)
