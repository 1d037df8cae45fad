"""Attention of ragged query rows over the paged KV cache, for decode, verify, draft and prefill.

Rows are (token, query head) pairs. Those of one kv head and request form tiles of `block_m`
rows. The keys that a tile sees are cut into splits. `paged_plan_triton` lists all items (tile,
split) of a batch, once for all layers, by the tile's own length. So a row's result has the same
bits whatever the other rows are, and no program starts for an empty split. The last program to
finish a tile adds its splits up in order.

A KeyMask says which keys a row sees, by constants. With first_key or window all blocks compare
every key, and those before the window of a tile's first row are not read. A head_dim that is no
power of two is computed as the next one, BLOCK_D, of which the rest is zeros.

The twin in plain torch is `worker.attention.reference`.
"""

from typing import Any

import torch
from torch import Tensor

from worker.attention.base import AttentionShape
from worker.attention.eight_bits_triton import (
    FEW_ROWS,
    apart,
    in_16_bits,
    in_order,
    in_words,
    key_dims,
    key_tile,
    power_of,
    queries_for_words,
    value_tiles,
    weight_power,
)
from worker.attention.paged_plan_triton import FIELDS, PagedPlan, bound_of, item_at
from worker.attention.paged_tiles import PagedTiles
from worker.ops.jit import INTERPRETED, enter, overlap, power_of_two, tl, triton


@triton.jit
def capped(x, CAP: tl.constexpr):
    """CAP · tanh(x), for exp2."""
    return (CAP * 1.4426950408889634) * (1.0 - 2.0 / (tl.exp2(x * 2.885390081777927) + 1.0))


@triton.jit
def sink_of(sinks, heads):
    """The logits of these heads that have no value, for exp2."""
    return tl.load(sinks + heads).to(tl.float32) * 1.4426950408889634


@triton.jit
def _combine(
    partial, stats, first_slot, num_splits, here, BLOCK_D: tl.constexpr, KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr, USED: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """[USED, BLOCK_D] f32: the splits of one tile, added in their order; here: [USED].

    A row that sees no key is that of slot 0, and the keys of its tile are too few to be split.
    """
    local = tl.arange(0, USED)
    dims = tl.arange(0, BLOCK_D)
    top = tl.full((USED,), float("-inf"), tl.float32)
    weight = tl.zeros((USED,), tl.float32)
    total = tl.zeros((USED, BLOCK_D), tl.float32)
    for first in range(0, bound_of(num_splits), UNROLL):
        for i in tl.static_range(UNROLL):  # so many loads are in flight together
            slot = first_slot + (first + i) * KV_HEADS
            known = here & (first + i < num_splits)
            stats_at = stats + slot * (2 * ROWS) + local
            part_top = tl.load(stats_at, mask=known, other=float("-inf"), cache_modifier=".cg")
            part_weight = tl.load(stats_at + ROWS, mask=known, other=0.0, cache_modifier=".cg")
            part_at = partial + (slot * ROWS + local)[:, None] * BLOCK_D + dims[None, :]
            part = tl.load(part_at, mask=known[:, None], other=0.0, cache_modifier=".cg")
            higher = tl.maximum(top, part_top)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            old, new = tl.exp2(top - base), tl.exp2(part_top - base)  # new: 0 if it had no key
            weight = weight * old + part_weight * new
            total = total * old[:, None] + part * new[:, None]
            top = higher
    return total / tl.where(here, weight, 1.0)[:, None]


@triton.jit
def _row_offset(row, start, head, stride, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Element at which query rows (token, head of the group) begin; tokens are `stride` apart."""
    token = (start + row // GROUP).to(tl.int64)
    return token * stride + (head * GROUP + row % GROUP) * HEAD_DIM


@triton.jit
def zero_padding(
    out, num_rows, num_tokens, program, num_programs,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Zeros into the tokens num_rows..num_tokens - 1 of `out`; all programs share the work."""
    dims = tl.arange(0, BLOCK_D)
    last = num_tokens * HEADS
    start = bound_of(num_rows * HEADS + program * 16)
    for first in range(start, bound_of(last), bound_of(num_programs * 16)):
        padding = first + tl.arange(0, 16)
        zero = tl.zeros((16, BLOCK_D), out.dtype.element_ty)
        zero_at = out + padding.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
        there = (padding < last)[:, None]
        if HEAD_DIM < BLOCK_D:
            there &= (dims < HEAD_DIM)[None, :]
        tl.store(zero_at, zero, mask=there)


@triton.jit
def page_of(table, key, keys, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page of the block of keys that begins at `key`; its keys' pages if they are several."""
    if PAGE >= BLOCK_N:
        page = tl.load(table + key // PAGE, mask=key < end, other=0)
    else:
        page = tl.load(table + keys // PAGE, mask=keys < end, other=0)
    return page.to(tl.int64)


@triton.jit
def rows_at(
    head, page, key, block, stride_page, ROW: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Where a block of keys, which begins at `key`, has its rows of ROW elements."""
    if PAGE >= BLOCK_N:  # a split begins at a multiple of BLOCK_N, so no block spans two pages
        return head + page * stride_page + key % PAGE * ROW + block * ROW
    else:
        return head + (page * stride_page + block % PAGE * ROW)


@triton.jit
def _block_exponents(
    k_head, v_head, page, key, block, stride_page, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Those of a block of keys and values, i32; where they are not in eight bits, nothing.

    Beyond the last key they may be any byte; masks hide it.
    """
    if k_head.dtype.element_ty == tl.float8e4nv:
        k_first = k_head.to(tl.pointer_type(tl.uint8)) + PAGE * HEAD_DIM
        v_first = v_head.to(tl.pointer_type(tl.uint8)) + PAGE * HEAD_DIM
        k_at = rows_at(k_first, page, key, block, stride_page, 1, PAGE, BLOCK_N)
        v_at = rows_at(v_first, page, key, block, stride_page, 1, PAGE, BLOCK_N)
        return tl.load(k_at).to(tl.int32), tl.load(v_at).to(tl.int32)
    else:
        return page, page


@triton.jit
def _blocks(
    acc, weight, top, q_tile, k_head, v_head, table, page, of_keys, of_values, stride_page,
    begin, stop, end, position, limit, scale, DTYPE: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    FIRST_KEY: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Online softmax over the blocks of keys begin..stop - 1; limit: the last key a row sees.

    scale: a number, or [rows, 1]. weight: sums of weights, [rows], or apart by a key's place in its
    block, [rows, BLOCK_N]. Without MASKED every row sees all of these keys. `page`, of_keys and
    of_values are the page and the exponents of the first block; those of the block after the last
    are returned. Keys from `end` on have no page. Exponents are loaded a block before their use:
    Triton overlaps no loads of single bytes.
    """
    EIGHT: tl.constexpr = k_head.dtype.element_ty == tl.float8e4nv
    COLUMNS: tl.constexpr = BLOCK_D // 4 if WORDS else BLOCK_D
    WIDTH: tl.constexpr = HEAD_DIM * COLUMNS // BLOCK_D  # columns of a key that there are
    NOTHING: tl.constexpr = 0 if WORDS else 0.0  # pyright: ignore[reportAssignmentType]
    if WORDS:
        acc_0, acc_1, acc_2, acc_3 = apart(acc)  # type: ignore[misc]
    dims = tl.arange(0, COLUMNS)
    block = tl.arange(0, BLOCK_N)
    for key in range(bound_of(begin), bound_of(stop), BLOCK_N):
        keys = key + block
        k_rows = rows_at(k_head, page, key, block, stride_page, HEAD_DIM, PAGE, BLOCK_N)
        v_rows = rows_at(v_head, page, key, block, stride_page, HEAD_DIM, PAGE, BLOCK_N)
        if WORDS:
            k_rows = k_rows.to(tl.pointer_type(tl.int32))
            v_rows = v_rows.to(tl.pointer_type(tl.int32))
        k_at, v_at = k_rows[:, None] + dims[None, :], v_rows[:, None] + dims[None, :]
        wide = (dims < WIDTH)[None, :]
        if MASKED:
            inside = (keys < end)[:, None]  # memory beyond may hold NaN, and 0 · NaN is NaN
            if FIRST_KEY:
                inside &= (keys >= FIRST_KEY)[:, None]
            if HEAD_DIM < BLOCK_D:
                inside &= wide
            k_tile = tl.load(k_at, mask=inside, other=NOTHING)
            v_tile = tl.load(v_at, mask=inside, other=NOTHING)
        elif HEAD_DIM < BLOCK_D:
            k_tile = tl.load(k_at, mask=wide, other=NOTHING)
            v_tile = tl.load(v_at, mask=wide, other=NOTHING)
        else:
            k_tile, v_tile = tl.load(k_at), tl.load(v_at)
        k_exponents, v_exponents = of_keys, of_values
        page = page_of(table, key + BLOCK_N, keys + BLOCK_N, end, PAGE, BLOCK_N)
        of_keys, of_values = _block_exponents(  # type: ignore[misc]
            k_head, v_head, page, key + BLOCK_N, block, stride_page, HEAD_DIM, PAGE, BLOCK_N
        )
        if WORDS:
            k_tile = key_tile(k_tile, q_tile.dtype)
        else:
            if EIGHT:
                k_tile = in_16_bits(k_tile, DTYPE)
                v_tile = in_16_bits(v_tile, DTYPE)
            k_tile = tl.trans(k_tile)
        if INTERPRETED:
            k_tile = k_tile.to(tl.float32)
        scores = tl.dot(q_tile, k_tile, input_precision="ieee")
        if EIGHT:  # powers of two: scores and weights take them with the same bits as keys would
            scores *= power_of(k_exponents)[None, :]
        scores *= scale
        if CAP > 0:
            scores = capped(scores, CAP)
        if MASKED:  # the last block may pass `end`; no row of the tile sees keys there
            seen = keys[None, :] <= limit[:, None]
            if FIRST_KEY:
                seen &= (keys >= FIRST_KEY)[None, :]
            if WINDOW:
                seen &= keys[None, :] > position[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = higher
        if MASKED:
            base = tl.where(higher == float("-inf"), 0.0, higher)  # the row has seen no key yet
        shrink = tl.exp2(top - base)
        p = tl.exp2(scores - base[:, None])
        if len(weight.shape) == 2:
            weight = weight * shrink[:, None] + p
        else:
            weight = weight * shrink + tl.sum(p, 1)
        p = p.to(DTYPE)
        if WORDS:
            p *= weight_power(v_exponents, 60).to(DTYPE)[None, :]
        elif EIGHT:
            p *= weight_power(v_exponents, 0).to(DTYPE)[None, :]
        if INTERPRETED:
            p = p.to(tl.float32)
        if WORDS:
            v_0, v_1, v_2, v_3 = value_tiles(v_tile, DTYPE)  # type: ignore[misc]
            acc_0 = tl.dot(p, v_0, acc_0 * shrink[:, None], input_precision="ieee")
            acc_1 = tl.dot(p, v_1, acc_1 * shrink[:, None], input_precision="ieee")
            acc_2 = tl.dot(p, v_2, acc_2 * shrink[:, None], input_precision="ieee")
            acc_3 = tl.dot(p, v_3, acc_3 * shrink[:, None], input_precision="ieee")
        else:
            if INTERPRETED:
                v_tile = v_tile.to(tl.float32)
            acc = tl.dot(p, v_tile, acc * shrink[:, None], input_precision="ieee")
        top = higher
    if WORDS:
        acc = in_order(acc_0, acc_1, acc_2, acc_3)
    return acc, weight, top, page, of_keys, of_values


@triton.jit
def _online(
    q_tile, k_head, v_head, table, first_page, stride_page, begin, end, position, limit, scale,
    top, weight, DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, MANY: tl.constexpr,
    FIRST_KEY: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, WORDS: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """Softmax over keys begin..end - 1, not yet divided: sums, sum of weights, highest score.

    top, weight: the highest score and the sum of weights of keys seen before.
    """
    block = tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if PAGE >= BLOCK_N:
        page = first_page.to(tl.int64)
    else:
        page = page_of(table, begin, begin + block, end, PAGE, BLOCK_N)
    of_keys, of_values = _block_exponents(  # type: ignore[misc]
        k_head, v_head, page, begin, block, stride_page, HEAD_DIM, PAGE, BLOCK_N
    )
    masked = begin
    if APART:  # the warps share a row, and would wait for one another to add it up
        weight = tl.where(block[None, :] == 0, weight[:, None], 0.0)
    # Most blocks of a prompt lie before all rows of a tile and need no mask. A second loop drains
    # the pipeline of loads, so short queries have one loop only.
    if MANY and not (FIRST_KEY or WINDOW):
        masked += tl.maximum(tl.min(limit, 0) + 1 - begin, 0) // BLOCK_N * BLOCK_N
        acc, weight, top, page, of_keys, of_values = _blocks(  # type: ignore[misc]
            acc, weight, top, q_tile, k_head, v_head, table, page, of_keys, of_values,
            stride_page, begin, tl.minimum(masked, end), end, position, limit, scale, DTYPE, False,
            BLOCK_N, HEAD_DIM, BLOCK_D, PAGE, FIRST_KEY, WINDOW, CAP, WORDS,
        )  # fmt: skip
    acc, weight, top, page, of_keys, of_values = _blocks(  # type: ignore[misc]
        acc, weight, top, q_tile, k_head, v_head, table, page, of_keys, of_values,
        stride_page, masked, end, end, position, limit, scale, DTYPE, True, BLOCK_N, HEAD_DIM,
        BLOCK_D, PAGE, FIRST_KEY, WINDOW, CAP, WORDS,
    )  # fmt: skip
    if APART:
        weight = tl.sum(weight, 1)
    if WORDS:
        acc *= 2.0**60  # value_tiles lack 2^120
    return acc, weight, top


@triton.jit(do_not_specialize=["num_tokens", "stride_table"])
def _attend_kernel(
    q, out, k_cache, v_cache, page_table, items, counts, partial, stats, arrivals, sinks,
    num_tokens, stride_q, stride_page, stride_head, stride_table, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, ROWS: tl.constexpr,
    USED: tl.constexpr, UNROLL: tl.constexpr, FIELDS: tl.constexpr, MANY: tl.constexpr,
    FIRST_KEY: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    WORDS: tl.constexpr, APART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs, which divide the pairs (item, kv head) among themselves.

    MANY: requests may have several tiles. Later tiles see more keys, so the last ones go first.

    q: [num_tokens, heads, HEAD_DIM], rows stride_q apart; out: the same, contiguous.
    k_cache, v_cache: [pages, KV_HEADS, PAGE, HEAD_DIM], tokens contiguous, of q's dtype or in eight
    bits. scale: for exp2, or with CAP for tanh. sinks: [heads] or None.
    items, counts: written by _plan_kernel. arrivals: i32 [items, KV_HEADS], zeros.
    partial: f32 [items, KV_HEADS, ROWS, BLOCK_D]; stats: f32 [items, KV_HEADS, 2, ROWS].
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    enter(PDL)
    num_pairs = tl.load(counts) * KV_HEADS
    num_rows = tl.load(counts + 1)
    # `items` has room for one item a program, so this load need not wait for the number of items.
    index = tl.maximum(num_pairs - 1 - program, 0) if MANY else program
    start, num_r, past, begin, end, req, page, cut = item_at(  # type: ignore[misc]
        items, index // KV_HEADS, program >= 0, FIELDS
    )
    local = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    q_dims = key_dims(BLOCK_D) if WORDS else dims
    for turn in range(bound_of(program), bound_of(num_pairs), bound_of(num_programs)):
        flat = num_pairs - 1 - turn if MANY else turn
        head = flat % KV_HEADS
        split, num_splits = cut % 256, cut // 256 % 256
        rows = cut // 65536 * BLOCK_M + local
        here = rows < num_r
        column = rows // GROUP
        position = past + column
        limit = position
        if not CAUSAL:
            limit = tl.zeros_like(column) + (past + num_r // GROUP - 1)
        table = page_table + req.to(tl.int64) * stride_table
        q_at = q + _row_offset(rows, start, head, stride_q, GROUP, HEAD_DIM)[:, None]
        # Triton 3.6 and 3.7 take what only an inner loop's bounds need for dead and do not carry it
        # to the next turn (facebookexperimental/triton#687): so `begin` is needed here as well.
        inside = here[:, None]
        if HEAD_DIM < BLOCK_D:
            inside &= (q_dims < HEAD_DIM)[None, :]
        q_tile = tl.load(q_at + q_dims[None, :], mask=inside & (begin >= 0), other=0.0)
        row_scale = scale
        if WORDS:
            WITH_KEYS: tl.constexpr = tl.float32 if q_tile.dtype == tl.float32 else tl.float16
            q_tile, back = queries_for_words(q_tile, WITH_KEYS)  # type: ignore[misc]
            row_scale = (scale * back)[:, None]
        if INTERPRETED:
            q_tile = q_tile.to(tl.float32)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
        if sinks is not None:  # the first split sees them, as a key without a value
            sink = sink_of(sinks, head * GROUP + rows % GROUP)
            top = tl.where(split == 0, sink, top)
            weight = tl.where(split == 0, 1.0, weight)
        acc, weight, top = _online(
            q_tile, k_cache + head * stride_head, v_cache + head * stride_head, table, page,
            stride_page, begin, end, position, limit, row_scale, top, weight, q.dtype.element_ty,
            BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_D, PAGE, MANY, FIRST_KEY, WINDOW, CAP, WORDS, APART,
        )  # fmt: skip

        stride_out = KV_HEADS * GROUP * HEAD_DIM
        if num_splits == 1:
            out_at = out + _row_offset(rows, start, head, stride_out, GROUP, HEAD_DIM)[:, None]
            whole = acc / tl.where(weight > 0, weight, 1.0)[:, None]  # 0 where there is no key
            known = here[:, None]
            if HEAD_DIM < BLOCK_D:
                known &= (dims < HEAD_DIM)[None, :]
            tl.store(out_at + dims[None, :], whole.to(out.dtype.element_ty), mask=known)
        else:
            slot = tl.cast(flat, tl.int64)
            part_at = partial + (slot * ROWS + local)[:, None] * BLOCK_D + dims[None, :]
            tl.store(part_at, acc, mask=here[:, None])
            tl.store(stats + slot * (2 * ROWS) + local, top, mask=here)
            tl.store(stats + slot * (2 * ROWS) + ROWS + local, weight, mask=here)
            tl.debug_barrier()  # all threads' parts are written before the one atomic releases them
            first_slot = slot - split * KV_HEADS
            arrived = tl.atomic_add(arrivals + first_slot, 1, sem="acq_rel", scope="gpu")
            if arrived == num_splits - 1:
                # Only rows that a tile can have, so that more splits fit into registers at once.
                used = cut // 65536 * BLOCK_M + tl.arange(0, USED)
                real = used < num_r
                total = _combine(
                    partial, stats, first_slot, num_splits, real, BLOCK_D, KV_HEADS, ROWS, USED,
                    UNROLL,
                )  # fmt: skip
                used_at = _row_offset(used, start, head, stride_out, GROUP, HEAD_DIM)[:, None]
                total = total.to(out.dtype.element_ty)
                known = real[:, None]
                if HEAD_DIM < BLOCK_D:
                    known &= (dims < HEAD_DIM)[None, :]
                tl.store(out + used_at + dims[None, :], total, mask=known)
                tl.store(arrivals + first_slot, 0)
        following = flat - num_programs if MANY else flat + num_programs
        start, num_r, past, begin, end, req, page, cut = item_at(  # type: ignore[misc]
            items, following // KV_HEADS, (following >= 0) & (following < num_pairs), FIELDS
        )

    HEADS: tl.constexpr = KV_HEADS * GROUP
    zero_padding(out, num_rows, num_tokens, program, num_programs, HEADS, HEAD_DIM, BLOCK_D)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: PagedPlan, out: Tensor, sinks: Tensor | None
) -> Tensor:
    """Rows' attention to the keys of their requests that they see; padded rows are zero.

    q: [num_tokens, heads, head_dim], rows contiguous; k_cache, v_cache: a layer's
    [num_pages, kv_heads, page_size, head_dim] views; sinks: [heads], where the plan's shape has
    some. Returns `out`: [num_tokens, heads, head_dim], contiguous.
    """
    num_tokens, num_heads, head_dim = q.shape
    tiles, shape = plan.tiles, plan.shape
    assert num_heads == shape.num_heads
    assert k_cache.stride() == v_cache.stride()
    assert q.stride()[1:] == k_cache.stride()[2:] == (head_dim, 1)
    assert out.is_contiguous()
    options = overlap(q)
    if not tiles.early:
        options = {"PDL": options["PDL"]}  # the next kernel may still start early
    constants = constants_of(tiles, shape, k_cache.shape[2], k_cache.dtype)
    options |= options_of(tiles, shape, constants)
    _attend_kernel[(tiles.programs,)](
        q, out, k_cache, v_cache, plan.page_table, plan.items, plan.counts, plan.partial,
        plan.stats, plan.arrivals, sinks, num_tokens, q.stride(0), k_cache.stride(0),
        k_cache.stride(1), plan.page_table.stride(0), scale_of(shape),
        **constants, **options,
    )  # fmt: skip
    return out


def scale_of(shape: AttentionShape) -> float:
    """The factor of products in kernels: for exp2, or for tanh where there is a cap."""
    return shape.scale / shape.cap if shape.cap else shape.scale * 1.4426950408889634


def constants_of(
    tiles: PagedTiles, shape: AttentionShape, page_size: int, kept: torch.dtype
) -> dict[str, Any]:
    """The compile-time constants of _attend_kernel, except PDL; kept: the cache's dtype."""
    used, block_d = power_of_two(tiles.rows), power_of_two(shape.head_dim)
    return {
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "HEAD_DIM": shape.head_dim,
        "BLOCK_D": block_d, "CAP": shape.cap, "WORDS": in_words(kept, tiles.block_m, block_d),
        "PAGE": page_size, "GROUP": shape.num_heads // shape.num_kv_heads,
        "KV_HEADS": shape.num_kv_heads, "ROWS": tiles.rows, "USED": used,
        "UNROLL": min(max(64 // used, 1), 16), "FIELDS": FIELDS, "MANY": tiles.max_tiles > 1,
        "APART": tiles.block_m <= FEW_ROWS, **shape.mask.constants(),
    }  # fmt: skip


def options_of(
    tiles: PagedTiles, shape: AttentionShape, constants: dict[str, Any]
) -> dict[str, int]:
    """How _attend_kernel is compiled with those constants."""
    made = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    most = tiles.max_registers
    if constants["WORDS"] and tiles.block_m == 16 and shape.dtype != "float32":
        most = 128  # so an SM holds four programs: 159 us a layer of 32 x 8192 on an H200, not 176
    return made | ({"maxnreg": most} if most else {})
