"""Grouped products of many tokens in Gluon, for Hopper: product_triton's, but faster.

A program stays on its multiprocessor and takes tile after tile: 128 of an expert's rows of tokens
with 256 rows of its weights. Two groups of four warps have 64 of the tokens, and others load: they
are ahead over the end of a tile, so a group's epilogue meets products of the other.

What holds of a row's bits holds here, too: sums over K ascend in the same steps.
"""

# To a type checker Gluon's kernels are ordinary functions.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from worker.ops.experts.route import Routes
from worker.ops.jit import enter, num_sms, overlap, tl, triton

ROWS = gl.constexpr(64)  # of tokens, of a group
TOKENS, WIDTH = gl.constexpr(128), gl.constexpr(256)  # of a tile
BLOCK_K, STAGES = gl.constexpr(64), gl.constexpr(4)
TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# Registers of a thread of the second group, and of the warps that load.
COMPUTES, LOADS = gl.constexpr(200), gl.constexpr(104)
# A Gluon without what the kernel names is met here and not by its compiler.
NAMES = gl.warp_specialize, gl.NVMMADistributedLayout, gl.DistributedLinearLayout, gl.SliceLayout
COPIES = async_copy.mbarrier_arrive, gl.fma, gl.div_rn


@triton.jit
def _items_kernel(starts, items, COUNT: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr):
    """Grid (COUNT,). items: i32 [.., 4]: their number; expert, first row, row behind its last"""
    expert = tl.program_id(0)
    experts = tl.arange(0, triton.next_power_of_2(COUNT))
    enter(PDL)
    begins = tl.load(starts + experts, mask=experts < COUNT, other=0)
    ends = tl.load(starts + experts + 1, mask=experts < COUNT, other=0)
    nums = (ends - begins + TOKENS - 1) // TOKENS
    if expert == 0:
        tl.store(items, tl.sum(nums, 0))
    at = items + (tl.sum(tl.where(experts < expert, nums, 0), 0) + 1) * 4
    begin, end = tl.load(starts + expert), tl.load(starts + expert + 1)
    for first in range(begin, end, TOKENS):
        tl.store(at, expert)
        tl.store(at + 1, first)
        tl.store(at + 2, end)
        at += 4


@gluon.jit
def _loads(
    x, w, order, items, stride_x, num_tiles, columns, tiles, full, free, TOP_K: gl.constexpr,
    GATED: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """The warps that load: one, or where rows of tokens are gathered four."""
    x_tiles, w_tiles = tiles
    HALF: gl.constexpr = WIDTH // 2
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    total = gl.load(items) * num_tiles
    step = 0
    for flat in range(gl.program_id(0), total, gl.num_programs(0)):
        item, tile = items + (flat // num_tiles + 1) * 4, flat % num_tiles
        expert, first, end = gl.load(item), gl.load(item + 1), gl.load(item + 2)
        if GATED:
            row = expert * (2 * columns) + tile * HALF
            below = row + columns
            rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
            ks = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LOADED))[None, :]
            upper = gl.load(order + gl.minimum(rows, end - 1)) // TOP_K * stride_x
            lower = gl.load(order + gl.minimum(rows + ROWS, end - 1)) // TOP_K * stride_x
            upper_at, lower_at = x + upper[:, None] + ks, x + lower[:, None] + ks
        else:
            row = expert * columns + tile * WIDTH
            below = row + HALF
        for k in range(STEPS):
            stage = step % STAGES
            at, bar = k * BLOCK_K, full.index(stage)
            w_tile, two = w_tiles.index(stage), first + ROWS < end
            x_tile, next_tile = x_tiles.index(2 * stage), x_tiles.index(2 * stage + 1)
            mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
            if GATED:
                mbarrier.expect(bar, 2 * w.block_type.nbytes)
            else:
                mbarrier.expect(bar, 2 * w.block_type.nbytes + x.block_type.nbytes, pred=not two)
                mbarrier.expect(bar, 2 * (w.block_type.nbytes + x.block_type.nbytes), pred=two)
            tma.async_copy_global_to_shared(w, [row, at], bar, w_tile.slice(0, HALF))
            tma.async_copy_global_to_shared(w, [below, at], bar, w_tile.slice(HALF, HALF))
            if GATED:
                async_copy.async_copy_global_to_shared(x_tile, upper_at + at)
                if two:
                    async_copy.async_copy_global_to_shared(next_tile, lower_at + at)
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                tma.async_copy_global_to_shared(x, [first, at], bar, x_tile)
                tma.async_copy_global_to_shared(x, [first + ROWS, at], bar, next_tile, pred=two)
            step += 1


@gluon.jit
def _quotient(a, b):
    """a / b, of b from 1 on, as div_rn has it, without a branch."""
    low = gl.inline_asm_elementwise(
        "rcp.approx.f32 $0, $1;", "=f,f", [b], dtype=gl.float32, is_pure=True, pack=1
    )
    near = gl.fma(gl.fma(-b, low, 1.0), low, low)
    first = a * near
    first = gl.fma(gl.fma(-b, first, a), near, first)
    rest = gl.fma(-b, first, a)
    return gl.where(rest == rest, gl.fma(rest, near, first), a * low)  # else one is infinite


@gluon.jit
def _group(
    out, order, items, weights, num_tiles, columns, tiles, full, free, NUMBER: gl.constexpr,
    GATED: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """A group of warps that multiply, by number."""
    x_tiles, w_tiles = tiles
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    COLUMNS: gl.constexpr = WIDTH // 2 if GATED else WIDTH
    STORED: gl.constexpr = _stored(COLUMNS)
    dtype: gl.constexpr = out.dtype.element_ty
    total = gl.load(items) * num_tiles
    step = 0
    for flat in range(gl.program_id(0), total, gl.num_programs(0)):
        item = items + (flat // num_tiles + 1) * 4
        first, end = gl.load(item + 1) + NUMBER * ROWS, gl.load(item + 2)
        if first < end:
            acc = gl.zeros([ROWS, WIDTH], gl.float32, SUMS)
            spot = first + gl.arange(0, ROWS, gl.SliceLayout(1, STORED))
            here = (spot < end)[:, None]
            if not GATED:
                spot = gl.load(order + gl.minimum(spot, end - 1))
                weight = gl.load(weights + spot)
            for k in range(STEPS):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                x_tile, w_tile = x_tiles.index(2 * stage + NUMBER), w_tiles.index(stage)
                acc = warpgroup_mma(x_tile, w_tile.permute((1, 0)), acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
                mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
                step += 1
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1)
            if GATED:
                gate, up = acc.reshape([ROWS, 2, COLUMNS]).permute((0, 2, 1)).split()
                gate, up = gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32)
                # As silu_and_mul.
                whole = _quotient(gate, 1.0 + gl.exp(-gate)).to(dtype).to(gl.float32) * up
            else:
                whole = acc * gl.convert_layout(weight, gl.SliceLayout(1, SUMS))[:, None]
            whole = gl.convert_layout(whole.to(dtype), STORED)
            cols = flat % num_tiles * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, STORED))
            out_at = out + spot.to(gl.int64)[:, None] * columns + cols[None, :]
            gl.store(out_at, whole, mask=here & (cols < columns)[None, :])
        else:
            for _ in range(STEPS):
                mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
                mbarrier.arrive(free.index(step % STAGES), count=1)
                step += 1


@gluon.constexpr_function
def _stored(columns: int) -> Any:
    """Threads of a group have 8 numbers in a row of its result, next to what they are given."""
    more = [[0, 1 << i] for i in range(5, 9) if 1 << i < columns]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], *more, [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.jit
def _barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(made.index(i), count=COUNT)
    return made


@gluon.jit
def _grouped_kernel(
    x, w, order, items, weights, out, stride_x, num_tiles, columns, TOP_K: gl.constexpr,
    GATED: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Grid (multiprocessors,).

    x: by GATED rows by token, of stride_x, else a descriptor of rows in blocks of ROWS. w: a
    descriptor of the rows of all experts in blocks of half a tile's. columns: of `out`. See
    product_triton's for the rest.
    """
    dtype: gl.constexpr = out.dtype.element_ty
    tiles = (
        gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, BLOCK_K], w.layout),
        gl.allocate_shared_memory(dtype, [STAGES, WIDTH, BLOCK_K], w.layout),
    )
    full, free = _barriers(STAGES, 129 if GATED else 1), _barriers(STAGES, 2)
    fence_async_shared()
    LOADERS: gl.constexpr = 4 if GATED else 1
    gl.warp_specialize(
        [
            (_group, (
                out, order, items, weights, num_tiles, columns, tiles, full, free, 0, GATED, STEPS,
            )),
            (_group, (
                out, order, items, weights, num_tiles, columns, tiles, full, free, 1, GATED, STEPS,
            )),
            (_loads, (
                x, w, order, items, stride_x, num_tiles, columns, tiles, full, free,
                TOP_K, GATED, STEPS,
            )),
        ],
        [4, LOADERS],
        [COMPUTES, LOADS],
    )  # fmt: skip


def _describe(rows: Tensor, block: int) -> TensorDescriptor:
    return TensorDescriptor(
        rows, list(rows.shape), [rows.stride(0), 1], [block, BLOCK_K.value], TILE
    )


def items_of(starts: Tensor, num_rows: int) -> Tensor:
    """Which rows of which expert a tile has: see _items_kernel. starts: Routes'."""
    count = len(starts) - 1
    items = starts.new_empty(1 + num_rows // TOKENS.value + min(count, num_rows), 4)
    _items_kernel[(count,)](
        starts, items, **overlap(starts, COUNT=count, TOKENS=TOKENS.value, num_warps=1)
    )
    return items


def grouped_product(x: Tensor, w: Tensor, routes: Routes, out: Tensor) -> None:
    """What product_triton's _Stack.multiply makes of a stack alone, with nothing to add or clamp.

    w: [count, rows, k], of 16 bits; k is a multiple of BLOCK_K.
    """
    (_, rows, k), columns = w.shape, out.shape[1]
    gated = columns < rows
    _grouped_kernel[(num_sms(x.device),)](
        x if gated else _describe(x, ROWS.value), _describe(w.view(-1, k), WIDTH.value // 2),
        routes.order, items_of(routes.starts, len(routes.order)), routes.weights, out,
        x.stride(0), -(-columns // (WIDTH.value // (2 if gated else 1))), columns,
        TOP_K=routes.ids.shape[1], GATED=gated, STEPS=k // BLOCK_K.value, num_warps=4,
    )  # fmt: skip
