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
from worker.ops.e4m3_triton import block_in_e4m3
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
from worker.ops.product import MAX_BOXED_PARTIALS, MAX_TILES
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


@triton.jit(do_not_specialize=["M", "stride_column", "stride_out_column"])
def _boxed_gemm_kernel(
    x, w, of_rows, scales, out, out_rows, partial, arrivals,
    M, N, K, stride_out, stride_column, stride_rows, stride_blocks, stride_out_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, GRAIN: tl.constexpr,
    SPLIT: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, EVEN_K: tl.constexpr,
    GATED: tl.constexpr, HALVED: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of x · tiles of w, SPLIT): tiles of x that read the same weights side by side.

    x: boxes [BLOCK_M, BLOCK] of [M, K]; w: boxes [BLOCK_N, BLOCK] of [N, K]; out: [M, N]; of_rows:
    boxes [BLOCK_M] of the memory of scales, a column every `stride_column`, of rows beyond M
    anything. (Of fewer scales than threads a load would be slow: a thread copies all it needs.)
    HALVED: w's are [BLOCK_N / 2, BLOCK], and a step has two products, one after the other: else
    registers would hold a step's sums of all rows beside the whole ones.
    GATED: w is [2 N, K], gate rows before up rows, a half is of gates; SPLIT is 1.
    out_rows: None, or scales of `out`, which is in e4m3 then: [M, blocks of N], GATED,
    BLOCK_N = 2 · BLOCK. Otherwise see _skinny_gemm_kernel.
    """
    WIDTH: tl.constexpr = BLOCK_N // 2 if HALVED else BLOCK_N  # rows of a box
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # of the output
    tiles = tl.cdiv(M, BLOCK_M)
    tile, part = tl.program_id(0), tl.program_id(1)
    row, first = tile // tiles * COLUMNS, tile % tiles * BLOCK_M
    second = row + (N if GATED else WIDTH)
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
    other = acc  # sums of the second half
    for i in tl.range(0, STEPS, num_stages=STAGES):
        begin = (step + i) * BLOCK
        there = begin < K
        x_tile = x.load([first, begin])
        x_scale = of_rows.load([(step + i) * stride_column + first])
        acc = _sum_of_step(  # pyright: ignore
            acc, w, row, begin, x_tile, x_scale, at, there, WIDTH, GRAIN, EVEN_K
        )
        if HALVED:
            other = _sum_of_step(  # pyright: ignore
                other, w, second, begin, x_tile, x_scale, second_at, there, WIDTH, GRAIN, EVEN_K
            )
        at += stride_blocks
        second_at += stride_blocks
        if PDL and i == TRIGGER:
            gdc_launch_dependents()
    if GATED:
        dtype = tl.bfloat16 if out_rows is not None else out.dtype.element_ty
        acc = silu_and_mul(acc.to(dtype).to(tl.float32), other.to(dtype).to(tl.float32), dtype)
    elif HALVED:
        acc = tl.reshape(tl.permute(tl.join(acc, other), (2, 0, 1)), (BLOCK_N, BLOCK_M))
    acc = tl.trans(acc)
    cols = row + tl.arange(0, COLUMNS)
    inside = here[:, None] & (cols < N)[None, :]
    out_at = out + tokens[:, None] * stride_out + cols[None, :]
    if out_rows is not None:
        eight, scale = block_in_e4m3(acc.to(tl.bfloat16))  # pyright: ignore
        tl.store(out_at, eight, mask=inside)
        tl.store(out_rows + row // BLOCK * stride_out_column + tokens, scale, mask=here)
    else:
        store_sums(  # pyright: ignore
            acc, out_at, inside, here[:, None], partial, arrivals, tile, part,
            BLOCK_M, BLOCK_N, SPLIT,
        )  # fmt: skip


# Tiles by the most rows of x, and by the smallest n of weights: block_m, block_n, num_warps and
# num_stages, or None: another kernel is as fast. The splits are those of skinny_triton. Boxes in
# shared memory begin at 128 bytes, and so the scales of a step are 32 at least.
_BANDS, _FEWEST = (32, 64, 128, 256), 32
_Shapes = tuple[tuple[int, int, int, int] | None, ...]
_TABLE: tuple[tuple[int, _Shapes], ...] = (
    (16384, (None, (64, 128, 4, 4), (128, 128, 8, 4), (128, 128, 8, 4))),
    (0, (None, (64, 64, 4, 4), (128, 64, 4, 3), (128, 128, 8, 4))),
)
_GATED: _Shapes = None, (64, 256, 8, 4), (128, 128, 4, 4), (128, 128, 4, 4)
MAX_BOXED_ROWS = _BANDS[-1]
MOST_SUMS = 64 * 32  # of a step in the registers of a warp, beside as many whole ones


@cache
def choose_boxed(m: int, n: int, k: int, *, gated: bool = False) -> SkinnyTile | None:
    """The tile for x: [m, k], w: [n, k], gates and ups if it is gated; None: another kernel's."""
    if not 0 < m <= MAX_BOXED_ROWS or k % 16:
        return None
    shapes = _GATED if gated else next(shapes for least, shapes in _TABLE if n >= least)
    shape = next(shape for most, shape in zip(_BANDS, shapes, strict=True) if m <= most)
    like = choose(MAX_ROWS, n, k, product_follows=gated, eight=True)
    if shape is None or (gated and (n % (2 * SCALE_BLOCK) or not like.gates(n))):
        return None
    block_m, block_n, num_warps, num_stages = shape
    tile = replace(
        like, block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages
    )
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
    out_rows: Tensor | None = None,
) -> None:
    """out[:] = (x · of_rows) (w · scales)ᵀ, or with the same bits its swiglu.

    x: [m, k] e4m3, of_rows and scales: see skinny_gemm, as w and gated; k a multiple of 16.
    out: [m, n] bf16 or f16, rows contiguous; with out_rows, of a gated product, both are eight_bits
    of its bf16: n / 2 is a multiple of 128, and tile.block_n 256.
    """
    (m, k), n, column = x.shape, len(w), of_rows.stride(1)
    halved = gated or tile.block_n * tile.block_m > MOST_SUMS * tile.num_warps
    box = tile.block_n // 2 if halved else tile.block_n
    (tiles, partials), steps = scratch(m, n, tile), -(-k // (SCALE_BLOCK * tile.split))
    assert x.dtype == w.dtype == E4M3
    assert out.dtype == E4M3 if out_rows is not None else out.dtype in DTYPES
    assert tile.block_k == SCALE_BLOCK
    assert tile.block_m >= _FEWEST
    assert of_rows.stride(0) == out.stride(1) == 1
    assert tiles <= workspace.arrivals.numel()
    assert partials <= workspace.partial.numel()
    assert not gated or (tile.gates(n) and out.shape[1] == n // 2 and n % (2 * box) == 0)
    assert out_rows is None or (gated and box == SCALE_BLOCK)
    size = (of_rows.shape[1] - 1) * column + m
    flat = of_rows.as_strided((size,), (1,))
    boxes = TensorDescriptor.from_tensor
    _boxed_gemm_kernel[(tiles, tile.split)](
        boxes(x, [tile.block_m, SCALE_BLOCK]), boxes(w, [box, SCALE_BLOCK]),
        boxes(flat, [tile.block_m]), scales, out, out_rows, workspace.partial, workspace.arrivals,
        m, n // 2 if gated else n, k, out.stride(0), column, *strides_of(scales),
        0 if out_rows is None else out_rows.stride(1),
        **overlap(
            x, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK=SCALE_BLOCK,
            GRAIN=n // len(scales), SPLIT=tile.split, STEPS=steps, STAGES=tile.num_stages,
            EVEN_K=steps * SCALE_BLOCK * tile.split == k, GATED=gated, HALVED=halved,
            TRIGGER=max(-1, steps - 1 - tile.trigger), num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        ),
    )  # fmt: skip
