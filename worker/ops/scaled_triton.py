"""Kernels of scaled.py: x into eight bits, and products of many rows.

norms_triton has kernels that make x in eight bits at once, skinny_triton products of few rows.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from worker.config.checkpoint.quantization import SCALE_BLOCK
from worker.ops.e4m3_triton import block_in_e4m3
from worker.ops.jit import INTERPRETED, aligned, enter, has_dependent_launch, overlap, tl, triton
from worker.ops.norms_triton import launch_rms_norm, launch_swiglu
from worker.ops.product import OWN_ROWS, tile_for, workspace_of
from worker.ops.scaled import E4M3, room, strides_of
from worker.ops.scaled_boxed_triton import boxed_gemm, choose_boxed
from worker.ops.scaled_library import agrees, multiplied, suits
from worker.ops.skinny_triton import DTYPES, SkinnyTile, skinny_gemm

# Of x, that a program brings into eight bits. A GPU starts some 0.8 programs a ns: of 8 rows
# 2048 x 4096 takes 10.6 us, with 32 3.8 (benchmarks/results/eight_bits.md).
ROWS, ROWS_OF_MANY, MANY_ROWS = 8, 32, 1024


@triton.jit(do_not_specialize=["M", "stride_scales"])
def _eight_bits_kernel(
    x, values, scales, M, K, stride_x, stride_scales,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of columns, rows / ROWS)."""
    block = tl.program_id(0)
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    here = rows < M
    inside = here[:, None] & (at < K)[None, :]
    enter(PDL)
    x_tile = tl.load(x + rows[:, None] * stride_x + at[None, :], mask=inside, other=0.0)
    eight, scale = block_in_e4m3(x_tile)  # pyright: ignore
    tl.store(values + rows[:, None] * K + at[None, :], eight, mask=inside)
    tl.store(scales + block.to(tl.int64) * stride_scales + rows, scale, mask=here)


def eight_bits_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    assert x.stride(1) == 1
    values, of_rows = room(m, k, x.device)
    rows = ROWS_OF_MANY if m >= MANY_ROWS else ROWS
    _eight_bits_kernel[(of_rows.shape[1], -(-m // rows))](
        x, values, of_rows, m, k, x.stride(0), of_rows.stride(1),
        **overlap(x, ROWS=rows, BLOCK=SCALE_BLOCK, num_warps=4),
    )  # fmt: skip
    return values, of_rows


def add_rms_norm_eight_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    assert total is None or total.shape == x.shape
    values, of_rows = room(x.shape[0], x.shape[1], x.device)
    total = torch.empty_like(x) if total is None else total
    launch_rms_norm(x, residual, weight, values, total, eps, of_rows)
    return values, of_rows, total


def add_rms_norm_both_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert total is None or total.shape == x.shape
    values, of_rows = room(x.shape[0], x.shape[1], x.device)
    total, normed = torch.empty_like(x) if total is None else total, torch.empty_like(x)
    launch_rms_norm(x, residual, weight, values, total, eps, of_rows, normed)
    return values, of_rows, total, normed


def swiglu_eight_triton(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    m, width = gate_up.shape
    values, of_rows = room(m, width // 2, gate_up.device)
    launch_swiglu(gate_up, values, of_rows)
    return values, of_rows


@triton.jit(do_not_specialize=["M", "stride_column"])
def _scaled_gemm_kernel(
    x, of_rows, w, of_weights, out, M, N, K, stride_column, stride_rows, stride_blocks, stride_out,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, GRAIN: tl.constexpr,
    STAGES: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of x · tiles of w); GROUP tiles of x follow one another over all tiles of w.

    x: [M, K], w: [N, K], contiguous; of_rows: [M, blocks of K], contiguous along M; of_weights:
    [N / GRAIN, blocks of K]; out: [M, N], rows contiguous. STAGES: see _skinny_gemm_kernel.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0) // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    within = tl.program_id(0) % (GROUP * tiles_n)
    tokens = (first + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows beyond the last read it again and are not stored.
    rows, lines = tl.minimum(tokens, M - 1).to(tl.int64), tl.minimum(cols, N - 1).to(tl.int64)
    ks = tl.arange(0, BLOCK)
    x_at, w_at = x + rows[:, None] * K + ks[None, :], w + lines[:, None] * K + ks[None, :]
    row_at, weight_at = of_rows + rows, of_weights + lines // GRAIN * stride_rows
    enter(PDL)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in tl.range(0, K, BLOCK, num_stages=STAGES):
        if EVEN_K:
            x_tile, w_tile = tl.load(x_at), tl.load(w_at)
        else:
            inside = (begin + ks < K)[None, :]
            x_tile = tl.load(x_at, mask=inside, other=0.0)
            w_tile = tl.load(w_at, mask=inside, other=0.0)
        if INTERPRETED:
            x_tile, w_tile = x_tile.to(tl.float32), w_tile.to(tl.float32)
        scale = tl.load(row_at)[:, None] * tl.load(weight_at)[None, :]
        acc += tl.dot(x_tile, tl.trans(w_tile)) * scale
        x_at += BLOCK
        w_at += BLOCK
        row_at += stride_column
        weight_at += stride_blocks
    out_at = out + tokens.to(tl.int64)[:, None] * stride_out + cols[None, :]
    stored = (tokens < M)[:, None] & (cols < N)[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=stored)


@dataclass(frozen=True, slots=True)
class ScaledTile:
    """How a product of many rows is cut into programs."""

    rows: int  # of x
    columns: int  # of the result
    num_warps: int
    num_stages: int


@cache
def choose_scaled(m: int, n: int) -> ScaledTile:
    """The tile for [m, n], measured on an H200; sums do not depend on it."""
    return ScaledTile(128, 64, 4, 4 if m * n >= 1 << 20 else 6)


def scaled_gemm(
    x: Tensor, of_rows: Tensor, w: Tensor, scales: Tensor, out: Tensor, tile: ScaledTile
) -> Tensor:
    """out[:] = (x · of_rows) (w · scales)ᵀ; a row's result depends on that row alone, bit for bit.

    x: [m, k] e4m3; of_rows: [m, blocks of k] f32, contiguous along m; w, scales: see
    scaled_product_ref.
    """
    (m, k), n = x.shape, len(w)
    assert x.dtype == w.dtype == E4M3
    assert x.is_contiguous()
    assert w.is_contiguous()
    assert out.stride(1) == 1
    assert of_rows.stride(0) == 1
    num_tiles = -(-m // tile.rows) * -(-n // tile.columns)
    _scaled_gemm_kernel[(num_tiles,)](
        x, of_rows, w, scales, out, m, n, k, of_rows.stride(1), *strides_of(scales), out.stride(0),
        **overlap(
            x, BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK=SCALE_BLOCK, GRAIN=n // len(scales),
            STAGES=tile.num_stages, GROUP=8, EVEN_K=k % SCALE_BLOCK == 0, num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        ),
    )  # fmt: skip
    return out


def scaled_product_triton(
    values: Tensor,
    of_rows: Tensor,
    w: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    whole_blocks: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See scaled_product_ref.

    A row's result is the same in any batch of up to OWN_ROWS (64) rows, and of up to MAX_BOXED_ROWS
    (128) where choose_boxed has tiles for them, of k from 8192 on. Beyond it depends on the number
    of rows, too, if torch's library computes it.
    """
    m, n = len(values), len(w)
    if (tile := _boxed(values, w, dtype)) is not None:
        out = torch.empty(m, n, dtype=dtype, device=values.device) if out is None else out
        return _in_boxes(values, of_rows, w, scales, out, tile)
    if m > OWN_ROWS and whole_blocks and suits(w, scales, dtype) and agrees(values.device):
        product = multiplied(*_in_fours(values, of_rows), w, scales)[:m]
        return product if out is None else out.copy_(product)
    out = torch.empty(m, n, dtype=dtype, device=values.device) if out is None else out
    if m == 0:
        return out
    if (tile := tile_for(m, w, dtype)) is not None:
        return _streamed(values, w, out, tile, scaled=(of_rows, scales))
    return scaled_gemm(values, of_rows, w, scales, out, choose_scaled(m, n))


def scaled_gated_product_triton(
    values: Tensor,
    of_rows: Tensor,
    w: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    whole_blocks: bool = False,
) -> tuple[Tensor, Tensor]:
    m, n = len(values), len(w)
    if (tile := _boxed(values, w, dtype, gated=True)) is not None:
        out = torch.empty(m, n // 2, dtype=dtype, device=values.device)
        return eight_bits_triton(_in_boxes(values, of_rows, w, scales, out, tile, gated=True))
    tile = tile_for(m, w, dtype, product_follows=True)
    if tile is None or not tile.gates(n):
        y = scaled_product_triton(values, of_rows, w, scales, dtype, whole_blocks)
        return swiglu_eight_triton(y)
    out = torch.empty(m, n // 2, dtype=dtype, device=values.device)
    scaled = of_rows, scales
    return eight_bits_triton(_streamed(values, w, out, tile, gated=True, scaled=scaled))


def _boxed(
    values: Tensor, w: Tensor, dtype: torch.dtype, *, gated: bool = False
) -> SkinnyTile | None:
    """The tile of boxed_gemm; None: another kernel multiplies."""
    if dtype not in DTYPES or not (INTERPRETED or has_dependent_launch(values)):
        return None
    return choose_boxed(len(values), *w.shape, gated=gated)


def _in_boxes(
    values: Tensor, of_rows: Tensor, w: Tensor, scales: Tensor, out: Tensor, tile: SkinnyTile,
    *, gated: bool = False,
) -> Tensor:  # fmt: skip
    boxed_gemm(values, of_rows, w, scales, out, workspace_of(values.device), tile, gated=gated)
    return out


def _in_fours(values: Tensor, of_rows: Tensor) -> tuple[Tensor, Tensor]:
    """The same, and rows up to a multiple of 4, whose products nobody reads."""
    height = aligned(len(values))
    return (
        values.as_strided((height, values.shape[1]), values.stride()),
        of_rows.as_strided((height, of_rows.shape[1]), of_rows.stride()),
    )


def _streamed(values: Tensor, w: Tensor, out: Tensor, tile: SkinnyTile, **options: Any) -> Tensor:
    pdl = has_dependent_launch(values)
    return skinny_gemm(values, w, out, workspace_of(values.device), tile, pdl=pdl, **options)
