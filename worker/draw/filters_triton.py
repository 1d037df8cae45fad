"""Device functions of a draw: temperature, top_k, top_p and min_p, for a block of logits.

Logits are compared by keys, integers of the same order. `sampler_triton` fills `keys` and `sums`.
"""

from __future__ import annotations

from worker.ops.best_pairs_triton import value_of
from worker.ops.jit import tl, triton
from worker.ops.philox_triton import natural_log


@triton.jit
def best_of(best, row, BLOCKS: tl.constexpr, BLOCKS_2: tl.constexpr):
    """The row's largest logit."""
    at = tl.arange(0, BLOCKS_2)
    return tl.max(tl.load(best + row * BLOCKS + at, mask=at < BLOCKS, other=float("-inf")), 0)


@triton.jit
def is_likely(x, highest, temperature, min_p, EXACT: tl.constexpr):
    """Which tokens min_p keeps, rounded as in the definition; never tokens at -inf."""
    likely = x > float("-inf")
    if min_p > 0.0:
        bound = tl.div_rn(highest, temperature) + natural_log(min_p, EXACT)
        likely = likely & (tl.div_rn(x, temperature) >= bound)
    return likely


@triton.jit
def probability(x, highest, temperature):
    """A token's probability relative to the likeliest one's."""
    return tl.exp2((x - highest) * (1.4426950408889634 / temperature))


@triton.jit
def weights_of(
    x, key, row, n, vocab, highest, temperature, top_k, min_p, keys, sums,
    PROBABLE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """1 for each token, or with PROBABLE its relative probability; 0 for tokens filtered out.

    At top_k's threshold only some of the tokens stay. All of them weigh the same, so each counts
    in part.
    """
    likely = is_likely(x, highest, temperature, tl.load(min_p + row), EXACT)
    if PROBABLE:
        weight = tl.where(likely, probability(x, highest, temperature), 0.0)
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
def room_of(key, row, n, highest, temperature, sums, BITS: tl.constexpr):
    """How many of the tokens at top_p's threshold reach the target; at least one."""
    sums += 3 * n + row
    weight = probability(value_of(key, BITS), highest, temperature)
    room = tl.ceil((tl.load(sums + 2 * n) - tl.load(sums)) / weight)
    room = tl.where(room < 1e9, room, 1e9)  # weight is 0 or NaN if no token is there
    return tl.maximum(room, 1.0).to(tl.int32)


@triton.jit
def threshold_of(
    row, n, vocab, highest, temperature, top_k, top_p, keys, sums, BITS: tl.constexpr
):  # fmt: skip
    """(key, room): tokens of higher keys stay, and the first `room` of the tokens with this key."""
    cut = tl.full((), -32768 if BITS == 16 else -2147483648, tl.int32)
    room = tl.full((), 1000000000, tl.int32)
    k = tl.load(top_k + row)
    if (k > 0) & (k < vocab):
        cut = tl.load(keys + row)
        room = (k.to(tl.float32) - tl.load(sums + row)).to(tl.int32)
    if tl.load(top_p + row) < 1.0:
        other = tl.load(keys + n + row)
        its_room = room_of(other, row, n, highest, temperature, sums, BITS)
        room = tl.where(
            other > cut, its_room, tl.where(other == cut, tl.minimum(room, its_room), room)
        )
        cut = tl.maximum(cut, other)
    return cut, room


@triton.jit
def winner_of(values, ids, row, vocab, BLOCKS: tl.constexpr, BLOCKS_2: tl.constexpr):
    """The lowest id among the blocks' largest values."""
    at = tl.arange(0, BLOCKS_2)
    inside = at < BLOCKS
    value = tl.load(values + row * BLOCKS + at, mask=inside, other=float("-inf"))
    token = tl.load(ids + row * BLOCKS + at, mask=inside, other=vocab - 1)
    return tl.min(tl.where(value == tl.max(value, 0), token, vocab - 1), 0)
