"""The gated delta rule: chunks of prompts, decode steps, and the state's layout.

Yang et al., "Gated Delta Networks" (arXiv:2412.06464), as Qwen3-Next computes it: a short causal
convolution of q, k and v, then for a value head, in f32,
    S ← e^g · S;  δ = β · (v − Sᵀ k);  S ← S + k ⊗ δ;  o = Sᵀ q.

A chunk goes 64 tokens at a time. Within a block the rule is a product of matrices (WY form: Yang et
al., arXiv:2406.06484, section 3; with decay arXiv:2412.06464, section 3.3). Blocks begin at
multiples of 64 of the request, and chunks that are not a prompt's last end there, so it does not
matter how a prompt was cut.

A decode step folds the tokens that the last step accepted, and computes a window. Speculation by
replay: rejected drafts are never folded, so nothing is restored. A step reads the state of the
first `folded` tokens, folds the `pending` ones, whose raw inputs the last window has left in the
ring, stores the state, and computes its own window without storing. A window of one token is always
accepted and folded at once.

States are f32, or bf16: then they are rounded behind a token that is folded, and behind a block of
a chunk, so it does not matter either which windows and chunks led to them.

A *snapshot* is the state at a multiple of the grid that a chunk or a fold passes, in a slot apart.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.config.checkpoint.delta_shape import DELTA_BLOCK, TAPS, VALUES, DeltaShape
from worker.forward.batch import StateChunks, StateWindows
from worker.ops.op import op

L2_EPS = 1e-6


class DeltaWeights(NamedTuple):
    """Weights of one layer but for its products."""

    conv: Tensor  # [channels, TAPS]
    a_log: Tensor  # [value_heads] f32
    dt_bias: Tensor  # [value_heads] f32
    norm: Tensor  # [value_dim]; of heads' outputs
    eps: float


class DeltaState(NamedTuple):
    """Slots of one layer, strided views. Slot 0 is a sink; none is read at position 0."""

    # [num_slots, key_heads, ratio, blocks of values, key_dim, values of a block] f32 or bf16
    s: Tensor
    conv: Tensor  # [num_slots, key_heads, TAPS - 1, head_channels]; raw inputs, oldest first
    # [num_rows + 1, max_width, raw_width]: raw inputs of rows' last windows, if wider than 1
    ring: Tensor

    @property
    def shape(self) -> DeltaShape:
        _, key_heads, ratio, blocks, key_dim, values = self.s.shape
        return DeltaShape(key_heads, ratio, key_dim, blocks * values)


def delta_states(
    views: Sequence[tuple[Tensor, Tensor]], shape: DeltaShape, num_rows: int, max_width: int
) -> list[DeltaState]:
    """By layer: `views` of the pool (KVPool.states) and a new ring.

    shape: of this rank; max_width: tokens of the widest window. A window of one needs no ring.
    """
    if not views:
        return []
    raw = views[0][1]
    lines = max_width if max_width > 1 else 0
    rings = raw.new_zeros(len(views), num_rows + 1, lines, shape.raw_width)
    values = min(VALUES, shape.value_dim)
    sizes = shape.ratio, shape.value_dim // values, shape.key_dim, values
    return [
        DeltaState(s.unflatten(2, sizes), conv, ring)
        for (s, conv), ring in zip(views, rings, strict=True)
    ]


def read_states(state: DeltaState, slots: Tensor) -> Tensor:
    """[n, value_heads, key_dim, value_dim] f32; slots: [n] i64."""
    return state.s[slots].float().flatten(1, 2).transpose(2, 3).flatten(3)


def write_states(state: DeltaState, slots: Tensor, s: Tensor) -> None:
    """The inverse; s: [n, value_heads, key_dim, value_dim] f32, slots: [n] i64."""
    _, key_heads, ratio, blocks, _, values = state.s.shape
    s = s.unflatten(3, (blocks, values)).transpose(2, 3)
    state.s[slots] = s.unflatten(1, (key_heads, ratio)).to(state.s.dtype)


def by_channel(conv: Tensor, shape: DeltaShape) -> Tensor:
    """[n, key_heads, rows, head_channels] -> [n, rows, channels], in the projection's order."""
    q, k, v = conv.transpose(1, 2).split(
        [shape.key_dim, shape.key_dim, shape.ratio * shape.value_dim], dim=-1
    )
    return torch.cat([part.flatten(2) for part in (q, k, v)], dim=-1)


def by_head(raw: Tensor, shape: DeltaShape) -> Tensor:
    """The inverse: [n, rows, channels] -> [n, key_heads, rows, head_channels]."""
    n, rows, _ = raw.shape
    width = shape.key_heads * shape.key_dim
    parts = raw.split([width, width, shape.value_width], dim=-1)
    heads = [part.view(n, rows, shape.key_heads, -1) for part in parts]
    return torch.cat(heads, dim=-1).transpose(1, 2)


def convolved(raw: Tensor, weight: Tensor) -> Tensor:
    """silu of the causal convolution, rounded once: [.., TAPS - 1 + n, channels] -> [.., n, ..]."""
    n = raw.shape[-2] - (TAPS - 1)
    total = raw.new_zeros((), dtype=torch.float32)
    for tap in range(TAPS):
        total = total + raw[..., tap : tap + n, :].float() * weight[:, tap].float()
    return F.silu(total).to(raw.dtype)


class Inputs(NamedTuple):
    """Inputs of the recurrence, f32; [..] are the tokens."""

    q: Tensor  # [.., value_heads, key_dim]; normalised, and scaled by key_dim ** -0.5
    k: Tensor  # [.., value_heads, key_dim]; normalised
    v: Tensor  # [.., value_heads, value_dim]
    g: Tensor  # [.., value_heads]; log of the decay
    beta: Tensor  # [.., value_heads]


def inputs(mixed: Tensor, ba: Tensor, weights: DeltaWeights, shape: DeltaShape) -> Inputs:
    """mixed: [.., channels], convolved; ba: [.., 2 · value_heads], b by head, then a by head."""
    width = shape.key_heads * shape.key_dim
    q, k, v = mixed.float().split([width, width, shape.value_width], dim=-1)
    heads = [part.unflatten(-1, (shape.key_heads, shape.key_dim)) for part in (q, k)]
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in heads)
    q = q * shape.key_dim**-0.5
    q, k = (x.repeat_interleave(shape.ratio, dim=-2) for x in (q, k))  # of value head h: h // ratio
    b, a = ba.float().chunk(2, dim=-1)
    g = -weights.a_log.exp() * F.softplus(a + weights.dt_bias)
    return Inputs(q, k, v.unflatten(-1, (shape.value_heads, -1)), g, torch.sigmoid(b))


def delta_step(s: Tensor, x: Inputs) -> tuple[Tensor, Tensor]:
    """(state after one token, its output [n, value_heads, value_dim] f32).

    s: [n, value_heads, key_dim, value_dim] f32; x: of n tokens.
    """
    q, k = x.q[..., None], x.k[..., None]
    s = s * x.g.exp()[..., None, None]
    delta = x.beta[..., None] * (x.v - (s * k).sum(-2))
    s = s + k * delta[..., None, :]
    return s, (s * q).sum(-2)


def gated_norm(o: Tensor, z: Tensor, weights: DeltaWeights, shape: DeltaShape) -> Tensor:
    """RMS norm of a head's output, times weight and silu(z): [n, value_width] of z's dtype.

    o: [n, value_heads, value_dim] f32; z: [n, value_width].
    """
    o = o.to(z.dtype).float()
    o = (o * torch.rsqrt(o.square().mean(-1, keepdim=True) + weights.eps)).to(z.dtype)
    gate = F.silu(z.float().unflatten(-1, (shape.value_heads, -1)))
    return ((o * weights.norm).float() * gate).to(z.dtype).flatten(1)


def delta_chunk_ref(
    packed: Tensor, weights: DeltaWeights, state: DeltaState, chunks: StateChunks, out: Tensor
) -> None:
    """Fill `out`, the requests' slots, and those of snapshots that the chunks pass.

    packed: [num_tokens, packed_width]; out: [num_tokens, value_width] of that dtype; padding: 0.
    """
    shape = state.shape
    widths = [shape.channels, shape.value_width, 2 * shape.value_heads]
    qkv, z, ba = packed.split(widths, dim=-1)
    out.zero_()
    starts, lengths = chunks.query_start.tolist(), chunks.seq_lens.tolist()
    for i in range(len(lengths)):
        tokens = slice(starts[i], starts[i + 1])
        count = tokens.stop - tokens.start
        if not count:
            continue
        held = chunks.slots[i : i + 1]
        s, early = read_states(state, held)[0], by_channel(state.conv[held], shape)[0]
        if lengths[i] == count:  # nothing is read at position 0
            s, early = torch.zeros_like(s), torch.zeros_like(early)
        raw = torch.cat((early, qkv[tokens]))
        x = inputs(convolved(raw, weights.conv), ba[tokens], weights, shape)
        outputs, snap = [], chunks.snap_lens[i] - (lengths[i] - count)
        for at in range(0, count, DELTA_BLOCK):
            s, o = delta_block(s, Inputs(*(part[at : at + DELTA_BLOCK] for part in x)))
            s = s.to(state.s.dtype).float()
            outputs.append(o)
            if at + DELTA_BLOCK == snap:
                kept = chunks.snap_slots[i : i + 1]
                write_states(state, kept, s[None])
                state.conv[kept] = by_head(raw[None, snap : snap + TAPS - 1], shape)
        out[tokens] = gated_norm(torch.cat(outputs), z[tokens], weights, shape)
        write_states(state, held, s[None])
        state.conv[held] = by_head(raw[None, 1 - TAPS :], shape)


def delta_block(s: Tensor, x: Inputs) -> tuple[Tensor, Tensor]:
    """delta_step of up to 64 tokens at once: (state, outputs [tokens, value_heads, value_dim]).

    s: [value_heads, key_dim, value_dim] f32. A token's arithmetic depends on none that follow it.
    """
    count = len(x.g)
    q, k, v, g, beta = (part.transpose(0, 1) for part in x)
    q, k, v = (F.pad(part, (0, 0, 0, DELTA_BLOCK - count)) for part in (q, k, v))
    g, beta = (F.pad(part, (0, DELTA_BLOCK - count)) for part in (g, beta))
    total = g.cumsum(1)
    decay = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
    mixed = (beta[..., None] * (k @ k.mT) * decay).tril(-1)
    both = torch.cat((beta[..., None] * v, (beta * total.exp())[..., None] * k), dim=-1)
    eye = torch.eye(DELTA_BLOCK, device=s.device)
    u, w = torch.linalg.solve_triangular(eye + mixed, both, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], dim=-1
    )
    new = u - w @ s
    o = (q * total.exp()[..., None]) @ s + (q @ k.mT * decay) @ new
    last = total[:, -1:]
    s = s * last[..., None].exp() + (k * (last - total).exp()[..., None]).mT @ new
    return s, o[:, :count].transpose(0, 1)


delta_chunk = op(delta_chunk_ref)


def delta_window_ref(
    packed: Tensor, weights: DeltaWeights, state: DeltaState, rows: StateWindows
) -> Tensor:
    """Returns [n · width, value_width] of the dtype of `packed`: the heads' normed, gated outputs.

    packed: [n · width, packed_width]. Slots and ring are written, and slots of snapshots.
    """
    shape, width, n = state.shape, rows.width, len(rows.live)
    channels, ring = shape.channels, state.ring[rows.live]
    num_lines = ring.shape[1]
    active, slots = rows.live > 0, rows.state_slot[rows.live]
    folded = rows.folded[rows.live]
    pending = (rows.seq_len[rows.live] - folded) * active
    started = (active & (folded > 0)).view(n, 1, 1)
    qkv, z, ba = packed.split([channels, shape.value_width, 2 * shape.value_heads], dim=-1)
    new = torch.cat((qkv, ba), dim=-1).view(n, width, -1)
    conv = by_channel(state.conv[slots], shape)
    known = torch.cat((ring, new), dim=1)
    raw = torch.cat((torch.where(started, conv, 0), known[..., :channels]), dim=1)
    # Behind a row's pending tokens come its window's: `at` is the tokens' lines of `known`.
    token = torch.arange(num_lines + width)
    at = token + (token >= pending[:, None]) * (num_lines - pending[:, None])
    at = at.clamp(max=num_lines + width - 1)
    early = torch.arange(TAPS - 1).expand(n, -1)
    raw = _lines(raw, torch.cat((early, at + TAPS - 1), dim=1))
    ba = _lines(known[..., channels:], at)
    x = inputs(convolved(raw, weights.conv), ba, weights, shape)
    held = read_states(state, slots)
    s = torch.where(started.unsqueeze(-1), held, 0)
    kept = pending + (width == 1)  # tokens that are folded now
    # The token behind which a snapshot is stored, and where; -1, and the sink, if there is none.
    snap, line = rows.snap_slot[rows.live], rows.grid - 1 - folded % rows.grid
    line = torch.where(active & (snap > 0) & (line < kept), line, -1)
    passed, snap = held, snap * (line >= 0)
    after, outputs = held, list[Tensor]()
    for i in range(num_lines + width):
        s, o = delta_step(s, Inputs(*(part[:, i] for part in x)))
        s = s.to(state.s.dtype).float()
        after = torch.where((i < kept).view(n, 1, 1, 1), s, after)
        passed = torch.where((line == i).view(n, 1, 1, 1), s, passed)
        outputs.append(o)
    window = pending[:, None] + torch.arange(width)
    o = torch.stack(outputs, dim=1)[torch.arange(n)[:, None], window].flatten(0, 1)
    # A row that is not there has slot 0 and row 0 of the ring, which nobody reads.
    write_states(state, slots, after)
    last = _lines(raw, kept[:, None] + torch.arange(TAPS - 1))
    state.conv[slots] = by_head(torch.where((kept > 0).view(n, 1, 1), last, conv), shape)
    write_states(state, snap, passed)
    state.conv[snap] = by_head(_lines(raw, line[:, None] + 1 + torch.arange(TAPS - 1)), shape)
    if width > 1:
        state.ring[rows.live, :width] = new
    out = gated_norm(o, z, weights, shape)
    return torch.where(active.repeat_interleave(width)[:, None], out, 0)


def _lines(x: Tensor, at: Tensor) -> Tensor:
    """x[i, at[i, j]] as [n, j, ..]; x: [n, lines, width]."""
    return x.gather(1, at[..., None].expand(-1, -1, x.shape[2]))


delta_window = op(delta_window_ref)
