"""Kernels of latent.py: absorbed queries over rows in pages, and what stores rows.

Rows of a tile are (token, head) pairs, as in paged_triton, and paged_plan_triton cuts a batch into
items (tile, split) for both. A block of rows in pages is loaded once: all of it for the scores, its
first VALUE numbers for the sums. Each item has a program, and parts are merged by a second kernel:
a part is 16 · 512 numbers and more, too many for the last program of a tile to add up alone.
"""

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from torch import Tensor

from worker.attention.base import AttentionCaps, AttentionShape, PoolAttention
from worker.attention.eight_bits_triton import exponent_for, in_16_bits, power_of, weight_power
from worker.attention.latent import LatentNorm, absorbs, expands
from worker.attention.paged_plan_triton import FIELDS, PagedPlan, bound_of, item_at, plan_items
from worker.attention.paged_tiles import MAX_SPLITS, PagedTiles
from worker.attention.paged_triton import page_of, rows_at, scale_of, zero_padding
from worker.attention.qk_rope_store import Rotation
from worker.cache.eight_bits import E4M3
from worker.cache.pool import KVPool
from worker.errors import Unsupported
from worker.forward.batch import Batch, Bounds
from worker.forward.context import current
from worker.ops.e4m3_triton import to_e4m3
from worker.ops.jit import (
    HAS_TRITON,
    INTERPRETED,
    enter,
    num_sms,
    overlap,
    power_of_two,
    tl,
    triton,
)

STORED_HEADS = 16  # of queries that one program rotates
MAX_PARTS = 128  # of a tile
MANY_PARTS = 16  # so many are added up all at once, 64 columns a program


@triton.jit
def _latent_blocks(
    q_value, q_rope, rows, table, page, stride_page, begin, end, limit, scale,
    DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, VALUE: tl.constexpr,
    ROPE: tl.constexpr, PAGE: tl.constexpr, FIRST_KEY: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys begin..end - 1, not yet divided: sums, sums of weights, highest.

    q_value, q_rope: [BLOCK_M, VALUE], [BLOCK_M, ROPE]; limit: the last key that a row sees. Of rows
    in eight bits scores and weights take the power, with the same bits as rows would. Exponents are
    loaded a block before their use: Triton overlaps no loads of single bytes.
    TURNED: products have keys and numbers of latents as rows, queries as columns: as wgmma does,
    whose rows are 64, where 16 queries are too few to be rows.
    """
    KEYS: tl.constexpr = 0 if TURNED else 1  # pyright: ignore - the dimension of scores
    EIGHT: tl.constexpr = rows.dtype.element_ty == tl.float8e4nv
    ROW: tl.constexpr = VALUE + ROPE
    block, of_value, of_rope = tl.arange(0, BLOCK_N), tl.arange(0, VALUE), tl.arange(0, ROPE)
    acc = tl.zeros((VALUE, BLOCK_M) if TURNED else (BLOCK_M, VALUE), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    # By place: warps need not wait to add it up.
    weight = tl.zeros((BLOCK_N, BLOCK_M) if TURNED else (BLOCK_M, BLOCK_N), tl.float32)
    if PAGE >= BLOCK_N:
        page = page.to(tl.int64)
    else:
        page = page_of(table, begin, begin + block, end, PAGE, BLOCK_N)
    if EIGHT:
        first = rows.to(tl.pointer_type(tl.uint8)) + PAGE * ROW  # beyond the last key: any byte
        loaded = tl.load(rows_at(first, page, begin, block, stride_page, 1, PAGE, BLOCK_N))
    for key in range(bound_of(begin), bound_of(end), BLOCK_N):
        keys = key + block
        at = rows_at(rows, page, key, block, stride_page, ROW, PAGE, BLOCK_N)[:, None]
        inside = (keys < end)[:, None]  # memory beyond may hold NaN, and 0 · NaN is NaN
        if FIRST_KEY:
            inside &= (keys >= FIRST_KEY)[:, None]
        value = tl.load(at + of_value[None, :], mask=inside, other=0.0)
        rope = tl.load(at + VALUE + of_rope[None, :], mask=inside, other=0.0)
        page = page_of(table, key + BLOCK_N, keys + BLOCK_N, end, PAGE, BLOCK_N)
        if EIGHT:
            exponents, after = loaded, key + BLOCK_N
            loaded = tl.load(rows_at(first, page, after, block, stride_page, 1, PAGE, BLOCK_N))
            value, rope = in_16_bits(value, DTYPE), in_16_bits(rope, DTYPE)
        if INTERPRETED:
            value, rope = value.to(tl.float32), rope.to(tl.float32)
        if TURNED:
            scores = tl.dot(rope, tl.trans(q_rope), input_precision="ieee")
            scores = tl.dot(value, tl.trans(q_value), scores, input_precision="ieee") * scale
        else:
            scores = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
            scores = tl.dot(q_value, tl.trans(value), scores, input_precision="ieee") * scale
        if EIGHT:
            scores *= tl.expand_dims(power_of(exponents), 1 - KEYS)
        numbers = tl.expand_dims(keys, 1 - KEYS)
        scores = tl.where(numbers <= tl.expand_dims(limit, KEYS), scores, float("-inf"))
        if FIRST_KEY:
            scores = tl.where(numbers >= FIRST_KEY, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, KEYS))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # the row has seen no key yet
        shrink = tl.expand_dims(tl.exp2(top - base), KEYS)
        p = tl.exp2(scores - tl.expand_dims(base, KEYS))
        weight = weight * shrink + p
        p = p.to(DTYPE)
        if INTERPRETED:
            p = p.to(tl.float32)
        if EIGHT:
            by = weight_power(exponents.to(tl.int32), 0).to(p.dtype)
            p *= tl.expand_dims(by, 1 - KEYS)
        if TURNED:
            acc = tl.dot(tl.trans(value), p, acc * shrink, input_precision="ieee")
        else:
            acc = tl.dot(p, value, acc * shrink, input_precision="ieee")
        top = higher
    return tl.trans(acc) if TURNED else acc, tl.sum(weight, KEYS), top


@triton.jit
def _fetch(at, ROW: tl.constexpr):
    """Have the L2 read rows of ROW numbers; at: [n], where they begin."""
    LINES: tl.constexpr = triton.next_power_of_2((ROW + 63) // 64)
    line_at = at[:, None] + tl.minimum(tl.arange(0, LINES) * 64, ROW - 1)[None, :]
    FETCH: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"  # pyright: ignore
    tl.inline_asm_elementwise(FETCH, "=r,l", [line_at], tl.int32, False, 1)  # pyright: ignore


@triton.jit(do_not_specialize=["num_tokens", "stride_table"])
def _latent_kernel(
    q, out, rows, page_table, items, counts, partial, stats,
    num_tokens, stride_q, stride_page, stride_table, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, VALUE: tl.constexpr, ROPE: tl.constexpr,
    PAGE: tl.constexpr, FIRST_KEY: tl.constexpr, HEADS: tl.constexpr, FIELDS: tl.constexpr,
    MANY: tl.constexpr, ALONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (items,), of which the first counts[0] are there.

    MANY: requests may have several tiles. Later tiles see more keys, so the last ones go first.

    q: [num_tokens, HEADS, VALUE + ROPE], rows stride_q apart; out: [num_tokens, HEADS, VALUE].
    rows: [pages, PAGE, VALUE + ROPE], pages stride_page apart, of q's dtype or in eight bits.
    scale: for exp2. ALONE: few programs, see `choose`.
    partial: f32 [items, BLOCK_M, VALUE]; stats: f32 [items, 2, BLOCK_M], highest and weight.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    num_items = tl.load(counts)  # items are older than the kernel before, see plan_items
    num_rows = tl.load(counts + 1)
    # `items` has room for one item a program, so this load need not wait for the number of items.
    item = tl.maximum(num_items - 1 - program, 0) if MANY else program
    start, num_r, past, begin, end, req, page, cut = item_at(  # type: ignore[misc]
        items, item, program >= 0, FIELDS
    )
    if ALONE and PDL and PAGE >= BLOCK_N and program < num_items:  # as are most rows
        slot = (begin % PAGE + tl.arange(0, BLOCK_N)) * (VALUE + ROPE)
        _fetch(rows + page.to(tl.int64) * stride_page + slot, VALUE + ROPE)  # pyright: ignore
    enter(PDL)
    if program < num_items:
        local, of_value, of_rope = tl.arange(0, BLOCK_M), tl.arange(0, VALUE), tl.arange(0, ROPE)
        row = cut // 65536 * BLOCK_M + local
        here = (row < num_r)[:, None]
        token = (start + row // HEADS).to(tl.int64)
        q_at = (q + token * stride_q + row % HEADS * (VALUE + ROPE))[:, None]
        q_value = tl.load(q_at + of_value[None, :], mask=here, other=0.0)
        q_rope = tl.load(q_at + VALUE + of_rope[None, :], mask=here, other=0.0)
        if INTERPRETED:
            q_value, q_rope = q_value.to(tl.float32), q_rope.to(tl.float32)
        acc, weight, top = _latent_blocks(  # type: ignore[misc]
            q_value, q_rope, rows, page_table + req.to(tl.int64) * stride_table, page, stride_page,
            begin, end, past + row // HEADS, scale, q.dtype.element_ty, BLOCK_M, BLOCK_N, VALUE,
            ROPE, PAGE, FIRST_KEY, ALONE and q.dtype.element_ty != tl.float32,
        )  # fmt: skip
        if cut // 256 % 256 == 1:
            whole = acc / tl.where(weight > 0, weight, 1.0)[:, None]  # 0 where there is no key
            out_at = (out + token * (HEADS * VALUE) + row % HEADS * VALUE)[:, None]
            tl.store(out_at + of_value[None, :], whole.to(out.dtype.element_ty), mask=here)
        else:
            slot = tl.cast(item, tl.int64) * BLOCK_M + local
            tl.store(partial + slot[:, None] * VALUE + of_value[None, :], acc, mask=here)
            stats_at = stats + tl.cast(item, tl.int64) * (2 * BLOCK_M) + local
            tl.store(stats_at, top, mask=row < num_r)
            tl.store(stats_at + BLOCK_M, weight, mask=row < num_r)
    zero_padding(out, num_rows, num_tokens, program, num_programs, HEADS, VALUE, VALUE)


@triton.jit
def _merge_kernel(
    out, items, counts, partial, stats,
    BLOCK_M: tl.constexpr, VALUE: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr,
    FIELDS: tl.constexpr, COLUMNS: tl.constexpr, BY_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (items, any, VALUE / COLUMNS): items of a tile divide its rows, whose parts they add up.

    SPLITS: as many as there can be. BY_TILE: the grid is (tiles, any, ..), for few tiles.
    """
    item, part_of_rows = tl.program_id(0), tl.program_id(1)
    num_items = tl.load(counts)
    if BY_TILE:
        tile, item = item, item * 0
        for _ in range(bound_of(tile)):
            item += tl.load(items + item * FIELDS + 7, mask=item < num_items, other=0) // 256 % 256
    fields = item_at(items, item, item < num_items, FIELDS)
    start, num_r, _, _, _, _, _, cut = fields  # type: ignore[misc]
    enter(PDL)
    split, num_splits, row = cut % 256, cut // 256 % 256, cut // 65536 * BLOCK_M
    if num_splits > 1:
        first_item = (item - split).to(tl.int64)
        rows, sharing = tl.minimum(num_r - row, BLOCK_M), 1 if BY_TILE else num_splits
        begin, step = split + part_of_rows * sharing, sharing * tl.num_programs(1)
        part, of_value = tl.arange(0, SPLITS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        known, slot = part < num_splits, first_item + part
        for local in range(bound_of(begin), bound_of(rows), bound_of(step)):
            stats_at = stats + slot * (2 * BLOCK_M) + local
            tops = tl.load(stats_at, mask=known, other=float("-inf"))
            weights = tl.load(stats_at + BLOCK_M, mask=known, other=0.0)
            at = partial + (slot * BLOCK_M + local)[:, None] * VALUE + of_value[None, :]
            sums = tl.load(at, mask=known[:, None], other=0.0)
            shares = tl.exp2(tops - tl.max(tops, 0))  # a row sees its request's first key
            total = tl.sum(sums * shares[:, None], 0) / tl.sum(weights * shares, 0)
            token = (start + (row + local) // HEADS).to(tl.int64)
            out_at = out + (token * HEADS + (row + local) % HEADS) * VALUE
            tl.store(out_at + of_value, total.to(out.dtype.element_ty))


def latent_attention(q: Tensor, rows: Tensor, plan: PagedPlan, out: Tensor) -> Tensor:
    """Rows' attention to the keys of their requests that they see; padded rows are zero.

    q: [num_tokens, heads, head_dim], tokens strided; rows: a layer's [num_pages, 1, page_size,
    head_dim] view. Returns `out`: [num_tokens, heads, value_dim], contiguous.
    """
    tiles, shape = plan.tiles, plan.shape
    assert q.shape[1:] == (shape.num_heads, shape.head_dim)
    assert q.stride()[1:] == rows.stride()[2:] == (shape.head_dim, 1)
    assert out.is_contiguous()
    constants, options = constants_of(tiles, shape, rows.shape[2])
    # The next kernel may start early; this one does if all its programs have an SM.
    options |= overlap(q) if tiles.early else {"PDL": overlap(q)["PDL"]}
    _latent_kernel[(tiles.programs,)](
        q, out, rows, plan.page_table, plan.items, plan.counts, plan.partial, plan.stats,
        len(q), q.stride(0), rows.stride(0), plan.page_table.stride(0), scale_of(shape),
        **constants, **options,
    )  # fmt: skip
    if tiles.max_splits > 1:
        same = {name: constants[name] for name in ("BLOCK_M", "VALUE", "HEADS", "FIELDS")}
        splits = power_of_two(tiles.most)  # not those of this bound: parts add up in one order
        columns = min(64, shape.value_dim) if splits >= MANY_PARTS else shape.value_dim
        grid = tiles.max_items, 1 if splits >= MANY_PARTS else tiles.rows // 8
        if tiles.early:
            grid = tiles.max_items // tiles.max_splits, tiles.rows
        _merge_kernel[(*grid, shape.value_dim // columns)](
            out, plan.items, plan.counts, plan.partial, plan.stats,
            **overlap(
                q, **same, SPLITS=splits, COLUMNS=columns, BY_TILE=tiles.early, num_warps=4
            ),
        )  # fmt: skip
    return out


def constants_of(
    tiles: PagedTiles, shape: AttentionShape, page_size: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The compile-time constants of _latent_kernel, except PDL, and how it is compiled."""
    constants = {
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "VALUE": shape.value_dim,
        "ROPE": shape.head_dim - shape.value_dim, "PAGE": page_size, "HEADS": shape.num_heads,
        "FIRST_KEY": shape.mask.first_key, "FIELDS": FIELDS, "MANY": tiles.max_tiles > 1,
        "ALONE": tiles.early,
    }  # fmt: skip
    return constants, {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}


@lru_cache(4096)
def choose(bounds: Bounds, num_heads: int, item_bytes: int, num_sms: int) -> PagedTiles:
    """The tiles for a batch's bounds, by rule and without a search.

    As paged_tiles.choose: lengths change no tile, and limit only how many splits there can be.
    """
    num_reqs, num_tokens, max_query_len, max_seq_len = bounds
    rows = max_query_len * num_heads
    block_m = min(max(16, power_of_two(rows)), 64 if item_bytes == 2 else 16)
    max_tiles = -(-rows // block_m)
    tiles = min(num_reqs * max_tiles, -(-num_tokens * num_heads // block_m) + num_reqs)
    # A block of 64 rows in pages is 72 KB. Up to 16 rows of a tile an SM holds two programs with
    # two blocks of 32; more rows fill its registers. On an H200 32 requests over 8192 keys take
    # 90 us with 16 heads (64 keys at a time: 93), 118 with 20 (32: 124), 308 with 128 (32: 335).
    slots = num_sms * (2 if block_m == 16 else 1)
    is_alone = block_m == 16 and MAX_SPLITS * tiles <= slots  # its parts leave SMs without work
    most = _splits(tiles, slots, MAX_PARTS if is_alone else MAX_SPLITS)
    shortest = 64 if is_alone else 128 if 4 * tiles <= slots else 512
    max_splits = max(1, min(most, -(-max_seq_len // shortest)))
    return PagedTiles(
        block_m=block_m,
        block_n=16 if item_bytes > 2 else 32 if block_m == 16 and not is_alone else 64,
        rows=block_m,
        max_tiles=max_tiles,
        max_splits=max_splits,
        max_items=tiles * max_splits,
        shortest=shortest,
        most=most,
        programs=tiles * max_splits,
        num_warps=8 if block_m > 16 else 4,
        num_stages=2 if block_m == 64 or is_alone else 3,
        early=is_alone,
        longest_first=max_tiles == 1 and tiles > slots,  # which do not all run at once
    )


def _splits(tiles: int, slots: int, limit: int) -> int:
    """Most splits of a tile, so that the last programs of so many at once do not run alone.

    A part costs as much as 3 % of a long row: its first blocks, and being written and added up.
    """

    def cost(splits: int) -> float:
        turns = -(-tiles * splits // slots)
        return turns * (1 / splits + 0.03)

    return min(range(1, limit + 1), key=cost)


class LatentTriton(PoolAttention):
    """Absorbed attention by these kernels, at any batch shape and true length up to the bounds.

    A row's bits depend on its own tokens and on the batch's padded shape (num_reqs, num_tokens,
    max_query_len) alone. `plan` allocates all scratch, in a capture from the graph's pool.
    """

    caps: ClassVar[AttentionCaps] = AttentionCaps(
        devices=frozenset({"cuda", "cpu"} if INTERPRETED else {"cuda"}),
        dtypes=frozenset({"float32", "bfloat16", "float16", "float8_e4m3fn"}),
        page_sizes=frozenset(1 << i for i in range(13)),
        features=frozenset({"first_key"}),
        parts=1,
    )
    static_plan: ClassVar[bool] = True

    def __init__(self, pool: KVPool, shape: AttentionShape, sinks: Sequence[Tensor] = ()) -> None:
        if not HAS_TRITON:
            raise Unsupported("attention backend: triton is not installed")
        super().__init__(pool, shape, sinks)
        for dim in (shape.value_dim, shape.head_dim - shape.value_dim):
            if dim < 16 or dim != power_of_two(dim):
                raise Unsupported(f"attention backend: {dim} of a latent row is no power of two")
        self._num_sms = num_sms(pool.device)

    def plan(self, batch: Batch) -> PagedPlan | None:
        """None where layers expand."""
        if expands(batch):
            return None
        lengths = batch.query_start, batch.seq_lens, batch.page_table
        return plan_items(*lengths, self._tiles(batch.bounds), self.shape, self.region.page_size)

    def variant(self, bounds: Bounds) -> Hashable:
        if not absorbs(bounds.max_query_len):
            return None  # but for captures without breaks, which warm up by themselves
        tiles = self._tiles(bounds)
        constants, options = constants_of(tiles, self.shape, self.region.page_size)
        merged = power_of_two(tiles.most) if tiles.max_splits > 1 else 0
        return *constants.values(), *options.values(), merged, tiles.early

    def forward(self, q: Tensor, layer_id: int, out: Tensor | None = None) -> Tensor:
        plan, (rows,) = current().attn_plan, self._layers[layer_id]
        assert isinstance(plan, PagedPlan), "the plan must be this backend's own"
        if out is None:
            out = q.new_empty(*q.shape[:2], self.shape.value_dim)
        return latent_attention(q, rows, plan, out)

    def _tiles(self, bounds: Bounds) -> PagedTiles:
        return choose(bounds, self.shape.num_heads, self.dtype.itemsize, self._num_sms)


@triton.jit
def _turned(
    source, known, cos, sin, ROPE: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """Pairs of neighbours, rotated; source, known: [ROWS, 1], of rows of ROPE numbers.

    Also where they stand in their rows, and which are there.
    """
    at = tl.arange(0, 2 * PAIRS)[None, :]
    known &= at < ROPE
    x = tl.load(source + at, mask=known, other=0.0).to(tl.float32)
    first, second = tl.split(tl.reshape(x, (ROWS, PAIRS, 2)))
    return tl.interleave(first * cos - second * sin, second * cos + first * sin), at, known


@triton.jit
def _turn(
    source, to, known, cos, sin, ROPE: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """Store what `_turned` makes."""
    turned, at, known = _turned(source, known, cos, sin, ROPE, ROWS, PAIRS)  # type: ignore[misc]
    tl.store(to + at, turned.to(to.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["num_tokens"])
def _latent_rope_store_kernel(
    q_rope, out, latents, positions, table, weight, rows, slot_mapping, keys, num_tokens,
    stride_q, stride_q_head, stride_out, stride_out_head, stride_latents, stride_page,
    stride_head, stride_key, eps,
    VALUE: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
    NOPE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens · PARTS + products,): a token's row, or BLOCK_H of its heads, or a product.

    PARTS: 1 + heads / BLOCK_H. BLOCK, PAIRS: powers of two not below VALUE and ROPE / 2.
    NOPE: numbers of a head before q_rope's, which products take into the space of latents, before
    `out`: BLOCK_T tokens and COLUMNS of a head with keys [HEADS, NOPE, VALUE], of which the lines
    of a head are stride_key apart; 0: they do not.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    program, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    if NOPE:
        product = tl.program_id(0) - num_tokens * PARTS
        if product >= 0:
            BLOCKS: tl.constexpr = VALUE // COLUMNS
            head, columns = product // BLOCKS % HEADS, product % BLOCKS * COLUMNS
            tokens = product // (BLOCKS * HEADS) * BLOCK_T + tl.arange(0, BLOCK_T)
            at, of_column = tl.arange(0, BLOCK_D), columns + tl.arange(0, COLUMNS)
            inside = at < NOPE
            keys_at = keys + head * stride_head + at[:, None] * stride_key + of_column[None, :]
            w = tl.load(keys_at, mask=inside[:, None], other=0.0)
            enter(PDL)
            here = (tokens < num_tokens)[:, None]
            source = q_rope + tokens.to(tl.int64)[:, None] * stride_q + head * stride_q_head - NOPE
            x = tl.load(source + at[None, :], mask=here & inside[None, :], other=0.0)
            if INTERPRETED:
                x, w = x.to(tl.float32), w.to(tl.float32)
            made = tl.dot(x, w, input_precision="ieee")
            to = out + tokens.to(tl.int64)[:, None] * stride_out + head * stride_out_head - VALUE
            tl.store(to + of_column[None, :], made.to(DTYPE), mask=here)
            return
    enter(PDL)
    token = program.to(tl.int64)
    pair = tl.arange(0, PAIRS)
    turned = (pair < ROPE // 2)[None, :]
    angles = table + tl.load(positions + token) * ROPE + pair[None, :]
    cos = tl.load(angles, mask=turned, other=1.0)
    sin = tl.load(angles + ROPE // 2, mask=turned, other=0.0)
    if part == 0:
        slot = tl.load(slot_mapping + token)
        latent = latents + token * stride_latents
        row = rows + slot // PAGE * stride_page + slot % PAGE * (VALUE + ROPE)
        at = tl.arange(0, BLOCK)
        inside = at < VALUE
        x = tl.load(latent + at, mask=inside, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / VALUE + eps)
        by = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        normed = x.to(weight.dtype.element_ty).to(tl.float32) * by
        one = tl.zeros((1, 1), tl.int32)
        key = latent + VALUE + one
        if rows.dtype.element_ty == tl.float8e4nv:
            normed = normed.to(DTYPE).to(tl.float32)
            rope, of_rope, known = _turned(  # type: ignore[misc]
                key, one == 0, cos, sin, ROPE, 1, PAIRS
            )
            rope = rope.to(DTYPE).to(tl.float32)
            amax = tl.maximum(tl.max(tl.abs(normed), 0), tl.max(tl.abs(rope)))
            exponent, inverse = exponent_for(amax)  # type: ignore[misc]
            tl.store(row + at, to_e4m3(normed * inverse), mask=inside)
            tl.store(row + VALUE + of_rope, to_e4m3(rope * inverse), mask=known)
            exponents = rows.to(tl.pointer_type(tl.uint8)) + slot // PAGE * stride_page
            tl.store(exponents + PAGE * (VALUE + ROPE) + slot % PAGE, exponent.to(tl.uint8))
        else:
            tl.store(row + at, normed.to(DTYPE), mask=inside)
            _turn(key, row + VALUE + one, one == 0, cos, sin, ROPE, 1, PAIRS)  # pyright: ignore
    else:
        head = ((part - 1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        source = q_rope + token * stride_q + head * stride_q_head
        to = out + token * stride_out + head * stride_out_head
        _turn(source, to, head < HEADS, cos, sin, ROPE, BLOCK_H, PAIRS)  # pyright: ignore


def latent_rope_store_triton(
    q_rope: Tensor,
    latents: Tensor,
    rotation: Rotation,
    norm: LatentNorm,
    rows: Tensor,
    slot_mapping: Tensor,
    out: Tensor,
    keys: Tensor | None = None,
) -> None:
    """One launch. keys: what stands before q_rope and `out` is computed with them, too."""
    num_tokens, num_heads, rope = q_rope.shape
    value = latents.shape[1] - rope
    assert rows.shape[1:] == (1, rows.shape[2], value + rope)
    assert rows.stride()[2:] == (value + rope, 1)
    assert q_rope.stride(2) == out.stride(2) == latents.stride(1) == 1
    assert q_rope.dtype == out.dtype == latents.dtype
    assert rows.dtype in (latents.dtype, E4M3)
    assert rotation.table.is_contiguous()
    assert rotation.table.shape[1] == rope
    parts, nope = 1 + -(-num_heads // STORED_HEADS), 0 if keys is None else keys.shape[1]
    block_t = min(max(16, power_of_two(num_tokens)), 64)
    columns = min(32 if num_tokens <= 16 else 64, value)
    products = -(-num_tokens // block_t) * num_heads * (value // columns) if nope else 0
    stride_head, stride_key = (0, 0) if keys is None else keys.stride()[:2]
    _latent_rope_store_kernel[(num_tokens * parts + products,)](
        q_rope, out, latents, rotation.positions, rotation.table, norm.weight, rows, slot_mapping,
        keys, num_tokens, q_rope.stride(0), q_rope.stride(1), out.stride(0), out.stride(1),
        latents.stride(0), rows.stride(0), stride_head, stride_key, norm.eps,
        **overlap(
            q_rope, VALUE=value, ROPE=rope, BLOCK=power_of_two(value), HEADS=num_heads,
            PAIRS=power_of_two(rope // 2), BLOCK_H=STORED_HEADS, PAGE=rows.shape[2], PARTS=parts,
            NOPE=nope, BLOCK_D=power_of_two(max(16, nope)), BLOCK_T=block_t, COLUMNS=columns,
            num_warps=4, enable_fp_fusion=False,  # rope rounds products, as torch does
        ),
    )  # fmt: skip


def latent_absorb_store_triton(
    q: Tensor,
    latents: Tensor,
    rotation: Rotation,
    norm: LatentNorm,
    rows: Tensor,
    slot_mapping: Tensor,
    keys: Tensor,
) -> Tensor:
    """One launch; a row's result depends on its token and on num_tokens alone."""
    nope, value = keys.shape[1:]
    assert keys.stride(2) == 1
    assert len(keys) == q.shape[1]
    out = q.new_empty(*q.shape[:2], rows.shape[3])
    rotated = q[..., nope:], latents, rotation, norm, rows, slot_mapping, out[..., value:]
    latent_rope_store_triton(*rotated, keys)
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _latent_values_kernel(
    x, w, out, num_tokens, SIZE, stride_head, stride, HEADS: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_T: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tokens, HEADS, blocks of COLUMNS).

    x: [num_tokens, HEADS, VALUE]; w: [HEADS, SIZE, VALUE], the lines of a head `stride` apart; out:
    [num_tokens, HEADS, SIZE].
    """
    tokens, head = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.program_id(1)
    columns, at = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, BLOCK_K)
    line = tl.minimum(columns, SIZE - 1)
    w_at = w + head * stride_head + line[:, None] * stride + at[None, :]
    w_tile = tl.load(w_at)
    enter(PDL)
    row, here = tokens.to(tl.int64) * HEADS + head, (tokens < num_tokens)[:, None]
    x_at = x + row[:, None] * VALUE + at[None, :]
    acc = tl.zeros((COLUMNS, BLOCK_T), tl.float32)
    for begin in tl.static_range(0, VALUE, BLOCK_K):
        x_tile = tl.load(x_at + begin, mask=here, other=0.0)
        if INTERPRETED:
            x_tile, w_tile = x_tile.to(tl.float32), w_tile.to(tl.float32)
        acc = tl.dot(w_tile, tl.trans(x_tile), acc, input_precision="ieee")
        if begin + BLOCK_K < VALUE:
            w_tile = tl.load(w_at + (begin + BLOCK_K))
    to = out + row[:, None] * SIZE + columns[None, :]
    tl.store(to, tl.trans(acc).to(out.dtype.element_ty), mask=here & (columns < SIZE)[None, :])


def latent_values_triton(attended: Tensor, values: Tensor) -> Tensor:
    """One launch; contiguous. A row's result depends on its token and on num_tokens alone."""
    (num_tokens, num_heads, value), size = attended.shape, values.shape[1]
    assert attended.is_contiguous()
    assert values.stride(2) == 1
    assert values.shape == (num_heads, size, value)
    out = attended.new_empty(num_tokens, num_heads, size)
    block_t = min(max(16, power_of_two(num_tokens)), 64)
    columns = 16 if block_t == 16 else 32
    _latent_values_kernel[(-(-num_tokens // block_t), num_heads, -(-size // columns))](
        attended, values, out, num_tokens, size, values.stride(0), values.stride(1),
        **overlap(
            attended, HEADS=num_heads, VALUE=value, BLOCK_T=block_t, COLUMNS=columns,
            BLOCK_K=min(8192 // block_t, value), num_warps=4,
        ),
    )  # fmt: skip
    return out
