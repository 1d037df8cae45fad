"""Causal attention of long chunks over the paged KV cache, on GPUs whose TMA loads blocks of keys.

Rows, tiles and items are those of `paged_attention`: a tile is 128 pairs (token, query head) of one
kv head, and no tile is split. One program computes one (tile, kv head). A layer's keys are one
matrix of head_dim columns, of which a page holds `page_size` rows for each head; so TMA loads them
where they lie. 64 keys are a block; PAIR blocks share one maximum and one rescaling of the sums.

A row takes its keys in units of PAIR blocks, counted from its first key, and a unit without a key
that it sees leaves its sums as they are. So its bits depend neither on where its prompt is cut into
chunks, nor on the other rows.

The twin in plain torch is `worker.attention.reference`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.kernels.attention.paged_attention import (
    FIELDS,
    PagedPlan,
    PagedTiles,
    bound_of,
    item_at,
)
from worker.kernels.jit import INTERPRETED, gdc_launch_dependents, gdc_wait, tl, triton
from worker.kernels.launch import has_dependent_launch, overlap

BLOCK_M, BLOCK_N = 128, 64
HEAD_DIMS = (64, 128)
SHARED_BYTES = 228 << 10  # of an SM
PAIR = 2  # blocks of keys that are handled together
NUM_WARPS, NUM_STAGES = 8, 3


@triton.jit
def _page(table, key, end, PAGE: tl.constexpr):
    """The page of a key; the sink for those from `end` on, which no row of the tile sees."""
    return tl.load(table + key // PAGE, mask=key < end, other=0)


@triton.jit
def _scores(
    q_tile, k_tile, key, position,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N] f32, not yet scaled; MASKED: -inf where the row does not see the key."""
    if INTERPRETED:
        k_tile = k_tile.to(tl.float32)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
    if MASKED:
        keys = key + tl.arange(0, BLOCK_N)
        scores = tl.where(keys[None, :] <= position[:, None], scores, float("-inf"))
    return scores


@triton.jit
def _add(
    acc, p, values, row, key, end,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """acc + p · the values of a block, which begins at `row`."""
    v_tile = values.load([row, 0])
    if MASKED:  # memory from `end` on may hold NaN, and 0 · NaN is NaN
        inside = (key + tl.arange(0, BLOCK_N) < end)[:, None]
        v_tile = tl.where(inside, v_tile, tl.zeros_like(v_tile))
    p = p.to(v_tile.dtype)
    if INTERPRETED:
        p, v_tile = p.to(tl.float32), v_tile.to(tl.float32)
    return tl.dot(p, v_tile, acc, input_precision="ieee")


@triton.jit
def _units(
    acc, weight, top, q_tile, keys, values, table, page, other_page, first_row, stride_page,
    begin, stop, end, position, scale, MASKED: tl.constexpr,
    PAIR: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Online softmax over the units of keys in begin..stop - 1.

    Without MASKED every row sees all of these keys. `page` and `other_page` are those of the two
    blocks that begin at `begin`, and returned for those that begin at the last unit's end.
    """
    STAGES: tl.constexpr = 2 if MASKED else None  # type: ignore[assignment]
    for key in tl.range(  # type: ignore[misc]
        bound_of(begin, INTERPRETED), bound_of(stop, INTERPRETED), PAIR * BLOCK_N,
        num_stages=STAGES,
    ):  # fmt: skip
        row = page * stride_page + first_row + key % PAGE
        k_tile = keys.load([row, 0])
        scores = _scores(q_tile, k_tile, key, position, MASKED, BLOCK_N, INTERPRETED)
        highest = tl.max(scores, 1)
        if PAIR == 2:
            other = key + BLOCK_N
            other_row = other_page * stride_page + first_row + other % PAGE
            k_other = keys.load([other_row, 0])
            other_scores = _scores(
                q_tile, k_other, other, position, MASKED, BLOCK_N, INTERPRETED
            )  # fmt: skip
            highest = tl.maximum(highest, tl.max(other_scores, 1))
            other_page = _page(table, other + PAIR * BLOCK_N, end, PAGE)
        page = _page(table, key + PAIR * BLOCK_N, end, PAGE)

        higher = tl.maximum(top, highest * scale)
        base = higher
        if MASKED:
            base = tl.where(higher == float("-inf"), 0.0, higher)  # the row has seen no key yet
        shrink = tl.exp2(top - base)
        p = tl.exp2(scores * scale - base[:, None])
        new = tl.sum(p, 1)
        acc = _add(
            acc * shrink[:, None], p, values, row, key, end, MASKED, BLOCK_N, INTERPRETED
        )  # fmt: skip
        if PAIR == 2:
            p = tl.exp2(other_scores * scale - base[:, None])
            new += tl.sum(p, 1)
            acc = _add(acc, p, values, other_row, other, end, MASKED, BLOCK_N, INTERPRETED)
        weight = weight * shrink + new
        top = higher
    return acc, weight, top, page, other_page


@triton.jit(do_not_specialize=["num_tokens", "stride_table"])
def _prompt_kernel(
    q, out, keys, values, page_table, items, counts,
    num_tokens, stride_q, stride_page, stride_head, stride_table, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAIR: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, FIELDS: tl.constexpr,
    INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: a program for each pair (item, kv head) that there can be; the last items go first.

    q: [num_tokens, heads, HEAD_DIM], rows stride_q apart; out: the same, contiguous.
    keys, values: descriptors of [rows, HEAD_DIM] in blocks of BLOCK_N rows; page p of head h begins
    at row p · stride_page + h · stride_head. items, counts: of paged_attention's plan.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    flat = tl.load(counts) * KV_HEADS - 1 - program
    num_rows = tl.load(counts + 1)
    dims = tl.arange(0, HEAD_DIM)
    if flat >= 0:
        start, num_r, past, begin, end, req, page, cut = item_at(  # type: ignore[misc]
            items, flat // KV_HEADS, flat >= 0, FIELDS
        )
        head = flat % KV_HEADS
        rows = cut // 65536 * BLOCK_M + tl.arange(0, BLOCK_M)
        here = rows < num_r
        column = rows // GROUP
        position = past + column
        table = page_table + req.to(tl.int64) * stride_table
        row = (start + column).to(tl.int64)
        within = (head * GROUP + rows % GROUP) * HEAD_DIM
        q_at = q + (row * stride_q + within)[:, None] + dims[None, :]
        q_tile = tl.load(q_at, mask=here[:, None], other=0.0)
        if INTERPRETED:
            q_tile = q_tile.to(tl.float32)
        first_row = head * stride_head
        other_page = _page(table, BLOCK_N, end, PAGE)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
        # Most units lie before all rows of the tile and need no mask.
        UNIT: tl.constexpr = PAIR * BLOCK_N
        seen = tl.minimum(tl.maximum(tl.min(position, 0) + 1, 0) // UNIT * UNIT, end)
        acc, weight, top, page, other_page = _units(  # type: ignore[misc]
            acc, weight, top, q_tile, keys, values, table, page, other_page, first_row,
            stride_page, begin, seen, end, position, scale, False, PAIR, BLOCK_N, PAGE,
            INTERPRETED,
        )  # fmt: skip
        acc, weight, top, page, other_page = _units(  # type: ignore[misc]
            acc, weight, top, q_tile, keys, values, table, page, other_page, first_row,
            stride_page, seen, end, end, position, scale, True, PAIR, BLOCK_N, PAGE,
            INTERPRETED,
        )  # fmt: skip
        out_at = out + (row * (KV_HEADS * GROUP * HEAD_DIM) + within)[:, None] + dims[None, :]
        whole = acc / tl.where(weight > 0, weight, 1.0)[:, None]  # 0 where there is no key
        tl.store(out_at, whole.to(out.dtype.element_ty), mask=here[:, None])

    HEADS: tl.constexpr = KV_HEADS * GROUP
    last = num_tokens * HEADS
    for first in range(
        bound_of(num_rows * HEADS + program * 16, INTERPRETED), bound_of(last, INTERPRETED),
        bound_of(num_programs * 16, INTERPRETED),
    ):  # fmt: skip
        padding = first + tl.arange(0, 16)
        zero = tl.zeros((16, HEAD_DIM), out.dtype.element_ty)
        zero_at = out + padding.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(zero_at, zero, mask=(padding < last)[:, None])


@dataclass(frozen=True, slots=True)
class PromptCache:
    """One layer's keys and values as TMA sees them: matrices of head_dim columns."""

    keys: Any  # TensorDescriptor
    values: Any
    stride_page: int  # in rows
    stride_head: int
    page_size: int


def prompt_cache(k_cache: Tensor, v_cache: Tensor) -> PromptCache | None:
    """Descriptors of a layer's [num_pages, kv_heads, page_size, head_dim] views; they stay valid.

    None where the kernel does not run: below compute capability 9.0, with too little shared memory,
    and for other pages, head_dims and dtypes than it knows.
    """
    num_pages, kv_heads, page_size, head_dim = k_cache.shape
    assert k_cache.stride() == v_cache.stride()
    stride_page, stride_head = (stride // head_dim for stride in k_cache.stride()[:2])
    num_rows = (num_pages - 1) * stride_page + (kv_heads - 1) * stride_head + page_size
    if not (
        (INTERPRETED or _has_room(k_cache))
        and k_cache.dtype.itemsize == 2
        and page_size % BLOCK_N == 0
        and head_dim in HEAD_DIMS
        and num_rows < 1 << 31  # coordinates of TMA are i32
    ):
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor  # absent where Triton is

    keys, values = (
        TensorDescriptor(cache, [num_rows, head_dim], [head_dim, 1], [BLOCK_N, head_dim])
        for cache in (k_cache, v_cache)
    )
    return PromptCache(keys, values, stride_page, stride_head, page_size)


def _has_room(x: Tensor) -> bool:
    if not has_dependent_launch(x):
        return False
    device = torch.cuda.get_device_properties(x.device)
    return device.shared_memory_per_multiprocessor >= SHARED_BYTES


def prompt_tiles(
    num_reqs: int, num_tokens: int, max_query_len: int, heads: tuple[int, int]
) -> PagedTiles:
    """The tiles for a batch's host bounds and its (query, kv) heads, for plan_items."""
    group = heads[0] // heads[1]
    max_tiles = -(-max_query_len * group // BLOCK_M)
    tiles = min(num_reqs * max_tiles, -(-num_tokens * group // BLOCK_M) + num_reqs)
    return PagedTiles(
        block_m=BLOCK_M,
        block_n=BLOCK_N,
        rows=BLOCK_M,
        max_tiles=max_tiles,
        max_splits=1,
        max_items=tiles,
        shortest=1,
        most=1,
        programs=tiles * heads[1],
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        max_registers=None,
        early=True,
    )


def prompt_attention(
    q: Tensor, cache: PromptCache, plan: PagedPlan, scale: float, out: Tensor | None = None
) -> Tensor:
    """As paged_attention, for a plan by prompt_tiles."""
    num_tokens, num_heads, head_dim = q.shape
    tiles = plan.tiles
    assert num_heads == plan.heads[0]
    assert q.stride()[1:] == (head_dim, 1)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    assert out.is_contiguous()
    options = overlap(q, num_warps=tiles.num_warps, num_stages=tiles.num_stages)
    if tiles.max_registers:
        options["maxnreg"] = tiles.max_registers
    _prompt_kernel[(tiles.programs,)](
        q, out, cache.keys, cache.values, plan.page_table, plan.items, plan.counts, num_tokens,
        q.stride(0), cache.stride_page, cache.stride_head, plan.page_table.stride(0),
        scale * 1.4426950408889634,
        **prompt_constants(plan.heads, head_dim, cache.page_size), **options,
    )  # fmt: skip
    return out


def prompt_constants(heads: tuple[int, int], head_dim: int, page_size: int) -> dict[str, Any]:
    """The compile-time constants of _prompt_kernel, except PDL."""
    return {
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "PAIR": PAIR,
        "HEAD_DIM": head_dim,
        "PAGE": page_size,
        "GROUP": heads[0] // heads[1],
        "KV_HEADS": heads[1],
        "FIELDS": FIELDS,
        "INTERPRETED": INTERPRETED,
    }
