"""Weight methods: how a matrix is stored, multiplied by and filled. There is one, `Plain`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from worker.model.shard import Part, Shard, stacked
from worker.ops.product import gated_product, product
from worker.peers.base import Collective


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one rank of a model is built: among which ranks, in which dtype, on which device."""

    collective: Collective
    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> nn.Parameter:
        """An uninitialised weight without gradient; the loader fills it."""
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(tensor, requires_grad=False)

    def matrix(self, num_rows: int, num_columns: int) -> Plain:
        """An uninitialised matrix of the model's weight method."""
        return Plain(self.empty(num_rows, num_columns))


class Plain(nn.Module):
    """A matrix in the model's dtype, without scales.

    Linear layers know how a matrix is divided among ranks, its method alone how it is stored.
    """

    def __init__(self, tensor: nn.Parameter) -> None:
        super().__init__()
        self.tensor = tensor  # [num_rows, num_columns], of this rank

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
        """Checkpoint name -> Shard; parts: rows of the matrices that this one stacks."""
        named = {f"{name}.weight": part for name, part in parts.items()}
        return stacked(self.tensor, named, columns)
