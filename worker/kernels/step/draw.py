"""Draw one token a row without sorting the logits: temperature, filters, noise, argmax.

The torch twin is `worker.sampling.sampler.draw_ref`, which defines the result. A row is cut into
blocks of the vocabulary. Each pass runs over all blocks of all rows:

  best      the largest logit of each block
  search    four bits of a threshold: the smallest logit such that all tokens above it weigh less
            than the target. First each token weighs 1 and the target is top_k. Then a token weighs
            its probability and the target is top_p of their sum.
  ties      how many tokens of each block have exactly the threshold's logit
  draw      the largest perturbed logit among the tokens that are left, by block, then by row

The search works on the logits' bits, read as integers of the same order: 16 bits in bf16 (4
passes), otherwise 32 (8 passes). Of the tokens with the threshold's logit those with the lowest ids
stay, as many as the target leaves room for. Every sum has a fixed order, and a row's result depends
on that row alone.

The tokens kept may differ from the twin's in two cases. The probability before a token is within
f32's rounding of top_p: sums are pairwise here and sequential there. Or, in f32, two logits differ
but become equal when divided by the temperature: here the larger one comes first, there the lower
id. top_k and min_p are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels.jit import gdc_launch_dependents, gdc_wait, tl, triton
from worker.kernels.launch import overlap, power_of_two
from worker.kernels.step.philox import gumbel_block, natural_log

DRAW_BLOCK, DRAW_WARPS = 1024, 4
SEARCH_BLOCK, SEARCH_WARPS = 4096, 4
RADIX_BITS = 4


@dataclass(slots=True, frozen=True)
class DrawParams:
    """Sampling parameters; index i belongs to logits[i]. One number a row, except stop_ids."""

    position: Tensor  # [n] i64; index in prompt + output of the token to be drawn
    seed: Tensor  # [n] i64
    temperature: Tensor  # [n] f32; 0 = greedy
    top_k: Tensor  # [n] i64; 0 = off
    top_p: Tensor  # [n] f32; 1 = off
    min_p: Tensor  # [n] f32; 0 = off
    min_len: Tensor  # [n] i64
    stop_ids: Tensor  # [n, num_stops] i64; -1 = unused; not drawn at positions below min_len


@triton.jit
def _logits(logits, row, tokens, vocab, stride, position, min_len, stop_ids, STOPS: tl.constexpr):
    """Logits of `tokens` in f32; -inf beyond the vocabulary and for stop ids below min_len.

    STOPS: stop ids of a row; 0: none is forbidden.
    """
    inside = tokens < vocab
    x = tl.load(logits + row * stride + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.where(x == 0.0, 0.0, x)  # -0 and 0 are equal, their bits are not
    if STOPS > 0:  # noqa: SIM102 (the one is known at compile time)
        if tl.load(position + row) < tl.load(min_len + row):
            for i in range(STOPS):
                x = tl.where(tokens == tl.load(stop_ids + row * STOPS + i), float("-inf"), x)
    return x


@triton.jit
def _key_of(x, BITS: tl.constexpr):
    """Signed integers in the order of x. BITS = 16 keeps the upper half, which is all of a bf16."""
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if BITS == 16:
        key = key >> 16
    return key


@triton.jit
def _value_of(key, BITS: tl.constexpr):
    """The f32 that has this key."""
    if BITS == 16:
        key = (key << 16) | ((key >> 31) & 0xFFFF)
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _best_of(best, row, BLOCKS: tl.constexpr, BLOCKS_2: tl.constexpr):
    """The row's largest logit."""
    at = tl.arange(0, BLOCKS_2)
    return tl.max(tl.load(best + row * BLOCKS + at, mask=at < BLOCKS, other=float("-inf")), 0)


@triton.jit
def _likely(x, highest, temperature, min_p, EXACT: tl.constexpr):
    """Which tokens min_p keeps, with the twin's rounding; never those at -inf."""
    likely = x > float("-inf")
    if min_p > 0.0:
        bound = tl.div_rn(highest, temperature) + natural_log(min_p, EXACT)
        likely = likely & (tl.div_rn(x, temperature) >= bound)
    return likely


@triton.jit
def _probability(x, highest, temperature):
    """A token's probability relative to the likeliest one's."""
    return tl.exp2((x - highest) * (1.4426950408889634 / temperature))


@triton.jit
def _weights(
    x, key, row, n, vocab, highest, temperature, top_k, min_p, keys, sums,
    PROBABLE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """1 for each token, or with PROBABLE its relative probability; 0 for tokens filtered out.

    At top_k's threshold only some tokens stay. They weigh the same, so all of them count in part.
    """
    likely = _likely(x, highest, temperature, tl.load(min_p + row), EXACT)
    if PROBABLE:
        weight = tl.where(likely, _probability(x, highest, temperature), 0.0)
        k = tl.load(top_k + row)
        if (k > 0) & (k < vocab):
            cut = tl.load(keys + row)
            above = tl.load(sums + row)
            there = tl.maximum(tl.load(sums + n + row) - above, 1.0)
            share = tl.minimum((k.to(tl.float32) - above) / there, 1.0)
            weight = tl.where(key == cut, weight * share, weight)
            weight = tl.where(key >= cut, weight, 0.0)
    else:
        weight = tl.where(likely, 1.0, 0.0)
    return weight


@triton.jit
def _reaches(digit, least, EXACT: tl.constexpr):
    """1.0 where digit >= least, else 0.0; both are whole.

    EXACT: one saturating addition, half the work of a comparison on a GPU.
    """
    if EXACT:
        return tl.inline_asm_elementwise(
            "add.sat.f32 $0, $1, $2;", "=f,f,f", [digit, 1.0 - least],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return tl.where(digit >= least, 1.0, 0.0)


@triton.jit(do_not_specialize=["n"])
def _best_kernel(
    logits, position, min_len, stop_ids, best, keys, arrivals, n, vocab, stride,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STOPS: tl.constexpr, BITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, rows). Also resets both searches: the lowest key, no arrivals."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    x = _logits(logits, row, tokens, vocab, stride, position, min_len, stop_ids, STOPS)
    tl.store(best + row * BLOCKS + block, tl.max(x, 0))
    if block == 0:
        lowest = -32768 if BITS == 16 else -2147483648
        tl.store(keys + row, lowest)
        tl.store(keys + n + row, lowest)
        tl.store(arrivals + row, 0)


@triton.jit
def _narrow(
    partial, row, n, limit, keys, sums, shift, first,
    PROBABLE: tl.constexpr, RADIX: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_2: tl.constexpr,
):  # fmt: skip
    """Find four more bits of the row's threshold; all blocks' sums are there.

    keys: [2, n], one for each search. sums: [2, 3, n]: weight above the threshold, weight at or
    above it, target.
    """
    blocks, digits = tl.arange(0, BLOCKS_2), tl.arange(0, RADIX)
    at = (row * BLOCKS + blocks)[:, None] * RADIX + digits[None, :]
    parts = tl.load(partial + at, mask=(blocks < BLOCKS)[:, None], other=0.0, cache_modifier=".cg")
    from_digit = tl.sum(parts, 0)  # never rises along the digits
    sums += PROBABLE * 3 * n + row
    if first:
        if PROBABLE:
            total = tl.sum(tl.where(digits == 0, from_digit, 0.0), 0)
            target = tl.maximum(limit * total, 1e-30)
        else:
            target = limit.to(tl.float32)
        tl.store(sums + 2 * n, target)
    else:
        target = tl.load(sums + 2 * n)
    reached = tl.sum((from_digit >= target).to(tl.int32), 0)
    digit = tl.maximum(reached - 1, 0)
    here = tl.sum(tl.where(digits == digit, from_digit, 0.0), 0)
    if digit < RADIX - 1:
        tl.store(sums, tl.sum(tl.where(digits == digit + 1, from_digit, 0.0), 0))
    elif first:
        tl.store(sums, 0.0)
    tl.store(sums + n, here)
    keys += PROBABLE * n + row
    tl.store(keys, tl.load(keys) + (digit << shift))


@triton.jit(do_not_specialize=["n", "shift"])
def _search_kernel(
    logits, position, min_len, stop_ids, temperatures, top_k, top_p, min_p,
    best, keys, sums, partial, arrivals, n, vocab, stride, shift,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_2: tl.constexpr, STOPS: tl.constexpr,
    BITS: tl.constexpr, RADIX: tl.constexpr, RADIX_BITS: tl.constexpr,
    PROBABLE: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, rows): the weight at or above each of RADIX keys; the last block runs _narrow.

    PROBABLE: the search for top_p; else for top_k. Rows without that filter return at once.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperatures + row)
    if PROBABLE:
        limit = tl.load(top_p + row)
        if (temperature == 0.0) | (limit >= 1.0):
            return
    else:
        limit = tl.load(top_k + row)
        if (temperature == 0.0) | (limit <= 0) | (limit >= vocab):
            return
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    x = _logits(logits, row, tokens, vocab, stride, position, min_len, stop_ids, STOPS)
    key = _key_of(x, BITS)
    highest = _best_of(best, row, BLOCKS, BLOCKS_2)
    weight = _weights(
        x, key, row, n, vocab, highest, temperature, top_k, min_p, keys, sums, PROBABLE, EXACT
    )
    prefix = tl.load(keys + PROBABLE * n + row)
    digit = ((key - prefix).to(tl.uint32, bitcast=True) >> shift).to(tl.float32)
    digit = tl.where(key < prefix, -1.0, digit)
    to = partial + (row * BLOCKS + block) * RADIX
    for least in tl.static_range(RADIX):
        tl.store(to + least, tl.sum(weight * _reaches(digit, least, EXACT), 0))
    tl.debug_barrier()  # all threads' sums are written before the one atomic releases them
    arrived = tl.atomic_add(arrivals + row, 1, sem="acq_rel", scope="gpu")
    if arrived == BLOCKS - 1:
        first = shift == BITS - RADIX_BITS
        _narrow(partial, row, n, limit, keys, sums, shift, first, PROBABLE, RADIX, BLOCKS, BLOCKS_2)
        tl.store(arrivals + row, 0)


@triton.jit
def _room(key, row, n, highest, temperature, sums, BITS: tl.constexpr):
    """How many tokens at top_p's threshold it takes to reach the target; at least one."""
    sums += 3 * n + row
    weight = _probability(_value_of(key, BITS), highest, temperature)
    room = tl.ceil((tl.load(sums + 2 * n) - tl.load(sums)) / weight)
    room = tl.where(room < 1e9, room, 1e9)  # weight is 0 or NaN if no token is there
    return tl.maximum(room, 1.0).to(tl.int32)


@triton.jit
def _cut(
    row, n, vocab, highest, temperature, top_k, top_p, keys, sums, BITS: tl.constexpr
):  # fmt: skip
    """(key, room): tokens of higher keys stay, and of those with this key the first `room`."""
    cut = tl.full((), -32768 if BITS == 16 else -2147483648, tl.int32)
    room = tl.full((), 1000000000, tl.int32)
    k = tl.load(top_k + row)
    if (k > 0) & (k < vocab):
        cut = tl.load(keys + row)
        room = (k.to(tl.float32) - tl.load(sums + row)).to(tl.int32)
    if tl.load(top_p + row) < 1.0:
        other = tl.load(keys + n + row)
        its_room = _room(other, row, n, highest, temperature, sums, BITS)
        room = tl.where(
            other > cut, its_room, tl.where(other == cut, tl.minimum(room, its_room), room)
        )
        cut = tl.maximum(cut, other)
    return cut, room


@triton.jit(do_not_specialize=["n"])
def _ties_kernel(
    logits, position, min_len, stop_ids, temperatures, top_k, top_p, min_p,
    best, keys, sums, ties, n, vocab, stride,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SEARCH_BLOCKS: tl.constexpr,
    SEARCH_BLOCKS_2: tl.constexpr, STOPS: tl.constexpr, BITS: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, rows): how many tokens of each block are at the threshold."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperatures + row)
    if temperature == 0.0:
        return
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    x = _logits(logits, row, tokens, vocab, stride, position, min_len, stop_ids, STOPS)
    highest = _best_of(best, row, SEARCH_BLOCKS, SEARCH_BLOCKS_2)
    threshold = _cut(row, n, vocab, highest, temperature, top_k, top_p, keys, sums, BITS)
    likely = _likely(x, highest, temperature, tl.load(min_p + row), EXACT)
    here = likely & (_key_of(x, BITS) == threshold[0])
    tl.store(ties + row * BLOCKS + block, tl.sum(here.to(tl.int32), 0))


@triton.jit(do_not_specialize=["n"])
def _draw_kernel(
    logits, seed, position, temperatures, top_k, top_p, min_p, min_len, stop_ids,
    best, keys, sums, ties, values, ids, n, vocab, stride,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_2: tl.constexpr,
    SEARCH_BLOCKS: tl.constexpr, SEARCH_BLOCKS_2: tl.constexpr, STOPS: tl.constexpr,
    BITS: tl.constexpr, FILTERED: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, rows): the largest perturbed logit of each block, the lowest id with it."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    x = _logits(logits, row, tokens, vocab, stride, position, min_len, stop_ids, STOPS)
    temperature = tl.load(temperatures + row)
    if temperature != 0.0:
        if FILTERED:
            key = _key_of(x, BITS)
            highest = _best_of(best, row, SEARCH_BLOCKS, SEARCH_BLOCKS_2)
            threshold = _cut(row, n, vocab, highest, temperature, top_k, top_p, keys, sums, BITS)
            cut, room = threshold[0], threshold[1]
            likely = _likely(x, highest, temperature, tl.load(min_p + row), EXACT)
            x = tl.where(likely, x, float("-inf"))
            x = tl.where(key >= cut, x, float("-inf"))
            blocks = tl.arange(0, BLOCKS_2)
            at = ties + row * BLOCKS + blocks
            before = tl.sum(tl.load(at, mask=blocks < block, other=0), 0)
            own = tl.load(ties + row * BLOCKS + block)
            if before + own > room:
                tie = ((key == cut) & (x > float("-inf"))).to(tl.int32)
                rank = before + tl.cumsum(tie, 0) - tie
                x = tl.where((tie > 0) & (rank >= room), float("-inf"), x)
        # Noise is the costly part, and after filters few blocks have tokens left.
        if tl.max(x, 0) > float("-inf"):
            x = tl.div_rn(x, temperature)
            start = block * BLOCK
            x += gumbel_block(tl.load(seed + row), tl.load(position + row), start, BLOCK, EXACT)
    most = tl.max(x, 0)
    tl.store(values + row * BLOCKS + block, most)
    tl.store(ids + row * BLOCKS + block, tl.min(tl.where(x == most, tokens, vocab - 1), 0))


@triton.jit
def _winner_kernel(
    values, ids, out, vocab, BLOCKS: tl.constexpr, BLOCKS_2: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program a row: the lowest id among the blocks' largest values."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS_2)
    inside = at < BLOCKS
    value = tl.load(values + row * BLOCKS + at, mask=inside, other=float("-inf"))
    token = tl.load(ids + row * BLOCKS + at, mask=inside, other=vocab - 1)
    first = tl.min(tl.where(value == tl.max(value, 0), token, vocab - 1), 0)
    tl.store(out + row, first.to(tl.int64))


class _Filters:
    """Scratch of one call's searches, and their launches."""

    def __init__(self, logits: Tensor, params: DrawParams, stops: int) -> None:
        n, vocab = logits.shape
        self.logits, self.params, self.stops = logits, params, stops
        self.blocks = -(-vocab // SEARCH_BLOCK)
        self.bits = 16 if logits.dtype == torch.bfloat16 else 32

        def scratch(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=logits.device)

        self.best = scratch(n, self.blocks, dtype=torch.float32)
        self.partial = scratch(n, self.blocks, 1 << RADIX_BITS, dtype=torch.float32)
        self.sums = scratch(2, 3, n, dtype=torch.float32)
        self.keys = scratch(2, n, dtype=torch.int32)
        self.arrivals = scratch(n, dtype=torch.int32)
        self.ties = scratch(n, -(-vocab // DRAW_BLOCK), dtype=torch.int32)

    def run(self) -> None:
        """Launch every pass that comes before the draw."""
        params, (n, vocab), stride = self.params, self.logits.shape, self.logits.stride(0)
        rows = self.logits, params.position, params.min_len, params.stop_ids
        limits = params.temperature, params.top_k, params.top_p, params.min_p
        grid, exact = (self.blocks, n), self.logits.is_cuda
        common = dict(
            BLOCK=SEARCH_BLOCK, BLOCKS=self.blocks, STOPS=self.stops, BITS=self.bits,
            num_warps=SEARCH_WARPS,
        )  # fmt: skip
        blocks_2 = power_of_two(self.blocks)
        _best_kernel[grid](
            *rows, self.best, self.keys, self.arrivals, n, vocab, stride,
            **overlap(self.logits, **common),
        )  # fmt: skip
        for probable in (False, True):
            for shift in range(self.bits - RADIX_BITS, -1, -RADIX_BITS):
                _search_kernel[grid](
                    *rows, *limits,
                    self.best, self.keys, self.sums, self.partial, self.arrivals, n, vocab, stride,
                    shift,
                    **overlap(
                        self.logits, BLOCKS_2=blocks_2, RADIX=1 << RADIX_BITS,
                        RADIX_BITS=RADIX_BITS, PROBABLE=probable, EXACT=exact, **common,
                    ),
                )  # fmt: skip
        draw_blocks = self.ties.shape[1]
        _ties_kernel[(draw_blocks, n)](
            *rows, *limits, self.best, self.keys, self.sums, self.ties, n, vocab, stride,
            **overlap(
                self.logits, BLOCK=DRAW_BLOCK, BLOCKS=draw_blocks, SEARCH_BLOCKS=self.blocks,
                SEARCH_BLOCKS_2=blocks_2, STOPS=self.stops, BITS=self.bits, EXACT=exact,
                num_warps=DRAW_WARPS,
            ),
        )  # fmt: skip


def draw_triton(
    logits: Tensor, params: DrawParams, *, filtered: bool, stops: bool = True
) -> Tensor:
    """Draw one token a row; no host sync, and fit for a CUDA graph.

    Args:
        logits: [n, vocab] bf16, f16 or f32, rows contiguous; not written.
        params: of the n rows, each tensor contiguous.
        filtered: some row may have top_k, top_p or min_p; else they are not read.
        stops: whether stop ids are forbidden below min_len.

    Returns:
        [n] i64; of equal values the lowest id.
    """
    n, vocab = logits.shape
    assert logits.stride(1) == 1
    num_stops = params.stop_ids.shape[1] if stops else 0
    blocks = -(-vocab // DRAW_BLOCK)
    values = torch.empty(n, blocks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(n, blocks, dtype=torch.int32, device=logits.device)
    out = torch.empty(n, dtype=torch.int64, device=logits.device)
    found = (values, ids, values, ids)  # not read without filters
    search_blocks = -(-vocab // SEARCH_BLOCK)
    if filtered:
        filters = _Filters(logits, params, num_stops)
        filters.run()
        found = (filters.best, filters.keys, filters.sums, filters.ties)
    _draw_kernel[(blocks, n)](
        logits, params.seed, params.position, params.temperature, params.top_k, params.top_p,
        params.min_p, params.min_len, params.stop_ids, *found, values, ids,
        n, vocab, logits.stride(0),
        **overlap(
            logits, BLOCK=DRAW_BLOCK, BLOCKS=blocks, BLOCKS_2=power_of_two(blocks),
            SEARCH_BLOCKS=search_blocks, SEARCH_BLOCKS_2=power_of_two(search_blocks),
            STOPS=num_stops, BITS=16 if logits.dtype == torch.bfloat16 else 32,
            FILTERED=filtered, EXACT=logits.is_cuda, num_warps=DRAW_WARPS,
        ),
    )  # fmt: skip
    _winner_kernel[(n,)](
        values, ids, out, vocab,
        **overlap(logits, BLOCKS=blocks, BLOCKS_2=power_of_two(blocks), num_warps=1),
    )  # fmt: skip
    return out
