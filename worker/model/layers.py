"""The blocks of a layer, divided among ranks: matrices, norms, embedding and head.

A weight method (there is one, `Plain`) says how a matrix is stored, multiplied by and filled; the
linear layers say how it is divided.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker.attention.qk_rope_store import HeadNorms, Rotation, qk_rope_store
from worker.forward.context import current
from worker.model.shape import LayerShape
from worker.model.shard import (
    Part,
    Shard,
    all_of,
    by_head,
    split_even,
    split_heads,
    stacked,
    whole,
)
from worker.ops.best_pairs import ALIGNMENT, VocabPart
from worker.ops.norms import add_rms_norm, rms_norm, sigmoid_gate
from worker.ops.product import gated_product, product
from worker.ops.rope import rope_inv_freq, rope_table
from worker.peers.base import Collective


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one rank of a model is built: among which ranks, in which dtype, on which device."""

    collective: Collective
    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialised weight without gradient, of the model's dtype; the loader fills it."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(tensor, requires_grad=False)

    def matrix(self, num_rows: int, num_columns: int) -> "Plain":
        """An uninitialised matrix of the model's weight method."""
        return Plain(self.empty(num_rows, num_columns))


class Plain(nn.Module):
    """A matrix [num_rows, num_columns] of this rank, in the model's dtype, without scales."""

    def __init__(self, tensor: nn.Parameter) -> None:
        super().__init__()
        self.tensor = tensor

    def product(
        self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None, first_row: int = 0
    ) -> Tensor:
        """x times the transposed rows from `first_row` on, plus bias; see ops.product."""
        rows = self.tensor[first_row:] if first_row else self.tensor
        return product(x, rows, bias) if out is None else product(x, rows, bias, out)

    def gated(self, x: Tensor) -> Tensor:
        """silu(gate) · up, where gate is the product with the first half of the rows."""
        return gated_product(x, self.tensor)

    def shards(self, parts: Mapping[str, Part], columns: Part) -> dict[str, Shard]:
        named = {f"{name}.weight": part for name, part in parts.items()}
        return stacked(self.tensor, named, columns)


class Linear(nn.Module):
    """y = x Wᵀ + b. W stacks several of the checkpoint's matrices, so one product serves them all.

    rows: this rank's rows of the matrices, by name below the layer's prefix; columns: of all.
    """

    def __init__(
        self, rows: Mapping[str, Part], columns: Part, placement: Placement, *, bias: bool
    ) -> None:
        super().__init__()
        self._rows, self.columns = dict(rows), columns
        self.part_sizes = [len(part) for part in rows.values()]
        num_rows = sum(self.part_sizes)
        self.weight = placement.matrix(num_rows, len(columns))
        self.bias = placement.empty(num_rows) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, sum(part_sizes)], parts in order."""
        return self.weight.product(x, self.bias)

    def shards(self, prefix: str) -> dict[str, Shard]:
        parts = {f"{prefix}.{name}".rstrip("."): part for name, part in self._rows.items()}
        shards = self.weight.shards(parts, self.columns)
        if self.bias is not None:
            biases = {f"{name}.bias": part for name, part in parts.items()}
            shards |= stacked(self.bias, biases)
        return shards


class ColumnParallelLinear(Linear):
    """Each rank computes some columns of y, and nothing is exchanged."""

    def __init__(
        self, in_features: int, rows: Mapping[str, Part], placement: Placement, *, bias: bool
    ) -> None:
        super().__init__(rows, all_of(in_features), placement, bias=bias)

    def last(self, x: Tensor, num_parts: int) -> Tensor:
        """The last `num_parts` of forward()'s parts alone: [num_tokens, sum of their sizes]."""
        start = sum(self.part_sizes[:-num_parts])
        bias = None if self.bias is None else self.bias[start:]
        return self.weight.product(x, bias, first_row=start)

    def gated(self, x: Tensor) -> Tensor:
        """silu(gate) · up of two parts: [num_tokens, in_features] -> [num_tokens, size of one]."""
        assert self.bias is None
        return self.weight.gated(x)


class RowParallelLinear(Linear):
    """Each rank holds some columns of x and of W, and computes its part of a sum.

    The norm that follows adds the parts up (RMSNorm.reduce_add), in one op where the collective has
    one. Parts are computed where the collective sums them without a copy.
    """

    def __init__(
        self, name: str, in_features: int, out_features: int, placement: Placement, *, bias: bool
    ) -> None:
        collective = placement.collective
        held = split_even(f"{name} columns", in_features, collective.rank, collective.size)
        super().__init__(
            {name: all_of(out_features)}, Part(in_features, held), placement, bias=bias
        )
        self._local_bias = self.bias if collective.rank == 0 else None  # it enters the sum once
        self._collective = collective

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in_features of this rank] -> [num_tokens, out_features], to be summed.

        With several ranks the result lies in a Collective.buffer.
        """
        if self._collective.size == 1:
            return self.weight.product(x, self._local_bias)
        out = self._collective.buffer((x.shape[0], self.part_sizes[0]), x.dtype)
        return self.weight.product(x, self._local_bias, out)


class ReplicatedLinear(Linear):
    """Every rank computes the whole of y."""

    def __init__(
        self, in_features: int, out_features: int, placement: Placement, *, bias: bool
    ) -> None:
        super().__init__({"": all_of(out_features)}, all_of(in_features), placement, bias=bias)


def selected(x: Tensor, rows: Tensor | None) -> Tensor:
    """The rows of `x` with these numbers; None: all."""
    return x if rows is None else x.index_select(0, rows)


class RMSNorm(nn.Module):
    """Every rank holds the whole weight; x: [..., size]."""

    def __init__(
        self, size: int, eps: float, placement: Placement, *, centred: bool = False
    ) -> None:
        """centred: the checkpoint has the weight minus 1; here it is f32, and rounded once."""
        super().__init__()
        self.eps, self._plus = eps, float(centred)
        self.weight = placement.empty(size, dtype=torch.float32 if centred else None)
        self.tap: Tensor | None = None  # [max_tokens, size], where sums are kept; see Decoder.tap
        self._collective = placement.collective

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def reduce_add(self, part: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(normed, new residual), which is residual + the sum of all ranks' `part`.

        Both are [num_tokens, size]. With a residual, the content of `part` is lost. Without one,
        `part` is whole, as the embedded tokens are, and becomes the residual.
        """
        if residual is None:
            return self(part), part
        total = None if self.tap is None else self.tap[: len(part)]
        if self._collective.size == 1:
            return add_rms_norm(part, residual, self.weight, self.eps, total)
        return self._collective.all_reduce_rms_norm(part, residual, self.weight, self.eps, total)

    def shards(self, prefix: str) -> dict[str, Shard]:
        return {f"{prefix}.weight": whole(self.weight, self._plus)}


class VocabParallelEmbedding(nn.Module):
    """Each rank holds the same number of rows; rows beyond the vocabulary are zero.

    With several ranks the number is a multiple of ALIGNMENT, so some may hold no token's row.
    """

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self._collective = collective = placement.collective
        rows = -(-vocab_size // collective.size)
        if collective.size > 1:
            rows = -(-rows // ALIGNMENT) * ALIGNMENT
        self.start = min(collective.rank * rows, vocab_size)
        self.stop = min(self.start + rows, vocab_size)
        self.weight = placement.empty(rows, hidden_size)
        self.weight.zero_()
        # The ids whose logits this rank computes, before any gather; None: all ids.
        self.part: VocabPart | None = None
        if collective.size > 1:
            self.part = VocabPart(
                collective.rank * rows,
                vocab_size,
                lambda pairs: collective.all_gather(pairs, dim=0).view(collective.size, -1),
            )

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids: [num_tokens] i64 -> [num_tokens, hidden_size], equal on all ranks.

        With several ranks the result lies in a Collective.buffer.
        """
        if self._collective.size == 1:
            return F.embedding(input_ids, self.weight)
        elsewhere = (input_ids < self.start) | (input_ids >= self.stop)
        rows = (input_ids - self.start).masked_fill(elsewhere, 0)
        shape = len(input_ids), self.weight.shape[1]
        part = self._collective.buffer(shape, self.weight.dtype)
        torch.index_select(self.weight, 0, rows, out=part)
        return self._collective.all_reduce(part.masked_fill_(elsewhere.unsqueeze(-1), 0.0))

    def logits(self, hidden: Tensor, *, whole: bool = True) -> Tensor:
        """hidden: [n, hidden_size] -> [n, vocab_size]: products with every token's row.

        whole: gathered from all ranks; else [n, ids of `part`].
        """
        part = product(hidden, self.weight)
        if not whole or self._collective.size == 1:
            return part[:, : self.stop - self.start]
        return self._collective.all_gather(part, dim=-1)[:, : self.vocab_size]

    def shards(self, prefix: str) -> dict[str, Shard]:
        rows = Part(self.vocab_size, slice(self.start, self.stop))
        return stacked(self.weight, {f"{prefix}.weight": rows}, all_of(self.weight.shape[1]))


class RotaryEmbedding(nn.Module):
    """Angles for positions 0 .. max_positions − 1, f32; one table serves all layers of a model."""

    table: Tensor  # [max_positions, rotary_dim] f32

    def __init__(self, shape: LayerShape, max_positions: int, device: torch.device) -> None:
        super().__init__()
        inv_freq = rope_inv_freq(shape.rotary_dim, shape.rope_theta, shape.rope_scaling)
        table = rope_table(inv_freq, max_positions, device)
        self.register_buffer("table", table, persistent=False)


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
        in_features = in_features or size
        self.qkv = ColumnParallelLinear(in_features, rows, placement, bias=features.qkv_bias)
        self.output = RowParallelLinear("o_proj", width, size, placement, bias=features.output_bias)
        self.q_norm = self.k_norm = self._norms = None
        if features.qk_norm:
            self.q_norm = RMSNorm(head_dim, eps, placement, centred=features.centred)
            self.k_norm = RMSNorm(head_dim, eps, placement, centred=features.centred)
            self._norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, eps)
        self.rotary, self.layer_id = rotary, layer_id  # of the pool
        self._heads, self._head_dim = heads, head_dim
        self._all_heads = num_heads
        self._gate_width = heads.num_heads * head_dim if features.output_gate else 0

    def forward(self, hidden: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """hidden: [num_tokens, in_features] -> this rank's part of the sum, [.., hidden_size].

        The tokens attend to all stored keys, their own included. positions: [num_tokens] i64.
        rows: see DecoderLayer.forward.
        """
        qkv, table = self.qkv(hidden), self.rotary.table
        attended = qkv.new_empty(qkv.shape[0], self._heads.num_heads, self._head_dim)
        norms = self._norms or (None, None, 0.0)
        attend(qkv[:, self._gate_width :], positions, table, *norms, self.layer_id, attended)
        out = selected(attended.flatten(1), rows)
        if self._gate_width:
            out = sigmoid_gate(out, selected(qkv[:, : self._gate_width], rows))
        return self.output(out)

    def store(self, hidden: Tensor, positions: Tensor) -> None:
        """Only the keys and values of forward(), into the tokens' slots."""
        context, kv = current(), self.qkv.last(hidden, 2)
        caches, slots = context.attention.kv(self.layer_id), context.batch.slot_mapping
        qk_rope_store(kv, Rotation(self.rotary.table, positions), caches, slots, self._norms)

    def shards(self, prefix: str) -> dict[str, Shard]:
        shards = self.qkv.shards(prefix) | self.output.shards(prefix)
        if self._gate_width:
            shards = self._with_gate(shards, prefix)
        if self.q_norm is not None and self.k_norm is not None:
            shards |= self.q_norm.shards(f"{prefix}.q_norm")
            shards |= self.k_norm.shards(f"{prefix}.k_norm")
        return shards

    def _with_gate(self, shards: dict[str, Shard], prefix: str) -> dict[str, Shard]:
        """q_proj holds, head by head, the rows of the query and then those of the gate."""
        first, heads = self._heads.first_head, self._heads.num_heads
        part, width = Part(self._all_heads, slice(first, first + heads)), self._gate_width
        sizes = {"q": self._head_dim, "gate": self._head_dim}
        held = [("weight", self.qkv.weight.tensor, (self.qkv.columns,))]
        held += [("bias", self.qkv.bias, ())] if self.qkv.bias is not None else []
        for kind, tensor, inner in held:
            del shards[f"{prefix}.gate.{kind}"], shards[f"{prefix}.q_proj.{kind}"]
            rows = {"gate": tensor[:width], "q": tensor[width : 2 * width]}
            shards |= by_head(f"{prefix}.q_proj.{kind}", rows, sizes, part, *inner)
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
