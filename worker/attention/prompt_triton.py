"""Causal attention of long chunks, on GPUs whose TMA loads blocks of keys (ADR 0022).

The keys and values of a layer are gathered from their pages, one request's behind the other's,
and a program takes 128 tokens of one query head over them, 128 keys at a time. Copying 32768 keys
takes a hundredth of what 8192 rows over them take, and dense blocks load a third faster than pages.

A row takes its keys in units of BLOCKS_N of its head_dim, counted from its first one, and a unit
without a key that it sees leaves its sums as they are. So its bits depend neither on where its
prompt is cut into chunks, nor on the other rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from worker.attention.base import AttentionShape
from worker.attention.eight_bits_triton import exponents_at, power_of
from worker.attention.paged_plan_triton import FIELDS, PagedPlan, bound_of, item_at, plan_items
from worker.attention.paged_tiles import PagedTiles
from worker.attention.paged_triton import capped, scale_of, sink_of, zero_padding
from worker.config.checkpoint.mask import KEY_BLOCK
from worker.forward.batch import Bounds
from worker.ops.jit import (
    INTERPRETED,
    has_dependent_launch,
    is_hopper,
    power_of_two,
    tl,
    triton,
)

BLOCK_M = 128
UNIT = KEY_BLOCK  # gathered rows of a request are a multiple of it
HEAD_DIMS = (64, 96, 128, 256)
BLOCKS_N = {64: 128, 128: 128, 256: 64}  # keys of a step, by head_dim, or the next power of two
SHARED_BYTES = 228 << 10  # of an SM
NO_PAGE = 1 << 30  # tokens: all keys are within the first of such pages, and no item's page is read
NUM_WARPS, NUM_STAGES = 8, {64: 3, 128: 3, 256: 2}  # stages by head_dim


@triton.jit(do_not_specialize=["stride_table", "stride_head"])
def _gather_kernel(
    k_cache, v_cache, keys, values, page_table, seq_lens, first_rows, query_start,
    stride_table, stride_page, stride_cache_head, stride_head,
    PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Grid (pages of the longest request, requests, kv heads): copies a page of one head.

    keys, values: [kv_heads, rows, BLOCK_D], heads stride_head apart. A request's rows begin at
    first_rows[i] and are zeros from its last key to the end of a unit: 0 · NaN would be NaN.
    query_start: with a WINDOW, so that units before it are left out; else None.
    """
    page, req, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_keys = tl.load(seq_lens + req)
    first = page * PAGE
    wanted = first < tl.cdiv(num_keys, UNIT) * UNIT
    if WINDOW:
        query_len = tl.load(query_start + req + 1) - tl.load(query_start + req)
        wanted &= first >= tl.maximum(num_keys - query_len - (WINDOW - 1), 0) // UNIT * UNIT
    if wanted:
        at = tl.load(page_table + req.to(tl.int64) * stride_table + page, mask=first < num_keys)
        slot = tl.arange(0, PAGE)
        dims = tl.arange(0, BLOCK_D)
        inside = (first + slot < num_keys)[:, None]
        if HEAD_DIM < BLOCK_D:
            inside &= (dims < HEAD_DIM)[None, :]
        within = slot[:, None] * HEAD_DIM + dims[None, :]
        source = at.to(tl.int64) * stride_page + head * stride_cache_head + within
        row = tl.load(first_rows + req).to(tl.int64) + first
        dest = head.to(tl.int64) * stride_head + row * BLOCK_D
        dest += slot[:, None] * BLOCK_D + dims[None, :]
        key = tl.load(k_cache + source, mask=inside, other=0.0)
        value = tl.load(v_cache + source, mask=inside, other=0.0)
        if k_cache.dtype.element_ty == tl.float8e4nv:
            of_page = at.to(tl.int64) * stride_page + head * stride_cache_head + PAGE * HEAD_DIM
            there = first + slot < num_keys
            of_keys = power_of(exponents_at(k_cache, of_page + slot, there))
            of_values = power_of(exponents_at(v_cache, of_page + slot, there))
            key = key.to(tl.float32) * of_keys[:, None]
            value = value.to(tl.float32) * of_values[:, None]
        tl.store(keys + dest, key.to(keys.dtype.element_ty))
        tl.store(values + dest, value.to(values.dtype.element_ty))


@triton.jit
def _units(
    acc, weight, top, q_tile, keys, values, first_row, begin, stop, position, scale,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys begin..stop - 1; without MASKED every row sees all of them."""
    unit = 1.0 if CAP > 0 else scale  # of scores, for exp2
    for key in tl.range(bound_of(begin), bound_of(stop), BLOCK_N):  # type: ignore[misc]
        k_tile = keys.load([first_row + key, 0])
        v_tile = values.load([first_row + key, 0])
        dtype = v_tile.dtype
        if INTERPRETED:
            k_tile, v_tile = k_tile.to(tl.float32), v_tile.to(tl.float32)
        scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")
        if CAP > 0:
            scores = capped(scores * scale, CAP)
        if MASKED:
            at = (key + tl.arange(0, BLOCK_N))[None, :]
            seen = at <= position[:, None]
            if WINDOW:
                seen &= at > position[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * unit)
        base = higher
        if MASKED:
            base = tl.where(higher == float("-inf"), 0.0, higher)  # the row has seen no key yet
        p = tl.exp2(scores * unit - base[:, None])
        shrink = tl.exp2(top - base)
        weight = weight * shrink + tl.sum(p, 1)
        p = p.to(dtype)
        if INTERPRETED:
            p = p.to(tl.float32)
        acc = tl.dot(p, v_tile, acc * shrink[:, None], input_precision="ieee")
        top = higher
    return acc, weight, top


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _prompt_kernel(
    q, out, keys, values, items, counts, first_rows, sinks, num_tokens, num_rows, stride_q, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, FIELDS: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of tokens · query heads,); the last tiles, whose keys are the most, go first.

    q: [num_tokens, HEADS, HEAD_DIM], rows stride_q apart; out: the same, contiguous.
    keys, values: descriptors of [kv_heads · num_rows, BLOCK_D] in blocks of BLOCK_N rows.
    items, counts: of plan_items, as if query heads were kv heads. sinks: [HEADS] or None.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    flat = tl.load(counts) * HEADS - 1 - program
    num_computed = tl.load(counts + 1)
    dims = tl.arange(0, BLOCK_D)
    if flat >= 0:
        start, num_r, past, begin, end, req, _, cut = item_at(  # type: ignore[misc]
            items, flat // HEADS, flat >= 0, FIELDS
        )
        head = flat % HEADS
        rows = cut // 65536 * BLOCK_M + tl.arange(0, BLOCK_M)
        here = (rows < num_r)[:, None]
        if HEAD_DIM < BLOCK_D:
            here &= (dims < HEAD_DIM)[None, :]
        position = past + rows
        row = (start + rows).to(tl.int64)[:, None]
        q_tile = tl.load(q + row * stride_q + head * HEAD_DIM + dims[None, :], mask=here, other=0.0)
        if INTERPRETED:
            q_tile = q_tile.to(tl.float32)
        first_row = head // GROUP * num_rows + tl.load(first_rows + req)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
        if sinks is not None:  # as a key without a value
            top = tl.zeros((BLOCK_M,), tl.float32) + sink_of(sinks, head)
            weight += 1.0
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        # Most units lie before all rows of the tile, and in the windows of all. They need no mask.
        seen = tl.minimum((tl.min(position, 0) + 1) // BLOCK_N * BLOCK_N, end)
        if WINDOW:
            first = tl.maximum(tl.max(position, 0) - (WINDOW - 1), 0)
            first = tl.minimum(tl.cdiv(first, BLOCK_N) * BLOCK_N, end)
            acc, weight, top = _units(  # type: ignore[misc]
                acc, weight, top, q_tile, keys, values, first_row, begin, first, position, scale,
                True, BLOCK_N, WINDOW, CAP,
            )  # fmt: skip
            begin, seen = first, tl.maximum(first, seen)
        acc, weight, top = _units(  # type: ignore[misc]
            acc, weight, top, q_tile, keys, values, first_row, begin, seen, position, scale,
            False, BLOCK_N, WINDOW, CAP,
        )  # fmt: skip
        acc, weight, top = _units(  # type: ignore[misc]
            acc, weight, top, q_tile, keys, values, first_row, seen, end, position, scale,
            True, BLOCK_N, WINDOW, CAP,
        )  # fmt: skip
        whole = acc / tl.where(weight > 0, weight, 1.0)[:, None]  # 0 where there is no key
        out_at = out + (row * HEADS + head) * HEAD_DIM + dims[None, :]
        tl.store(out_at, whole.to(out.dtype.element_ty), mask=here)

    zero_padding(out, num_computed, num_tokens, program, num_programs, HEADS, HEAD_DIM, BLOCK_D)


class PromptKernel(NamedTuple):
    """What computes chunks over gathered keys: this file's, or prompt_gluon's where that serves."""

    describe: Callable[[Tensor], Any]  # [rows, width] of keys or values, as it loads them
    launch: Callable[[Tensor, Tensor, "PromptPlan", Tensor | None], None]  # q, out, plan, sinks


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The plan of one pass, for all layers, which overwrite each other's gathered keys."""

    kernel: PromptKernel
    paged: PagedPlan  # tiles of tokens, as if query heads were kv heads
    query_start: Tensor | None  # [num_reqs + 1] i32, with a window; else None
    seq_lens: Tensor  # [num_reqs] i32
    first_rows: Tensor  # [num_reqs] i32, in `gathered`
    gathered: Tensor  # [2, kv_heads, rows, power_of_two(head_dim)]: keys, values
    keys: Any  # described: [kv_heads * rows, power_of_two(head_dim)]
    values: Any
    max_seq_len: int  # host bound


def serves(k_cache: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel runs for a layer's [num_pages, kv_heads, page_size, head_dim] view.

    dtype: of the queries, and of the keys once they are gathered.
    """
    _, _, page_size, head_dim = k_cache.shape
    known = dtype.itemsize == 2 and UNIT % page_size == 0 and head_dim in HEAD_DIMS
    return known and page_size >= 16 and (has_room(k_cache))


def has_room(x: Tensor) -> bool:
    """Whether an SM has SHARED_BYTES; in the interpreter, too."""
    if INTERPRETED or not has_dependent_launch(x):
        return bool(INTERPRETED)
    device = torch.cuda.get_device_properties(x.device)
    return device.shared_memory_per_multiprocessor >= SHARED_BYTES


def hopper_serves(k_cache: Tensor, shape: AttentionShape) -> bool:
    """Whether prompt_gluon's kernel runs for such layers, of those that `serves` is true for.

    Caps stay with this file's, as the other has none.
    """
    return not shape.cap and not INTERPRETED and is_hopper(k_cache)


def num_rows(seq_lens: Sequence[int]) -> int:
    """Rows of gathered keys that requests of such lengths take."""
    return sum(-(-length // UNIT) * UNIT for length in seq_lens)


def plan_prompts(
    query_start: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    bounds: Bounds,
    shape: AttentionShape,
    gathered: Tensor,
    kernel: PromptKernel | None = None,
) -> PromptPlan:
    """Plan a batch of these bounds for a kernel; None: this file's.

    gathered: [2, kv_heads, rows, power_of_two(head_dim)], at least `num_rows` of the lengths.
    """
    kernel = kernel or KERNEL
    _, num_tokens, max_query_len, max_seq_len = bounds
    wide = gathered.shape[3]
    max_tiles, block_n = -(-max_query_len // BLOCK_M), BLOCKS_N[wide]
    num_tiles = min(len(seq_lens) * max_tiles, -(-num_tokens // BLOCK_M) + len(seq_lens))
    tiles = PagedTiles(
        BLOCK_M, block_n, rows=BLOCK_M, max_tiles=max_tiles, max_items=num_tiles,
        programs=num_tiles * shape.num_heads, num_warps=NUM_WARPS,
        num_stages=NUM_STAGES[wide],
    )  # fmt: skip
    by_head = replace(shape, num_kv_heads=shape.num_heads)
    paged = plan_items(query_start, seq_lens, page_table, tiles, by_head, NO_PAGE)
    units = torch.div(seq_lens + UNIT - 1, UNIT, rounding_mode="floor") * UNIT
    first_rows = (units.cumsum(0) - units).to(torch.int32)
    keys, values = map(kernel.describe, gathered.flatten(1, 2))
    starts = None if shape.mask.window is None else query_start
    return PromptPlan(
        kernel, paged, starts, seq_lens, first_rows, gathered, keys, values, max_seq_len
    )


def prompt_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: PromptPlan, out: Tensor, sinks: Tensor | None
) -> Tensor:
    """As paged_attention, for a plan by plan_prompts."""
    _, num_heads, head_dim = q.shape
    _, kv_heads, page_size, _ = k_cache.shape
    page_table, shape = plan.paged.page_table, plan.paged.shape
    assert num_heads == shape.num_heads
    assert q.stride()[1:] == (head_dim, 1)
    assert k_cache.stride() == v_cache.stride()
    assert out.is_contiguous()
    keys, values = plan.gathered
    num_pages = num_rows([plan.max_seq_len]) // page_size
    constants: dict[str, Any] = {
        "PAGE": page_size, "HEAD_DIM": head_dim, "BLOCK_D": keys.shape[2], "UNIT": UNIT,
        "WINDOW": shape.mask.window or 0,
    }  # fmt: skip
    _gather_kernel[(num_pages, len(plan.seq_lens), kv_heads)](
        k_cache, v_cache, keys, values, page_table, plan.seq_lens, plan.first_rows,
        plan.query_start, page_table.stride(0), k_cache.stride(0), k_cache.stride(1),
        keys.stride(0), **constants,
    )  # fmt: skip
    plan.kernel.launch(q, out, plan, sinks)
    return out


def _describe(rows: Tensor) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor  # absent where Triton is

    wide = rows.shape[1]
    return TensorDescriptor(rows, list(rows.shape), [wide, 1], [BLOCKS_N[wide], wide])


def _launch(q: Tensor, out: Tensor, plan: PromptPlan, sinks: Tensor | None) -> None:
    tiles, shape = plan.paged.tiles, plan.paged.shape
    _, kv_heads, num_rows, _ = plan.gathered.shape
    options: dict[str, Any] = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    _prompt_kernel[(tiles.programs,)](
        q, out, plan.keys, plan.values, plan.paged.items, plan.paged.counts, plan.first_rows,
        sinks, len(q), num_rows, q.stride(0), scale_of(shape),
        **prompt_constants(replace(shape, num_kv_heads=kv_heads)), **options,
    )  # fmt: skip


KERNEL = PromptKernel(_describe, _launch)


def prompt_constants(shape: AttentionShape) -> dict[str, Any]:
    """The compile-time constants of _prompt_kernel."""
    wide = power_of_two(shape.head_dim)
    return {
        "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCKS_N[wide], "HEAD_DIM": shape.head_dim, "BLOCK_D": wide,
        "HEADS": shape.num_heads, "GROUP": shape.num_heads // shape.num_kv_heads,
        "FIELDS": FIELDS, "WINDOW": shape.mask.window or 0, "CAP": shape.cap,
    }  # fmt: skip
