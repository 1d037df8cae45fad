"""RMS norms, alone and fused with the residual before them, and SwiGLU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.ops.op import op


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467).

    x: [..., hidden]; weight: [hidden] of x.dtype. Reduces in f32, rounds to x.dtype before the
    product with `weight`, as the checkpoints were trained; returns [..., hidden] of x.dtype.
    """
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


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


def swiglu_ref(gate_up: Tensor) -> Tensor:
    """silu(gate) · up; Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202).

    gate_up: [..., 2 · width], gate in the first half; returns [..., width] of the same dtype.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


swiglu = op(swiglu_ref)
