"""How a matrix of a linear layer is stored, multiplied by and filled.

`layers.Placement.matrix` chooses; the linear layers say how a matrix is divided among ranks.
"""

import math
from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from worker.model.shard import Part, Shard, all_of, coarse, stacked, with_scales
from worker.ops.product import gated_product, product
from worker.ops.scaled import BLOCK, E4M3, LARGEST, scaled_gated_product, scaled_product

# Rows that share a scale here, where 128 do in the file: a rank's part, or the rows of one of
# several stacked matrices, may begin within such a block. It costs 0.2 % of the memory.
GRAIN = 16


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


class EightBitMatrix(nn.Module):
    """A matrix [num_rows, num_columns] in e4m3, with scales; see ops.scaled."""

    def __init__(self, tensor: nn.Parameter, scales: nn.Parameter, *, by_block: bool) -> None:
        """by_block: scales have a column for each BLOCK columns; else one."""
        super().__init__()
        self.tensor, self.scales, self._by_block = tensor, scales, by_block
        self.grain = -(-len(tensor) // len(scales))

    def product(
        self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None, first_row: int = 0
    ) -> Tensor:
        """As Plain.product; `first_row`: a multiple of 16."""
        rows, scales = self.tensor, self.scales
        if first_row:
            assert first_row % self.grain == 0
            rows, scales = rows[first_row:], scales[first_row // self.grain :]
        y = scaled_product(x, rows, scales) if out is None else scaled_product(x, rows, scales, out)
        return y if bias is None else y.add_(bias)

    def gated(self, x: Tensor) -> Tensor:
        """silu(gate) · up, where gate is the product with the first half of the rows."""
        return scaled_gated_product(x, self.tensor, self.scales)

    def scale_columns(self, columns: Part) -> Part:
        """The part of the scales' columns that goes with this one of the matrix's."""
        return coarse(columns, BLOCK) if self._by_block else all_of(1)

    def shards(self, parts: Mapping[str, Part], columns: Part) -> dict[str, Shard]:
        named = {f"{name}.weight": part for name, part in parts.items()}
        values = stacked(self.tensor, named, columns)
        of_rows = {name: coarse(part, self.grain) for name, part in named.items()}
        scales = stacked(self.scales, of_rows, self.scale_columns(columns))
        return with_scales(values, scales)


Matrix = Plain | EightBitMatrix


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
