"""Kernels of route.py.

    router   logits: partial sums over parts of K, which are cut by the weights' shape alone
    route    the k largest of a token, and their weights
    arrange  the order of rows: one program an expert, which looks for its own tokens; the few
             tokens of one program of `route` have theirs from there

A row's sums, choice and weights depend on that row alone, bit for bit. So no sum is left to the
layout of a block, which follows from how many tokens are in it.
"""

import torch
from torch import Tensor

from worker.config.checkpoint.experts import ExpertShape, Held
from worker.ops.experts.route import TINY, Routes
from worker.ops.jit import INTERPRETED, enter, overlap, power_of_two, tl, triton

PART = 256  # of K: what one sum of the router is over
TOKENS = 4  # of a program of `route`, a warp each
LOWEST = -(1 << 31)  # a key of what is not to be chosen
AT_ONCE = 4096  # assignments that a program of `arrange` looks at


@triton.jit(do_not_specialize=["num_tokens"])
def _router_kernel(
    x, gate, out, num_tokens, num_experts, K, stride_x, BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tokens, of experts, parts of K). out: f32 [parts, num_tokens, experts]."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    part = tl.program_id(2)
    ks = tl.arange(0, BLOCK_K)
    enter(PDL)
    acc = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
    for begin in range(0, PART, BLOCK_K):
        at = part * PART + begin + ks
        inside = (at < K)[None, :]
        gate_at = gate + experts.to(tl.int64)[:, None] * K + at[None, :]
        x_at = x + tokens.to(tl.int64)[:, None] * stride_x + at[None, :]
        w = tl.load(gate_at, mask=(experts < num_experts)[:, None] & inside, other=0.0)
        y = tl.load(x_at, mask=(tokens < num_tokens)[:, None] & inside, other=0.0)
        if INTERPRETED:
            w, y = w.to(tl.float32), y.to(tl.float32)
        acc = tl.dot(w, tl.trans(y), acc, input_precision="ieee")
    at = part.to(tl.int64) * num_tokens + tokens
    at = out + at[None, :] * num_experts + experts[:, None]
    tl.store(at, acc, mask=(tokens < num_tokens)[None, :] & (experts < num_experts)[:, None])


@triton.jit
def _sum(x, TOKENS: tl.constexpr, SIZE: tl.constexpr):
    """The sums of x [TOKENS, SIZE] over its columns, pair by pair, whatever its layout is."""
    if SIZE == 1:
        return tl.reshape(x, (TOKENS,))
    else:  # what stood behind the branch would be compiled in either case
        even, odd = tl.split(tl.reshape(x, (TOKENS, SIZE // 2, 2)))
        return _sum(even + odd, TOKENS, SIZE // 2)


@triton.jit
def _scores(logits, SCORING: tl.constexpr):
    """Scores [TOKENS, EXPERTS] of all experts, at least 0; softmax's but for their sum."""
    if SCORING == "sigmoid":
        scores = tl.sigmoid(logits)
    else:
        tl.static_assert(SCORING == "softmax")
        scores = tl.exp(logits - tl.max(logits, 1)[:, None])
    return scores


@triton.jit
def _keys(x):
    """i32 in the order of x; a NaN is as -inf; all are above LOWEST."""
    bits = tl.where(x == x, x, float("-inf")).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _values(keys):
    """What `_keys` were made of; -inf of a NaN."""
    return tl.where(keys < 0, keys ^ 0x7FFFFFFF, keys).to(tl.float32, bitcast=True)


@triton.jit
def _first(keys, numbers, SIZE: tl.constexpr):
    """([TOKENS] the largest key, [TOKENS] its number, the lowest of several) of [TOKENS, SIZE]."""
    high = tl.max(keys, 1)
    return high, tl.min(tl.where(keys == high[:, None], numbers[None, :], SIZE), 1)


@triton.jit
def _in_top_groups(
    keys, experts, SIZE: tl.constexpr, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, ADDS: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """See in_top_groups; keys: [TOKENS, SIZE]; groups are of WIDTH experts.

    ADDS: a group's worth is the sum of its two largest.
    """
    COLUMNS: tl.constexpr = triton.next_power_of_2(NUM_GROUPS)
    group, groups = experts // WIDTH, tl.arange(0, COLUMNS)
    ranked = tl.full((keys.shape[0], COLUMNS), LOWEST, tl.int32)
    for number in tl.static_range(NUM_GROUPS):  # type: ignore
        own = tl.where((group == number)[None, :], keys, LOWEST)
        high, best = _first(own, experts, SIZE)  # type: ignore
        if ADDS:
            rest = tl.max(tl.where(experts[None, :] == best[:, None], LOWEST, own), 1)
            high = _keys(_values(high) + _values(rest))
        ranked = tl.where((groups == number)[None, :], high[:, None], ranked)
    kept = keys < LOWEST
    for _ in tl.static_range(TOP_GROUPS):  # type: ignore
        _, best = _first(ranked, groups, COLUMNS)  # type: ignore
        ranked = tl.where(groups[None, :] == best[:, None], LOWEST, ranked)
        kept |= group[None, :] == best[:, None]
    return tl.where(kept, keys, _keys(tl.full(keys.shape, float("-inf"), tl.float32)))


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    parts, bias, slots, ids, weights, starts, order, load, num_tokens, sink, first, count, factor,
    NUM_EXPERTS: tl.constexpr, TOKENS: tl.constexpr, TOP_K: tl.constexpr, PARTS: tl.constexpr,
    SCORING: tl.constexpr, RENORMALIZES: tl.constexpr, BIASED: tl.constexpr,
    NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, LOWEST: tl.constexpr, TINY: tl.constexpr,
    ALONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tokens). parts: f32 [PARTS, num_tokens, NUM_EXPERTS].

    bias: f32, of logits, or where it is BIASED of the choice; None: there is none.

    ALONE: there is one block, which gives rows their order, too; see `_arrange_kernel`.
    """
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    EXPERTS: tl.constexpr = triton.next_power_of_2(NUM_EXPERTS)
    experts = tl.arange(0, EXPERTS)
    real, exists = tokens < num_tokens, (experts < NUM_EXPERTS)[None, :]
    at = parts + tokens.to(tl.int64)[:, None] * NUM_EXPERTS + experts[None, :]
    enter(PDL)
    logits = tl.zeros((TOKENS, EXPERTS), tl.float32)
    for _ in tl.static_range(PARTS):
        logits += tl.load(at, mask=real[:, None] & exists, other=0.0)
        at += num_tokens.to(tl.int64) * NUM_EXPERTS
    if bias is not None:
        added = tl.load(bias + experts, mask=experts < NUM_EXPERTS, other=0.0)[None, :]
        logits += 0.0 if BIASED else added
    logits = tl.where(exists, logits, float("-inf"))
    scores = _scores(logits, SCORING)
    keys = tl.where(exists, _keys(scores + added if BIASED else scores), LOWEST)
    if NUM_GROUPS > 1:
        WIDTH: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
        keys = _in_top_groups(keys, experts, EXPERTS, NUM_GROUPS, TOP_GROUPS, WIDTH, BIASED, LOWEST)
        keys = tl.where(exists, keys, LOWEST)
    total = tl.zeros((TOKENS,), tl.float32)
    places = tl.full((TOKENS, EXPERTS), TOP_K, tl.int32)  # of an expert among the k; TOP_K: of none
    for place in tl.static_range(TOP_K):
        _, best = _first(keys, experts, EXPERTS)
        this = experts[None, :] == best[:, None]
        total += tl.sum(tl.where(this, scores, 0.0), 1)
        keys = tl.where(this, LOWEST, keys)
        places = tl.where(this, place, places)
    if RENORMALIZES:
        total += TINY
    elif SCORING == "softmax":
        total = _sum(tl.where(exists, scores, 0.0), TOKENS, EXPERTS)
    else:
        total = tl.full((TOKENS,), 1.0, tl.float32)
    live = real
    if slots is not None:
        live &= tl.load(slots + tokens, mask=real, other=0) >= sink
    chosen = (places < TOP_K) & real[:, None]
    spots = tokens[:, None] * TOP_K + places
    numbers = tl.where(live[:, None], experts[None, :], NUM_EXPERTS)
    tl.store(ids + spots, numbers, mask=chosen)
    tl.store(weights + spots, tl.div_rn(scores, total[:, None]) * factor, mask=chosen)
    if ALONE:
        held = (experts >= first) & (experts < first + count)
        here = chosen & live[:, None] & held[None, :]
        own = tl.sum(here.to(tl.int32), 0)
        begins = tl.cumsum(own, 0) - own
        behind = begins[None, :] + tl.cumsum(here.to(tl.int32), 0)
        tl.store(order + behind - 1, spots, mask=here)
        at = experts - first
        tl.store(starts + at, begins, mask=held)
        tl.store(starts + count, tl.sum(own, 0))
        tl.store(load + at, tl.load(load + at, mask=held, other=0) + own, mask=held)
        steps = load + count + 1
        met = tl.load(steps + at, mask=held, other=0) + (own > 0).to(tl.int64)
        tl.store(steps + at, met, mask=held)
        tl.store(steps + count, tl.load(steps + count) + 1)


@triton.jit(do_not_specialize=["num_rows"])
def _arrange_kernel(
    ids, starts, order, load, num_rows, first, count, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (count + 1): an expert's rows begin behind those of the experts before it.

    load: i64 [2, count + 1]; each column has one program that adds to it.
    """
    expert = tl.program_id(0)
    at = tl.arange(0, AT_ONCE)
    enter(PDL)
    row = 0
    for begin in range(0, num_rows, AT_ONCE):
        some = tl.load(ids + begin + at, mask=begin + at < num_rows, other=-1)
        row += tl.sum(((some >= first) & (some < first + expert)).to(tl.int32), 0)
    tl.store(starts + expert, row)
    steps = load + count + 1 + expert
    if expert == count:
        tl.store(steps, tl.load(steps) + 1)
    else:
        begins = row
        for begin in range(0, num_rows, AT_ONCE):
            some = tl.load(ids + begin + at, mask=begin + at < num_rows, other=-1)
            own = (some == first + expert).to(tl.int32)
            rank = tl.cumsum(own, 0) - own
            tl.store(order + row + rank, begin + at, mask=own > 0)
            row += tl.sum(own, 0)
        tl.store(load + expert, tl.load(load + expert) + row - begins)
        tl.store(steps, tl.load(steps) + tl.where(row > begins, 1, 0))


def route_triton(
    x: Tensor,
    gate: Tensor,
    slots: Tensor | None,
    sink: int,
    shape: ExpertShape,
    held: Held,
    load: Tensor,
    bias: Tensor | None = None,
) -> Routes:
    """See route_ref."""
    assert (bias is not None) == (shape.has_biases or shape.is_biased)
    n, k = x.shape
    num_experts, top_k = shape.num_experts, shape.top_k
    assert x.stride(1) == 1
    assert gate.is_contiguous()
    assert gate.shape == (num_experts, k)

    def ints(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.int32, device=x.device)

    ids, starts, order = ints(n, top_k), ints(held.count + 1), ints(n * top_k)
    weights = torch.empty(n, top_k, dtype=torch.float32, device=x.device)
    logits = torch.empty(-(-k // PART), n, num_experts, dtype=torch.float32, device=x.device)
    block_t = min(max(16, power_of_two(n)), 64)
    _router_kernel[(-(-n // block_t), -(-num_experts // 64), len(logits))](
        x, gate, logits, n, num_experts, k, x.stride(0),
        **overlap(
            x, BLOCK_E=64, BLOCK_T=block_t, BLOCK_K=128, PART=PART, num_warps=4, num_stages=3
        ),
    )  # fmt: skip
    tokens = min(power_of_two(n), TOKENS)
    _route_kernel[(-(-n // tokens),)](
        logits, bias, slots, ids, weights, starts, order, load, n, sink, *held, shape.factor,
        **overlap(
            x, NUM_EXPERTS=num_experts, TOKENS=tokens, TOP_K=top_k, PARTS=len(logits),
            SCORING=shape.scoring, RENORMALIZES=shape.renormalizes, BIASED=shape.is_biased,
            NUM_GROUPS=shape.num_groups, TOP_GROUPS=shape.top_groups, LOWEST=LOWEST, TINY=TINY,
            ALONE=n <= tokens, num_warps=tokens,
        ),
    )  # fmt: skip
    if n <= tokens:
        return Routes(ids, weights, starts, order)
    at_once = min(max(32, power_of_two(n * top_k)), AT_ONCE)
    _arrange_kernel[(held.count + 1,)](
        ids, starts, order, load, n * top_k, *held,
        **overlap(x, AT_ONCE=at_once, num_warps=min(8, max(1, at_once // 256))),
    )  # fmt: skip
    return Routes(ids, weights, starts, order)
