"""The attention op as a layer: whichever backend the current forward pass names."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from worker.attention.qk_rope_store import qk_rope_store
from worker.forward.context import current
from worker.model.norm import RMSNorm
from worker.model.rotary import RotaryEmbedding


class Attention(nn.Module):
    """From the packed projection to attention's output: norms, rope, KV store, attention."""

    def __init__(
        self,
        layer_id: int,
        num_heads: int,
        rotary: RotaryEmbedding,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.layer_id = layer_id  # of the pool
        self.num_heads = num_heads  # of q, on this rank
        self.rotary = rotary
        self.q_norm = q_norm  # of each head, before rope
        self.k_norm = k_norm

    def forward(self, qkv: Tensor, positions: Tensor) -> Tensor:
        """Attend to all stored keys, those of qkv's own tokens included.

        qkv: [num_tokens, (num_heads + 2 · num_kv_heads) · head_dim]; positions: [num_tokens] i64.
        Returns [num_tokens, num_heads, head_dim].
        """
        table, norms = self.rotary.table, (self.q_norm, self.k_norm)
        q_weight, k_weight = (None if norm is None else norm.weight for norm in norms)
        eps = 0.0 if self.q_norm is None else self.q_norm.eps
        out = qkv.new_empty(qkv.shape[0], self.num_heads, table.shape[1])
        attend(qkv, positions, table, q_weight, k_weight, eps, self.layer_id, out)
        return out

    def store(self, kv: Tensor, positions: Tensor) -> None:
        """The part of forward() that fills the tokens' KV slots; no token attends.

        kv: [num_tokens, 2 · num_kv_heads · head_dim]; positions: [num_tokens] i64.
        """
        context, (q_norm, k_norm) = current(), (self.q_norm, self.k_norm)
        qk_rope_store(
            kv, positions, self.rotary.table, *context.attention.kv(self.layer_id),
            context.batch.slot_mapping, None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight, 0.0 if k_norm is None else k_norm.eps,
        )  # fmt: skip


def attend(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    layer_id: int,
    out: Tensor,
) -> None:
    """The part of a layer that reads the forward context; fills `out` and the tokens' KV slots.

    In a captured pass the store belongs to the graph before the break, because it reads only
    positions and slots, which lie in fixed buffers. So the layer's KV is final when that graph has
    run.

    qkv .. eps: see qk_rope_store; out: [num_tokens, num_heads, head_dim], contiguous.
    """
    context = current()
    k_cache, v_cache = context.attention.kv(layer_id)
    q = qk_rope_store(
        qkv, positions, table, k_cache, v_cache, context.batch.slot_mapping, q_weight, k_weight, eps
    )
    if context.breaks is None:
        _attend(layer_id, q, out)
    else:
        context.breaks.at(partial(_attend, layer_id), q, out)


def _attend(layer_id: int, q: Tensor, out: Tensor) -> None:
    """The break of captured passes: only from here on does code depend on the batch's requests."""
    context = current()
    if context.on_layer is not None:
        context.on_layer(layer_id)
    context.attention.forward(q, None, None, layer_id, out)
