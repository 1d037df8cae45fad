"""The table of rotary position embedding; one serves all layers of a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from worker.ops.rope import rope_inv_freq, rope_table
from worker.ops.scaling import RopeScaling


class RotaryEmbedding(nn.Module):
    """Angles for positions 0 .. max_positions − 1; f32 whatever the model's dtype.

    Raises:
        Unsupported: a rope type that is not known.
    """

    table: Tensor  # [max_positions, head_dim] f32

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        theta: float,
        scaling: RopeScaling | None,
        *,
        device: torch.device,
    ) -> None:
        super().__init__()
        inv_freq = rope_inv_freq(head_dim, theta, scaling)
        table = rope_table(inv_freq, max_positions, device)
        self.register_buffer("table", table, persistent=False)
