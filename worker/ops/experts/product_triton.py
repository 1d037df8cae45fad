"""Kernels of product.py: grouped products whose weights are the left operand, then a sum.

A program has some rows of one expert's weights and some of that expert's rows of tokens. Which
ones, it finds from `starts`: the grid is as large as any routing may need, and programs beyond the
rows end at once. Sums over K ascend; the number of tokens side by side changes no sum of a row.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from worker.config.checkpoint.experts import Held
from worker.config.checkpoint.quantization import SCALE_BLOCK
from worker.ops.experts.product import (
    MAX_BESIDE,
    PLAIN_FINISH,
    Beside,
    Finish,
    PackedPair,
    expert_products_ref,
)
from worker.ops.experts.route import Routes
from worker.ops.jit import (
    INTERPRETED,
    TensorDescriptor,
    enter,
    from_gluon,
    gdc_launch_dependents,
    gdc_wait,
    has_dependent_launch,
    is_hopper,
    overlap,
    power_of_two,
    tl,
    triton,
)
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
    tail: int = 0  # rows of tokens of an expert's last tile, if so many are enough; 0: as `tokens`
    is_boxed: bool = False  # weights are loaded in boxes, by the TMA


# Most tokens of a tile -> (rows, block_k, num_warps, num_stages), gated and not: on an H100.
# Five stages of few tokens keep an SM at two programs: of one row with shared experts, which has
# 256, one SM would else have three and another one.
_TABLE: dict[int, tuple[tuple[int, int, int, int], tuple[int, int, int, int]]] = {
    16: ((64, 128, 4, 3), (64, 128, 4, 5)),
    32: ((64, 128, 4, 3), (64, 128, 4, 3)),
    64: ((64, 128, 4, 3), (128, 64, 4, 4)),
    128: ((128, 64, 8, 3), (128, 64, 4, 3)),
}
TAIL = 64
# Of many tokens, of matrices in 16 bits on sm_90, gated and not: on an H200, where a prompt of 2048
# tokens of V2-Lite takes 314 and 163 us a layer (with pointers 361 and 184).
_BOXED = Tile(128, 256, 64, 8, 4, TAIL, is_boxed=True)
# Of bf16 from such an even share of rows on there is a faster kernel, with the same bits.
GLUON_FROM, IN_GLUON = 96, ("worker.ops.experts.product_gluon", "grouped_product")
# In four bits, on an H200: the same where it differs, and for so few rows of all experts that
# programs leave multiprocessors idle.
_FOUR = _TABLE | {
    16: ((64, 128, 4, 3), (128, 128, 4, 3)),
    32: ((128, 128, 4, 3), (64, 128, 4, 3)),
}
_FEW_ROWS, _FEW = 8, (64, 256, 4, 3)
# In eight bits, on an H200: most tokens -> (rows, num_warps, num_stages), gated and not.
_EIGHT: dict[int, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    16: ((128, 4, 6), (128, 4, 4)), 32: ((64, 4, 6), (64, 4, 6)), 64: ((128, 4, 4), (128, 4, 4)),
}  # fmt: skip


@cache
def choose(
    num_tokens: int, top_k: int, num_experts: int, *, gated: bool, kind: str = "plain"
) -> Tile:
    """The tile for so many tokens, of which an expert has its even share up to twice.

    top_k, num_experts: without what every token has.

    kind: of weights; "eight" or "packed" (in four bits), "boxed" if the TMA may load them.
    """
    share = power_of_two(max(1, 2 * num_tokens * top_k // num_experts))
    tokens = min(max(16, share), max(_EIGHT if kind == "eight" else _TABLE))
    if kind == "eight":
        rows, num_warps, num_stages = _EIGHT[tokens][not gated]
        return Tile(tokens, rows, SCALE_BLOCK, num_warps, num_stages)
    if kind == "boxed" and tokens == _BOXED.tokens:
        return replace(_BOXED, tail=0) if gated and share > 8 * TAIL else _BOXED
    if kind == "packed" and num_tokens * top_k <= _FEW_ROWS:
        return Tile(tokens, *_FEW)
    table = sorted((_FOUR if kind == "packed" else _TABLE).items())
    shapes = next(shapes for most, shapes in table if tokens <= most)
    return Tile(tokens, *shapes[not gated], TAIL if tokens > TAIL and kind != "packed" else 0)


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
def _rows_of_item(
    x, of_rows, w, scales, zeros, factors, bias, weights, order, out, N, K, stride_x,
    stride_column, stride_expert, stride_rows, stride_blocks, shared, number, boxes,
    expert, first, end, tile, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GATED: tl.constexpr, GRAIN: tl.constexpr, STAGES: tl.constexpr,
    STEPS: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, GAIN: tl.constexpr, PLUS: tl.constexpr, LIMIT: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """What a program of _grouped_kernel computes: up to BLOCK_T rows of tokens from `first` on.

    number: of a shared expert, below SHARED; its rows are one a token.
    """
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # columns of the output
    rows = first + tl.arange(0, BLOCK_T)
    here = rows < end
    routed = here & (number >= SHARED) if SHARED else here
    at = tl.load(order + rows, mask=routed, other=0, cache_modifier=".cg")
    within = tl.arange(0, BLOCK_N)
    # Rows of weights beyond N read the last one again, or in boxes others, and are not stored.
    lines = tl.minimum(tile * WIDTH + (within % WIDTH if GATED else within), N - 1)
    if GATED:
        ends = lines + tl.where(within < WIDTH, 0, SHARED * N)
        lines += tl.where(within < WIDTH, 0, N)
        height = 2 * N
        source = at // TOP_K
    else:
        ends = lines * SHARED
        height = N
        source = rows
    ks = tl.arange(0, BLOCK_K)
    numbers = expert.to(tl.int64) * height + lines
    w_rows = w + numbers * K
    if SHARED:
        far = ends.to(tl.int64) + (number * N if GATED else number)
        w_rows = tl.where(number < SHARED, shared + far * K, w_rows)
        at = tl.where(number < SHARED, rows, at)
        source = tl.where(number < SHARED, rows - first, source) if GATED else rows
    if not GATED:
        enter(PDL)
    w_at = w_rows[:, None] + ks[None, :]
    x_rows = x + source.to(tl.int64)[:, None] * stride_x
    x_at = x_rows + ks[None, :]
    if GRAIN:
        scales_at = scales + expert.to(tl.int64) * stride_expert + lines // GRAIN * stride_rows
        row_at = of_rows + source
    acc = tl.zeros((BLOCK_N if boxes is None else WIDTH, BLOCK_T), tl.float32)
    of_up, box = acc, expert * height + tile * WIDTH
    dtype = out.dtype.element_ty
    for begin in tl.range(0, STEPS * BLOCK_K, BLOCK_K, num_stages=STAGES):
        if KIND >= 0:
            acc = multiply_packed(
                acc, x_rows, here[:, None], numbers, begin, w, scales, zeros, K, dtype,
                BLOCK_K, KIND, GROUP, EVEN_K,
            )  # fmt: skip
            w_tile, x_tile = acc, acc  # they are loaded there
        elif boxes is not None:
            w_tile = boxes.load([box, begin])
            x_tile = tl.load(x_at, mask=here[:, None], other=0.0)
            if GATED:
                up_tile = boxes.load([box + N, begin])
                if INTERPRETED:
                    up_tile = up_tile.to(tl.float32)
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
            if GATED and boxes is not None:
                x_tile = x_tile.to(up_tile.dtype)
                of_up = tl.dot(up_tile, tl.trans(x_tile), of_up, input_precision="ieee")
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
        if boxes is not None:
            gate, up = acc, of_up
        else:
            pair = tl.permute(tl.reshape(acc, (2, WIDTH, BLOCK_T)), (1, 2, 0))
            gate, up = tl.split(pair)
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        acc = _gated(gate, up, dtype, GAIN, PLUS, LIMIT)  # pyright: ignore
        spot = rows
        if PDL and SHARED:
            gdc_wait()  # before memory is written that what came before may still read
    else:
        acc = acc * tl.load(weights + at, mask=routed, other=1.0)[None, :]
        spot = at
    out_at = out + spot.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(out_at, tl.trans(acc).to(dtype), mask=here[:, None] & (cols < N)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _grouped_kernel(
    x, of_rows, w, scales, zeros, factors, bias, weights, starts, order, out, N, K, stride_x,
    num_tiles, stride_column, stride_expert, stride_rows, stride_blocks, shared, num_tokens, boxes,
    COUNT: tl.constexpr, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, GRAIN: tl.constexpr,
    STAGES: tl.constexpr, STEPS: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, GAIN: tl.constexpr, PLUS: tl.constexpr,
    LIMIT: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Grid ((SHARED + items) · tiles of weights).

    GATED: x: [n, K] by token; w: [COUNT, 2 · N, K], gates before ups; out: [rows, N].
    Else x: [rows, K]; w: [COUNT, N, K]; out: [n · TOP_K, N] by assignment, times its weight.
    TAIL: rows of tokens of an expert's last item, if it has no more.
    GRAIN, STAGES, of_rows: see _skinny_gemm_kernel; KIND, GROUP, zeros, factors: of weights in four
    bits, see multiply_packed; KIND below 0: in more. bias: [COUNT, rows of w], or None; GAIN, PLUS,
    LIMIT: see Finish. shared: [2 · SHARED · N, K] or [N, SHARED · K], see Beside; behind all rows
    a shared expert has num_tokens more. boxes: None, or a descriptor of w by rows, of
    blocks [columns of the output in a tile, BLOCK_K].
    """
    item, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    if SHARED and item < SHARED:
        if GATED and PDL:
            # Need not wait: the kernel before, which makes routes, has waited for the one of `x`.
            gdc_launch_dependents()
        expert, first = item * 0, (TOP_K + item) * num_tokens
        end = first + num_tokens
    else:
        if GATED:
            enter(PDL)  # else the kernel before is the gated one: it has waited for `starts`
        expert, first, end = _item(starts, item - SHARED, COUNT, BLOCK_T)  # pyright: ignore
    if expert < 0:
        if not GATED:
            enter(PDL)
        return
    if TAIL < BLOCK_T and end - first <= TAIL:
        _rows_of_item(  # pyright: ignore
            x, of_rows, w, scales, zeros, factors, bias, weights, order, out, N, K, stride_x,
            stride_column, stride_expert, stride_rows, stride_blocks, shared, item,
            boxes, expert, first, end, tile, TOP_K, TAIL, BLOCK_N, BLOCK_K, GATED, GRAIN, STAGES,
            STEPS, EVEN_K, PDL, KIND, GROUP, GAIN, PLUS, LIMIT, SHARED,
        )  # fmt: skip
    else:
        _rows_of_item(  # pyright: ignore
            x, of_rows, w, scales, zeros, factors, bias, weights, order, out, N, K, stride_x,
            stride_column, stride_expert, stride_rows, stride_blocks, shared, item,
            boxes, expert, first, end, tile, TOP_K, BLOCK_T, BLOCK_N, BLOCK_K, GATED, GRAIN, STAGES,
            STEPS, EVEN_K, PDL, KIND, GROUP, GAIN, PLUS, LIMIT, SHARED,
        )  # fmt: skip


@triton.jit
def _combine_kernel(
    parts, ids, plus, out, size, stride_out, first, count,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of columns). parts: [n · TOP_K + SHARED · n, size]. See Routes.plus."""
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
    for place in tl.static_range(TOP_K, TOP_K + SHARED):
        spot = place * tl.num_programs(0) + token
        total += tl.load(parts + spot * size + at, mask=inside, other=0.0).to(tl.float32)
    if plus is not None:
        total += tl.load(plus + token * size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * stride_out + at, total.to(out.dtype.element_ty), mask=inside)


class _Stack(NamedTuple):
    """The matrices of all experts, [total, rows, columns]; see Held."""

    w: Tensor
    scales: Tensor | None  # of e4m3
    packed: tuple[Any, ...]  # of four bits: (scales, zeros, factors); (): it is in more
    bias: Tensor | None  # [count, rows]
    shared: Tensor | None  # of Beside

    def multiply(
        self, x: Tensor, routes: Routes, held: Held, n: int, out: Tensor, finish: Finish,
        known: Any = None, items: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """What _grouped_kernel makes of n tokens; gated where out is narrower than w has rows.

        items: what the same returned of other matrices of these experts.
        """
        w, scales, packed, bias, shared = self
        (count, rows, _), columns, (_, k) = w.shape, out.shape[1], x.shape
        some = 0 if shared is None else shared.numel() // (rows * k)
        assert shared is None or shared.is_contiguous()
        assert w.is_contiguous()
        assert bias is None or (bias.is_contiguous() and bias.shape == w.shape[:2])
        gated, top_k = columns < rows, routes.ids.shape[1]
        kind = "eight" if scales is not None else "packed" if packed else "plain"
        if kind == "plain" and bias is shared is None and w.element_size() == 2:
            has_boxes = INTERPRETED or has_dependent_launch(x)
            kind = "boxed" if has_boxes and k % _BOXED.block_k == 0 else kind
        share, is_plain = n * (top_k - held.shared) // held.count, finish[2:] == PLAIN_FINISH[2:]
        if kind == "boxed" and is_plain and x.dtype == torch.bfloat16 and share >= GLUON_FROM:
            product = from_gluon(*IN_GLUON) if is_hopper(x) and x.stride(0) % 16 == 0 else None
            if product is not None:
                return product(x, w, routes, out, share, items)
        tile = choose(n, top_k - held.shared, held.count, gated=gated, kind=kind)
        width, boxes = tile.rows // 2 if gated else tile.rows, None
        if tile.is_boxed:
            boxes = TensorDescriptor.from_tensor(w.view(-1, k), [width, tile.block_k])
        num_rows = n * top_k
        num_items = some + min(num_rows, num_rows // tile.tokens + min(count, num_rows))
        assert not some or n <= tile.tokens
        num_tiles = -(-columns // width)
        of_rows, of_columns, strides = None, 0, (0, 0, 0)
        if scales is not None:
            x, of_rows, *_ = known or eight_bits_triton(x)
            of_columns, strides = of_rows.stride(1), (scales.stride(0), *strides_of(scales[0]))
        steps, group = steps_of(packed[0], k) if packed else (-1, 0)
        of_w, zeros, factors = packed or (scales, None, None)
        _grouped_kernel[(num_items * num_tiles,)](
            x, of_rows, w.view(torch.uint16) if packed else w, words_of(of_w), zeros, factors, bias,
            routes.weights, routes.starts, routes.order, out, columns, k, x.stride(0), num_tiles,
            of_columns, *strides, shared, n, boxes,
            **overlap(
                x, COUNT=count, TOP_K=top_k, BLOCK_T=tile.tokens, BLOCK_N=tile.rows,
                TAIL=tile.tail or tile.tokens, BLOCK_K=tile.block_k, GATED=gated,
                STEPS=-(-k // tile.block_k),
                EVEN_K=k % tile.block_k == 0,
                GRAIN=0 if scales is None else rows // scales.shape[1],
                STAGES=None if of_w is None else tile.num_stages,
                num_warps=tile.num_warps, num_stages=tile.num_stages, KIND=steps, GROUP=group,
                GAIN=finish.gain, PLUS=finish.plus, LIMIT=finish.limit, SHARED=some,
            ),
        )  # fmt: skip
        return None


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
    beside: Beside | None = None,
    rows: Any = None,
) -> Tensor:
    """See expert_products_ref; padding in `routes` is read by no product but `beside`'s."""
    if packed is not None and not takes(x, packed[0][0]):
        return expert_products_ref(x, routes, gate_up, down, held, out, None, packed, finish)
    (n, size), top_k = x.shape, routes.ids.shape[1]
    width, num_rows = gate_up.shape[1] // 2, n * top_k
    stored = (size, width) if packed is None else (bytes_of(size), bytes_of(width))
    assert gate_up.shape == (held.total, 2 * width, stored[0])
    assert down.shape == (held.total, size, stored[1])
    assert (scales is not None) == (gate_up.dtype == E4M3) == (down.dtype == E4M3)
    assert x.stride(1) == 1
    assert routes.plus is None or routes.plus.is_contiguous()
    some, pair = 0, (None, None)
    if beside is not None:
        assert n <= MAX_BESIDE
        some, pair = len(beside.gate_up) // (2 * width), beside
    all_rows = num_rows + some * n
    hidden, parts = x.new_empty(all_rows, width), x.new_empty(all_rows, size)
    (of_up, of_down), (up_four, down_four) = scales or (None, None), packed or ((), ())
    ups = _Stack(gate_up, of_up, up_four, finish.up_bias, pair[0])
    items = ups.multiply(x, routes, held, n, hidden, finish, rows)
    downs = _Stack(down, of_down, down_four, finish.down_bias, pair[1])
    downs.multiply(hidden, routes, held, n, parts, finish, items=items)
    out, block = torch.empty_like(x) if out is None else out, min(1024, power_of_two(size))
    _combine_kernel[(n, -(-size // block))](
        parts, routes.ids, routes.plus, out, size, out.stride(0), held.first, held.total,
        **overlap(x, TOP_K=top_k, SHARED=some, BLOCK=block, num_warps=4),
    )  # fmt: skip
    return out
