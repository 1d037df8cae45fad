"""Kernels of delta_net.py.

Of a decode step: the tokens' inputs, the state, the gated norm. Width and pending tokens are
numbers that the kernels read, not constants: one compiled kernel, in one order of its sums, folds
and verifies at every width. So a state has the same bits whichever windows led to it. A program is
one warp. Of chunks: convolution, blocks' matrices, the scan over blocks.
"""

import torch
from torch import Tensor

from worker.attention.recurrent.delta_net import DeltaShape, DeltaState, DeltaWeights
from worker.config.checkpoint.delta_shape import DELTA_BLOCK
from worker.forward.batch import StateChunks, StateWindows
from worker.ops.jit import enter, overlap, tl, triton

ROWS = 8  # heads of tokens of a program; 4 take 1.6 times as long for 8,192 tokens
STAGES = 3  # tokens whose inputs are loaded at once
# Of a state's program, so that 16 of states in f32 are at once on a multiprocessor of an H200: 128
# rows in windows of four take 237 us a layer, with the 150 that it would have 256.
STATE_REGISTERS = 128
CONVOLVED = 16  # tokens of a program of the convolution
SCAN_VALUES, SCAN_STAGES, SCAN_WARPS = 32, 3, 4  # values of a head in a program of the scan
MATRIX_WARPS = 4
EXACT = tl.constexpr("tf32x3")  # of products of f32: as good as f32, on tensor cores


@triton.jit
def _softplus(x):
    """log(1 + e^x), x itself where it is large, as torch has it."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _silu(x):
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
def _snapshot(row, snap_slot, start, kept, grid):
    """(the token of a step's kept ones behind which a snapshot is stored; -1: none, its slot)."""
    at = (grid - 1 - start % grid).to(tl.int32)
    slot = tl.load(snap_slot + row)
    return tl.where((row > 0) & (slot > 0) & (at < kept), at, -1), slot


@triton.jit
def _part_of(
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
def _taps(weight, lanes, inside):
    """A convolution's four weights of lanes, f32."""
    at = weight + lanes * 4
    w0 = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    w1 = tl.load(at + 1, mask=inside, other=0.0).to(tl.float32)
    w2 = tl.load(at + 2, mask=inside, other=0.0).to(tl.float32)
    w3 = tl.load(at + 3, mask=inside, other=0.0).to(tl.float32)
    return w0, w1, w2, w3


@triton.jit
def _inputs_of(
    ring, new, t, pending, end, at, inside, head, is_value, stride_ring, stride_packed,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """(raw inputs at `at`, b, a) of a row's token t, which is pending or new; 0 from `end` on."""
    is_old, there = t < pending, t < end
    source = tl.where(is_old, ring + t * stride_ring, new + (t - pending) * stride_packed)
    gate = source + CHANNELS + tl.where(is_old, 0, VALUES) + head
    x = tl.load(source + at, mask=inside & there, other=0.0)
    b = tl.load(gate, mask=there & is_value, other=0.0)
    return x, b, tl.load(gate + HEADS, mask=there & is_value, other=0.0)


@triton.jit(do_not_specialize=["width", "max_tokens", "grid"])
def _inputs_kernel(
    packed, conv_weight, a_log, dt_bias, conv_all, ring_all, live, state_slot, folded, seq_len,
    snap_slot, convolved, decays, betas, width, max_tokens, grid,
    stride_packed, stride_conv_slot, stride_conv_head, stride_conv, stride_ring_row, stride_ring,
    KEY_HEADS: tl.constexpr, RATIO: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, heads of q, then of k, then of v): convolution, lengths of q and k, gates.

    Writes the raw inputs that the next step needs to slot and ring, once it has read theirs.
    """
    HEADS: tl.constexpr = KEY_HEADS * RATIO
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    is_value, head, at, key_head, of_head = _part_of(KEY_HEADS, RATIO, KEY_DIM, VALUE_DIM)  # type: ignore
    lanes = tl.arange(0, BLOCK)
    inside = lanes < tl.where(is_value, VALUE_DIM, KEY_DIM)
    i = tl.program_id(0).to(tl.int64)
    row, slot, start, pending, kept = _row(i, live, state_slot, folded, seq_len, width)  # type: ignore
    snap_at, snap = _snapshot(row, snap_slot, start, kept, grid)  # type: ignore
    w0, w1, w2, w3 = _taps(conv_weight + at * 4, lanes, inside)  # type: ignore
    conv = conv_all + slot * stride_conv_slot + key_head * stride_conv_head + of_head + lanes
    rate_bias, rate_factor = tl.load(dt_bias + head), -tl.exp(tl.load(a_log + head))
    held = inside & (start > 0) & (row > 0)
    x0 = tl.load(conv, mask=held, other=0.0)
    x1 = tl.load(conv + stride_conv, mask=held, other=0.0)
    x2 = tl.load(conv + 2 * stride_conv, mask=held, other=0.0)
    enter(PDL)

    ring, new = ring_all + row * stride_ring_row, packed + i * width * stride_packed
    convolved += i * max_tokens * CHANNELS + at + lanes
    to_gate = i * max_tokens * HEADS + head
    writes, last = inside & (row > 0), (row > 0) & (kept > 0)
    end = pending + width
    x3, b, a = _inputs_of(  # type: ignore
        ring, new, 0, pending, end, at + lanes, inside, head, is_value, stride_ring, stride_packed,
        CHANNELS, HEADS, HEADS * VALUE_DIM,
    )  # fmt: skip
    for t in range(end):
        x4, next_b, next_a = _inputs_of(  # type: ignore
            ring, new, t + 1, pending, end, at + lanes, inside, head, is_value, stride_ring,
            stride_packed, CHANNELS, HEADS, HEADS * VALUE_DIM,
        )  # fmt: skip
        y = w0 * x0.to(tl.float32) + w1 * x1.to(tl.float32)
        y = _silu(y + w2 * x2.to(tl.float32) + w3 * x3.to(tl.float32))
        y = y.to(packed.dtype.element_ty).to(tl.float32)
        if is_value:
            g = rate_factor * _softplus(a.to(tl.float32) + rate_bias)
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
        if t == snap_at:
            to_snap = conv + (snap - slot) * stride_conv_slot
            tl.store(to_snap, x0, mask=inside)
            tl.store(to_snap + stride_conv, x1, mask=inside)
            tl.store(to_snap + 2 * stride_conv, x2, mask=inside)
        if (t >= pending) & (width > 1):
            tl.store(ring + (t - pending) * stride_ring + at + lanes, x3, mask=writes)
        x3, b, a = x4, next_b, next_a


@triton.jit(do_not_specialize=["width", "max_tokens", "grid"])
def _state_kernel(
    convolved, decays, betas, s_all, live, state_slot, folded, seq_len, snap_slot, out,
    width, max_tokens, grid, stride_slot, stride_head,
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
    snap_at, snap = _snapshot(row, snap_slot, start, kept, grid)  # type: ignore
    s_at = s_all + slot * stride_slot + head // RATIO * stride_head
    s_at += head % RATIO * (KEY_DIM * VALUE_DIM) + part * (KEY_DIM * VALUES)
    s_at += keys[:, None] * VALUES + tl.arange(0, VALUES)[None, :]
    s = tl.load(s_at, mask=(start > 0) & (row > 0) & (keys[:, None] >= 0), other=0.0)
    s = s.to(tl.float32)
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
        s = s.to(s_all.dtype.element_ty).to(tl.float32)
        if (t + 1 == kept) & (row > 0):
            tl.store(s_at, s)
        if t == snap_at:
            tl.store(s_at + (snap - slot) * stride_slot, s)


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
    columns = rows[:5]
    sizes = overlap(
        packed, KEY_HEADS=shape.key_heads, RATIO=shape.ratio, KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    _inputs_kernel[(n, 2 * shape.key_heads + heads)](
        packed, weights.conv, weights.a_log, weights.dt_bias, conv, ring, *columns,
        convolved, gates[0], gates[1], rows.width, max_tokens, rows.grid, packed.stride(0),
        conv.stride(0), conv.stride(1), conv.stride(2), ring.stride(0), ring.stride(1),
        BLOCK=max(shape.key_dim, shape.value_dim), **sizes,  # type: ignore
    )  # fmt: skip
    values = s.shape[5]
    _state_kernel[(shape.value_dim // values, heads, n)](
        convolved, gates[0], gates[1], s, *columns, out, rows.width, max_tokens, rows.grid,
        s.stride(0), s.stride(1), VALUES=values, STAGES=STAGES,
        maxnreg=STATE_REGISTERS, **sizes,  # type: ignore
    )  # fmt: skip
    z = packed[:, shape.channels : shape.channels + shape.value_width]
    gated_norm_triton(out, z, weights, shape)
    return out


@triton.jit
def _raw(conv, chunk, stride_conv, stride_packed, t, end, started, lanes, inside):
    """Raw inputs of a chunk's tokens t < end; below 0 they are of the slot."""
    source = tl.where(t < 0, conv + (t + 3) * stride_conv, chunk + t * stride_packed)
    there = tl.where(t < 0, started, t < end)
    return tl.load(source + lanes, mask=there & inside, other=0.0)


@triton.jit
def _put(to, x0, x1, x2, x3, w0, w1, w2, w3, kept, is_value, scale):
    """Convolve one token, rounded once; of q and k, give it a length of `scale`."""
    y = w0 * x0.to(tl.float32) + w1 * x1.to(tl.float32)
    y = _silu(y + w2 * x2.to(tl.float32) + w3 * x3.to(tl.float32))
    y = y.to(to.dtype.element_ty).to(tl.float32)
    if not is_value:
        y *= tl.rsqrt(tl.sum(y * y, 0) + 1e-6) * scale
    tl.store(to, y.to(to.dtype.element_ty), mask=kept)


@triton.jit
def _convolve_kernel(
    packed, conv_weight, a_log, dt_bias, conv_all, query_start, seq_lens, slots, blocks,
    mixed, decays, betas, stride_packed, stride_conv_slot, stride_conv_head, stride_conv,
    num_reqs, num_blocks,
    KEY_HEADS: tl.constexpr, RATIO: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, heads of q, k and v, BLOCK / TOKENS); a program is one warp.

    `decays` become sums of g from the block's begin on.
    """
    HEADS: tl.constexpr = KEY_HEADS * RATIO
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    is_value, head, first, key_head, of_head = _part_of(KEY_HEADS, RATIO, KEY_DIM, VALUE_DIM)  # type: ignore
    lanes = tl.arange(0, LANES)
    inside = lanes < tl.where(is_value, VALUE_DIM, KEY_DIM)
    w0, w1, w2, w3 = _taps(conv_weight + first * 4, lanes, inside)
    scale = tl.where(tl.program_id(1) < KEY_HEADS, KEY_DIM**-0.5, 1.0)
    enter(PDL)
    request = tl.load(blocks + tl.program_id(0))
    if request < num_reqs:
        begin = tl.load(query_start + request)
        end = tl.load(query_start + request + 1) - begin
        at = tl.load(blocks + num_blocks + tl.program_id(0)) - begin
        started = tl.load(seq_lens + request) > end
        conv = conv_all + tl.load(slots + request).to(tl.int64) * stride_conv_slot
        conv += key_head * stride_conv_head + of_head
        chunk = packed + begin.to(tl.int64) * stride_packed
        source, early = chunk + first, at + tl.program_id(2) * TOKENS
        to_part = mixed + begin.to(tl.int64) * CHANNELS + first + lanes
        x0 = _raw(conv, source, stride_conv, stride_packed, early - 3, end, started, lanes, inside)
        x1 = _raw(conv, source, stride_conv, stride_packed, early - 2, end, started, lanes, inside)
        x2 = _raw(conv, source, stride_conv, stride_packed, early - 1, end, started, lanes, inside)
        for t in range(early, tl.minimum(early + TOKENS, end), 4):  # four loads at once
            token = source + t * stride_packed + lanes
            x3 = tl.load(token, mask=inside, other=0.0)
            x4 = tl.load(token + stride_packed, mask=inside & (t + 1 < end), other=0.0)
            x5 = tl.load(token + 2 * stride_packed, mask=inside & (t + 2 < end), other=0.0)
            x6 = tl.load(token + 3 * stride_packed, mask=inside & (t + 3 < end), other=0.0)
            to = to_part + t * CHANNELS
            _put(to, x0, x1, x2, x3, w0, w1, w2, w3, inside, is_value, scale)
            to += CHANNELS
            _put(to, x1, x2, x3, x4, w0, w1, w2, w3, inside & (t + 1 < end), is_value, scale)
            to += CHANNELS
            _put(to, x2, x3, x4, x5, w0, w1, w2, w3, inside & (t + 2 < end), is_value, scale)
            to += CHANNELS
            _put(to, x3, x4, x5, x6, w0, w1, w2, w3, inside & (t + 3 < end), is_value, scale)
            x0, x1, x2 = x4, x5, x6
        if is_value & (tl.program_id(2) == 0):
            token = at + tl.arange(0, BLOCK)
            there = token < end
            gates = chunk + token * stride_packed + CHANNELS + HEADS * VALUE_DIM + head
            b = tl.load(gates, mask=there, other=0.0).to(tl.float32)
            a = tl.load(gates + HEADS, mask=there, other=0.0).to(tl.float32)
            g = -tl.exp(tl.load(a_log + head)) * _softplus(a + tl.load(dt_bias + head))
            g = tl.cumsum(tl.where(there, g, 0.0), 0)
            gate_at = (begin + token).to(tl.int64) * HEADS + head
            tl.store(decays + gate_at, g, mask=there)
            tl.store(betas + gate_at, 1.0 / (1.0 + tl.exp(-b)), mask=there)


@triton.jit
def _matrices_kernel(
    mixed, decays, betas, query_start, blocks, scratch, w_all, u_all, p_all, num_reqs, num_blocks,
    KEY_HEADS: tl.constexpr, RATIO: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, value heads): T = (1 + A)^-1, w = T β e^G k, u = T β v, and P of q and k.

    T by forward substitution of the four blocks of 16 on its diagonal, then by twos.
    """
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    HEADS: tl.constexpr = KEY_HEADS * RATIO
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    number, head = tl.program_id(0), tl.program_id(1)
    enter(PDL)
    request = tl.load(blocks + number)
    if request < num_reqs:
        end = tl.load(query_start + request + 1)
        i = tl.arange(0, BLOCK)
        tokens = tl.load(blocks + num_blocks + number) + i
        inside = tokens < end
        rows = tokens.to(tl.int64)
        # Behind the end the sum stays what it is: e to a difference from 0 might overflow.
        total = tl.load(decays + tl.minimum(rows, end - 1) * HEADS + head)
        beta = tl.load(betas + rows * HEADS + head, mask=inside, other=0.0)
        both = inside[:, None]
        k_at = mixed + rows[:, None] * CHANNELS + KEYS + head // RATIO * KEY_DIM
        keys = tl.arange(0, KEY_DIM)[None, :]
        k = tl.load(k_at + keys, mask=both, other=0.0)
        q = tl.load(k_at - KEYS + keys, mask=both, other=0.0)
        p = tl.dot(q, tl.trans(k), input_precision=EXACT)
        a = tl.dot(k, tl.trans(k), input_precision=EXACT)
        lower = i[:, None] >= i[None, :]
        decay = tl.where(lower, tl.exp(tl.where(lower, total[:, None] - total[None, :], 0.0)), 0.0)
        place = (number.to(tl.int64) * HEADS + head) * (BLOCK * BLOCK)
        square = i[:, None] * BLOCK + i[None, :]
        tl.store(p_all + place + square, (p * decay).to(DTYPE))
        scratch += place
        a *= decay * beta[:, None]
        tl.store(scratch + square, tl.where(i[:, None] > i[None, :], a, 0.0))
        tl.debug_barrier()

        # The diagonal blocks at once, column c of the inverse over rows r: sums stay in a warp.
        d, c = tl.arange(0, 4)[:, None, None], tl.arange(0, 16)[None, :, None]
        r = tl.arange(0, 16)[None, None, :]
        diagonal = scratch + d * (16 * BLOCK + 16)
        inverse = tl.where((r == c) & (d >= 0), 1.0, 0.0)
        for row in tl.static_range(1, 16):  # type: ignore
            line = tl.sum(inverse * tl.load(diagonal + (row * BLOCK + r + 0 * c)), 2)[:, :, None]
            inverse -= tl.where(r == row, line, 0.0)
        tl.debug_barrier()
        tl.store(diagonal + r * BLOCK + c, inverse)
        tl.debug_barrier()
        h = tl.arange(0, 16)
        half = h[:, None] * BLOCK + h[None, :]
        for pair in tl.static_range(2):  # type: ignore
            corner = scratch + pair * 32 * (BLOCK + 1)
            left = tl.load(corner + 16 * (BLOCK + 1) + half)
            below = tl.dot(left, tl.load(corner + 16 * BLOCK + half), input_precision=EXACT)
            below = -tl.dot(below, tl.load(corner + half), input_precision=EXACT)
            tl.store(corner + 16 * BLOCK + half, below)
        tl.debug_barrier()
        h2 = tl.arange(0, 32)
        half2 = h2[:, None] * BLOCK + h2[None, :]
        left2 = tl.load(scratch + 32 * (BLOCK + 1) + half2)
        below2 = tl.dot(left2, tl.load(scratch + 32 * BLOCK + half2), input_precision=EXACT)
        below2 = -tl.dot(below2, tl.load(scratch + half2), input_precision=EXACT)
        tl.store(scratch + 32 * BLOCK + half2, below2)
        tl.debug_barrier()

        t = tl.load(scratch + square).to(DTYPE)
        w_at = w_all + (rows[:, None] * HEADS + head) * KEY_DIM
        k = tl.load(k_at + keys, mask=both, other=0.0)  # again: its registers were needed
        k = (k.to(tl.float32) * (beta * tl.exp(total))[:, None]).to(DTYPE)
        tl.store(w_at + keys, tl.dot(t, k, input_precision=EXACT).to(DTYPE), mask=both)
        values = tl.arange(0, VALUE_DIM)[None, :]
        v_at = mixed + rows[:, None] * CHANNELS + 2 * KEYS + head * VALUE_DIM + values
        v = tl.load(v_at, mask=both, other=0.0).to(tl.float32)
        u = tl.dot(t, (v * beta[:, None]).to(DTYPE), input_precision=EXACT)
        u_at = u_all + (rows[:, None] * HEADS + head) * VALUE_DIM + values
        tl.store(u_at, u.to(DTYPE), mask=both)


@triton.jit
def _scan_kernel(
    packed, mixed, decays, query_start, seq_lens, slots, snap_lens, snap_slots, w_all, u_all, p_all,
    s_all, conv_all, out,
    stride_packed, stride_slot, stride_head, stride_conv_slot, stride_conv_head, stride_conv,
    KEY_HEADS: tl.constexpr, RATIO: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (VALUE_DIM / VALUES, value heads, requests): outputs, and the state after the chunk.

    HELD: values that lie together in a state.
    """
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    HEADS: tl.constexpr = KEY_HEADS * RATIO
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    part, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    enter(PDL)
    begin, end = tl.load(query_start + request), tl.load(query_start + request + 1)
    if end > begin:
        started = tl.load(seq_lens + request) > end - begin
        slot = tl.load(slots + request).to(tl.int64)
        snap = tl.load(snap_lens + request) - tl.load(seq_lens + request) + end - begin
        snap_slot = tl.load(snap_slots + request).to(tl.int64)
        i, keys = tl.arange(0, BLOCK), tl.arange(0, KEY_DIM)
        values = part * VALUES + tl.arange(0, VALUES)
        key_head = head // RATIO
        s_at = s_all + slot * stride_slot + key_head * stride_head
        s_at += head % RATIO * (KEY_DIM * VALUE_DIM) + keys[:, None] * HELD
        s_at += (values // HELD * (KEY_DIM * HELD) + values % HELD)[None, :]
        s = tl.load(s_at, mask=started & (keys[:, None] >= 0), other=0.0).to(tl.float32)
        number = 0
        for earlier in range(request):
            length = tl.load(query_start + earlier + 1) - tl.load(query_start + earlier)
            number += (length + BLOCK - 1) // BLOCK
        p_at = p_all + (number.to(tl.int64) * HEADS + head) * (BLOCK * BLOCK)  # type: ignore
        p_at += i[:, None] * BLOCK + i[None, :]
        for first in range(begin, end, BLOCK):
            inside = first + i < end
            rows = (first + i).to(tl.int64)
            both = inside[:, None]
            w = tl.load(w_all + (rows[:, None] * HEADS + head) * KEY_DIM + keys[None, :], mask=both,
                        other=0.0)  # fmt: skip
            u_at = u_all + (rows[:, None] * HEADS + head) * VALUE_DIM + values[None, :]
            u = tl.load(u_at, mask=both, other=0.0).to(tl.float32)
            q_at = mixed + rows[:, None] * CHANNELS + key_head * KEY_DIM + keys[None, :]
            q = tl.load(q_at, mask=both, other=0.0)
            k = tl.load(q_at + KEYS, mask=both, other=0.0)
            total = tl.load(decays + tl.minimum(rows, end - 1) * HEADS + head)
            last_row = (tl.minimum(first + BLOCK, end) - 1).to(tl.int64)
            last = tl.load(decays + last_row * HEADS + head)
            held = s.to(DTYPE)
            new = u - tl.dot(w, held, input_precision=EXACT)
            o = tl.dot(q, held, input_precision=EXACT) * tl.exp(total)[:, None]
            o += tl.dot(tl.load(p_at), new.to(DTYPE), input_precision=EXACT)
            to = out + (rows[:, None] * HEADS + head) * VALUE_DIM + values[None, :]
            tl.store(to, o.to(DTYPE), mask=both)
            new = (new * tl.exp(last - total)[:, None]).to(DTYPE)
            s = s * tl.exp(last) + tl.dot(tl.trans(k), new, input_precision=EXACT)
            s = s.to(s_all.dtype.element_ty).to(tl.float32)
            p_at += HEADS * BLOCK * BLOCK
            if first + BLOCK - begin == snap:
                tl.store(s_at + (snap_slot - slot) * stride_slot, s)
        tl.store(s_at, s)

        # The last three raw inputs, of the snapshot and of the chunk. Some of a short chunk's were
        # in the slot before.
        for number in tl.static_range(2):  # type: ignore
            length = snap if number == 0 else end - begin
            if length > 0:
                to_slot = snap_slot if number == 0 else slot
                t = length - 3 + tl.arange(0, 4)[:, None]
                chunk = packed + begin.to(tl.int64) * stride_packed
                conv = conv_all + slot * stride_conv_slot + key_head * stride_conv_head
                line = tl.arange(0, 4)[:, None] * stride_conv
                line += (to_slot - slot) * stride_conv_slot
                inside = tl.arange(0, 4)[:, None] < 3
                of_v = head % RATIO * VALUE_DIM + 2 * KEY_DIM
                x = _raw(conv + of_v, chunk + 2 * KEYS + head * VALUE_DIM, stride_conv,
                         stride_packed, t, length, started, values[None, :], inside)  # fmt: skip
                tl.debug_barrier()
                tl.store(conv + of_v + line + values[None, :], x, mask=inside)
                if (part == 0) & (head % RATIO == 0):
                    of_q = chunk + key_head * KEY_DIM
                    x_q = _raw(conv, of_q, stride_conv, stride_packed, t, length, started,
                               keys[None, :], inside)  # fmt: skip
                    x_k = _raw(conv + KEY_DIM, of_q + KEYS, stride_conv, stride_packed, t, length,
                               started, keys[None, :], inside)  # fmt: skip
                    tl.debug_barrier()
                    tl.store(conv + line + keys[None, :], x_q, mask=inside)
                    tl.store(conv + KEY_DIM + line + keys[None, :], x_k, mask=inside)


def delta_chunk_triton(
    packed: Tensor, weights: DeltaWeights, state: DeltaState, chunks: StateChunks, out: Tensor
) -> None:
    """See delta_chunk_ref; a token's result depends on its request alone, bit for bit."""
    shape, num_tokens, num_reqs = state.shape, len(packed), len(chunks.slots)
    s, conv, _ = state
    heads, num_blocks = shape.value_heads, chunks.blocks.shape[1]
    assert s[0, 0].is_contiguous()
    assert packed.stride(1) == conv.stride(3) == 1
    mixed = packed.new_empty(num_tokens, shape.channels)
    decays = torch.empty(2, num_tokens, heads, dtype=torch.float32, device=packed.device)
    w = packed.new_empty(num_tokens, heads, shape.key_dim)
    u = packed.new_empty(num_tokens, heads, shape.value_dim)
    p = packed.new_empty(num_blocks, heads, DELTA_BLOCK, DELTA_BLOCK)
    scratch = torch.empty(p.shape, dtype=torch.float32, device=packed.device)
    sizes = overlap(
        packed, KEY_HEADS=shape.key_heads, RATIO=shape.ratio, KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim, BLOCK=DELTA_BLOCK,
    )  # fmt: skip
    strides = conv.stride(0), conv.stride(1), conv.stride(2)
    _convolve_kernel[(num_blocks, 2 * shape.key_heads + heads, DELTA_BLOCK // CONVOLVED)](
        packed, weights.conv, weights.a_log, weights.dt_bias, conv, chunks.query_start,
        chunks.seq_lens, chunks.slots, chunks.blocks, mixed, decays[0], decays[1],
        packed.stride(0), *strides, num_reqs, num_blocks, LANES=max(shape.key_dim, shape.value_dim),
        TOKENS=CONVOLVED, num_warps=1, **sizes,  # type: ignore
    )  # fmt: skip
    _matrices_kernel[(num_blocks, heads)](
        mixed, decays[0], decays[1], chunks.query_start, chunks.blocks, scratch, w, u, p,
        num_reqs, num_blocks, num_warps=MATRIX_WARPS, **sizes,  # type: ignore
    )  # fmt: skip
    values = min(SCAN_VALUES, shape.value_dim)
    stages = SCAN_STAGES - (packed.dtype == torch.float32)  # which needs twice the shared memory
    _scan_kernel[(shape.value_dim // values, heads, num_reqs)](
        packed, mixed, decays[0], *chunks[:5], w, u, p, s, conv, out,
        packed.stride(0), s.stride(0), s.stride(1), *strides, VALUES=values,
        HELD=s.shape[5], num_warps=SCAN_WARPS, num_stages=stages, **sizes,  # type: ignore
    )  # fmt: skip
    z = packed[:, shape.channels : shape.channels + shape.value_width]
    gated_norm_triton(out, z, weights, shape, chunks.query_start[-1:])
