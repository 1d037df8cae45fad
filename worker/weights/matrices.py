"""How a matrix of a linear layer is stored, multiplied by and filled.

`layers.Placement.matrix` chooses; the linear layers say how a matrix is divided among ranks.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from worker.ops.product import gated_product, product
from worker.ops.scaled import (
    BLOCK,
    E4M3,
    LARGEST,
    EightBitRows,
    eight_bit_rows,
    scaled_gated_product,
    scaled_product,
)
from worker.weights.shard import Part, Shard, coarse, stacked, with_scales

# Rows that share a scale here, where 128 do in the file: a rank's part, or the rows of one of
# several stacked matrices, may begin within such a block. It costs 0.2 % of the memory.
GRAIN = 16
Operand = Tensor | EightBitRows  # of a product: x, or x in eight bits already


class Plain(nn.Module):
    """A matrix [num_rows, num_columns] of this rank, in the model's dtype, without scales."""

    def __init__(self, tensor: nn.Parameter) -> None:
        super().__init__()
        self.tensor = tensor

    def product(
        self, x: Operand, bias: Tensor | None = None, out: Tensor | None = None, first_row: int = 0
    ) -> Tensor:
        """x times the transposed rows from `first_row` on, plus bias; see ops.product."""
        assert isinstance(x, Tensor)
        rows = self.tensor[first_row:] if first_row else self.tensor
        return product(x, rows, bias) if out is None else product(x, rows, bias, out)

    def gated(self, x: Operand) -> Tensor:
        """silu(gate) · up, where gate is the product with the first half of the rows."""
        assert isinstance(x, Tensor)
        return gated_product(x, self.tensor)

    def shards(self, parts: Mapping[str, Part], columns: Part) -> dict[str, Shard]:
        return _shards(self.tensor, None, parts, columns)


class ScaleGrid(NamedTuple):
    """Of a matrix in e4m3, or of a stack of them."""

    tensor: Tensor  # [(count,) num_rows / grain, columns] f32
    grain: int  # rows that share a scale
    whole_blocks: bool  # of 128 rows in the file none is cut, so scales are equal within 128 here
    columns: Part  # a block of the matrix's columns each, or one for all


class EightBitMatrix(nn.Module):
    """A matrix [num_rows, num_columns] in e4m3, with scales; see ops.scaled."""

    def __init__(self, tensor: nn.Parameter, scales: ScaleGrid) -> None:
        super().__init__()
        self.tensor, self.scales = tensor, scales.tensor
        self._grid = scales

    def product(
        self, x: Operand, bias: Tensor | None = None, out: Tensor | None = None, first_row: int = 0
    ) -> Tensor:
        """As Plain.product; `first_row`: where one of the stacked matrices begins."""
        rows, scales = self.tensor, self.scales
        if first_row:
            assert first_row % self._grid.grain == 0
            rows, scales = rows[first_row:], scales[first_row // self._grid.grain :]
        values, of_rows, dtype = eight_bit_rows(x)
        operands = values, of_rows, rows, scales, dtype, self._grid.whole_blocks
        y = scaled_product(*operands) if out is None else scaled_product(*operands, out)
        return y if bias is None else y.add_(bias)

    def gated(self, x: Operand) -> EightBitRows:
        """As Plain.gated, for a product in eight bits."""
        values, of_rows, dtype = eight_bit_rows(x)
        operands = values, of_rows, self.tensor, self.scales, dtype, self._grid.whole_blocks
        return EightBitRows(*scaled_gated_product(*operands), dtype)

    def shards(self, parts: Mapping[str, Part], columns: Part) -> dict[str, Shard]:
        return _shards(self.tensor, self._grid, parts, columns)


Matrix = Plain | EightBitMatrix


class Stack(nn.Module):
    """Matrices [count, num_rows, num_columns] of experts, in the model's dtype or with scales."""

    def __init__(self, tensor: nn.Parameter, scales: ScaleGrid | None) -> None:
        super().__init__()
        self.tensor, self._of = tensor, scales
        self.scales = None if scales is None else scales.tensor

    def shards(self, number: int, parts: Mapping[str, Part], columns: Part) -> dict[str, Shard]:
        """Of one of the matrices."""
        scales = None
        if self._of is not None:
            scales = self._of._replace(tensor=self._of.tensor[number])
        return _shards(self.tensor[number], scales, parts, columns)


def _shards(
    tensor: Tensor, scales: ScaleGrid | None, parts: Mapping[str, Part], columns: Part
) -> dict[str, Shard]:
    """Of a matrix of the parts of modules of these names."""
    named = {f"{name}.weight": part for name, part in parts.items()}
    values = stacked(tensor, named, columns)
    if scales is None:
        return values
    of_rows = {name: coarse(part, scales.grain) for name, part in named.items()}
    return with_scales(values, stacked(scales.tensor, of_rows, scales.columns))


def quantized(x: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A drawn matrix as e4m3, of x's shape, and its scales, of `shape`.

    x: [.., k] f32; shape: [.., blocks of k], or with one column for all; its product divides that
    of x's other dimensions.
    """
    *lead, k = x.shape
    height, width = math.prod(shape[:-1]), shape[-1]
    rows = x.reshape(-1, k)
    if width > 1:
        rows = F.pad(rows, (0, width * BLOCK - k))
    blocks = rows.view(height, -1, width, rows.shape[1] // width)
    scales = (blocks.abs().amax((1, 3), keepdim=True) / LARGEST).clamp_(min=1e-12)
    values = (blocks / scales).view(len(rows), -1)[:, :k].to(E4M3)
    return values.view(*lead, k), scales.view(shape)
