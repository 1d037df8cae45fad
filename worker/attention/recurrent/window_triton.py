"""Kernels of window.py: the tokens' inputs, the state, the gated norm.

Width and pending tokens are numbers that the kernels read, not constants: one compiled kernel, in
one order of its sums, folds and verifies at every width. So a state has the same bits whichever
windows led to it. A program is one warp.
"""

import torch
from torch import Tensor

from worker.attention.recurrent.delta_net import DeltaShape, DeltaState, DeltaWeights
from worker.forward.batch import StateWindows
from worker.ops.jit import enter, tl, triton
from worker.ops.launch import overlap

ROWS = 8  # heads of tokens of a program; 4 take 1.6 times as long for 8,192 tokens
STAGES = 3  # tokens whose inputs are loaded at once


@triton.jit
def softplus(x):
    """log(1 + e^x), x itself where it is large, as torch has it."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def silu(x):
    """x · sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _row(at, live, state_slot, folded, seq_len, width):
    """Of live[at]: (row, slot, tokens in its state, tokens of this step pending, and kept)."""
    row = tl.load(live + at)
    start = tl.load(folded + row)
    pending = tl.where(row > 0, tl.load(seq_len + row) - start, 0).to(tl.int32)
    kept = tl.where(width == 1, pending + 1, pending)  # a token alone is accepted
    return row, tl.load(state_slot + row), start, pending, kept


@triton.jit
def part_of(
    KEY_HEADS: tl.constexpr, RATIO: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr
):  # fmt: skip
    """Of program_id(1), a head of q, then of k, then of v: (is it of v, which head, its first
    channel, key head, its place in that key head's part of a slot)."""
    part = tl.program_id(1)
    is_value = part >= 2 * KEY_HEADS
    head = tl.where(is_value, part - 2 * KEY_HEADS, part % KEY_HEADS)  # of values, or of keys
    of_v = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    at = tl.where(is_value, of_v, part * KEY_DIM)
    in_v = 2 * KEY_DIM + head % RATIO * VALUE_DIM
    of_head = tl.where(is_value, in_v, part // KEY_HEADS * KEY_DIM)
    return is_value, head, at, tl.where(is_value, head // RATIO, head), of_head


@triton.jit
def taps(weight, lanes, inside):
    """A convolution's four weights of lanes, f32."""
    at = weight + lanes * 4
    w0 = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    w1 = tl.load(at + 1, mask=inside, other=0.0).to(tl.float32)
    w2 = tl.load(at + 2, mask=inside, other=0.0).to(tl.float32)
    w3 = tl.load(at + 3, mask=inside, other=0.0).to(tl.float32)
    return w0, w1, w2, w3


@triton.jit(do_not_specialize=["width", "max_tokens"])
def _inputs_kernel(
    packed, conv_weight, a_log, dt_bias, conv_all, ring_all, live, state_slot, folded, seq_len,
    convolved, decays, betas, width, max_tokens,
    stride_packed, stride_conv_slot, stride_conv_head, stride_conv, stride_ring_row, stride_ring,
    KEY_HEADS: tl.constexpr, RATIO: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, heads of q, then of k, then of v): convolution, lengths of q and k, gates.

    Writes the raw inputs that the next step needs to slot and ring, once it has read theirs.
    """
    HEADS: tl.constexpr = KEY_HEADS * RATIO
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    is_value, head, at, key_head, of_head = part_of(KEY_HEADS, RATIO, KEY_DIM, VALUE_DIM)  # type: ignore
    lanes = tl.arange(0, BLOCK)
    inside = lanes < tl.where(is_value, VALUE_DIM, KEY_DIM)
    i = tl.program_id(0).to(tl.int64)
    row, slot, start, pending, kept = _row(i, live, state_slot, folded, seq_len, width)  # type: ignore
    w0, w1, w2, w3 = taps(conv_weight + at * 4, lanes, inside)  # type: ignore
    conv = conv_all + slot * stride_conv_slot + key_head * stride_conv_head + of_head + lanes
    held = inside & (start > 0) & (row > 0)
    x0 = tl.load(conv, mask=held, other=0.0)
    x1 = tl.load(conv + stride_conv, mask=held, other=0.0)
    x2 = tl.load(conv + 2 * stride_conv, mask=held, other=0.0)
    enter(PDL)

    ring, new = ring_all + row * stride_ring_row, packed + i * width * stride_packed
    convolved += i * max_tokens * CHANNELS + at + lanes
    to_gate = i * max_tokens * HEADS + head
    writes, last = inside & (row > 0), (row > 0) & (kept > 0)
    for t in range(pending + width):
        source = new + (t - pending) * stride_packed
        gate = source + CHANNELS + HEADS * VALUE_DIM + head
        if t < pending:
            source = ring + t * stride_ring
            gate = source + CHANNELS + head
        x3 = tl.load(source + at + lanes, mask=inside, other=0.0)
        y = w0 * x0.to(tl.float32) + w1 * x1.to(tl.float32)
        y = silu(y + w2 * x2.to(tl.float32) + w3 * x3.to(tl.float32))
        y = y.to(packed.dtype.element_ty).to(tl.float32)
        if is_value:
            b, a = tl.load(gate), tl.load(gate + HEADS)
            rate = softplus(a.to(tl.float32) + tl.load(dt_bias + head))
            g = -tl.exp(tl.load(a_log + head)) * rate
            tl.store(decays + to_gate + t * HEADS, tl.exp(g))
            tl.store(betas + to_gate + t * HEADS, 1.0 / (1.0 + tl.exp(-b.to(tl.float32))))
            if (t >= pending) & (width > 1) & (row > 0):
                line = ring + (t - pending) * stride_ring + CHANNELS + head
                tl.store(line, b)
                tl.store(line + HEADS, a)
        else:
            y *= tl.rsqrt(tl.sum(y * y, 0) + 1e-6)
            y *= tl.where(tl.program_id(1) < KEY_HEADS, KEY_DIM**-0.5, 1.0)
        tl.store(convolved + t * CHANNELS, y, mask=inside)
        x0, x1, x2 = x1, x2, x3
        if (t + 1 == kept) & last:
            tl.store(conv, x0, mask=inside)
            tl.store(conv + stride_conv, x1, mask=inside)
            tl.store(conv + 2 * stride_conv, x2, mask=inside)
        if (t >= pending) & (width > 1):
            tl.store(ring + (t - pending) * stride_ring + at + lanes, x3, mask=writes)


@triton.jit(do_not_specialize=["width", "max_tokens"])
def _state_kernel(
    convolved, decays, betas, s_all, live, state_slot, folded, seq_len, out, width, max_tokens,
    stride_slot, stride_head,
    KEY_HEADS: tl.constexpr, RATIO: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (VALUE_DIM / VALUES, value heads, rows): a slot's parts are read side by side."""
    HEADS: tl.constexpr = KEY_HEADS * RATIO
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    part, head, i = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    keys = tl.arange(0, KEY_DIM)
    values = part * VALUES + tl.arange(0, VALUES)
    row, slot, start, pending, kept = _row(i, live, state_slot, folded, seq_len, width)  # type: ignore
    s_at = s_all + slot * stride_slot + head // RATIO * stride_head
    s_at += head % RATIO * (KEY_DIM * VALUE_DIM) + part * (KEY_DIM * VALUES)
    s_at += keys[:, None] * VALUES + tl.arange(0, VALUES)[None, :]
    s = tl.load(s_at, mask=(start > 0) & (row > 0) & (keys[:, None] >= 0), other=0.0)
    enter(PDL)

    convolved += i * max_tokens * CHANNELS
    of_q = convolved + head // RATIO * KEY_DIM + keys
    of_v = convolved + 2 * KEYS + head * VALUE_DIM + values
    gate = i * max_tokens * HEADS + head
    out += i * width * (HEADS * VALUE_DIM) + head * VALUE_DIM + values
    for t in tl.range(pending + width, num_stages=STAGES):
        q = tl.load(of_q + t * CHANNELS)
        k = tl.load(of_q + t * CHANNELS + KEYS)[:, None]
        v = tl.load(of_v + t * CHANNELS)
        s *= tl.load(decays + gate + t * HEADS)
        delta = (v - tl.sum(s * k, 0)) * tl.load(betas + gate + t * HEADS)
        s = tl.fma(tl.broadcast_to(k, s.shape), tl.broadcast_to(delta[None, :], s.shape), s)
        o = tl.sum(s * q[:, None], 0)
        if t >= pending:
            to = out + (t - pending) * (HEADS * VALUE_DIM)
            tl.store(to, tl.where(row > 0, o, 0.0).to(out.dtype.element_ty))
        if (t + 1 == kept) & (row > 0):
            tl.store(s_at, s)


@triton.jit
def _gated_norm_kernel(
    o, z, weight, num_tokens, stride_z, num_rows, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens · HEADS / ROWS); heads of tokens from num_tokens[0] on become zero."""
    DTYPE: tl.constexpr = o.dtype.element_ty
    lanes = tl.arange(0, DIM)[None, :]
    scale = tl.load(weight + lanes).to(tl.float32)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    enter(PDL)
    real = row < num_rows
    if num_tokens is not None:
        real &= row // HEADS < tl.load(num_tokens)
    out = o + row.to(tl.int64) * DIM + lanes
    x = tl.load(out, mask=real, other=0.0).to(tl.float32)
    gate_at = z + (row // HEADS).to(tl.int64) * stride_z + row % HEADS * DIM + lanes
    gate = tl.load(gate_at, mask=real, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
    x = (x.to(DTYPE).to(tl.float32) * scale).to(DTYPE).to(tl.float32)
    x *= gate / (1.0 + tl.exp(-gate))
    tl.store(out, x.to(DTYPE), mask=(row < num_rows) & (lanes >= 0))


def gated_norm_triton(
    o: Tensor, z: Tensor, weights: DeltaWeights, shape: DeltaShape, num_tokens: Tensor | None = None
) -> None:
    """delta_net.gated_norm in place: of o, [n, value_width]; z: the same shape, rows strided.

    num_tokens: [1] i32; rows behind so many become zero; None: there are none.
    """
    num_rows = len(o) * shape.value_heads
    _gated_norm_kernel[(-(-num_rows // ROWS),)](
        o, z, weights.norm, num_tokens, z.stride(0), num_rows, weights.eps,
        **overlap(o, HEADS=shape.value_heads, DIM=shape.value_dim, ROWS=ROWS, num_warps=4),
    )  # fmt: skip


def delta_window_triton(
    packed: Tensor, weights: DeltaWeights, state: DeltaState, rows: StateWindows
) -> Tensor:
    """See delta_window_ref; a token's result depends on its row alone, bit for bit."""
    shape, (n,) = state.shape, rows.live.shape
    s, conv, ring = state
    heads, max_tokens = shape.value_heads, rows.width + ring.shape[1]
    assert s[0, 0].is_contiguous()
    assert conv.stride(3) == ring.stride(2) == packed.stride(1) == 1
    convolved = packed.new_empty(n, max_tokens, shape.channels, dtype=torch.float32)
    gates = packed.new_empty(2, n, max_tokens, heads, dtype=torch.float32)
    out = packed.new_empty(n * rows.width, shape.value_width)
    columns = rows.live, rows.state_slot, rows.folded, rows.seq_len
    sizes = overlap(
        packed, KEY_HEADS=shape.key_heads, RATIO=shape.ratio, KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    _inputs_kernel[(n, 2 * shape.key_heads + heads)](
        packed, weights.conv, weights.a_log, weights.dt_bias, conv, ring, *columns,
        convolved, gates[0], gates[1], rows.width, max_tokens, packed.stride(0),
        conv.stride(0), conv.stride(1), conv.stride(2), ring.stride(0), ring.stride(1),
        BLOCK=max(shape.key_dim, shape.value_dim), **sizes,  # type: ignore
    )  # fmt: skip
    values = s.shape[5]
    _state_kernel[(shape.value_dim // values, heads, n)](
        convolved, gates[0], gates[1], s, *columns, out, rows.width, max_tokens,
        s.stride(0), s.stride(1), VALUES=values, STAGES=STAGES, **sizes,  # type: ignore
    )  # fmt: skip
    z = packed[:, shape.channels : shape.channels + shape.value_width]
    gated_norm_triton(out, z, weights, shape)
    return out
