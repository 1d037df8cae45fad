"""The attention op as a layer: whichever backend the current forward pass names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from worker.context import current
from worker.kernels.qk_rope_store import qk_rope_store
from worker.layers.norm import RMSNorm
from worker.layers.rotary import RotaryEmbedding


class Attention(nn.Module):
    """From the packed projection: norms, rope, the new keys and values into the pool, attention."""

    def __init__(
        self,
        layer_id: int,
        rotary: RotaryEmbedding,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.layer_id = layer_id  # of the pool
        self.rotary = rotary
        self.q_norm = q_norm  # of each head, before rope
        self.k_norm = k_norm

    def forward(self, qkv: Tensor, positions: Tensor) -> Tensor:
        """Attend to what is stored, qkv's own tokens included.

        qkv: [num_tokens, (num_heads + 2 · num_kv_heads) · head_dim]; positions: [num_tokens] i64.
        Returns [num_tokens, num_heads, head_dim].
        """
        context = current()
        k_cache, v_cache = context.attention.kv(self.layer_id)
        norms = self.q_norm, self.k_norm
        q_weight, k_weight = (None if norm is None else norm.weight for norm in norms)
        q = qk_rope_store(
            qkv, positions, self.rotary.table, k_cache, v_cache, context.batch.slot_mapping,
            q_weight, k_weight, 0.0 if self.q_norm is None else self.q_norm.eps,
        )  # fmt: skip
        if context.breaks is None:
            return self._attend(q, None)
        return context.breaks.at(self._attend, q, torch.empty_like(q))

    def _attend(self, q: Tensor, out: Tensor | None) -> Tensor:
        """A break of captured passes: all that depends on the batch's requests is read from here.

        The store stays in the piece before: it reads nothing but positions and slots, which lie in
        static buffers, so the KV of this layer is final once that piece is through.
        """
        context = current()
        attended = context.attention.forward(q, None, None, self.layer_id, out)
        if context.on_layer is not None:
            context.on_layer(self.layer_id)
        return attended
