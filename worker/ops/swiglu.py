"""The gated activation of the feed-forward block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from worker.ops.op import op


def swiglu_ref(gate_up: Tensor) -> Tensor:
    """silu(gate) · up; Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202).

    gate_up: [..., 2 · width], gate in the first half; returns [..., width] of the same dtype.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


swiglu = op(swiglu_ref)
