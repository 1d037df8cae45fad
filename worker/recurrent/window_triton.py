"""Kernel of window.py: one launch a layer, in which a program has a row's key head to itself."""

import torch
from torch import Tensor

from worker.ops.jit import enter, tl, triton
from worker.ops.launch import overlap, power_of_two
from worker.recurrent.delta_net import DeltaState, DeltaWeights
from worker.recurrent.window import WindowRows

MODES = [(0, 1)]
WARPS, VALUES = 8, 64
LANES = 32  # of a key's numbers that lie side by side in a tile of the state; see state_tile


@triton.jit
def softplus(x):
    """log(1 + e^x), x itself where it is large, as torch has it."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def along_keys(s, x):
    """Sums over the keys of s · x: [1, VALUE_DIM, 1]. The order depends on the tile alone."""
    return tl.sum(tl.sum(s * x, 0, keep_dims=True), 2, keep_dims=True)


@triton.jit
def delta_step(s, k, v, decay, beta):
    """The state after one token; k: [KEY_DIM / LANES, 1, LANES]; v: [1, VALUE_DIM, 1]."""
    s = s * decay
    delta = beta * (v - along_keys(s, k))
    return tl.fma(tl.broadcast_to(delta, s.shape), tl.broadcast_to(k, s.shape), s)


@triton.jit
def _after(s, k, v, gates):
    """The state after the token whose inputs lie there."""
    return delta_step(s, tl.load(k), tl.load(v), tl.load(gates), tl.load(gates + 1))


@triton.jit
def _raw(conv, ring, packed, strides, t, pending, count, started, lanes):
    """Raw inputs of tokens t < count, from -3 on: of the slot, the ring or the window."""
    early, kept = t < 0, t < pending
    of_slot = tl.load(conv + (t + 3) * strides[0] + lanes, mask=early & started, other=0.0)
    of_ring = tl.load(ring + t * strides[1] + lanes, mask=(t >= 0) & kept, other=0.0)
    of_window = packed + (t - pending) * strides[2] + lanes
    of_window = tl.load(of_window, mask=(t >= pending) & (t < count), other=0.0)
    return tl.where(early, of_slot, tl.where(kept, of_ring, of_window))


@triton.jit
def _convolved(
    conv, ring, packed, strides, weight, pending, count, started,
    TOKENS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """[TOKENS, DIM] f32, rounded to the weight's dtype; zero behind the first `count` tokens."""
    t, lanes = tl.arange(0, TOKENS)[:, None], tl.arange(0, DIM)[None, :]
    total = tl.zeros((TOKENS, DIM), dtype=tl.float32)
    for tap in tl.static_range(4):
        x = _raw(conv, ring, packed, strides, t + (tap - 3), pending, count, started, lanes)
        total += x.to(tl.float32) * tl.load(weight + lanes * 4 + tap).to(tl.float32)
    total = total / (1.0 + tl.exp(-total))
    return tl.where(t < count, total.to(weight.dtype.element_ty).to(tl.float32), 0.0)


@triton.jit
def normalised(x):
    """Rows of x of length 1."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def _delta_window_kernel(
    packed, conv_weight, a_log, dt_bias, norm_weight, s_all, conv_all, ring_all,
    live, state_slot, folded, seq_len, scratch, out,
    stride_packed, stride_slot, stride_head, stride_conv_slot, stride_conv_head, stride_conv,
    stride_ring_row, stride_ring, eps,
    KEY_HEADS: tl.constexpr, RATIO: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr,
    MODE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, key heads). TOKENS: power of two, at least the most pending ones + WIDTH."""
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    HEADS: tl.constexpr = KEY_HEADS * RATIO
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    OWN: tl.constexpr = 2 * KEY_DIM + RATIO * VALUE_DIM  # channels of a key head
    LINE: tl.constexpr = OWN + 2 * RATIO  # of the scratch: a token's inputs, decay and beta
    DTYPE: tl.constexpr = out.dtype.element_ty
    i, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t, keys, values = tl.arange(0, TOKENS), tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM)
    norm = tl.load(norm_weight + values).to(tl.float32)
    row = tl.load(live + i)
    slot = tl.load(state_slot + row)
    start = tl.load(folded + row)
    pending = (tl.load(seq_len + row) - start).to(tl.int32)
    pending, started = tl.where(row > 0, pending, 0), start > 0
    s_head = s_all + slot * stride_slot + head * stride_head
    enter(PDL)

    # Inputs of all tokens, pending and new, through the scratch: each thread needs many of them.
    conv = conv_all + slot * stride_conv_slot + head * stride_conv_head
    ring, new = ring_all + row * stride_ring_row, packed + i * WIDTH * stride_packed
    strides = (stride_conv, stride_ring, stride_packed)
    scratch += (i * KEY_HEADS + head) * TOKENS * LINE
    count = pending + WIDTH
    if MODE != 2:
        lines = scratch + t[:, None] * LINE
        q = _convolved(
            conv, ring + head * KEY_DIM, new + head * KEY_DIM, strides,
            conv_weight + head * KEY_DIM * 4, pending, count, started, TOKENS, KEY_DIM,
        )  # fmt: skip
        tl.store(lines + keys[None, :], normalised(q) * KEY_DIM**-0.5)
        at = KEYS + head * KEY_DIM
        k = _convolved(
            conv + KEY_DIM, ring + at, new + at, strides, conv_weight + at * 4, pending, count,
            started, TOKENS, KEY_DIM,
        )  # fmt: skip
        tl.store(lines + KEY_DIM + keys[None, :], normalised(k))
        for e in tl.static_range(RATIO):
            value_head = head * RATIO + e
            at = 2 * KEYS + value_head * VALUE_DIM
            v = _convolved(
                conv + 2 * KEY_DIM + e * VALUE_DIM, ring + at, new + at, strides, conv_weight + at * 4,
                pending, count, started, TOKENS, VALUE_DIM,
            )  # fmt: skip
            tl.store(lines + 2 * KEY_DIM + e * VALUE_DIM + values[None, :], v)
            of_ring, of_window = t < pending, (t >= pending) & (t < count)
            gates_ring = ring + t * stride_ring + CHANNELS + value_head
            gates_new = new + (t - pending) * stride_packed + CHANNELS + HEADS * VALUE_DIM + value_head
            b = tl.load(gates_ring, mask=of_ring, other=0.0).to(tl.float32)
            b += tl.load(gates_new, mask=of_window, other=0.0).to(tl.float32)
            a = tl.load(gates_ring + HEADS, mask=of_ring, other=0.0).to(tl.float32)
            a += tl.load(gates_new + HEADS, mask=of_window, other=0.0).to(tl.float32)
            g = -tl.exp(tl.load(a_log + value_head)) * softplus(a + tl.load(dt_bias + value_head))
            tl.store(scratch + t * LINE + OWN + 2 * e, tl.exp(g))
            tl.store(scratch + t * LINE + OWN + 2 * e + 1, 1.0 / (1.0 + tl.exp(-b)))

        # What the next step finds in slot and ring. All is read before anything of it is written.
        kept = pending + (1 if WIDTH == 1 else 0)  # tokens that are folded now
        at, lanes = tl.arange(0, 4)[:, None], tl.arange(0, KEY_DIM)[None, :]
        last = kept - 3 + at
        old_q = _raw(conv, ring + head * KEY_DIM, new + head * KEY_DIM, strides, last, pending, count,
                     started, lanes)  # fmt: skip
        old_k = _raw(conv + KEY_DIM, ring + KEYS + head * KEY_DIM, new + KEYS + head * KEY_DIM, strides,
                     last, pending, count, started, lanes)  # fmt: skip
        tl.debug_barrier()
        writes = (at < 3) & (row > 0)
        # v of each value head below, behind a barrier of its own
        for e in tl.static_range(RATIO):
            at_e = 2 * KEYS + (head * RATIO + e) * VALUE_DIM
            lanes_v = tl.arange(0, VALUE_DIM)[None, :]
            old_v = _raw(conv + 2 * KEY_DIM + e * VALUE_DIM, ring + at_e, new + at_e, strides, last,
                         pending, count, started, lanes_v)  # fmt: skip
            tl.debug_barrier()
            tl.store(conv + 2 * KEY_DIM + e * VALUE_DIM + at * stride_conv + lanes_v, old_v, mask=writes)
        tl.store(conv + at * stride_conv + lanes, old_q, mask=writes)
        tl.store(conv + KEY_DIM + at * stride_conv + lanes, old_k, mask=writes)
        if WIDTH > 1:
            if row > 0:
                for w in tl.static_range(WIDTH):
                    to, of = ring + w * stride_ring, new + w * stride_packed
                    tl.store(to + head * KEY_DIM + keys, tl.load(of + head * KEY_DIM + keys))
                    tl.store(
                        to + KEYS + head * KEY_DIM + keys, tl.load(of + KEYS + head * KEY_DIM + keys)
                    )
                    for e in tl.static_range(RATIO):
                        value_head = head * RATIO + e
                        at_v = 2 * KEYS + value_head * VALUE_DIM + values
                        tl.store(to + at_v, tl.load(of + at_v))
                        gates = of + CHANNELS + HEADS * VALUE_DIM + value_head
                        tl.store(to + CHANNELS + value_head, tl.load(gates))
                        tl.store(to + CHANNELS + HEADS + value_head, tl.load(gates + HEADS))

    # The state, some of a head's values at a time. A token's output takes the place of its v.
    key = tl.arange(0, KEY_DIM // LANES)[:, None, None] * LANES + tl.arange(0, LANES)[None, None, :]
    value = tl.arange(0, VALUES)[None, :, None]
    tile = value * KEY_DIM + key
    PARTS: tl.constexpr = VALUE_DIM // VALUES
    first_part = 0
    last_part = RATIO * PARTS if MODE != 1 else 0
    if MODE == 2:
        first_part = tl.program_id(2) * PARTS
        last_part = first_part + PARTS
    for part in range(first_part, last_part):
        r = part // PARTS
        s_at = s_head + part * (VALUES * KEY_DIM) + tile
        s = tl.load(s_at, mask=started & (tile >= 0), other=0.0)
        line, gates = scratch, scratch + OWN + 2 * r
        of_v = 2 * KEY_DIM + part * VALUES + value
        for _ in range(pending):
            s = _after(s, line + KEY_DIM + key, line + of_v, gates)
            line += LINE
            gates += LINE
        if WIDTH > 1:
            tl.store(s_at, s, mask=(row > 0) & (tile >= 0))
        for _ in tl.static_range(WIDTH):
            s = _after(s, line + KEY_DIM + key, line + of_v, gates)
            tl.store(line + of_v, along_keys(s, tl.load(line + key)))
            line += LINE
            gates += LINE
        if WIDTH == 1:
            tl.store(s_at, s, mask=(row > 0) & (tile >= 0))
    tl.debug_barrier()

    w = tl.arange(0, TOKENS)[:, None]
    real = w < WIDTH
    for r in range(first_part // PARTS, last_part // PARTS):
        o_at = scratch + (pending + w) * LINE + 2 * KEY_DIM + r * VALUE_DIM + values[None, :]
        o = tl.load(o_at, mask=real, other=0.0).to(DTYPE).to(tl.float32)
        o *= tl.rsqrt(tl.sum(o * o, 1) / VALUE_DIM + eps)[:, None]
        o = (o.to(DTYPE).to(tl.float32) * norm[None, :]).to(DTYPE).to(tl.float32)
        at_v = (head * RATIO + r) * VALUE_DIM + values[None, :]
        z = tl.load(new + w * stride_packed + CHANNELS + at_v, mask=real, other=0.0).to(tl.float32)
        o = tl.where(row > 0, o * (z / (1.0 + tl.exp(-z))), 0.0).to(DTYPE)
        tl.store(out + (i * WIDTH + w) * (HEADS * VALUE_DIM) + at_v, o, mask=real)


def delta_window_triton(
    packed: Tensor, weights: DeltaWeights, state: DeltaState, rows: WindowRows
) -> Tensor:
    """See delta_window_ref; a token's result depends on its row alone, bit for bit."""
    shape, (n,) = state.shape, rows.live.shape
    s, conv, ring = state
    tokens = power_of_two(rows.width + ring.shape[1])
    line = shape.head_channels + 2 * shape.ratio
    scratch = torch.empty(
        n * shape.key_heads * tokens * line, dtype=torch.float32, device=packed.device
    )
    out = packed.new_empty(n * rows.width, shape.value_width)
    assert s.stride()[2:] == (shape.value_dim * shape.key_dim, shape.key_dim, 1)
    assert conv.stride(3) == ring.stride(2) == packed.stride(1) == 1
    for mode, grid in MODES:
      _delta_window_kernel[(n, shape.key_heads, shape.ratio if mode == 2 else 1)](
        packed, weights.conv, weights.a_log, weights.dt_bias, weights.norm, s, conv, ring,
        rows.live, rows.state_slot, rows.folded, rows.seq_len, scratch, out,
        packed.stride(0), s.stride(0), s.stride(1), conv.stride(0), conv.stride(1), conv.stride(2),
        ring.stride(0), ring.stride(1), weights.eps,
        **overlap(
            packed, KEY_HEADS=shape.key_heads, RATIO=shape.ratio, KEY_DIM=shape.key_dim,
            VALUE_DIM=shape.value_dim, WIDTH=rows.width, TOKENS=tokens, VALUES=min(VALUES, shape.value_dim), MODE=mode,
            LANES=min(LANES, shape.key_dim), num_warps=WARPS,
            enable_fp_fusion=False,  # fold and window round alike
        ),
    )  # fmt: skip
    return out
