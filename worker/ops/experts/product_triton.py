"""Kernels of product.py: grouped products whose weights are the left operand, then a sum.

A program has some rows of one expert's weights and some of that expert's rows of tokens. Which
ones, it finds from `starts`: the grid is as large as any routing may need, and programs beyond the
rows end at once. Sums over K ascend; the number of tokens side by side changes no sum of a row.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from worker.config.checkpoint.experts import Held
from worker.config.checkpoint.quantization import SCALE_BLOCK
from worker.ops.experts.product import PLAIN_FINISH, Finish, PackedPair, expert_products_ref
from worker.ops.experts.route import Routes
from worker.ops.jit import INTERPRETED, enter, overlap, power_of_two, tl, triton
from worker.ops.norms_triton import silu_and_mul
from worker.ops.packed import bytes_of
from worker.ops.packed_triton import multiply_packed, steps_of, takes, whole_sums, words_of
from worker.ops.scaled import E4M3, strides_of
from worker.ops.scaled_triton import eight_bits_triton


@dataclass(frozen=True, slots=True)
class Tile:
    """How a grouped product is cut into programs: by the step's tokens and the shapes alone."""

    tokens: int  # rows of tokens
    rows: int  # of an expert's weights
    block_k: int
    num_warps: int
    num_stages: int


# Most tokens of a tile -> (rows, block_k, num_warps, num_stages), gated and not: on an H100.
_TABLE: dict[int, tuple[tuple[int, int, int, int], tuple[int, int, int, int]]] = {
    32: ((64, 128, 4, 3), (64, 128, 4, 3)),
    64: ((64, 128, 4, 3), (128, 64, 4, 4)),
    128: ((128, 64, 8, 3), (128, 64, 4, 3)),
}
# In four bits, on an H200: the same where it differs, and for so few rows of all experts that
# programs leave multiprocessors idle.
_FOUR = _TABLE | {
    16: ((64, 128, 4, 3), (128, 128, 4, 3)),
    32: ((128, 128, 4, 3), (64, 128, 4, 3)),
}
_FEW_ROWS, _FEW = 8, (64, 256, 4, 3)
# In eight bits, on an H200: most tokens -> (rows, num_warps, num_stages).
_EIGHT: dict[int, tuple[int, int, int]] = {16: (128, 8, 4), 32: (64, 4, 6), 64: (128, 4, 4)}


@cache
def choose(
    num_tokens: int, top_k: int, num_experts: int, *, gated: bool, eight: bool = False,
    four: bool = False,
) -> Tile:  # fmt: skip
    """The tile for so many tokens, of which an expert has its even share up to twice."""
    share = power_of_two(max(1, 2 * num_tokens * top_k // num_experts))
    tokens = min(max(16, share), max(_EIGHT if eight else _TABLE))
    if eight:
        rows, num_warps, num_stages = _EIGHT[tokens]
        return Tile(tokens, rows, SCALE_BLOCK, num_warps, num_stages)
    if four and num_tokens * top_k <= _FEW_ROWS:
        return Tile(tokens, *_FEW)
    table = sorted((_FOUR if four else _TABLE).items())
    shapes = next(shapes for most, shapes in table if tokens <= most)
    return Tile(tokens, *shapes[not gated])


@triton.jit
def _item(starts, item, COUNT: tl.constexpr, BLOCK_T: tl.constexpr):
    """(expert, first row, row behind its last) of an item; expert -1: there is no such item."""
    experts = tl.arange(0, triton.next_power_of_2(COUNT))
    at = starts + experts  # beside the L1, which may hold numbers of before the kernel waits
    begins = tl.load(at, mask=experts < COUNT, other=0, cache_modifier=".cg")
    ends = tl.load(at + 1, mask=experts < COUNT, other=0, cache_modifier=".cg")
    items = (ends - begins + BLOCK_T - 1) // BLOCK_T
    behind = tl.cumsum(items, 0)
    expert = tl.sum((behind <= item).to(tl.int32), 0)
    this = experts == expert
    first = tl.sum(tl.where(this, begins + (item - behind + items) * BLOCK_T, 0), 0)
    end = tl.sum(tl.where(this, ends, 0), 0)
    return tl.where(expert < COUNT, expert, -1), first, end


@triton.jit
def _gated(gate, up, dtype, GAIN: tl.constexpr, PLUS: tl.constexpr, LIMIT: tl.constexpr):
    """See gated_ref; of f32. A NaN stays one."""
    if GAIN == 1 and PLUS == 0 and LIMIT == 0:
        return silu_and_mul(gate, up, dtype)
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return (up + PLUS) * tl.div_rn(gate, 1.0 + tl.exp(-GAIN * gate))


@triton.jit
def _grouped_kernel(
    x, of_rows, w, scales, zeros, factors, bias, weights, starts, order, out, N, K, stride_x,
    num_tiles, stride_column, stride_expert, stride_rows, stride_blocks,
    COUNT: tl.constexpr, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GATED: tl.constexpr, GRAIN: tl.constexpr, STAGES: tl.constexpr,
    STEPS: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, GAIN: tl.constexpr, PLUS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Grid (items · tiles of weights).

    GATED: x: [n, K] by token; w: [COUNT, 2 · N, K], gates before ups; out: [rows, N].
    Else x: [rows, K]; w: [COUNT, N, K]; out: [n · TOP_K, N] by assignment, times its weight.
    GRAIN, STAGES, of_rows: see _skinny_gemm_kernel; KIND, GROUP, zeros, factors: of weights in four
    bits, see multiply_packed; KIND below 0: in more. bias: [COUNT, rows of w], or None; GAIN, PLUS,
    LIMIT: see Finish.
    """
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # columns of the output
    item, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    if GATED:
        enter(PDL)  # else the kernel before is the gated one: its programs have waited for `starts`
    expert, first, end = _item(starts, item, COUNT, BLOCK_T)  # pyright: ignore
    if expert < 0:
        if not GATED:
            enter(PDL)
        return
    rows = first + tl.arange(0, BLOCK_T)
    here = rows < end
    at = tl.load(order + rows, mask=here, other=0, cache_modifier=".cg")
    within = tl.arange(0, BLOCK_N)
    # Rows of weights beyond N read the last one again and are not stored.
    lines = tl.minimum(tile * WIDTH + (within % WIDTH if GATED else within), N - 1)
    if GATED:
        lines += tl.where(within < WIDTH, 0, N)
        height = 2 * N
        source = at // TOP_K
    else:
        height = N
        source = rows
    ks = tl.arange(0, BLOCK_K)
    numbers = expert.to(tl.int64) * height + lines
    w_rows = w + numbers * K
    if not GATED:
        enter(PDL)
    w_at = w_rows[:, None] + ks[None, :]
    x_rows = x + source.to(tl.int64)[:, None] * stride_x
    x_at = x_rows + ks[None, :]
    if GRAIN:
        scales_at = scales + expert.to(tl.int64) * stride_expert + lines // GRAIN * stride_rows
        row_at = of_rows + source
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    dtype = out.dtype.element_ty
    for begin in tl.range(0, STEPS * BLOCK_K, BLOCK_K, num_stages=STAGES):
        if KIND >= 0:
            acc = multiply_packed(
                acc, x_rows, here[:, None], numbers, begin, w, scales, zeros, K, dtype,
                BLOCK_K, KIND, GROUP, EVEN_K,
            )  # fmt: skip
            w_tile, x_tile = acc, acc  # they are loaded there
        elif EVEN_K:
            w_tile = tl.load(w_at)
            x_tile = tl.load(x_at, mask=here[:, None], other=0.0)
        else:
            inside = (begin + ks < K)[None, :]
            w_tile = tl.load(w_at, mask=inside, other=0.0)
            x_tile = tl.load(x_at, mask=here[:, None] & inside, other=0.0)
        if INTERPRETED:
            w_tile, x_tile = w_tile.to(tl.float32), x_tile.to(tl.float32)
        if KIND >= 0:
            pass
        elif GRAIN:
            scale = tl.load(scales_at)[:, None] * tl.load(row_at, mask=here, other=0.0)[None, :]
            acc += tl.dot(w_tile, tl.trans(x_tile), input_precision="ieee") * scale
            scales_at += stride_blocks
            row_at += stride_column
        else:
            acc = tl.dot(w_tile, tl.trans(x_tile), acc, input_precision="ieee")
        w_at += BLOCK_K
        x_at += BLOCK_K
    if KIND >= 0:
        acc = whole_sums(acc, dtype, KIND)
    if factors is not None:
        acc *= tl.load(factors + numbers)[:, None]
    if bias is not None:
        acc += tl.load(bias + numbers).to(tl.float32)[:, None]
    cols = tile * WIDTH + tl.arange(0, WIDTH)
    if GATED:
        pair = tl.permute(tl.reshape(acc, (2, WIDTH, BLOCK_T)), (1, 2, 0))
        gate, up = tl.split(pair)
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        acc = _gated(gate, up, dtype, GAIN, PLUS, LIMIT)  # pyright: ignore
        spot = rows
    else:
        acc = acc * tl.load(weights + at, mask=here, other=0.0)[None, :]
        spot = at
    out_at = out + spot.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(out_at, tl.trans(acc).to(dtype), mask=here[:, None] & (cols < N)[None, :])


@triton.jit
def _combine_kernel(
    parts, ids, out, size, stride_out, first, count,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of columns). parts: [n · TOP_K, size]."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    enter(PDL)
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(TOP_K):
        spot = token * TOP_K + place
        expert = tl.load(ids + spot)
        held = (expert >= first) & (expert < first + count)
        total += tl.load(parts + spot * size + at, mask=inside & held, other=0.0).to(tl.float32)
    tl.store(out + token * stride_out + at, total.to(out.dtype.element_ty), mask=inside)


class _Stack(NamedTuple):
    """The matrices of all experts, [count, rows, columns]."""

    w: Tensor
    scales: Tensor | None  # of e4m3
    packed: tuple[Any, ...]  # of four bits: (scales, zeros, factors); (): it is in more
    bias: Tensor | None  # [count, rows]

    def multiply(self, x: Tensor, routes: Routes, n: int, out: Tensor, finish: Finish) -> None:
        """What _grouped_kernel makes of n tokens; gated where out is narrower than w has rows."""
        w, scales, packed, bias = self
        (count, rows, _), (num_rows, columns), (_, k) = w.shape, out.shape, x.shape
        assert w.is_contiguous()
        assert bias is None or (bias.is_contiguous() and bias.shape == w.shape[:2])
        gated, top_k = columns < rows, routes.ids.shape[1]
        tile = choose(n, top_k, count, gated=gated, eight=scales is not None, four=bool(packed))
        num_items = min(num_rows, num_rows // tile.tokens + min(count, num_rows))
        num_tiles = -(-columns // (tile.rows // 2 if gated else tile.rows))
        of_rows, of_columns, strides = None, 0, (0, 0, 0)
        if scales is not None:
            x, of_rows = eight_bits_triton(x)
            of_columns, strides = of_rows.stride(1), (scales.stride(0), *strides_of(scales[0]))
        kind, group = steps_of(packed[0], k) if packed else (-1, 0)
        held, zeros, factors = packed or (scales, None, None)
        _grouped_kernel[(num_items * num_tiles,)](
            x, of_rows, w.view(torch.uint16) if packed else w, words_of(held), zeros, factors, bias,
            routes.weights, routes.starts, routes.order, out, columns, k, x.stride(0), num_tiles,
            of_columns, *strides,
            **overlap(
                x, COUNT=count, TOP_K=top_k, BLOCK_T=tile.tokens, BLOCK_N=tile.rows,
                BLOCK_K=tile.block_k, GATED=gated, STEPS=-(-k // tile.block_k),
                EVEN_K=k % tile.block_k == 0,
                GRAIN=0 if scales is None else rows // scales.shape[1],
                STAGES=None if held is None else tile.num_stages,
                num_warps=tile.num_warps, num_stages=tile.num_stages, KIND=kind, GROUP=group,
                GAIN=finish.gain, PLUS=finish.plus, LIMIT=finish.limit,
            ),
        )  # fmt: skip


def expert_products_triton(
    x: Tensor,
    routes: Routes,
    gate_up: Tensor,
    down: Tensor,
    held: Held,
    out: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    packed: PackedPair | None = None,
    finish: Finish = PLAIN_FINISH,
) -> Tensor:
    """See expert_products_ref; padding in `routes` is read by no product."""
    if packed is not None and not takes(x, packed[0][0]):
        return expert_products_ref(x, routes, gate_up, down, held, out, None, packed, finish)
    (n, size), top_k = x.shape, routes.ids.shape[1]
    width, num_rows = gate_up.shape[1] // 2, n * top_k
    stored = (size, width) if packed is None else (bytes_of(size), bytes_of(width))
    assert gate_up.shape == (held.count, 2 * width, stored[0])
    assert down.shape == (held.count, size, stored[1])
    assert (scales is not None) == (gate_up.dtype == E4M3) == (down.dtype == E4M3)
    assert x.stride(1) == 1
    hidden, parts = x.new_empty(num_rows, width), x.new_empty(num_rows, size)
    (of_up, of_down), (up_four, down_four) = scales or (None, None), packed or ((), ())
    _Stack(gate_up, of_up, up_four, finish.up_bias).multiply(x, routes, n, hidden, finish)
    _Stack(down, of_down, down_four, finish.down_bias).multiply(hidden, routes, n, parts, finish)
    out, block = torch.empty_like(x) if out is None else out, min(1024, power_of_two(size))
    _combine_kernel[(n, -(-size // block))](
        parts, routes.ids, out, size, out.stride(0), *held,
        **overlap(x, TOP_K=top_k, BLOCK=block, num_warps=4),
    )  # fmt: skip
    return out
