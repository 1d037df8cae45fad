"""Matrices in e4m3, with scales of blocks or rows.

What else files have in eight bits becomes the model's dtype while it is loaded.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker.config.checkpoint.quantization import SCALE_BLOCK, Quantization
from worker.ops.experts.product import expert_products
from worker.ops.experts.route import Routes
from worker.ops.scaled import (
    E4M3,
    E4M3_MAX,
    EightBitRows,
    add_rms_norm_both,
    add_rms_norm_eight,
    eight_bit_rows,
    multiplies_eight_bits,
    scaled_gated_product,
    scaled_product,
)
from worker.weights.base import Grid, Matrix, Operand, Parts, itself
from worker.weights.scaled_files import SCALES, ScaledFiles, ScaledFormat
from worker.weights.shard import VALUES, all_of, coarse

# Rows that share a scale here, where 128 do in the file: a rank's part, or the rows of one of
# several stacked matrices, may begin within such a block. It costs 0.2 % of the memory.
GRAIN = 16


class EightBitMatrix(Matrix):
    """values: e4m3; scales: f32, of rows and of blocks of columns, or of all; see ops.scaled."""

    scales: nn.Parameter

    def __init__(self, kept: "EightBits", parts: Parts, empty: Any) -> None:
        super().__init__(kept, parts, empty)
        self._grain = self._grids[SCALES].grain
        self.of_blocks: Tensor | None = None  # `scales` once for 128 equal rows, from `settle` on
        # Of 128 rows in the file none is cut, so scales are equal within 128 here.
        self.whole_blocks = self._grain > 1 and not any(
            end % SCALE_BLOCK
            for part in parts.rows.values()
            for end in (part.size, part.held.start, part.held.stop)
        )

    def settle(self) -> None:
        if self.whole_blocks and self.parts.held is None:
            once = self.scales.detach()[:: SCALE_BLOCK // self._grain].contiguous()
            self.of_blocks = nn.Parameter(once, requires_grad=False)

    @staticmethod
    def add_norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor | None = None
    ) -> tuple[EightBitRows, Tensor]:
        """(rows in eight bits, x + residual); see add_rms_norm_eight."""
        values, of_rows, added = add_rms_norm_eight(x, residual, weight, eps, total)
        return EightBitRows(values, of_rows, x.dtype), added

    @staticmethod
    def add_norm_both(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor | None = None
    ) -> tuple[EightBitRows, Tensor]:
        """The same, and the norm in the rows; see add_rms_norm_both."""
        values, of_rows, added, normed = add_rms_norm_both(x, residual, weight, eps, total)
        return EightBitRows(values, of_rows, x.dtype, normed), added

    def product(
        self, x: Operand, bias: Tensor | None = None, out: Tensor | None = None, first_row: int = 0
    ) -> Tensor:
        rows, scales = self.values, self._of_products
        if first_row:
            grain = len(rows) // len(scales)
            assert first_row % grain == 0
            rows, scales = rows[first_row:], scales[first_row // grain :]
        values, of_rows, dtype, _ = eight_bit_rows(x)
        operands = values, of_rows, rows, scales, dtype, self.whole_blocks
        y = scaled_product(*operands) if out is None else scaled_product(*operands, out)
        return y if bias is None else y.add_(bias)

    def gated(self, x: Operand) -> EightBitRows:
        values, of_rows, dtype, _ = eight_bit_rows(x)
        operands = values, of_rows, self.values, self._of_products, dtype, self.whole_blocks
        return EightBitRows(*scaled_gated_product(*operands), dtype)

    @property
    def _of_products(self) -> Tensor:
        return self.scales if self.of_blocks is None else self.of_blocks

    def gates_for(self, other: Matrix) -> bool:
        return isinstance(other, EightBitMatrix)

    def experts(
        self, down: Matrix, x: Operand, routes: Routes, out: Tensor | None = None
    ) -> Tensor:
        assert isinstance(down, EightBitMatrix)
        assert self.parts.held is not None
        scales = self.scales, down.scales
        rows = x if isinstance(x, EightBitRows) else None
        x = itself(x)
        operands = x, routes, self.values, down.values, self.parts.held, out, scales
        return expert_products(*operands, finish=self.finish, rows=rows)


class EightBitFiles(ScaledFiles):
    """Numbers in e4m3."""

    dtype = "F8_E4M3"


class EightBits(ScaledFormat):
    """e4m3 with scales in f32; activations are brought into e4m3 as they come."""

    name = "eight bits"
    noise = "e4m3 by 128"
    matrix = EightBitMatrix
    reading = EightBitFiles

    def __init__(self, declared: Quantization) -> None:
        super().__init__(declared)
        self._by_block = declared.group > 0

    def multiplies(self, device: torch.device) -> bool:
        return multiplies_eight_bits(device)

    def stores(self, parts: Parts) -> dict[str, Grid]:
        grain, rows = 1, parts.rows.values()
        if self._by_block and not parts.moved and not any(part.size % GRAIN for part in rows):
            grain = GRAIN
        of_columns = coarse(parts.columns, SCALE_BLOCK) if self._by_block else all_of(1)
        return {
            VALUES: Grid(parts.columns, dtype=E4M3),
            SCALES: Grid(of_columns, grain, torch.float32),
        }

    def drawn(self, whole: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Tensor]:
        """In blocks as published, however finely their scales are kept.

        So for any number of ranks, and for what multiplies whole blocks.
        """
        height, *width = shapes[SCALES]
        blocks = height
        if height < len(whole) and len(whole) % SCALE_BLOCK == 0:
            blocks = len(whole) // SCALE_BLOCK
        values, scales = as_e4m3(whole, (blocks, *width))
        return {VALUES: values, SCALES: scales.repeat_interleave(height // blocks, 0)}


def as_e4m3(x: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A drawn matrix as e4m3, of x's shape, and its scales, of `shape`.

    x: [.., k] f32; shape: [.., blocks of k], or with one column for all; its product divides that
    of x's other dimensions.
    """
    *lead, k = x.shape
    height, width = math.prod(shape[:-1]), shape[-1]
    rows = x.reshape(-1, k)
    if width > 1:
        rows = F.pad(rows, (0, width * SCALE_BLOCK - k))
    blocks = rows.view(height, -1, width, rows.shape[1] // width)
    scales = (blocks.abs().amax((1, 3), keepdim=True) / E4M3_MAX).clamp_(min=1e-12)
    values = (blocks / scales).view(len(rows), -1)[:, :k].to(E4M3)
    return values.view(*lead, k), scales.view(shape)
