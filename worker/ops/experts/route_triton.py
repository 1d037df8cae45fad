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
# Most tokens times 128 experts of one program of `route`, a warp for as much. H200: four of 256
# experts take 7.0 us with the router, 12.5 in one warp; eight of 128 take 5.5, in two kernels 6.0.
AT_A_TIME = 8
LOWEST = -(1 << 31)  # a key of what is not to be chosen
AT_ONCE = 4096  # assignments that a program of `arrange` looks at


@triton.jit(do_not_specialize=["num_tokens"])
def _router_kernel(
    x, gate, out, num_tokens, num_experts, K, stride_x, stride_out, BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tokens, of experts, parts of K). out: f32 [parts, num_tokens, stride_out]."""
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
    at = out + at[None, :] * stride_out + experts[:, None]
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
    NUM_EXPERTS: tl.constexpr, STRIDE: tl.constexpr, TOKENS: tl.constexpr, TOP_K: tl.constexpr,
    SHARED: tl.constexpr, HAS_GATE: tl.constexpr, PARTS: tl.constexpr,
    SCORING: tl.constexpr, RENORMALIZES: tl.constexpr, BIASED: tl.constexpr,
    NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, LOWEST: tl.constexpr, TINY: tl.constexpr,
    ALONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tokens). parts: f32 [PARTS, num_tokens, STRIDE].

    bias: f32, of logits, or where it is BIASED of the choice; None: there is none.

    SHARED: behind the TOP_K of a token comes the expert that every token has; HAS_GATE: its logit
    stands behind those of all others.

    ALONE: there is one block, which gives rows their order, too; see `_arrange_kernel`.
    """
    PLACES: tl.constexpr = TOP_K + SHARED
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    EXPERTS: tl.constexpr = triton.next_power_of_2(NUM_EXPERTS)
    experts = tl.arange(0, EXPERTS)
    real, exists = tokens < num_tokens, (experts < NUM_EXPERTS)[None, :]
    own_parts = parts + tokens.to(tl.int64) * STRIDE
    at = own_parts[:, None] + experts[None, :]
    held = (experts >= first) & (experts < first + count)
    enter(PDL)
    # What is far and needed late is asked for first.
    live = real
    if slots is not None:
        live &= tl.load(slots + tokens, mask=real, other=0) >= sink
    if ALONE:
        rows_at, steps = load + experts - first, load + count + 1
        steps_at = steps + experts - first
        rows_before = tl.load(rows_at, mask=held, other=0)
        met_before = tl.load(steps_at, mask=held, other=0)
        steps_before = tl.load(steps + count)
    logits = tl.zeros((TOKENS, EXPERTS), tl.float32)
    of_shared = tl.zeros((TOKENS,), tl.float32)
    for _ in tl.static_range(PARTS):
        logits += tl.load(at, mask=real[:, None] & exists, other=0.0)
        at += num_tokens.to(tl.int64) * STRIDE
        if HAS_GATE:
            of_shared += tl.load(own_parts + NUM_EXPERTS, mask=real, other=0.0)
            own_parts += num_tokens.to(tl.int64) * STRIDE
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
        high, best = _first(keys, experts, EXPERTS)
        this = experts[None, :] == best[:, None]
        if BIASED or NUM_GROUPS > 1:
            total += tl.sum(tl.where(this, scores, 0.0), 1)
        else:  # the key is the score's, and a NaN's that of -inf
            total += tl.where(_values(high) < 0, float("nan"), _values(high))
        keys = tl.where(this, LOWEST, keys)
        places = tl.where(this, place, places)
    if RENORMALIZES:
        total += TINY
    elif SCORING == "softmax":
        total = _sum(tl.where(exists, scores, 0.0), TOKENS, EXPERTS)
    else:
        total = tl.full((TOKENS,), 1.0, tl.float32)
    chosen = (places < TOP_K) & real[:, None]
    spots = tokens[:, None] * PLACES + places
    numbers = tl.where(live[:, None], experts[None, :], NUM_EXPERTS + SHARED)
    tl.store(ids + spots, numbers, mask=chosen)
    tl.store(weights + spots, tl.div_rn(scores, total[:, None]) * factor, mask=chosen)
    last = tokens * PLACES + TOP_K
    if SHARED:
        one = tl.sigmoid(of_shared) if HAS_GATE else of_shared + 1.0
        tl.store(ids + last, tl.where(live, NUM_EXPERTS, NUM_EXPERTS + SHARED), mask=real)
        tl.store(weights + last, one, mask=real)
    if ALONE:
        here = chosen & live[:, None] & held[None, :]
        own = tl.sum(here.to(tl.int32), 0)
        begins = tl.cumsum(own, 0) - own
        behind = begins[None, :] + tl.cumsum(here.to(tl.int32), 0)
        tl.store(order + behind - 1, spots, mask=here)
        tl.store(starts + experts - first, begins, mask=held)
        all_rows = tl.sum(own, 0)
        tl.store(starts + count, all_rows)
        if SHARED:
            behind_them = tl.cumsum(live.to(tl.int32), 0)
            tl.store(order + all_rows + behind_them - 1, last, mask=live)
            tl.store(starts + count + 1, all_rows + tl.sum(live.to(tl.int32), 0))
        tl.store(rows_at, rows_before + own, mask=held)
        tl.store(steps_at, met_before + (own > 0).to(tl.int64), mask=held)
        tl.store(steps + count, steps_before + 1)


@triton.jit(do_not_specialize=["num_rows"])
def _arrange_kernel(
    ids, starts, order, load, num_rows, first, count, SHARED: tl.constexpr,
    AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (count + SHARED + 1): an expert's rows begin behind those of the experts before it.

    load: i64 [2, count + 1]; each column has one program that adds to it.
    """
    expert = tl.program_id(0)
    at = tl.arange(0, AT_ONCE)
    enter(PDL)
    before = tl.zeros((AT_ONCE,), tl.int32)  # added up behind the loop: its loads wait for no sum
    for begin in range(0, num_rows, AT_ONCE):
        some = tl.load(ids + begin + at, mask=begin + at < num_rows, other=-1)
        before += ((some >= first) & (some < first + expert)).to(tl.int32)
    row = tl.sum(before, 0)
    tl.store(starts + expert, row)
    column = tl.where(expert < count, expert, count)
    counted = load + column
    steps = counted + count + 1
    had, met = tl.load(counted), tl.load(steps)
    if expert == count + SHARED:
        tl.store(steps, met + 1)
    else:
        begins = row
        for begin in range(0, num_rows, AT_ONCE):
            some = tl.load(ids + begin + at, mask=begin + at < num_rows, other=-1)
            own = (some == first + expert).to(tl.int32)
            rank = tl.cumsum(own, 0) - own
            tl.store(order + row + rank, begin + at, mask=own > 0)
            row += tl.sum(own, 0)
        tl.store(counted, had + row - begins, mask=expert < count)
        tl.store(steps, met + tl.where(row > begins, 1, 0), mask=expert < count)


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
    has_gate = len(gate) > num_experts
    assert gate.shape == (num_experts + has_gate, k)

    def ints(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.int32, device=x.device)

    places, stride = top_k + held.shared, -(-len(gate) // 4) * 4  # rows of 16 bytes
    ids, starts, order = ints(n, places), ints(held.total + 1), ints(n * places)
    weights = torch.empty(n, places, dtype=torch.float32, device=x.device)
    logits = torch.empty(-(-k // PART), n, stride, dtype=torch.float32, device=x.device)
    block_t = min(max(16, power_of_two(n)), 64)
    _router_kernel[(-(-n // block_t), -(-len(gate) // 64), len(logits))](
        x, gate, logits, n, len(gate), k, x.stride(0), stride,
        **overlap(
            x, BLOCK_E=64, BLOCK_T=block_t, BLOCK_K=128, PART=PART, num_warps=4, num_stages=3
        ),
    )  # fmt: skip
    tokens, blocks = power_of_two(n), max(1, power_of_two(num_experts) // 128)
    alone = tokens * blocks <= AT_A_TIME
    tokens = tokens if alone else 1
    part = held.first, held.count
    _route_kernel[(-(-n // tokens),)](
        logits, bias, slots, ids, weights, starts, order, load, n, sink, *part, shape.factor,
        **overlap(
            x, NUM_EXPERTS=num_experts, STRIDE=stride, TOKENS=tokens, TOP_K=top_k,
            SHARED=held.shared, HAS_GATE=has_gate, PARTS=len(logits),
            SCORING=shape.scoring, RENORMALIZES=shape.renormalizes, BIASED=shape.is_biased,
            NUM_GROUPS=shape.num_groups, TOP_GROUPS=shape.top_groups, LOWEST=LOWEST, TINY=TINY,
            ALONE=alone, num_warps=tokens * blocks if alone else 1,
        ),
    )  # fmt: skip
    if alone:
        return Routes(ids, weights, starts, order)
    at_once = min(max(32, power_of_two(n * places)), AT_ONCE)
    _arrange_kernel[(held.total + 1,)](
        ids, starts, order, load, n * places, *part,
        **overlap(
            x, SHARED=held.shared, AT_ONCE=at_once, num_warps=min(8, max(1, at_once // 256)),
        ),
    )  # fmt: skip
    return Routes(ids, weights, starts, order)
