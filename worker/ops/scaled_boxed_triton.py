"""Products in eight bits for the rows of a wide decode step, whose weights stream through once.

As in skinny_triton weights are the left operand, K is cut into as many ranges whatever the number
of rows, and the last program of a tile adds up the sums of ranges in their order: so a row has the
same bits here as there. The TMA loads both operands, a box of 128 columns a step, and fills what
lies beyond their rows and columns with zeros.
"""

from dataclasses import replace
from functools import cache

from torch import Tensor

from worker.config.checkpoint.quantization import SCALE_BLOCK
from worker.ops.jit import (
    INTERPRETED,
    TensorDescriptor,
    gdc_launch_dependents,
    gdc_wait,
    overlap,
    tl,
    triton,
)
from worker.ops.norms_triton import silu_and_mul
from worker.ops.product import MAX_BOXED_PARTIALS, MAX_TILES, OWN_ROWS
from worker.ops.scaled import E4M3, strides_of
from worker.ops.skinny_triton import (
    DTYPES,
    MAX_ROWS,
    SkinnyTile,
    SkinnyWorkspace,
    choose,
    store_sums,
)


@triton.jit
def _sum_of_step(
    acc, w, row, begin, x_tile, x_scale, scales_at, there,
    WIDTH: tl.constexpr, GRAIN: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """acc [WIDTH, columns of x_tile's], and what rows of w from `row` on add to it in a step."""
    w_tile = w.load([row, begin])
    w_scale = tl.load(scales_at) if EVEN_K else tl.load(scales_at, mask=there, other=0.0)
    if INTERPRETED:
        w_tile, x_tile = w_tile.to(tl.float32), x_tile.to(tl.float32)
    if GRAIN % WIDTH == 0:
        scale = (w_scale * x_scale)[None, :]
    else:
        scale = w_scale[:, None] * x_scale[None, :]
    return acc + tl.dot(w_tile, tl.trans(x_tile)) * scale


@triton.jit
def _scales_at(
    scales, row, last, stride_rows, WIDTH: tl.constexpr, GRAIN: tl.constexpr
):  # fmt: skip
    """Where the first scale of WIDTH rows from `row` on is: of all of them, or of every one."""
    lines = row if GRAIN % WIDTH == 0 else row + tl.arange(0, WIDTH)
    return scales + tl.minimum(lines, last) // GRAIN * stride_rows


@triton.jit(do_not_specialize=["M", "stride_column"])
def _boxed_gemm_kernel(
    x, w, of_rows, scales, out, partial, arrivals,
    M, N, K, stride_out, stride_column, stride_rows, stride_blocks,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, GRAIN: tl.constexpr,
    SPLIT: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, EVEN_K: tl.constexpr,
    GATED: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of x · tiles of w, SPLIT): tiles of x that read the same weights side by side.

    x: boxes [BLOCK_M, BLOCK] of [M, K]; w: boxes [BLOCK_N, BLOCK] of [N, K]; out: [M, N]; of_rows:
    boxes [BLOCK_M] of the memory of scales, a column every `stride_column`, of rows beyond M
    anything. (Of fewer scales than threads a load would be slow: a thread copies all it needs.)
    GATED: w is [2 N, K], gate rows before up rows, its boxes [BLOCK_N / 2, BLOCK], and a step has
    two products, of gates and of ups; SPLIT is 1. Otherwise see _skinny_gemm_kernel.
    """
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # rows of a box, columns of the output
    tiles = tl.cdiv(M, BLOCK_M)
    tile, part = tl.program_id(0), tl.program_id(1)
    row, first = tile // tiles * WIDTH, tile % tiles * BLOCK_M
    second = row + N  # of ups
    if PDL:
        if TRIGGER < 0:
            gdc_launch_dependents()
        gdc_wait()
    tokens = first + tl.arange(0, BLOCK_M)
    here = tokens < M
    step = part * STEPS
    last = (2 * N if GATED else N) - 1
    at = _scales_at(scales, row, last, stride_rows, WIDTH, GRAIN)  # pyright: ignore
    second_at = _scales_at(scales, second, last, stride_rows, WIDTH, GRAIN)  # pyright: ignore
    at += step * stride_blocks
    second_at += step * stride_blocks
    acc = tl.zeros((WIDTH, BLOCK_M), tl.float32)
    other = acc  # sums of ups
    for i in tl.range(0, STEPS, num_stages=STAGES):
        begin = (step + i) * BLOCK
        there = begin < K
        x_tile = x.load([first, begin])
        x_scale = of_rows.load([(step + i) * stride_column + first])
        acc = _sum_of_step(  # pyright: ignore
            acc, w, row, begin, x_tile, x_scale, at, there, WIDTH, GRAIN, EVEN_K
        )
        if GATED:
            other = _sum_of_step(  # pyright: ignore
                other, w, second, begin, x_tile, x_scale, second_at, there, WIDTH, GRAIN, EVEN_K
            )
        at += stride_blocks
        second_at += stride_blocks
        if PDL and i == TRIGGER:
            gdc_launch_dependents()
    if GATED:
        dtype = out.dtype.element_ty
        acc = silu_and_mul(acc.to(dtype).to(tl.float32), other.to(dtype).to(tl.float32), dtype)
    acc = tl.trans(acc)
    cols = row + tl.arange(0, WIDTH)
    inside = here[:, None] & (cols < N)[None, :]
    store_sums(  # pyright: ignore
        acc, out + tokens[:, None] * stride_out + cols[None, :], inside, here[:, None],
        partial, arrivals, tile, part, BLOCK_M, BLOCK_N, SPLIT,
    )  # fmt: skip


# H200, Qwen3-8B, us. 64 rows, skinny and boxed: qkv 17.3, 13.5; o 13.7, 11.4; down 27.1, 20.8; up
# 28.3, 27.1; gated 33.2, 32.5. 128 rows, library and boxed: down 35.7, 26.3, of k 12288; of k 4096
# qkv 14.9, 16.2; o 14.6, 15.7; up 32.5, 33.5; gated 36.7, 37.9. 256 rows: the library everywhere.
FEW_ROWS, MAX_BOXED_ROWS = 32, 128
LONG = 8192  # the least k with tiles for more than OWN_ROWS


@cache
def choose_boxed(m: int, n: int, k: int, *, gated: bool = False) -> SkinnyTile | None:
    """The tile for x: [m, k], w: [n, k], gates and ups if it is gated; None: another kernel's."""
    most = MAX_BOXED_ROWS if k >= LONG else OWN_ROWS
    if not FEW_ROWS < m <= most or k % 16:
        return None
    narrow = (64, 4) if n >= 16384 else (64, 6)
    block_n, num_stages = (128, 4) if gated or m > OWN_ROWS else narrow
    like = choose(MAX_ROWS, n, k, product_follows=gated, eight=True)
    if gated and (n % block_n or not like.gates(n)):
        return None
    tile = replace(like, block_m=64, block_n=block_n, num_warps=4, num_stages=num_stages)
    tiles, partials = scratch(m, n, tile)
    return tile if tiles <= MAX_TILES and partials <= MAX_BOXED_PARTIALS else None


def scratch(m: int, n: int, tile: SkinnyTile) -> tuple[int, int]:
    """Counters and floats of workspace that a product [m, n] needs."""
    of_x = -(-m // tile.block_m)  # tiles, side by side
    return of_x * tile.num_tiles(n), of_x * tile.num_partials(n)


def boxed_gemm(
    x: Tensor,
    of_rows: Tensor,
    w: Tensor,
    scales: Tensor,
    out: Tensor,
    workspace: SkinnyWorkspace,
    tile: SkinnyTile,
    *,
    gated: bool = False,
) -> None:
    """out[:] = (x · of_rows) (w · scales)ᵀ, or with the same bits its swiglu.

    x: [m, k] e4m3, of_rows and scales: see skinny_gemm, as w and gated; k a multiple of 16.
    out: [m, n] bf16 or f16, [m, n / 2] if gated, rows contiguous; then n is a multiple of
    tile.block_n.
    """
    (m, k), n, column = x.shape, len(w), of_rows.stride(1)
    box = tile.block_n // 2 if gated else tile.block_n
    (tiles, partials), steps = scratch(m, n, tile), -(-k // (SCALE_BLOCK * tile.split))
    assert x.dtype == w.dtype == E4M3
    assert out.dtype in DTYPES
    assert tile.block_k == SCALE_BLOCK
    assert tile.block_m >= 32  # boxes in shared memory begin at 128 bytes, those of scales too
    assert of_rows.stride(0) == out.stride(1) == 1
    assert tiles <= workspace.arrivals.numel()
    assert partials <= workspace.partial.numel()
    assert not gated or (tile.gates(n) and out.shape[1] == n // 2 and n % tile.block_n == 0)
    size = (of_rows.shape[1] - 1) * column + m
    flat = of_rows.as_strided((size,), (1,))
    boxes = TensorDescriptor.from_tensor
    _boxed_gemm_kernel[(tiles, tile.split)](
        boxes(x, [tile.block_m, SCALE_BLOCK]), boxes(w, [box, SCALE_BLOCK]),
        boxes(flat, [tile.block_m]), scales, out, workspace.partial, workspace.arrivals,
        m, n // 2 if gated else n, k, out.stride(0), column, *strides_of(scales),
        **overlap(
            x, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK=SCALE_BLOCK,
            GRAIN=n // len(scales), SPLIT=tile.split, STEPS=steps, STAGES=tile.num_stages,
            EVEN_K=steps * SCALE_BLOCK * tile.split == k, GATED=gated,
            TRIGGER=max(-1, steps - 1 - tile.trigger), num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        ),
    )  # fmt: skip
