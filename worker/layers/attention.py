"""The attention op as a layer: whichever backend the current forward pass names."""

from __future__ import annotations

from torch import Tensor, nn

from worker.context import current


class Attention(nn.Module):
    """Stores k and v and attends, in the pool's layer `layer_id`."""

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [num_tokens, num_heads, head_dim], k, v alike with kv heads -> shape of q."""
        return current().attention.forward(q, k, v, self.layer_id)
