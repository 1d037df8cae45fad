"""The attention of a layer, by whichever backend the current forward pass names."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from worker.attention.qk_rope_store import HeadNorms, Rotation, qk_rope_store
from worker.forward.context import current
from worker.model.layers import (
    ColumnParallelLinear,
    Placement,
    RMSNorm,
    RowParallelLinear,
    qkv_rows,
    selected,
)
from worker.model.rotary import RotaryEmbedding
from worker.model.shape import LayerShape
from worker.model.shard import Shard, split_heads


class SelfAttention(nn.Module):
    """Projections, optional norms, rope and attention of one layer."""

    def __init__(
        self,
        shape: LayerShape,
        layer_id: int,
        rotary: RotaryEmbedding,
        placement: Placement,
        in_features: int | None = None,
    ) -> None:
        """in_features: of q, k and v; None: the hidden size."""
        super().__init__()
        num_heads, head_dim, features = shape.num_heads, shape.head_dim, shape.features
        collective, eps = placement.collective, shape.rms_norm_eps
        heads = split_heads(num_heads, shape.num_kv_heads, collective.rank, collective.size)
        self.qkv = ColumnParallelLinear(
            in_features or shape.hidden_size,
            qkv_rows(heads, num_heads, shape.num_kv_heads, head_dim),
            placement,
            bias=features.qkv_bias,
        )
        self.output = RowParallelLinear(
            "o_proj", num_heads * head_dim, shape.hidden_size, placement, bias=features.output_bias
        )
        self.q_norm = self.k_norm = self._norms = None
        if features.qk_norm:
            self.q_norm = RMSNorm(head_dim, eps, placement)
            self.k_norm = RMSNorm(head_dim, eps, placement)
            self._norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, eps)
        self.rotary, self.layer_id = rotary, layer_id  # of the pool
        self._num_heads = heads.num_heads

    def forward(self, hidden: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """hidden: [num_tokens, in_features] -> this rank's part of the sum, [.., hidden_size].

        The tokens attend to all stored keys, their own included. positions: [num_tokens] i64.
        rows: see DecoderLayer.forward.
        """
        qkv, table = self.qkv(hidden), self.rotary.table
        attended = qkv.new_empty(qkv.shape[0], self._num_heads, table.shape[1])
        norms = self._norms or (None, None, 0.0)
        attend(qkv, positions, table, *norms, self.layer_id, attended)
        return self.output(selected(attended.flatten(1), rows))

    def store(self, hidden: Tensor, positions: Tensor) -> None:
        """Only the keys and values of forward(), into the tokens' slots."""
        context, kv = current(), self.qkv.last(hidden, 2)
        caches, slots = context.attention.kv(self.layer_id), context.batch.slot_mapping
        qk_rope_store(kv, Rotation(self.rotary.table, positions), caches, slots, self._norms)

    def shards(self, prefix: str) -> dict[str, Shard]:
        """Checkpoint name -> Shard."""
        shards = self.qkv.shards(prefix) | self.output.shards(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            shards |= self.q_norm.shards(f"{prefix}.q_norm")
            shards |= self.k_norm.shards(f"{prefix}.k_norm")
        return shards


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

    qkv .. eps: see qk_rope_store_ref; out: [num_tokens, num_heads, head_dim], contiguous.
    """
    context = current()
    caches, slots = context.attention.kv(layer_id), context.batch.slot_mapping
    norms = None
    if q_weight is not None and k_weight is not None:
        norms = HeadNorms(q_weight, k_weight, eps)
    q = qk_rope_store(qkv, Rotation(table, positions), caches, slots, norms)
    if context.breaks is None:
        _attend(layer_id, q, out)
    else:
        context.breaks.at(partial(_attend, layer_id), q, out)


def _attend(layer_id: int, q: Tensor, out: Tensor) -> None:
    """The break of captured passes: only from here on does code depend on the batch's requests."""
    context = current()
    if context.on_layer is not None:
        context.on_layer(layer_id)
    context.attention.forward(q, layer_id, out)
