"""RMS norms, alone and fused with sums and concatenations, and activations of feed-forwards."""

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.ops.op import op


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467).

    x: [..., hidden]; weight: [hidden] of x.dtype or f32. Reduces in f32, rounds to the weight's
    dtype before the product with it, as the checkpoints were trained; returns x's shape and dtype.
    """
    y = x.float()
    normed = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(weight.dtype)
    return (normed * weight).to(x.dtype)


def add_rms_norm_ref(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); the sum is rounded to its dtype before the norm.

    x, residual: [..., hidden] of one dtype; neither is written.
    total: [..., hidden], where the sum goes, rows maybe strided; None: to new memory.
    """
    residual = torch.add(x, residual, out=total)
    return rms_norm_ref(residual, weight, eps), residual


rms_norm = op(rms_norm_ref)
add_rms_norm = op(add_rms_norm_ref)


def pair_norm_ref(
    ids: Tensor | None,
    tokens: Tensor,
    hidden: Tensor,
    token_weight: Tensor | None,
    hidden_weight: Tensor | None,
    eps: float,
    hidden_first: bool,
) -> Tensor:
    """A row's embedded token and hidden state, both normed, one behind the other.

    ids: [n] i64, rows of `tokens`; None: row i of `tokens` is row i's token.
    tokens: [vocab_size, size], an embedding; or [n, size].
    hidden: [n, size] of one dtype with `tokens`; rows contiguous.
    token_weight, hidden_weight: [size], of the norms; None, both: neither is normed.
    hidden_first: does the hidden state stand before the token? Returns [n, 2 · size], contiguous.
    """
    token = tokens if ids is None else F.embedding(ids, tokens)
    if token_weight is not None and hidden_weight is not None:
        token = rms_norm_ref(token, token_weight, eps)
        hidden = rms_norm_ref(hidden, hidden_weight, eps)
    return torch.cat((hidden, token) if hidden_first else (token, hidden), dim=-1)


pair_norm = op(pair_norm_ref)


def swiglu_ref(gate_up: Tensor) -> Tensor:
    """silu(gate) · up; Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202).

    gate_up: [..., 2 · width], gate in the first half; returns [..., width] of the same dtype.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


swiglu = op(swiglu_ref)


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) · up, gelu by tanh, in plain torch; arguments and result as of swiglu."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)², in plain torch; So et al., "Primer" (arXiv:2109.08668)."""
    return F.relu(x).square()


def sigmoid_gate_ref(x: Tensor, gate: Tensor) -> Tensor:
    """x · sigmoid(gate), as gated attention has it; both [n, width] of one dtype, rows of `gate`
    maybe strided; sigmoid is rounded before the product."""
    return x * torch.sigmoid(gate)


sigmoid_gate = op(sigmoid_gate_ref)
