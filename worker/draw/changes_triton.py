"""How a draw changes a block of a row's logits, and filters it.

Changes are bias, penalties, early stops and the grammar's mask; the definitions are `penalize`,
`ban_early_stops` and `apply_masks` of `sampler.py`. Changed logits are not stored. Every pass that
reads logits changes them again, so no [rows, vocab] tensor in f32 is ever made. The bits are the
same, because products and quotients are rounded before anything is added to them. A row without
changes costs one scalar load a kind. In a window, WIDTH consecutive rows of logits belong to
one request. Row j counts the drafts 1 to j as drawn.

Filters are temperature, top_k, top_p and min_p. They compare logits by keys, integers of the same
order; `sampler_triton` fills `keys` and `sums`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from worker.forward.draws import Changes, DrawParams
from worker.ops.best_pairs_triton import value_of
from worker.ops.jit import enter, tl, triton
from worker.ops.launch import overlap
from worker.ops.philox_triton import natural_log

STUCK_BLOCK, STUCK_WARPS = 4096, 4


class Rules(NamedTuple):
    """Tensors that `changed_logits` reads; None: no row of the launch needs this one."""

    position: Tensor
    min_len: Tensor
    stop_ids: Tensor
    slot: Tensor | None = None
    repetition: Tensor | None = None
    frequency: Tensor | None = None
    presence: Tensor | None = None
    counts: Tensor | None = None
    in_prompt: Tensor | None = None  # u8
    bias: Tensor | None = None
    biased: Tensor | None = None  # u8
    drafts: Tensor | None = None
    words: Tensor | None = None
    line: Tensor | None = None
    stuck: Tensor | None = None  # [n] u8; the mask leaves only stop ids, so these may come early


@triton.jit
def _product(x, y, EXACT: tl.constexpr):
    """x * y, rounded before anything is added to it."""
    if EXACT:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    return x * y


@triton.jit
def _penalized(x, row, slot, tokens, vocab, rules, WIDTH: tl.constexpr, EXACT: tl.constexpr):
    """`penalize`, for some tokens of a row with a penalty slot; loads no table that is neutral."""
    at = slot * vocab + tokens
    inside = tokens < vocab
    if tl.load(rules.biased + slot) != 0:
        x += tl.load(rules.bias + at, mask=inside, other=0.0)
    repetition = tl.load(rules.repetition + row)
    frequency = tl.load(rules.frequency + row)
    presence = tl.load(rules.presence + row)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        counts = tl.load(rules.counts + at, mask=inside, other=0)
        if rules.drafts is not None:
            drafts = rules.drafts + row // WIDTH * (WIDTH - 1)
            for i in range(WIDTH - 1):
                draft = tl.where(i < row % WIDTH, tl.load(drafts + i), -1)
                counts += (tokens == draft).to(tl.int32)
        if repetition != 1.0:
            seen = tl.load(rules.in_prompt + at, mask=inside, other=0) != 0
            changed = tl.where(x > 0.0, tl.div_rn(x, repetition), _product(x, repetition, EXACT))
            x = tl.where(seen | (counts > 0), changed, x)
        x -= _product(frequency, counts.to(tl.float32), EXACT)
        x -= tl.where(counts > 0, presence, 0.0)
    return x


@triton.jit
def changed_logits(
    logits, row, tokens, vocab, stride, rules,
    STOPS: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Logits of `tokens` with all changes, in f32; -inf beyond the vocabulary.

    STOPS: stop ids of a row; WIDTH: rows of one request.
    """
    inside = tokens < vocab
    x = tl.load(logits + row * stride + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    if rules.counts is not None:
        slot = tl.load(rules.slot + row)
        if slot > 0:
            x = _penalized(x, row, slot, tokens, vocab, rules, WIDTH, EXACT)
    x = tl.where(x == 0.0, 0.0, x)  # -0 and 0 are equal, their bits are not
    early = tl.load(rules.position + row) < tl.load(rules.min_len + row)
    if rules.stuck is not None:
        early = early & (tl.load(rules.stuck + row) == 0)
    if early:
        for i in range(STOPS):
            x = tl.where(tokens == tl.load(rules.stop_ids + row * STOPS + i), float("-inf"), x)
    if rules.words is not None:
        line = tl.load(rules.line + row)
        if line > 0:
            at = line * ((vocab + 31) // 32) + tokens // 32
            word = tl.load(rules.words + at, mask=inside, other=0)
            x = tl.where((word >> (tokens % 32)) & 1 != 0, x, float("-inf"))
    return x


@triton.jit
def _stuck_kernel(
    logits, rules, stuck, vocab, stride,
    BLOCK: tl.constexpr, STOPS: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows): whether mask and early stops leave nothing. Few rows have both."""
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    early = tl.load(rules.position + row) < tl.load(rules.min_len + row)
    nothing = (early & (tl.load(rules.line + row) > 0)).to(tl.int32)
    start = 0
    while (nothing != 0) & (start < vocab):
        tokens = start + tl.arange(0, BLOCK)
        x = changed_logits(logits, row, tokens, vocab, stride, rules, STOPS, WIDTH, EXACT)
        if tl.max((x != float("-inf")).to(tl.int32), 0) > 0:
            nothing = nothing * 0
        start += BLOCK
    tl.store(stuck + row, nothing)


def rules_of(logits: Tensor, params: DrawParams, changes: Changes | None) -> Rules:
    """Gather the tensors that kernels read for logits [n, vocab]; with masks, launches a kernel."""
    rules = Rules(params.position, params.min_len, params.stop_ids)
    if changes is None:
        return rules
    rules = rules._replace(
        slot=params.penalty_slot,
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        counts=changes.counts,
        in_prompt=changes.in_prompt.view(torch.uint8),
        bias=changes.bias,
        biased=changes.biased.view(torch.uint8),
        drafts=changes.drafts,
    )
    if changes.masks is None:
        return rules
    n, vocab = logits.shape
    rules = rules._replace(words=changes.masks.words, line=changes.masks.line)
    stuck = torch.empty(n, dtype=torch.uint8, device=logits.device)
    _stuck_kernel[(n,)](
        logits, rules, stuck, vocab, logits.stride(0),
        **overlap(
            logits, BLOCK=STUCK_BLOCK, STOPS=params.stop_ids.shape[1], WIDTH=changes.width,
            EXACT=logits.is_cuda, num_warps=STUCK_WARPS,
        ),
    )  # fmt: skip
    return rules._replace(stuck=stuck)


@triton.jit
def best_of(best, row, BLOCKS: tl.constexpr):
    """The row's largest logit."""
    at = tl.arange(0, triton.next_power_of_2(BLOCKS))
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
    """1 a token, or with PROBABLE its relative probability; 0 for tokens filtered out.

    At top_k's threshold only some of the tokens stay. They weigh the same, so they count in part.
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
def winner_of(values, ids, row, vocab, BLOCKS: tl.constexpr):
    """The lowest id among the blocks' largest values."""
    at = tl.arange(0, triton.next_power_of_2(BLOCKS))
    inside = at < BLOCKS
    value = tl.load(values + row * BLOCKS + at, mask=inside, other=float("-inf"))
    token = tl.load(ids + row * BLOCKS + at, mask=inside, other=vocab - 1)
    return tl.min(tl.where(value == tl.max(value, 0), token, vocab - 1), 0)
