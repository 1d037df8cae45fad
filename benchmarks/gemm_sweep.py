"""Which tile is best for each product and number of rows: `python -m benchmarks.gemm --sweep`.

For every number of rows: each candidate over all the layers' weights in one graph with overlapping
launches, the best ones again and longer; then whole chained steps, which begin with the best tile
of each product and take another one of the best where the chain gets faster with it. Both libraries
are timed the same way. What a candidate computes is compared with the library's result. It prints
rows for `MEASURED` in `worker.kernels.product` for the largest number of rows of each class.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gemm_step import (
    Multiply,
    Product,
    Step,
    Tile,
    error,
    library,
    ours,
    spread,
    times_ms,
)
from worker.kernels import skinny_gemm, stream_k_gemm
from worker.kernels.jit import INTERPRETED, triton
from worker.kernels.product import ROW_CLASSES
from worker.kernels.skinny_gemm import AT_ONCE, SkinnyTile, SkinnyWorkspace
from worker.kernels.stream_k_gemm import MAX_PARTS, StreamTile

LIBRARIES = ("cublas", "cublaslt")
FINALISTS = 4  # of a product: timed again, and tried in the chain
KEPT = 12  # in the report, of those that work
FIRST_REPLAYS = 15
BOUND = 1e-2  # relative difference to the library's result; bf16 rounds by 2e-3
COMPILERS = 16  # threads
RING = 112 * 1024  # bytes of shared memory below which two programs share an SM
HALF_FULL = 0.5
WHOLE_TILES = 128 * 256  # sums of a tile; the code of stream-K spills registers with more

# By row class: block_n, rest, block_k, warps, stages, x_left. All compile for sm_90 without spills.
SHAPES: dict[int, tuple[tuple[int, int, int, int, int, bool], ...]] = {
    64: (
        (128, 64, 64, 4, 6, True),
        (128, 64, 64, 8, 6, True),
        (128, 64, 64, 8, 6, False),
        (128, 0, 64, 4, 8, True),
        (128, 0, 128, 4, 4, True),
        (128, 0, 64, 8, 8, False),
        (256, 0, 64, 8, 5, True),
        (256, 0, 64, 8, 5, False),
        (128, 0, 64, 4, 4, True),
        (64, 32, 64, 4, 5, True),
        (64, 0, 64, 4, 6, True),
    ),
    128: (
        (128, 64, 64, 8, 5, True),
        (128, 64, 64, 8, 5, False),
        (256, 0, 64, 8, 4, True),
        (256, 0, 64, 8, 4, False),
        (128, 0, 64, 8, 6, True),
        (128, 0, 64, 4, 6, True),
        (128, 0, 128, 8, 3, True),
        (128, 0, 64, 4, 3, True),
        (64, 32, 64, 4, 3, True),
        (64, 0, 64, 4, 4, False),
    ),
    256: (
        (128, 64, 64, 8, 3, False),
        (128, 64, 64, 8, 3, True),
        (128, 64, 64, 16, 3, True),
        (128, 0, 64, 8, 4, False),
        (128, 0, 64, 8, 4, True),
        (64, 32, 64, 8, 5, True),
        (64, 0, 64, 4, 5, False),
    ),
}
# By row class: block_n, block_k, warps, stages of the kernel for few rows.
SKINNY: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    64: ((64, 128, 4, 4), (64, 64, 4, 6), (128, 64, 8, 6), (128, 64, 4, 4)),
    128: ((64, 64, 4, 6), (128, 64, 8, 6), (128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 4)),
    256: (),  # spills
}


@dataclass(slots=True)
class Timed:
    """One candidate for one product: what a launch takes, in us; NaN if it failed."""

    tile: Tile
    us: float = float("nan")
    failed: str = ""

    def as_json(self) -> dict[str, Any]:
        """The tile as one writes it."""
        found = {"tile": repr(self.tile), "us": round(self.us, 3)}
        return {"tile": found["tile"], "failed": self.failed} if self.failed else found


def row_class(m: int) -> int:
    """Of the kernels for many rows: 64, 128 or 256."""
    return next(rows for rows in ROW_CLASSES if m <= rows and rows in SHAPES)


def candidates(each: Product, m: int, num_sms: int, specialize: bool) -> list[Tile]:
    """Those with the most promise first."""
    rows = row_class(m)
    found: list[Tile] = []
    for index, (block_n, rest, block_k, warps, stages, x_left) in enumerate(SHAPES[rows]):
        tile = StreamTile(rows, block_n, rest, block_k, 1, warps, stages, x_left)
        ring = (rows + tile.width) * block_k * 2 * stages
        slots = num_sms * (2 if ring <= RING and warps == 4 else 1)
        for shares in shares_of(tile, each, slots):
            found.append(replace(tile, shares=shares))
            if index == 0 and 0 < tile_parts(found[-1], each) > 1:
                found.append(replace(tile, shares=shares, patience=0))
    found = [tile for tile in found if tile_parts(tile, each) <= MAX_PARTS]
    if specialize:
        return list(specialized(rows, each, num_sms))
    found += skinny(each, m, rows)
    return list(dict.fromkeys(found))


def tile_parts(tile: Tile, each: Product) -> int:
    """Programs of one tile, at most."""
    return tile.cut(each.n, each.k).parts if isinstance(tile, StreamTile) else tile.split


def shares_of(tile: StreamTile, each: Product, slots: int) -> Iterator[int]:
    """Whole tiles, equal splits of them, and stream-K where neither fills `slots` programs."""
    cut = replace(tile, shares=1 << 30).cut(each.n, each.k)
    best = 0.0
    if cut.tiles >= slots * HALF_FULL:
        best = cut.tiles / (-(-cut.tiles // slots) * slots)
        yield cut.tiles
    splits = [s for s in range(2, MAX_PARTS + 1) if cut.steps % s == 0 and cut.tiles * s <= slots]
    for split in splits[-1:]:
        best = max(best, cut.tiles * split / slots)
        yield cut.tiles * split
    fits = tile.block_m * tile.width <= WHOLE_TILES
    if (best < 0.97 or cut.tiles > 2 * slots) and fits and slots <= cut.tiles * cut.steps:
        yield slots


def specialized(rows: int, each: Product, num_sms: int) -> Iterator[StreamTile]:
    """Whole tiles with warps of their own for the loads: Triton does so on Hopper for these."""
    for block_n, rest, stages in ((128, 64, 4), (128, 0, 5), (128, 0, 3)):
        tile = StreamTile(rows, block_n, rest, 64, 1, 4, stages, rows <= 128, specialize=True)
        if rows == 256 and (rest or stages > 4):  # compiles not, or takes too much shared memory
            continue
        if tile.num_tiles(each.n) >= num_sms * HALF_FULL:
            yield replace(tile, shares=tile.num_tiles(each.n))


def skinny(each: Product, m: int, rows: int) -> Iterator[SkinnyTile]:
    """The kernel for few rows: its own choice, and larger blocks."""
    if m <= skinny_gemm.MAX_ROWS:
        yield skinny_gemm.choose(m, each.n, each.k, product_follows=True)
    splits = (1,) if each.n >= 6144 else (2, 4)
    for block_n, block_k, warps, stages in SKINNY[rows]:
        for split in splits:
            yield SkinnyTile(rows, block_n, block_k, split, warps, stages, AT_ONCE)


def skinny_tiles(step: Step, m: int) -> dict[str, Tile]:
    """What the kernel for few rows chooses in a chain of products; m <= 64."""
    return {
        each.name: skinny_gemm.choose(m, each.n, each.k, product_follows=True)
        for each in step.products
    }


def compile_all(step: Step, m: int, tiles: dict[str, list[Tile]]) -> float:
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
                compiled = skinny_gemm if isinstance(tile, SkinnyTile) else stream_k_gemm
                compiled.compile_for(  # pyright: ignore[reportArgumentType]
                    x[:, : each.k],
                    weight,
                    out,
                    workspace,
                    tile,  # pyright: ignore[reportArgumentType]
                    pdl=True,
                )
    return time.monotonic() - began


class Sweep:
    """All measurements for m rows.

    Args:
        step: the weights.
        m: rows.
        replays: of what is timed for good; candidates get `FIRST_REPLAYS` first.
    """

    def __init__(self, step: Step, m: int, replays: int) -> None:
        self.step, self.m, self.replays = step, m, replays
        self.pdl = step.device != "cpu"
        width = max(each.k for each in step.products)
        self.x = torch.randn(m, width, device=step.device).to(step.dtype)

    def product_us(self, each: Product, multiply: Multiply, out: Tensor, replays: int) -> float:
        """Median of one launch, in a graph of all layers'."""
        took = times_ms(
            lambda: self.step.run_one(each.name, self.x, out, multiply),
            self.step.device,
            replays,
            warm_up=2,
        )
        return statistics.median(took) / each.count * 1e3

    def time_product(
        self, each: Product, tiles: list[Tile], deadline: float
    ) -> tuple[dict[str, float], list[Timed]]:
        """us of the libraries and of the candidates, the best of those first."""
        expected = torch.empty(self.m, each.n, device=self.step.device, dtype=self.step.dtype)
        libraries = {
            name: self.product_us(each, library(name), expected, self.replays) for name in LIBRARIES
        }
        found = [Timed(tile) for tile in tiles]
        for candidate in found:
            if time.monotonic() > deadline:
                candidate.failed = "no time left"
                continue
            self._time(each, candidate, expected, FIRST_REPLAYS)
        found.sort(key=lambda timed: (timed.us != timed.us, timed.us))
        for candidate in found[:FINALISTS]:
            if not candidate.failed:
                self._time(each, candidate, expected, self.replays)
        found.sort(key=lambda timed: (timed.us != timed.us, timed.us))
        return libraries, found

    def _time(self, each: Product, candidate: Timed, expected: Tensor, replays: int) -> None:
        out = torch.full_like(expected, float("nan"))
        try:
            multiply = ours(self.step, {each.name: candidate.tile}, self.pdl)
            candidate.us = self.product_us(each, multiply, out, replays)
        except Exception as failure:  # too much shared memory, or whatever the compiler dislikes
            candidate.failed = f"{type(failure).__name__}: {failure}"[:200]
            candidate.us = float("nan")
            return
        difference = error(out, expected)
        if not difference < BOUND:
            candidate.failed, candidate.us = f"error {difference:.1e}", float("nan")

    def step_times(self, multiply: Multiply, replays: int) -> tuple[list[float], Tensor]:
        """ms of the whole chain, and what it computes."""
        outs = self.step.buffers(self.m)
        took = times_ms(lambda: self.step.run(self.x, outs, multiply), self.step.device, replays)
        return took, outs[self.step.products[-1].name]

    def chain(
        self, found: dict[str, list[Timed]], deadline: float
    ) -> tuple[dict[str, Tile], dict[str, Any]]:
        """The tiles that are best in a chain, and the times of whole steps."""
        best = {name: timed[0].tile for name, timed in found.items()}

        def took(tiles: dict[str, Tile]) -> float:
            times, _ = self.step_times(ours(self.step, tiles, self.pdl), FIRST_REPLAYS)
            return statistics.median(times)

        fastest = took(best)
        for name, timed in found.items():
            for other in timed[1:FINALISTS]:
                if other.failed or time.monotonic() > deadline:
                    continue
                changed = best | {name: other.tile}
                if (ms := took(changed)) < fastest:
                    fastest, best = ms, changed
        ways: dict[str, Multiply] = {name: library(name) for name in LIBRARIES}
        ways["best"] = ours(self.step, best, self.pdl)
        if self.m <= skinny_gemm.MAX_ROWS:
            ways["skinny"] = ours(self.step, skinny_tiles(self.step, self.m), self.pdl)
        if self.pdl:
            ways["best_no_pdl"] = ours(self.step, best, False)
        steps: dict[str, Any] = {}
        results = {}
        for name, multiply in ways.items():
            times, results[name] = self.step_times(multiply, self.replays)
            steps[name] = spread(times)
        steps["error_to_cublas"] = error(results["best"], results["cublas"])
        if self.pdl:
            steps["pdl_changes_nothing"] = torch.equal(results["best"], results["best_no_pdl"])
        return best, steps


def sweep(
    step: Step,
    ms: list[int],
    replays: int,
    seconds: float,
    specialize: bool,
    report: dict[str, Any],
    write: Callable[[], None],
) -> None:
    """Fill report["rows"], a row for each of `ms` in that order, and print the best.

    After `seconds` no more candidates are timed. `write` is called after each row.
    """
    began = time.monotonic()
    for index, m in enumerate(ms):
        tiles = {each.name: candidates(each, m, step.num_sms, specialize) for each in step.products}
        compiling = compile_all(step, m, tiles)
        left = began + seconds - time.monotonic()
        deadline = time.monotonic() + left / (len(ms) - index)
        run = Sweep(step, m, replays)
        row: dict[str, Any] = {"m": m, "compile_s": round(compiling, 1), "products": {}}
        found: dict[str, list[Timed]] = {}
        for each in step.products:
            if not tiles[each.name]:
                continue
            libraries, timed = run.time_product(each, tiles[each.name], deadline)
            row["products"][each.name] = libraries | {
                "candidates": [
                    one.as_json() for i, one in enumerate(timed) if i < KEPT or one.failed
                ]
            }
            found[each.name] = [one for one in timed if not one.failed]
            print_product(each, m, step, libraries, timed)
        if all(found.get(each.name) for each in step.products):
            best, row["step"] = run.chain(found, deadline)
            row["tiles"] = {name: repr(tile) for name, tile in best.items()}
            print_step(m, row["step"])
            if m == max(other for other in ms if row_class(other) == row_class(m)):
                print_table(step, row_class(m), best)
        report["rows"].append(row)
        print(f"m={m}: {time.monotonic() - began:.0f} s so far, {compiling:.0f} compiling")
        write()


def print_product(
    each: Product, m: int, step: Step, libraries: dict[str, float], timed: Iterable[Timed]
) -> None:
    """The best few, and what failed."""
    num_bytes = step.num_bytes(each.name) / each.count
    shown = " ".join(f"{name} {us:.2f}" for name, us in libraries.items())
    print(f"m={m} {each.name}: us a launch: {shown}", flush=True)
    timed = list(timed)
    for one in timed[:FINALISTS]:
        if not one.failed:
            print(f"    {one.us:7.2f} us {num_bytes / one.us / 1e3:5.0f} GB/s  {one.tile}")
    for one in timed:
        if one.failed:
            print(f"    failed: {one.tile}: {one.failed}")


def print_step(m: int, steps: dict[str, Any]) -> None:
    """Whole chains."""
    for name, took in steps.items():
        if isinstance(took, dict):
            print(f"m={m} step {name:12s} {took['median_ms']:.3f} ms "
                  f"[{took['p10_ms']:.3f}, {took['p90_ms']:.3f}]")  # fmt: skip
        else:
            print(f"m={m} step {name} {took}", flush=True)


def print_table(step: Step, rows: int, best: dict[str, Tile]) -> None:
    """For `MEASURED` in `worker.kernels.product`."""
    for each in step.products:
        print(f"    ({rows}, {each.n}, {each.k}): {best[each.name]!r},")


if INTERPRETED:
    FIRST_REPLAYS = FINALISTS = 1
