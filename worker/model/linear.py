"""Matrix products whose weight is divided among ranks by its rows or by its columns."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from worker.model.shard import HeadSplit, Part, Shard, all_of, split_even, stacked
from worker.model.weights import Placement


class Linear(nn.Module):
    """y = x Wᵀ + b. W stacks several of the checkpoint's matrices, so one product serves them all.

    Args:
        rows: this rank's rows of each of the matrices, by name below the layer's prefix.
        columns: this rank's columns of all of them.
        placement: of W and b.
        bias: whether there is b.
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
        """Checkpoint name -> Shard, for every tensor that this layer holds."""
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
        """The last `num_parts` of forward()'s parts; the others are not computed.

        x: [num_tokens, in_features] -> [num_tokens, sum of their sizes].
        """
        start = sum(self.part_sizes[:-num_parts])
        bias = None if self.bias is None else self.bias[start:]
        return self.weight.product(x, bias, first_row=start)

    def gated(self, x: Tensor) -> Tensor:
        """forward() of gate and up in one: silu(gate) · up. Two parts of one size, without bias.

        x: [num_tokens, in_features] -> [num_tokens, size of a part].
        """
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
        # The bias enters the sum once.
        self._local_bias = self.bias if collective.rank == 0 else None
        self._collective = collective

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in_features of this rank] -> [num_tokens, out_features], to be summed.

        Of several ranks it lies in a Collective.buffer.
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


def qkv_rows(heads: HeadSplit, num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, Part]:
    """This rank's rows of the query, key and value projections; counts are the whole model's."""
    q = slice(heads.first_head * head_dim, (heads.first_head + heads.num_heads) * head_dim)
    first, num = heads.first_kv_head, heads.num_kv_heads
    kv = Part(num_kv_heads * head_dim, slice(first * head_dim, (first + num) * head_dim))
    return {"q_proj": Part(num_heads * head_dim, q), "k_proj": kv, "v_proj": kv}


def gate_up_rows(intermediate_size: int, rank: int, size: int) -> dict[str, Part]:
    """This rank's rows of the feed-forward's gate and up projections."""
    held = split_even("intermediate_size", intermediate_size, rank, size)
    part = Part(intermediate_size, held)
    return {"gate_proj": part, "up_proj": part}
