"""What a model's experts have had, counted on the device; nothing in a step waits for it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Load(NamedTuple):
    """Of all layers of experts of one rank, since the start."""

    layer_steps: int = 0
    distinct: int = 0  # experts that had tokens, summed over layers and steps
    busiest_share: float = 0.0  # of a layer's tokens, the mean of the layers


@torch.inference_mode()
def load_of(loads: Sequence[Tensor]) -> Load:
    """Sum up what `new_load` made for the layers: [2, num_experts + 1] i64 a layer.

    Waits for the device.
    """
    tokens, steps = torch.stack(list(loads)).cpu().unbind(1)  # [num_layers, num_experts + 1]
    rows = tokens[:, :-1].sum(1)
    shares = tokens.amax(1) / rows.clamp_min(1)
    layer_steps, distinct = int(steps[:, -1].sum()), int(steps[:, :-1].sum())
    return Load(layer_steps, distinct, shares.mean().item())
