"""A layer's attention over heads: projections, norms of q and k, rope."""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker.attention.base import AttentionShape
from worker.attention.qk_rope_store import HeadNorms, Rotation, qk_rope_store
from worker.config.checkpoint.rope_fields import Rope
from worker.config.checkpoint.shape import LayerShape
from worker.forward.context import current
from worker.model.layers import (
    ColumnParallelLinear,
    NormOptions,
    RMSNorm,
    RowParallelLinear,
    selected,
)
from worker.model.placement import Placement
from worker.ops.norms import sigmoid_gate
from worker.ops.rope import rope_inv_freq, rope_table
from worker.weights.base import Matrix, Operand, Parts
from worker.weights.shard import (
    HeadSplit,
    Key,
    Part,
    Shard,
    all_of,
    by_head,
    joined,
    moved,
    moved_rows,
    rearranged,
    split_heads,
    stacked,
)


def moved_rows_of(shape: LayerShape) -> tuple[tuple[slice, slice], ...]:
    """See weights.shard.moved_rows."""
    if shape.latent is not None:
        return ()
    interleaved = shape.features.interleaved
    return moved_rows(shape.head_dim, shape.rotary_dim, interleaved=interleaved)


class RotaryEmbedding(nn.Module):
    """Angles for positions 0 .. max_positions − 1, f32; one table serves all layers of a model."""

    table: Tensor  # [max_positions, rotary_dim] f32; where rows are moved, [.., head_dim]

    def __init__(
        self, shape: LayerShape, rope: Rope | None, max_positions: int, device: torch.device
    ) -> None:
        """rope: None: for layers without, whose table turns one pair of a head by nothing."""
        super().__init__()
        inv_freq, factor, pairs = torch.zeros(1), 1.0, None
        if rope is not None:
            inv_freq = rope_inv_freq(shape.rotary_dim, rope.theta, rope.scaling)
            factor = 1.0 if rope.scaling is None else rope.scaling.attention_factor
            pairs = shape.head_dim // 2 if moved_rows_of(shape) else None
        table = rope_table(inv_freq, max_positions, device, factor, pairs)
        self.register_buffer("table", table, persistent=False)


class WideNorms(nn.Module):
    """RMS norms of q and of k, each over all heads of all ranks, in plain torch."""

    def __init__(self, heads: tuple[Part, Part], eps: float, placement: Placement) -> None:
        """heads: this rank's part of q, and of k."""
        super().__init__()
        self._parts, self._eps, self._collective = heads, eps, placement.collective
        self.q, self.k = (placement.empty(len(part)) for part in heads)

    def forward(self, qkv: Tensor) -> None:
        """Norm q and k in place; qkv: [num_tokens, widths of this rank's q, k and v]."""
        q_size, k_size = map(len, self._parts)
        q, k, _ = qkv.split([q_size, k_size, qkv.shape[1] - q_size - k_size], dim=-1)
        # Means of squares. Ranks have equally many numbers, copies of k's heads too, so the mean
        # of their means is that of the whole. Four columns: 16 bytes, as `custom` likes them.
        means = torch.stack([x.float().square().mean(-1) for x in (q, k, q, k)], dim=-1)
        if self._collective.size > 1:
            means = self._collective.all_reduce(means) / self._collective.size
        scales = torch.rsqrt(means + self._eps)
        for i, (x, weight) in enumerate(((q, self.q), (k, self.k))):
            x.copy_((x.float() * scales[:, i : i + 1]).to(x.dtype) * weight)

    def shards(self, prefix: str) -> dict[Key, Shard]:
        return {
            Key(f"{prefix}.{name}_norm.weight"): Shard(weight.detach(), (part.size,), (part.held,))
            for name, weight, part in zip("qk", (self.q, self.k), self._parts, strict=True)
        }


class HeadLayerNorms(nn.Module):
    """Layer norms of each head of q and of k, with weights of their own, in plain torch."""

    def __init__(self, shape: LayerShape, heads: HeadSplit, placement: Placement) -> None:
        super().__init__()
        self._shape, self._heads = shape, heads
        self.q = placement.empty(heads.num_heads, shape.head_dim)
        self.k = placement.empty(heads.num_kv_heads, shape.head_dim)

    def forward(self, qkv: Tensor) -> None:
        """Norm q and k in place; see WideNorms."""
        start = 0
        for weight in (self.q, self.k):
            stop, size = start + weight.numel(), weight.shape[1]
            x = qkv[:, start:stop].unflatten(-1, (-1, size))
            normed = F.layer_norm(x.float(), (size,), eps=self._shape.rms_norm_eps)
            x.copy_(normed * weight.float())
            start = stop

    def shards(self, prefix: str) -> dict[Key, Shard]:
        found, split, whole = dict[Key, Shard](), self._heads, slice(0, self._shape.head_dim)
        held = slice(split.first_head, split.first_head + split.num_heads)
        held_kv = slice(split.first_kv_head, split.first_kv_head + split.num_kv_heads)
        for name, weight, part in (
            ("q", self.q, Part(self._shape.num_heads, held)),
            ("k", self.k, Part(self._shape.num_kv_heads, held_kv)),
        ):
            tensor, shape = f"{prefix}.{name}_norm.weight", (part.size, self._shape.head_dim)
            for i, (there, here) in enumerate(moved_rows_of(self._shape) or ((whole, whole),)):
                dest = weight.detach()[:, here]
                found[Key(tensor, str(i))] = Shard(dest, shape, (part.held, there))
        return found


class SelfAttention(nn.Module):
    """Projections, optional norms, rope and attention of one layer."""

    def __init__(
        self, shape: LayerShape, layer_id: int, rotary: RotaryEmbedding, placement: Placement
    ) -> None:
        """layer_id: of the pool."""
        super().__init__()
        num_heads, num_kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        collective, features, eps = placement.collective, shape.features, shape.rms_norm_eps
        size, width = shape.hidden_size, num_heads * head_dim
        heads = split_heads(num_heads, num_kv_heads, collective.rank, collective.size)
        first, first_kv = heads.first_head * head_dim, heads.first_kv_head * head_dim
        q = Part(width, slice(first, first + heads.num_heads * head_dim))
        kv_rows = slice(first_kv, first_kv + heads.num_kv_heads * head_dim)
        kv = Part(num_kv_heads * head_dim, kv_rows)
        rows = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        if features.output_gate:  # q_proj has both, head by head: see shards
            rows = {"gate": q, **rows}
        self._moved, self._fused = moved_rows_of(shape), features.fused_qkv
        parts = Parts(
            rows,
            all_of(shape.in_features),
            moved=bool(self._moved) or self._fused or features.output_gate,
            modules=["qkv_proj"] if self._fused else ["q_proj", "k_proj", "v_proj"],
        )
        self.qkv = ColumnParallelLinear(parts, placement, bias=features.qkv_bias)
        output = size, width
        self.output = RowParallelLinear("o_proj", output, placement, bias=features.output_bias)
        self.q_norm = self.k_norm = self._norms = None
        if features.qk_norm:
            options = NormOptions(features.centred)
            self.q_norm, self.k_norm = (
                RMSNorm(head_dim, eps, placement, options) for _ in range(2)
            )
            self._norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, eps)
        self.wide_norms: WideNorms | HeadLayerNorms | None = None
        if features.wide_qk_norm:
            self.wide_norms = WideNorms((q, kv), eps, placement)
        elif features.head_norm:
            self.wide_norms = HeadLayerNorms(shape, heads, placement)
        self.sinks = placement.empty(heads.num_heads) if features.sinks else None
        assert not (self._moved or self._fused) or not (features.qk_norm or features.output_gate)
        self.rotary, self.layer_id = rotary, layer_id
        self._shape, self._heads, self._head_dim = shape, heads, head_dim
        self._all_heads = num_heads
        self._gate_width = heads.num_heads * head_dim if features.output_gate else 0

    @property
    def reader(self) -> Matrix | None:
        """The one matrix that multiplies what forward() takes."""
        return self.qkv.weight

    def forward(self, hidden: Operand, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """hidden: [num_tokens, in_features] -> this rank's part of the sum, [.., hidden_size].

        The tokens attend to all stored keys, their own included. positions: [num_tokens] i64.
        rows: see DecoderLayer.forward.
        """
        qkv, table = self.qkv(hidden), self.rotary.table
        attended = qkv.new_empty(qkv.shape[0], self._heads.num_heads, self._head_dim)
        if self.wide_norms is not None:
            self.wide_norms(qkv)
        norms = self._norms or (None, None, 0.0)
        attend(qkv[:, self._gate_width :], positions, table, *norms, self.layer_id, attended)
        out = selected(attended.flatten(1), rows)
        if self._gate_width:
            out = sigmoid_gate(out, selected(qkv[:, : self._gate_width], rows))
        return self.output(out)

    def attended(self) -> AttentionShape:
        """What a backend attends with for such layers."""
        shape, heads = self._shape, self._heads
        return AttentionShape(
            heads.num_heads, heads.num_kv_heads, self._head_dim, shape.attention_scale,
            cap=shape.scales.attention_cap, sinks=shape.features.sinks,
        )  # fmt: skip

    def store(self, hidden: Tensor, positions: Tensor) -> None:
        """Only the keys and values of forward(), into the tokens' slots.

        hidden: [num_tokens, hidden]; positions: [num_tokens] i64.
        """
        context, kv = current(), self.qkv.last(hidden, 2)
        caches, slots = context.attention.kv(self.layer_id), context.batch.slot_mapping
        qk_rope_store(kv, Rotation(self.rotary.table, positions), caches, slots, self._norms)

    def shards(self, prefix: str) -> dict[Key, Shard]:
        shards = self.qkv.shards(prefix)
        if self._gate_width:
            shards = rearranged(shards, partial(self._with_gate, prefix))
        if self._moved or self._fused:
            shards = rearranged(shards, partial(self._by_head, prefix))
        shards |= self.output.shards(prefix)
        if self.wide_norms is not None:
            shards |= self.wide_norms.shards(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            shards |= self.q_norm.shards(f"{prefix}.q_norm")
            shards |= self.k_norm.shards(f"{prefix}.k_norm")
        if self.sinks is not None:
            first = self._heads.first_head
            part = Part(self._all_heads, slice(first, first + self._heads.num_heads))
            shards |= stacked(self.sinks, {f"{prefix}.sinks": part})
        return shards

    def _by_head(self, prefix: str, shards: dict[str, Shard]) -> dict[Key, Shard]:
        """q, k and v head by head: their rows lie elsewhere, or they are one tensor."""
        found, whole = dict[Key, Shard](), slice(0, self._head_dim)
        values = ((whole, whole),)
        rows = {"q_proj": self._moved or values, "k_proj": self._moved or values, "v_proj": values}
        for kind in ("weight", "bias"):
            parts = {
                name: moved(shards[key], self._head_dim, of_head)
                for name, of_head in rows.items()
                if (key := f"{prefix}.{name}.{kind}") in shards
            }
            if self._fused:
                found |= joined(f"{prefix}.qkv_proj.{kind}", parts)
                continue
            for name, held in parts.items():
                tensor = f"{prefix}.{name}.{kind}"
                found |= {Key(tensor, str(i)): each for i, each in enumerate(held)}
        return found

    def _with_gate(self, prefix: str, shards: dict[str, Shard]) -> dict[Key, Shard]:
        """q_proj holds, head by head, the rows of the query and then those of the gate."""
        first, heads = self._heads.first_head, self._heads.num_heads
        part = Part(self._all_heads, slice(first, first + heads))
        sizes, found = {"q": self._head_dim, "gate": self._head_dim}, dict[Key, Shard]()
        for kind in ("weight", "bias"):
            gate = shards.pop(f"{prefix}.gate.{kind}", None)
            if gate is None:
                continue
            q = shards.pop(f"{prefix}.q_proj.{kind}")
            inner = map(Part, q.full_shape[1:], q.index[1:])
            rows = {"gate": gate.dest, "q": q.dest}
            both = by_head(f"{prefix}.q_proj.{kind}", rows, sizes, part, *inner)
            found |= {key: replace(each, codec=q.codec) for key, each in both.items()}
        return found | {Key(name): each for name, each in shards.items()}


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

    qkv: see qk_rope_store_ref; positions, table: see Rotation; q_weight, k_weight, eps: see
    HeadNorms; out: [num_tokens, num_heads, head_dim], contiguous.
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
