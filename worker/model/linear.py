"""Matrix products whose weight is divided among ranks by its rows or by its columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from worker.model.shard import HeadSplit, Shard, split_even, whole
from worker.ops.product import gated_product, product
from worker.peers.base import Collective


@dataclass(frozen=True, slots=True)
class RowPart:
    """This rank's rows of one of the checkpoint's matrices."""

    name: str  # in the checkpoint, below the layer's prefix
    num_rows: int  # of the whole matrix
    rows: slice  # of the whole matrix, held here


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ + b, where each rank computes some columns of y and nothing is exchanged.

    W stacks this rank's rows of several checkpoint matrices (q, k, v or gate, up), so that one
    product serves them all.
    """

    def __init__(
        self,
        in_features: int,
        parts: Sequence[RowPart],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.parts = tuple(parts)
        self.part_sizes = [part.rows.stop - part.rows.start for part in parts]
        num_rows = sum(self.part_sizes)
        self.weight = empty_parameter(num_rows, in_features, dtype=dtype, device=device)
        self.bias = empty_parameter(num_rows, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, sum(part_sizes)], parts in order."""
        return product(x, self.weight, self.bias)

    def last(self, x: Tensor, num_parts: int) -> Tensor:
        """The last `num_parts` of forward()'s parts; the others are not computed.

        x: [num_tokens, in_features] -> [num_tokens, sum of their sizes].
        """
        start = sum(self.part_sizes[:-num_parts])
        bias = None if self.bias is None else self.bias[start:]
        return product(x, self.weight[start:], bias)

    def gated(self, x: Tensor) -> Tensor:
        """forward() of gate and up in one: silu(gate) · up. Two parts of one size, without bias.

        x: [num_tokens, in_features] -> [num_tokens, size of a part].
        """
        assert self.bias is None
        return gated_product(x, self.weight)

    def shards(self, prefix: str) -> dict[str, Shard]:
        """Checkpoint name -> Shard, for every tensor that this layer holds."""
        found: dict[str, Shard] = {}
        start = 0
        for part, size in zip(self.parts, self.part_sizes, strict=True):
            here = slice(start, start + size)
            found[f"{prefix}.{part.name}.weight"] = Shard(
                self.weight[here],
                (part.num_rows, self.in_features),
                (part.rows, slice(0, self.in_features)),
            )
            if self.bias is not None:
                found[f"{prefix}.{part.name}.bias"] = Shard(
                    self.bias[here], (part.num_rows,), (part.rows,)
                )
            start += size
        return found


class RowParallelLinear(nn.Module):
    """y = x Wᵀ + b, where each rank holds some columns of x and of W.

    With `reduce`, forward() adds the ranks' parts up; without, it returns this rank's part and
    the norm that follows does so (RMSNorm.reduce_add), in one op where the collective has one.
    Parts are computed where the collective sums them without a copy.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        collective: Collective,
        *,
        bias: bool,
        reduce: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.name = name
        self.in_features = in_features
        self.columns = split_even(f"{name} columns", in_features, collective.rank, collective.size)
        width = self.columns.stop - self.columns.start
        self.weight = empty_parameter(out_features, width, dtype=dtype, device=device)
        self.bias = empty_parameter(out_features, dtype=dtype, device=device) if bias else None
        # The bias enters the sum once.
        self._local_bias = self.bias if collective.rank == 0 else None
        self._collective, self._reduce = collective, reduce

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in_features of this rank] -> [num_tokens, out_features].

        Of several ranks it lies in a Collective.buffer.
        """
        collective, shape = self._collective, (x.shape[0], self.weight.shape[0])
        if collective.size == 1:
            return product(x, self.weight, self._local_bias)
        out = collective.buffer(shape, x.dtype)
        part = product(x, self.weight, self._local_bias, out)
        return collective.all_reduce(part) if self._reduce else part

    def shards(self, prefix: str) -> dict[str, Shard]:
        """Checkpoint name -> Shard, for every tensor that this layer holds."""
        rows = self.weight.shape[0]
        found = {
            f"{prefix}.{self.name}.weight": Shard(
                self.weight.detach(), (rows, self.in_features), (slice(0, rows), self.columns)
            )
        }
        if self.bias is not None:
            found[f"{prefix}.{self.name}.bias"] = Shard(
                self.bias.detach(), (rows,), (slice(0, rows),)
            )
        return found


class ReplicatedLinear(nn.Module):
    """y = x Wᵀ + b, computed whole by every rank."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features, dtype=dtype, device=device)
        self.bias = empty_parameter(out_features, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, out_features]."""
        return product(x, self.weight, self.bias)

    def shards(self, prefix: str) -> dict[str, Shard]:
        """Checkpoint name -> Shard, for every tensor that this layer holds."""
        found = {f"{prefix}.weight": whole(self.weight.detach())}
        if self.bias is not None:
            found[f"{prefix}.bias"] = whole(self.bias.detach())
        return found


def qkv_parts(
    heads: HeadSplit, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[RowPart, RowPart, RowPart]:
    """This rank's rows of the query, key and value projections; counts are the whole model's."""
    q = slice(heads.first_head * head_dim, (heads.first_head + heads.num_heads) * head_dim)
    kv = slice(
        heads.first_kv_head * head_dim, (heads.first_kv_head + heads.num_kv_heads) * head_dim
    )
    return (
        RowPart("q_proj", num_heads * head_dim, q),
        RowPart("k_proj", num_kv_heads * head_dim, kv),
        RowPart("v_proj", num_kv_heads * head_dim, kv),
    )


def gate_up_parts(intermediate_size: int, rank: int, size: int) -> tuple[RowPart, RowPart]:
    """This rank's rows of the feed-forward's gate and up projections."""
    rows = split_even("intermediate_size", intermediate_size, rank, size)
    return (
        RowPart("gate_proj", intermediate_size, rows),
        RowPart("up_proj", intermediate_size, rows),
    )


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised weight without gradient; the loader fills it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
