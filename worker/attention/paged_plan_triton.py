"""How a batch is cut into items (tile, split) for paged_triton, on the device.

How a tile is cut depends on its own length and on the batch's padded shape alone, for prompts also
on whether the bound of the keys is above SHORT_KEYS (see `paged_tiles`). So no launch depends on a
length that the host does not know.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.attention.base import AttentionShape
from worker.attention.paged_tiles import MAX_SPLITS, PagedTiles
from worker.ops.jit import INTERPRETED, power_of_two, tl, triton

FIELDS = 8  # i32 words of an item, see item_at: one sector of the L2


@triton.jit
def bound_of(x):
    """x for range(): the interpreter's scalars are arrays of one element, which range refuses."""
    if INTERPRETED:
        return x.handle.data.item()
    else:
        return x


@triton.jit
def _cut(num_keys, shortest, most, BLOCK_N: tl.constexpr):
    """How many splits num_keys keys are cut into, and the keys of all but the last."""
    wanted = tl.minimum(tl.maximum(tl.cdiv(num_keys, shortest), 1), most)
    length = tl.maximum(tl.cdiv(tl.cdiv(num_keys, wanted), BLOCK_N), 1) * BLOCK_N
    return tl.maximum(tl.cdiv(num_keys, length), 1), length


@triton.jit
def _num_keys(
    tile, query_len, seq_len, BLOCK_M: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr
):
    """Where the keys end that the last query row of a tile sees."""
    if CAUSAL:
        last = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, query_len - 1)
        return tl.maximum(seq_len - query_len + last + 1, 0)
    else:
        return tl.maximum(seq_len, 0)


@triton.jit
def _first_key(
    tile, query_len, seq_len,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """A multiple of BLOCK_N before which no row of a tile sees a key."""
    if WINDOW:
        position = seq_len - query_len + tile * BLOCK_M // GROUP
        return tl.maximum(position - (WINDOW - 1), 0) // BLOCK_N * BLOCK_N
    else:
        return 0


@triton.jit(do_not_specialize=["max_tiles", "shortest", "most", "stride_table"])
def _plan_kernel(
    query_start, seq_lens, page_table, items, counts, max_tiles, shortest, most, stride_table,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, FIELDS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """Grid (requests,): a program writes its request's items behind those of all before it.

    With SORTED those are the requests with more keys: programs start in the order of the items,
    and a long row that starts last would run on alone.
    """
    req, num_reqs = tl.program_id(0), tl.num_programs(0)
    own_seq_len = tl.load(seq_lens + req)
    before = tl.zeros((BLOCK_R,), tl.int32)
    everything = tl.zeros((BLOCK_R,), tl.int32)
    for first in range(0, bound_of(num_reqs), BLOCK_R):
        others = first + tl.arange(0, BLOCK_R)
        there = others < num_reqs
        other_start = tl.load(query_start + others, mask=there, other=0)
        other_end = tl.load(query_start + others + 1, mask=there, other=0)
        other_seq_len = tl.load(seq_lens + others, mask=there, other=0)
        other_len = other_end - other_start
        earlier = others < req
        if SORTED:
            earlier &= other_seq_len == own_seq_len
            earlier |= other_seq_len > own_seq_len
        for tile in range(bound_of(max_tiles)):
            num_keys = _num_keys(tile, other_len, other_seq_len, BLOCK_M, GROUP, CAUSAL)
            num_keys -= _first_key(tile, other_len, other_seq_len, BLOCK_M, BLOCK_N, GROUP, WINDOW)
            num_splits, length = _cut(num_keys, shortest, most, BLOCK_N)
            splits = tl.where(tile * BLOCK_M < other_len * GROUP, num_splits, 0)
            before += tl.where(earlier, splits, 0)
            everything += splits
    item = tl.sum(before, 0)

    start = tl.load(query_start + req)
    end = tl.load(query_start + req + 1)
    query_len = end - start
    seq_len = own_seq_len
    split = tl.arange(0, BLOCK_S)
    table = page_table + req.to(tl.int64) * stride_table
    num_tiles = tl.cdiv(query_len * GROUP, BLOCK_M)
    for tile in range(bound_of(num_tiles)):
        num_keys = _num_keys(tile, query_len, seq_len, BLOCK_M, GROUP, CAUSAL)
        first = _first_key(tile, query_len, seq_len, BLOCK_M, BLOCK_N, GROUP, WINDOW)
        num_splits, length = _cut(num_keys - first, shortest, most, BLOCK_N)
        at = items + (item + split) * FIELDS
        listed = split < num_splits
        begin = first + split * length
        page = tl.load(table + begin // PAGE, mask=listed & (begin < num_keys), other=0)
        tl.store(at, tl.zeros_like(split) + start, mask=listed)
        tl.store(at + 1, tl.zeros_like(split) + query_len * GROUP, mask=listed)
        tl.store(at + 2, tl.zeros_like(split) + (seq_len - query_len), mask=listed)
        tl.store(at + 3, begin, mask=listed)
        tl.store(at + 4, tl.minimum(begin + length, num_keys), mask=listed)
        tl.store(at + 5, tl.zeros_like(split) + req, mask=listed)
        tl.store(at + 6, page, mask=listed)
        tl.store(at + 7, split + (num_splits * 256 + tile * 65536), mask=listed)
        item += num_splits
    if req == num_reqs - 1:
        tl.store(counts, tl.sum(everything, 0))
        tl.store(counts + 1, end)


@triton.jit
def item_at(items, index, wanted, FIELDS: tl.constexpr):
    """The fields of one item, as _plan_kernel wrote them."""
    at = items + index * FIELDS
    start = tl.load(at, mask=wanted, other=0)
    num_rows = tl.load(at + 1, mask=wanted, other=0)
    past = tl.load(at + 2, mask=wanted, other=0)
    begin = tl.load(at + 3, mask=wanted, other=0)
    end = tl.load(at + 4, mask=wanted, other=0)
    req = tl.load(at + 5, mask=wanted, other=0)
    page = tl.load(at + 6, mask=wanted, other=0)
    cut = tl.load(at + 7, mask=wanted, other=0)
    return start, num_rows, past, begin, end, req, page, cut


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """One batch cut into items. The layers of a pass run one after the other and share it all."""

    tiles: PagedTiles
    shape: AttentionShape
    page_table: Tensor  # [num_reqs, max_pages] i32
    items: Tensor  # [max_items, FIELDS] i32; the first counts[0] are valid
    counts: Tensor  # [2] i32: items, query rows
    arrivals: Tensor  # [max_items * kv_heads] i32; all 0 between launches
    partial: Tensor  # [max_items * kv_heads * rows * power_of_two(out_dim)] f32; scratch
    stats: Tensor  # [max_items * kv_heads * 2 * rows] f32; scratch


def plan_items(
    query_start: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    tiles: PagedTiles,
    shape: AttentionShape,
    page_size: int,
) -> PagedPlan:
    """Cut the batch into items on the device.

    query_start: [num_reqs + 1], seq_lens: [num_reqs], page_table: [num_reqs, max_pages]; all i32.

    Everything that a pass needs is allocated here; during a capture, from the graph's own pool.
    """
    assert query_start.dtype == seq_lens.dtype == page_table.dtype == torch.int32
    assert page_table.stride(1) == 1
    device, slots = seq_lens.device, tiles.max_items * shape.num_kv_heads
    split_slots = slots if tiles.max_splits > 1 else 1
    plan = PagedPlan(
        tiles=tiles,
        shape=shape,
        page_table=page_table,
        items=torch.empty(tiles.max_items, FIELDS, dtype=torch.int32, device=device),
        counts=torch.empty(2, dtype=torch.int32, device=device),
        arrivals=torch.empty(slots, dtype=torch.int32, device=device),
        partial=torch.empty(split_slots * tiles.rows * power_of_two(shape.out_dim), device=device),
        stats=torch.empty(split_slots * tiles.rows * 2, device=device),
    )
    constants: dict[str, Any] = {
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "PAGE": page_size,
        "GROUP": shape.num_heads // shape.num_kv_heads, "BLOCK_R": 256,
        "BLOCK_S": max(MAX_SPLITS, power_of_two(tiles.most)), "FIELDS": FIELDS,
        "CAUSAL": shape.mask.causal, "WINDOW": shape.mask.window or 0,
        "SORTED": tiles.longest_first,
    }  # fmt: skip
    _plan_kernel[(seq_lens.shape[0],)](
        query_start, seq_lens, page_table, plan.items, plan.counts, tiles.max_tiles,
        tiles.shortest, tiles.most, page_table.stride(0), **constants,
    )  # fmt: skip
    plan.arrivals.zero_()  # launched behind it: so any PDL kernel that follows has whole items
    return plan
