"""The table of rotary position embedding; one serves all layers of a model."""

import torch
from torch import Tensor, nn

from worker.model.shape import LayerShape
from worker.ops.rope import rope_inv_freq, rope_table


class RotaryEmbedding(nn.Module):
    """Angles for positions 0 .. max_positions − 1; f32 whatever the model's dtype."""

    table: Tensor  # [max_positions, head_dim] f32

    def __init__(self, shape: LayerShape, max_positions: int, device: torch.device) -> None:
        super().__init__()
        inv_freq = rope_inv_freq(shape.head_dim, shape.rope_theta, shape.rope_scaling)
        table = rope_table(inv_freq, max_positions, device)
        self.register_buffer("table", table, persistent=False)
