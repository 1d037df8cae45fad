"""Grouped products of many tokens in Gluon, for Hopper: product_triton's, but faster.

A program stays on its multiprocessor and takes tile after tile: 128 of an expert's rows of tokens
with 256 rows of its weights, or of few tokens 256 with 128. A group of four warps has 64 of the
tokens, and others load: they are ahead over the end of a tile, so a group's epilogue meets products
of another.

What holds of a row's bits holds here, too: sums over K ascend in the same steps.
"""

# To a type checker Gluon's kernels are ordinary functions.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false

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
from worker.ops.parts_gluon import ROWS, TILE, barriers, stored

AREA = gl.constexpr(512)  # groups times rows of weights of a tile: as many sums are kept
BLOCK_K, STAGES = gl.constexpr(64), gl.constexpr(4)
# An expert's even share of rows from which two groups are faster than four, on an H200.
TWO_FROM = 320
# Groups -> registers of a thread of all but the first, and of the warps that load.
REGISTERS = {2: (200, 104), 4: (104, 64)}
# As parts_gluon.NAMES.
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
    GATED: gl.constexpr, STEPS: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """The warps that load: one, or where rows of tokens are gathered four.

    No fence stands between these rows' cp.async and wgmma, as in Triton's pipelines; PTX's model
    asks for one.
    """
    x_tiles, w_tiles = tiles
    WIDTH: gl.constexpr = AREA // GROUPS
    HALF: gl.constexpr = WIDTH // 2
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    total = gl.load(items) * num_tiles
    step = 0
    for flat in range(gl.program_id(0), total, gl.num_programs(0)):
        item, tile = items + (flat // num_tiles + 1) * 4, flat % num_tiles
        expert, first, end = gl.load(item), gl.load(item + 1), gl.load(item + 2)
        num = gl.minimum((end - first + ROWS - 1) // ROWS, GROUPS)
        if GATED:
            row = expert * (2 * columns) + tile * HALF
            below = row + columns
            ks = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LOADED))[None, :]
            sources = ()
            for group in gl.static_range(GROUPS):
                rows = first + group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
                token = gl.load(order + gl.minimum(rows, end - 1)) // TOP_K
                sources += (x + (token * stride_x)[:, None] + ks,)
        else:
            row = expert * columns + tile * WIDTH
            below = row + HALF
        for k in range(STEPS):
            stage = step % STAGES
            at, bar, w_tile = k * BLOCK_K, full.index(stage), w_tiles.index(stage)
            mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
            if GATED:
                mbarrier.expect(bar, WIDTH * BLOCK_K * 2)
            else:
                for some in gl.static_range(1, GROUPS + 1):
                    mbarrier.expect(bar, (WIDTH + some * ROWS) * BLOCK_K * 2, pred=num == some)
            tma.async_copy_global_to_shared(w, [row, at], bar, w_tile.slice(0, HALF))
            tma.async_copy_global_to_shared(w, [below, at], bar, w_tile.slice(HALF, HALF))
            for group in gl.static_range(GROUPS):
                x_tile = x_tiles.index(stage * GROUPS + group)
                if group < num:
                    if GATED:
                        async_copy.async_copy_global_to_shared(x_tile, sources[group] + at)
                    else:
                        from_row = first + group * ROWS
                        tma.async_copy_global_to_shared(x, [from_row, at], bar, x_tile)
            if GATED:
                async_copy.mbarrier_arrive(bar, increment_count=False)
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
    GATED: gl.constexpr, STEPS: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """A group of warps that multiply, by number. Without rows it only lets the others go on."""
    x_tiles, w_tiles = tiles
    WIDTH: gl.constexpr = AREA // GROUPS
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    COLUMNS: gl.constexpr = WIDTH // 2 if GATED else WIDTH
    STORED: gl.constexpr = stored(COLUMNS)
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
                x_tile, w_tile = x_tiles.index(GROUPS * stage + NUMBER), w_tiles.index(stage)
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


@gluon.jit
def _grouped_kernel(
    x, w, order, items, weights, out, stride_x, num_tiles, columns, TOP_K: gl.constexpr,
    GATED: gl.constexpr, STEPS: gl.constexpr, GROUPS: gl.constexpr, COMPUTES: gl.constexpr,
    LOADS: gl.constexpr,
):  # fmt: skip
    """Grid (multiprocessors,).

    x: by GATED rows by token, of stride_x, else a descriptor of rows in blocks of ROWS. w: a
    descriptor of the rows of all experts in blocks of half a tile's. columns: of `out`. See
    product_triton's for the rest.
    """
    dtype: gl.constexpr = out.dtype.element_ty
    tiles = (
        gl.allocate_shared_memory(dtype, [GROUPS * STAGES, ROWS, BLOCK_K], w.layout),
        gl.allocate_shared_memory(dtype, [STAGES, AREA // GROUPS, BLOCK_K], w.layout),
    )
    full, free = barriers(STAGES, 129 if GATED else 1), barriers(STAGES, GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [(_loads, (
            x, w, order, items, stride_x, num_tiles, columns, tiles, full, free, TOP_K, GATED,
            STEPS, GROUPS,
        )) if number == GROUPS else (_group, (
            out, order, items, weights, num_tiles, columns, tiles, full, free, number, GATED,
            STEPS, GROUPS,
        )) for number in (0, 1, 2, 3, 4)[: GROUPS + 1]],
        [4] * (GROUPS - 1) + [4 if GATED else 1],
        [COMPUTES] * (GROUPS - 1) + [LOADS],
    )  # fmt: skip


def _describe(rows: Tensor, block: int) -> TensorDescriptor:
    return TensorDescriptor(
        rows, list(rows.shape), [rows.stride(0), 1], [block, BLOCK_K.value], TILE
    )


def items_of(starts: Tensor, num_rows: int, tokens: int) -> Tensor:
    """Which rows of which expert a tile of so many has: see _items_kernel. starts: Routes'."""
    count = len(starts) - 1
    items = starts.new_empty(1 + num_rows // tokens + min(count, num_rows), 4)
    _items_kernel[(count,)](
        starts, items, **overlap(starts, COUNT=count, TOKENS=tokens, num_warps=1)
    )
    return items


def grouped_product(
    x: Tensor, w: Tensor, routes: Routes, out: Tensor, share: int, items: Tensor | None = None
) -> Tensor:
    """What product_triton's _Stack.multiply makes of a stack alone, with nothing to add or clamp.

    w: [count, rows, k], of 16 bits; k is a multiple of BLOCK_K. share: of rows, an expert's even.
    Returns `items`, or makes them: they are the same for all stacks of these routes and share.
    """
    (_, rows, k), columns = w.shape, out.shape[1]
    gated, groups = columns < rows, 2 if share >= TWO_FROM else 4
    width, (computes, loads) = AREA.value // groups, REGISTERS[groups]
    if items is None:
        items = items_of(routes.starts, len(routes.order), groups * ROWS.value)
    _grouped_kernel[(num_sms(x.device),)](
        x if gated else _describe(x, ROWS.value), _describe(w.view(-1, k), width // 2),
        routes.order, items, routes.weights, out, x.stride(0),
        -(-columns // (width // 2 if gated else width)), columns,
        TOP_K=routes.ids.shape[1], GATED=gated, STEPS=k // BLOCK_K.value, GROUPS=groups,
        COMPUTES=computes, LOADS=loads, num_warps=4,
    )  # fmt: skip
    return items
