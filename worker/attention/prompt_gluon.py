"""Causal attention of long chunks in Gluon, for Hopper: prompt_triton's, but faster (ADR 0022).

A program stays on its multiprocessor and takes tile after tile. One warp loads by TMA; two groups
of four warps have half a tile's 128 rows. While the tensor cores add up a block's values and score
the next keys, a group takes the weights of the scores before; with heads of 128 and 256 by turns.

What holds of a row's bits holds here, too: blocks begin at the same keys wherever a prompt is cut.
"""

# To a type checker Gluon's kernels are ordinary functions.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from worker.attention.paged_plan_triton import FIELDS
from worker.attention.paged_triton import scale_of
from worker.attention.prompt_triton import BLOCK_M, BLOCKS_N, PromptKernel, PromptPlan
from worker.ops.jit import num_sms, power_of_two
from worker.ops.parts_gluon import ROWS, TILE, barriers, stored

STAGES = {64: 4, 128: 2, 256: 2}  # blocks of keys on chip, by BLOCK_D; as many of values
# By BLOCK_D. 32768 tokens, 32 heads, with and without: of 128 14.5 and 14.7 ms, 64 10.1 and 9.9.
TURNS = {64: False, 128: True, 256: True}
# Registers of a thread of the second group, and of the warp that loads.
COMPUTES, LOADS = gl.constexpr(240), gl.constexpr(24)


@gluon.constexpr_function
def _barrier(verb: str, group: int) -> str:
    # 8 and 9: Triton's own are the first few.
    return f"bar.{verb} {8 + group}, 256; mov.u32 $0, 0;"


@gluon.jit
def _turn(VERB: gl.constexpr, GROUP: gl.constexpr):
    """sync: wait for the group's turn to multiply; arrive: give it the turn."""
    TEXT: gl.constexpr = _barrier(VERB, GROUP)
    gl.inline_asm_elementwise(TEXT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _num_tiles(total):
    """How many of all tiles this program takes."""
    programs = gl.num_programs(0)
    return total // programs + (_place(total // programs) < total % programs).to(gl.int32)


@gluon.jit
def _tile_at(i, total):
    """The last tiles, whose keys are the most, go first."""
    return total - 1 - (i * gl.num_programs(0) + _place(i))


@gluon.jit
def _place(i):
    """Rounds run back and forth, so that programs have about as much to do."""
    program = gl.program_id(0)
    return gl.where(i % 2 == 1, gl.num_programs(0) - 1 - program, program)


@gluon.jit
def _load(source, row, step, tiles, full, free, STAGES: gl.constexpr):
    stage = step % STAGES
    mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(stage), source.block_type.nbytes)
    tma.async_copy_global_to_shared(source, [row, 0], full.index(stage), tiles.index(stage))


@gluon.jit
def _loads(
    q, keys, values, items, counts, first_rows, num_rows, tiles, full, free,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr,
    HEADS: gl.constexpr, FIELDS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads."""
    q_tiles, k_tiles, v_tiles = tiles
    q_full, k_full, v_full = full
    q_free, k_free, v_free = free
    total = gl.load(counts) * HEADS
    step = 0
    taken = 0  # tiles with keys
    for i in range(_num_tiles(total)):
        flat = _tile_at(i, total)
        item = items + flat // HEADS * FIELDS  # see item_at
        begin, end = gl.load(item + 3), gl.load(item + 4)
        head = flat % HEADS
        at = head // GROUP * num_rows + gl.load(first_rows + gl.load(item + 5)) + begin
        if begin < end:
            row = gl.load(item) + gl.load(item + 7) // 65536 * BLOCK_M
            for group in gl.static_range(BLOCK_M // ROWS):
                mbarrier.wait(q_free.index(group), (taken & 1) ^ 1)
                mbarrier.expect(q_full.index(group), q.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    q, [row + group * ROWS, head * HEAD_DIM], q_full.index(group),
                    q_tiles.index(group),
                )  # fmt: skip
            taken += 1
            _load(keys, at, step, k_tiles, k_full, k_free, STAGES)
            for key in range(begin, end, BLOCK_N):
                if key + BLOCK_N < end:
                    _load(keys, at + BLOCK_N, step + 1, k_tiles, k_full, k_free, STAGES)
                _load(values, at, step, v_tiles, v_full, v_free, STAGES)
                at += BLOCK_N
                step += 1


@gluon.jit
def _weights(
    scores, weight, top, key, position, scale,
    MASKED: gl.constexpr, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Online softmax over one block; without MASKED every row sees all of its keys."""
    if MASKED:
        at = (key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT)))[None, :]
        seen = at <= position[:, None]
        if WINDOW:
            seen &= at > position[:, None] - WINDOW
        scores = gl.where(seen, scores, float("-inf"))
    higher = gl.maximum(top, gl.max(scores, 1) * scale)
    base = higher
    if MASKED:
        base = gl.where(higher == float("-inf"), 0.0, higher)  # the row has seen no key yet
    p = _exp2(scores * scale - base[:, None])
    shrink = _exp2(top - base)
    by_lane = gl.convert_layout(shrink, gl.SliceLayout(1, weight.type.layout))[:, None]
    return p, shrink, weight * by_lane + _by_lane(p, BLOCK_N), higher


@gluon.jit
def _by_lane(p, BLOCK_N: gl.constexpr):
    """[ROWS, 4]: the sums of what a row's four lanes hold, without a shuffle between them."""
    return gl.sum(gl.sum(p.reshape([ROWS, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon.jit
def _blocks(
    acc, p, weight, top, step, begin, stop, end, position, scale, q_tile, tiles, full, free,
    NUMBER: gl.constexpr, MASKED: gl.constexpr, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, SCORES: gl.constexpr, RESULT: gl.constexpr,
    WEIGHTS: gl.constexpr,
):  # fmt: skip
    """The keys begin..stop - 1. `p` is of the block before, whose values are still to be added."""
    _, k_tiles, v_tiles = tiles
    _, k_full, v_full = full
    _, k_free, v_free = free
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    for key in range(begin, stop, BLOCK_N):
        stage, before = step % STAGES, (step - 1) % STAGES
        if TURNS:
            _turn("sync", NUMBER)
        keys = k_tiles.index(stage).permute((1, 0))
        scores = warpgroup_mma(q_tile, keys, zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), (step - 1) // STAGES & 1)
        acc = warpgroup_mma(p, v_tiles.index(before), acc, is_async=True)
        if TURNS:
            _turn("arrive", 1 - NUMBER)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_free.index(stage), count=1)
        weights, shrink, weight, top = _weights(
            scores, weight, top, key, position, scale, MASKED, BLOCK_N, WINDOW, SCORES
        )
        p = gl.convert_layout(weights.to(p.dtype), WEIGHTS)
        step += 1
        # The branches of this wait keep the assembler from waiting for `acc` above the softmax.
        more = key + BLOCK_N < end
        mbarrier.wait(k_full.index(step % STAGES), step // STAGES & 1, pred=more)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_free.index(before), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, RESULT))[:, None]
    return acc, p, weight, top, step


@gluon.jit
def _group(
    out, items, counts, sinks, scale, tiles, full, free, NUMBER: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
    HEADS: gl.constexpr, FIELDS: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """A group of warps that multiply, by number."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    STORED: gl.constexpr = stored(BLOCK_D)
    q_tiles, k_tiles, v_tiles = tiles
    q_full, k_full, v_full = full
    q_free, k_free, v_free = free
    total = gl.load(counts) * HEADS
    step = 0
    taken = 0  # tiles with keys
    if TURNS and NUMBER == 1:
        _turn("arrive", 0)
    for i in range(_num_tiles(total)):
        flat = _tile_at(i, total)
        item = items + flat // HEADS * FIELDS  # see item_at
        start, num_r, past = gl.load(item), gl.load(item + 1), gl.load(item + 2)
        begin, end = gl.load(item + 3), gl.load(item + 4)
        first = gl.load(item + 7) // 65536 * BLOCK_M + NUMBER * ROWS
        head = flat % HEADS
        position = past + first + gl.arange(0, ROWS, BY_ROW)
        top = gl.full([ROWS], float("-inf"), gl.float32, BY_ROW)
        zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
        weight = _by_lane(zeros, BLOCK_N)
        if sinks is not None:  # as a key without a value
            top = gl.zeros([ROWS], gl.float32, BY_ROW)
            top += gl.load(sinks + head).to(gl.float32) * 1.4426950408889634
            weight += 0.25  # 1 in four lanes
        acc = gl.zeros([ROWS, BLOCK_D], gl.float32, RESULT)
        if begin < end:
            q_tile = q_tiles.index(NUMBER)
            mbarrier.wait(q_full.index(NUMBER), taken & 1)
            taken += 1
            stage = step % STAGES
            mbarrier.wait(k_full.index(stage), step // STAGES & 1)
            if TURNS:
                _turn("sync", NUMBER)
            keys = k_tiles.index(stage).permute((1, 0))
            scores = warpgroup_mma(q_tile, keys, zeros, use_acc=False, is_async=True)
            if TURNS:
                _turn("arrive", 1 - NUMBER)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_free.index(stage), count=1)
            weights, _, weight, top = _weights(
                scores, weight, top, begin, position, scale, True, BLOCK_N, WINDOW, SCORES
            )
            p = gl.convert_layout(weights.to(out.dtype.element_ty), WEIGHTS)
            step += 1
            begin += BLOCK_N
            mbarrier.wait(k_full.index(step % STAGES), step // STAGES & 1, pred=begin < end)
            # Blocks before all rows of the group, and in the windows of all, need no mask.
            inside = begin
            if WINDOW:
                inside = gl.cdiv(gl.maximum(past + first + ROWS - WINDOW, 0), BLOCK_N) * BLOCK_N
                inside = gl.maximum(gl.minimum(inside, end), begin)
            seen = gl.minimum(gl.maximum(past + first + 1, 0) // BLOCK_N * BLOCK_N, end)
            stops = inside, gl.maximum(seen, inside), end
            for part in gl.static_range(0 if WINDOW else 1, 3):
                acc, p, weight, top, step = _blocks(
                    acc, p, weight, top, step, begin, stops[part], end, position, scale, q_tile,
                    tiles, full, free, NUMBER, part != 1, BLOCK_N, WINDOW, STAGES, TURNS, SCORES,
                    RESULT, WEIGHTS,
                )  # fmt: skip
                begin = stops[part]
            mbarrier.arrive(q_free.index(NUMBER), count=1)
            before = (step - 1) % STAGES
            mbarrier.wait(v_full.index(before), (step - 1) // STAGES & 1)
            acc = warpgroup_mma(p, v_tiles.index(before), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_free.index(before), count=1)
        weight = gl.convert_layout(gl.sum(weight, 1), BY_ROW)
        weight = 1.0 / gl.where(weight > 0, weight, 1.0)  # 0 where there is no key
        whole = acc * gl.convert_layout(weight, gl.SliceLayout(1, RESULT))[:, None]
        whole = gl.convert_layout(whole.to(out.dtype.element_ty), STORED)
        rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, STORED))
        dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, STORED))
        out_at = (start + rows).to(gl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM
        here = (rows < num_r)[:, None]
        if HEAD_DIM < BLOCK_D:
            here &= (dims < HEAD_DIM)[None, :]
        gl.store(out + out_at[:, None] + dims[None, :], whole, mask=here)
    if TURNS and NUMBER == 0:
        _turn("sync", 0)  # the last that was given


@gluon.jit(do_not_specialize=["num_tokens", "num_rows"])
def _prompt_kernel(
    q, out, keys, values, items, counts, first_rows, sinks, num_tokens, num_rows, scale,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
    GROUP: gl.constexpr, HEADS: gl.constexpr, FIELDS: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Grid (multiprocessors,).

    q: descriptor of [num_tokens, HEADS · HEAD_DIM] in blocks of ROWS rows and BLOCK_D columns, of a
    head and, where these are more, of the next, which meet zeros. All else is as prompt_triton's.
    """
    GROUPS: gl.constexpr = BLOCK_M // ROWS
    dtype: gl.constexpr = out.dtype.element_ty
    tiles = (
        gl.allocate_shared_memory(dtype, [GROUPS, ROWS, BLOCK_D], q.layout),
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], keys.layout),
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], values.layout),
    )
    full = barriers(GROUPS, 1), barriers(STAGES, 1), barriers(STAGES, 1)
    free = barriers(GROUPS, 1), barriers(STAGES, GROUPS), barriers(STAGES, GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_group, (
                out, items, counts, sinks, scale, tiles, full, free, 0,
                BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_D, HEADS, FIELDS, WINDOW, STAGES, TURNS,
            )),
            (_group, (
                out, items, counts, sinks, scale, tiles, full, free, 1,
                BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_D, HEADS, FIELDS, WINDOW, STAGES, TURNS,
            )),
            (_loads, (
                q, keys, values, items, counts, first_rows, num_rows, tiles, full, free,
                BLOCK_M, BLOCK_N, HEAD_DIM, GROUP, HEADS, FIELDS, STAGES,
            )),
        ],
        [4, 1],
        [COMPUTES, LOADS],
    )  # fmt: skip
    # Zeros behind the last row.
    PADDED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    last = num_tokens * HEADS
    begin = gl.load(counts + 1) * HEADS + gl.program_id(0) * 16
    dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, PADDED))
    for row in range(begin, last, gl.num_programs(0) * 16):
        rows = row + gl.arange(0, 16, gl.SliceLayout(1, PADDED))
        at = rows.to(gl.int64)[:, None] * HEAD_DIM + dims[None, :]
        here = (rows < last)[:, None]
        if HEAD_DIM < BLOCK_D:
            here &= (dims < HEAD_DIM)[None, :]
        gl.store(out + at, gl.zeros([16, BLOCK_D], dtype, PADDED), mask=here)


def _describe(rows: Tensor, block: int, width: int) -> TensorDescriptor:
    return TensorDescriptor(rows, list(rows.shape), [rows.stride(0), 1], [block, width], TILE)


def _describe_keys(rows: Tensor) -> TensorDescriptor:
    return _describe(rows, BLOCKS_N[rows.shape[1]], rows.shape[1])


def _launch(q: Tensor, out: Tensor, plan: PromptPlan, sinks: Tensor | None) -> None:
    num_tokens, num_heads, head_dim = q.shape
    rows = q.as_strided((num_tokens, num_heads * head_dim), (q.stride(0), 1))
    window = plan.paged.shape.mask.window or 0
    constants = constants_of(num_heads, num_heads // plan.gathered.shape[1], head_dim, window)
    _prompt_kernel[(min(num_sms(q.device), plan.paged.tiles.programs),)](
        _describe(rows, ROWS.value, constants["BLOCK_D"]), out, plan.keys, plan.values,
        plan.paged.items, plan.paged.counts, plan.first_rows, sinks, num_tokens,
        plan.gathered.shape[2], scale_of(plan.paged.shape), num_warps=4, **constants,
    )  # fmt: skip


def constants_of(heads: int, group: int, head_dim: int, window: int) -> dict[str, Any]:
    """The compile-time constants of _prompt_kernel."""
    wide = power_of_two(head_dim)
    return {
        "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCKS_N[wide], "HEAD_DIM": head_dim, "BLOCK_D": wide,
        "GROUP": group, "HEADS": heads, "FIELDS": FIELDS, "WINDOW": window,
        "STAGES": STAGES[wide], "TURNS": TURNS[wide],
    }  # fmt: skip


KERNEL = PromptKernel(_describe_keys, _launch)
