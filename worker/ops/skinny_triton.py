"""y = x @ w.T for the few rows of a decode step: the weights stream through once.

A program multiplies x by `block_n` rows of w over one of `split` ranges of K. The weights are the
left operand of the tensor cores, so 16 rows of x cost little more than one. The program of a tile
that finishes last adds the f32 partial sums in the order of the ranges. How sums are cut depends on
the weights' shape, not on the batch: a row's result depends on that row alone, bit for bit.

With programmatic dependent launch the next kernel's programs start while the last loads of this one
are in flight: about 0.8 µs less a launch. Prefetches, TMA and other tiles did not help (H200).

A tile of a gated product has as many gate rows as up rows. It applies the activation to its sums
before it stores them, which saves a kernel and half of the writes.

In eight bits weights and x have scales (see scaled.py), one a row and step of BLOCK_K = 128.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from worker.config.checkpoint.quantization import SCALE_BLOCK
from worker.ops.jit import INTERPRETED, gdc_launch_dependents, gdc_wait, tl, triton
from worker.ops.norms_triton import silu_and_mul
from worker.ops.scaled import E4M3, strides_of

MAX_ROWS = 64
DTYPES = (torch.bfloat16, torch.float16)


@triton.jit(do_not_specialize=["M"])
def _skinny_gemm_kernel(
    x, w, of_rows, scales, out, partial, arrivals,
    M, N, K, stride_x, stride_out, stride_column, stride_rows, stride_blocks,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GRAIN: tl.constexpr,
    SPLIT: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of w's rows, SPLIT).

    x: [M, K], w: [N, K], out: [M, N]; rows contiguous, all of w contiguous.
    GATED: w is [2 N, K], gate rows before up rows, and SPLIT is 1.
    GRAIN: rows of w that share a scale, of [N / GRAIN, blocks of K]; 0: neither w nor x has scales.
    of_rows: x's, [M, blocks of K], contiguous along M.
    STAGES: of the pipeline, if loads that no product needs are to be part of it, as scales are.
    STEPS: blocks of K in one of the SPLIT ranges (a constant, as the interpreter needs one).
    partial: f32 [tiles, SPLIT, BLOCK_M, BLOCK_N]. arrivals: i32 [tiles], all 0 before and after.
    TRIGGER: after which step the next kernel may start; below 0, at once.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    if PDL:
        if TRIGGER < 0:
            gdc_launch_dependents()
        # Invariant: every program waits, so this kernel's end implies that of all before it.
        gdc_wait()

    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # columns of the output
    within = tl.arange(0, BLOCK_N)
    # Rows beyond N read the last row again and are not stored.
    rows = tile * WIDTH + (within % WIDTH if GATED else within)
    rows = (rows if EVEN_N else tl.minimum(rows, N - 1)).to(tl.int64)
    if GATED:
        rows += tl.where(within < WIDTH, 0, N)
    tokens = tl.arange(0, BLOCK_M)
    here = (tokens < M)[:, None]
    ks = tl.arange(0, BLOCK_K)
    k_begin = part * (STEPS * BLOCK_K)
    w_at = w + rows[:, None] * K + (k_begin + ks)[None, :]
    x_at = x + tokens[:, None] * stride_x + (k_begin + ks)[None, :]
    if GRAIN:
        scales_at = scales + rows // GRAIN * stride_rows + part * STEPS * stride_blocks
        row_at = of_rows + tokens + part * STEPS * stride_column
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        if EVEN_K:
            w_tile = tl.load(w_at)
            x_tile = tl.load(x_at, mask=here, other=0.0)
        else:
            inside = (k_begin + step * BLOCK_K + ks < K)[None, :]
            w_tile = tl.load(w_at, mask=inside, other=0.0)
            x_tile = tl.load(x_at, mask=here & inside, other=0.0)
        if INTERPRETED:  # which multiplies no bf16
            w_tile, x_tile = w_tile.to(tl.float32), x_tile.to(tl.float32)
        if GRAIN:
            known = tokens < M
            if EVEN_K:
                w_scale = tl.load(scales_at)
            else:
                there = k_begin + step * BLOCK_K < K
                known &= there
                w_scale = tl.load(scales_at, mask=there, other=0.0)
            x_scale = tl.load(row_at, mask=known, other=0.0)
            acc += tl.dot(w_tile, tl.trans(x_tile)) * (w_scale[:, None] * x_scale[None, :])
            scales_at += stride_blocks
            row_at += stride_column
        else:
            acc = tl.dot(w_tile, tl.trans(x_tile), acc)
        w_at += BLOCK_K
        x_at += BLOCK_K
        if PDL and step == TRIGGER:
            gdc_launch_dependents()
    if GATED:
        acc = gated_sums(acc, BLOCK_M, WIDTH, out.dtype.element_ty)
    acc = tl.trans(acc)

    cols = tile * WIDTH + tl.arange(0, WIDTH)
    out_at = out + tokens[:, None] * stride_out + cols[None, :]
    stored = here & (cols < N)[None, :]
    store_sums(  # pyright: ignore
        acc, out_at, stored, here, partial, arrivals, tile, part, BLOCK_M, BLOCK_N, SPLIT
    )


@triton.jit
def store_sums(
    acc, out_at, stored, here, partial, arrivals, tile, part,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, columns] goes to `out_at`, added up by the last of SPLIT parts to arrive.

    stored: where there is an output; here: [BLOCK_M, 1], where there are tokens.
    """
    dtype = out_at.dtype.element_ty
    if SPLIT == 1:
        tl.store(out_at, acc.to(dtype), mask=stored)
    else:
        spot = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        parts_at = partial + tile.to(tl.int64) * (SPLIT * BLOCK_M * BLOCK_N) + spot
        tl.store(parts_at + part * (BLOCK_M * BLOCK_N), acc, mask=here)
        tl.debug_barrier()  # all threads' sums are written before the one atomic releases them
        arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT - 1:
            total = tl.load(parts_at, mask=here, other=0.0, cache_modifier=".cg")
            for i in tl.static_range(1, SPLIT):  # pyright: ignore
                at = parts_at + i * (BLOCK_M * BLOCK_N)
                total += tl.load(at, mask=here, other=0.0, cache_modifier=".cg")
            tl.store(out_at, total.to(dtype), mask=stored)
            tl.store(arrivals + tile, 0)


@triton.jit
def gated_sums(acc, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, dtype):
    """silu(gate) · up of acc [2 · WIDTH, BLOCK_M], rounded as swiglu of a stored product is."""
    pair = tl.permute(tl.reshape(acc, (2, WIDTH, BLOCK_M)), (1, 2, 0))
    gate, up = tl.split(pair)
    return silu_and_mul(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype)


@dataclass(frozen=True, slots=True)
class SkinnyTile:
    """How one product is cut into programs."""

    block_m: int
    block_n: int
    block_k: int
    split: int
    num_warps: int
    num_stages: int
    trigger: int  # the next kernel may start when so many steps are left

    def num_tiles(self, n: int) -> int:
        """Tiles along the output's columns."""
        return -(-n // self.block_n)

    def num_partials(self, n: int) -> int:
        """Floats of workspace that a product with n outputs needs."""
        return self.num_tiles(n) * self.split * self.block_m * self.block_n if self.split > 1 else 0

    def gates(self, n: int) -> bool:
        """Whether n weight rows, gates and ups, can be paired in half tiles."""
        return self.split == 1 and n % 2 == 0


AT_ONCE = 1 << 20
# (smallest n, block_n, split, num_warps, num_stages, trigger before a product), measured on an H200
# over whole steps of the Qwen3-8B shape. Narrow products are split for a program a multiprocessor.
_TABLE = (
    (65536, 128, 1, 8, 4, 2),
    (16384, 64, 1, 4, 3, 0),
    (6144, 64, 1, 4, 5, 8),
    (3072, 64, 2, 4, 5, AT_ONCE),
    (1536, 64, 4, 4, 5, AT_ONCE),
    (0, 64, 8, 4, 5, AT_ONCE),
)
# In eight bits a step has half the bytes, so that more of them are in flight. (smallest n, largest
# k, split, and (block_n, num_warps, num_stages) for up to 16, 32 and 64 rows.)
_EIGHT = (
    (16384, AT_ONCE, 1, ((128, 8, 4), (128, 4, 4), (128, 4, 4))),
    (6144, 2048, 2, ((64, 4, 4), (64, 4, 4), (64, 4, 4))),  # 9.4 us of 9216 rows, not 13.9
    (6144, AT_ONCE, 2, ((128, 8, 8), (128, 4, 6), (64, 4, 4))),
    (3072, AT_ONCE, 4, ((128, 8, 8), (128, 4, 6), (64, 4, 4))),
    (0, AT_ONCE, 8, ((64, 4, 8), (64, 4, 6), (64, 4, 4))),
)


@cache
def choose(
    m: int, n: int, k: int, *, product_follows: bool = False, eight: bool = False
) -> SkinnyTile:
    """The tile for x: [m, k], w: [n, k]. How sums are cut depends on the weights' shape, not on m.

    The next kernel may start early. A small one (a norm, attention, an activation) starts at once
    and waits on the device. A product (`product_follows`) starts later: its loads would compete.
    """
    assert 0 < m <= MAX_ROWS
    block_m, block_k = max(16, 1 << (m - 1).bit_length()), 128
    if eight:  # the next kernel, x into eight bits, is small and starts at once
        _, _, split, tiles = next(row for row in _EIGHT if n >= row[0] and k <= row[1])
        block_n, num_warps, num_stages = tiles[block_m.bit_length() - 5]
        split = 1 if product_follows and n >= 6144 else split  # so that it can be gated
        trigger = AT_ONCE
    else:
        _, block_n, split, num_warps, num_stages, trigger = next(r for r in _TABLE if n >= r[0])
        if block_m == MAX_ROWS and num_stages == 3:  # a block of x is as large as one of w
            block_k, num_stages = 64, 4
        trigger = trigger if product_follows else AT_ONCE
    while split > 1 and split * 128 > k:
        split //= 2
    return SkinnyTile(block_m, block_n, block_k, split, num_warps, num_stages, trigger)


@dataclass(frozen=True, slots=True)
class SkinnyWorkspace:
    """Scratch of one stream: its products run one after the other, so all of them share it."""

    partial: Tensor  # f32
    arrivals: Tensor  # i32, all 0 between launches


def skinny_gemm(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    workspace: SkinnyWorkspace,
    tile: SkinnyTile,
    *,
    pdl: bool = False,
    gated: bool = False,
    scaled: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """out[:] = x @ w.T, or the same bits as its swiglu; allocates nothing, so graphs may hold it.

    x: [m, k] bf16 or f16, m <= tile.block_m, rows contiguous; w: [n, k] contiguous of x's dtype;
    out: [m, n] bf16 or f16, rows contiguous.
    `pdl` (Hopper and later): it starts while the kernel before it still runs, and waits for that
    kernel's end before it reads. A next kernel launched without `pdl` waits for this one's end.
    `gated`: w has gates in its first half, ups in its second; out is [m, n / 2]; tile.gates(n).
    `scaled`: of x and w in e4m3 the scales: [m, blocks of k], contiguous along m, and w's, as
    scaled_product_ref takes them.
    """
    (m, k), n = x.shape, w.shape[0]
    of_rows, scales = scaled or (None, None)
    assert out.dtype in DTYPES
    assert x.dtype == w.dtype == (out.dtype if scales is None else E4M3)
    assert scales is None or tile.block_k == SCALE_BLOCK
    assert of_rows is None or of_rows.stride(0) == 1
    assert 0 < m <= tile.block_m
    assert w.is_contiguous()
    assert x.stride(1) == out.stride(1) == 1
    assert tile.num_partials(n) <= workspace.partial.numel()
    assert tile.num_tiles(n) <= workspace.arrivals.numel()
    assert not gated or (tile.gates(n) and out.shape[1] == n // 2)
    steps = -(-k // (tile.block_k * tile.split))
    constants: dict[str, Any] = {
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
        "SPLIT": tile.split, "STEPS": steps,
        "STAGES": None if scales is None else tile.num_stages, "EVEN_N": n % tile.block_n == 0,
        "EVEN_K": steps * tile.block_k * tile.split == k, "PDL": pdl,
        "TRIGGER": max(-1, steps - 1 - tile.trigger), "GATED": gated,
        "GRAIN": 0 if scales is None else n // len(scales),
        "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip
    if pdl:
        constants["launch_pdl"] = True
    _skinny_gemm_kernel[(tile.num_tiles(n), tile.split)](
        x, w, of_rows, scales, out, workspace.partial, workspace.arrivals,
        m, n // 2 if gated else n, k, x.stride(0), out.stride(0),
        0 if of_rows is None else of_rows.stride(1), *strides_of(scales),
        **constants,
    )  # fmt: skip
    return out
