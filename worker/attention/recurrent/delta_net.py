"""The gated delta rule: inputs of its ops, one step of it, and the state's layout.

Yang et al., "Gated Delta Networks" (arXiv:2412.06464), as Qwen3-Next computes it: a short causal
convolution of q, k and v, then for a value head, in f32,
    S ← e^g · S;  δ = β · (v − Sᵀ k);  S ← S + k ⊗ δ;  o = Sᵀ q.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.config.checkpoint.delta_shape import TAPS, VALUES, DeltaShape

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

    # [num_slots, key_heads, ratio, blocks of values, key_dim, values of a block] f32
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
    return state.s[slots].flatten(1, 2).transpose(2, 3).flatten(3)


def write_states(state: DeltaState, slots: Tensor, s: Tensor) -> None:
    """The inverse; s: [n, value_heads, key_dim, value_dim] f32, slots: [n] i64."""
    _, key_heads, ratio, blocks, _, values = state.s.shape
    s = s.unflatten(3, (blocks, values)).transpose(2, 3)
    state.s[slots] = s.unflatten(1, (key_heads, ratio))


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
