"""Matrices in e4m3, with scales of blocks or rows, and how files hold them.

What else files have in eight bits becomes the model's dtype while it is loaded.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from worker.config.checkpoint.quantization import SCALE_BLOCK, Quantization
from worker.errors import UserError
from worker.ops.experts.product import expert_products
from worker.ops.experts.route import Routes
from worker.ops.scaled import (
    E4M3,
    LARGEST,
    EightBitRows,
    add_rms_norm_eight,
    eight_bit_rows,
    multiplies_eight_bits,
    scaled_gated_product,
    scaled_product,
)
from worker.weights.base import Format, Grid, Matrix, Operand, Parts, Reading, whole_of
from worker.weights.files import tensor_names
from worker.weights.shard import VALUES, Shard, all_of, coarse

SCALES = "scales"  # a role
# Rows that share a scale here, where 128 do in the file: a rank's part, or the rows of one of
# several stacked matrices, may begin within such a block. It costs 0.2 % of the memory.
GRAIN = 16
# Of DeepSeek's and Qwen's files, and of compressed-tensors; both are multiplied with.
WEIGHT_SCALES = ("weight_scale_inv", "weight_scale")
# Of activations and of KV in eight bits: neither is quantised here, or not by a fixed scale.
OTHER_SCALES = ("input_scale", "q_scale", "k_scale", "v_scale", "kv_scale", "output_scale")


class EightBitMatrix(Matrix):
    """values: e4m3; scales: f32, of rows and of blocks of columns, or of all; see ops.scaled."""

    scales: nn.Parameter

    def __init__(self, kept: "EightBits", parts: Parts, empty: Any) -> None:
        super().__init__(kept, parts, empty)
        self._grain = self._grids[SCALES].grain
        # Of 128 rows in the file none is cut, so scales are equal within 128 here.
        self.whole_blocks = self._grain > 1 and not any(
            end % SCALE_BLOCK
            for part in parts.rows.values()
            for end in (part.size, part.held.start, part.held.stop)
        )

    @staticmethod
    def add_norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor | None = None
    ) -> tuple[EightBitRows, Tensor]:
        """(rows in eight bits, x + residual); see add_rms_norm_eight."""
        values, of_rows, added = add_rms_norm_eight(x, residual, weight, eps, total)
        return EightBitRows(values, of_rows, x.dtype), added

    def product(
        self, x: Operand, bias: Tensor | None = None, out: Tensor | None = None, first_row: int = 0
    ) -> Tensor:
        rows, scales = self.values, self.scales
        if first_row:
            assert first_row % self._grain == 0
            rows, scales = rows[first_row:], scales[first_row // self._grain :]
        values, of_rows, dtype = eight_bit_rows(x)
        operands = values, of_rows, rows, scales, dtype, self.whole_blocks
        y = scaled_product(*operands) if out is None else scaled_product(*operands, out)
        return y if bias is None else y.add_(bias)

    def gated(self, x: Operand) -> EightBitRows:
        values, of_rows, dtype = eight_bit_rows(x)
        operands = values, of_rows, self.values, self.scales, dtype, self.whole_blocks
        return EightBitRows(*scaled_gated_product(*operands), dtype)

    def gates_for(self, other: Matrix) -> bool:
        return isinstance(other, EightBitMatrix)

    def experts(self, down: Matrix, x: Tensor, routes: Routes, out: Tensor | None = None) -> Tensor:
        assert isinstance(down, EightBitMatrix)
        assert self.parts.held is not None
        scales = self.scales, down.scales
        return expert_products(x, routes, self.values, down.values, self.parts.held, out, scales)


class EightBitFiles(Reading):
    """The scales of a model's weight files; they may lie in another file than their weights."""

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(files)
        self._files = files
        self._readers: dict[Path, Any] = {}  # a header may name thousands of tensors
        self._used = set[str]()

    @cached_property
    def _where(self) -> Mapping[str, Path]:
        """The file of each scale of weights."""
        names = {file: tensor_names(file.parent, [file]) for file in self._files}
        return {
            name: file
            for file, held in names.items()
            for name in held
            if name.endswith(WEIGHT_SCALES)
        }

    def opened(self, name: str, stored: Any) -> "Scaled | None":
        if stored.get_dtype() != "F8_E4M3":
            return None
        stem = name.removesuffix("weight")
        found = next((stem + end for end in WEIGHT_SCALES if stem + end in self._where), None)
        if found is None:
            raise UserError(f"{name} is in eight bits, and there is no {stem}{WEIGHT_SCALES[0]}")
        self._used.add(found)
        file = self._where[found]
        if file not in self._readers:
            self._readers[file] = safe_open(file, framework="pt", device="cpu")
        return Scaled(name, stored, self._readers[file].get_tensor(found).float())

    def is_spent(self, name: str) -> bool:
        return name in self._used or name.endswith(OTHER_SCALES)

    def owner_of(self, name: str) -> str:
        stem = next((name.removesuffix(end) for end in WEIGHT_SCALES if name.endswith(end)), None)
        return name if stem is None else f"{stem}weight"


class Scaled:
    """A tensor [N, K] in eight bits that is multiplied by its scales as it is sliced."""

    def __init__(self, name: str, stored: Any, scales: Tensor) -> None:
        """stored: what slices it without them. Raises UserError if they are of no form's shape."""
        self.values = stored
        rows, columns = self.get_shape()
        blocks = [-(-size // SCALE_BLOCK) for size in (rows, columns)]
        if scales.numel() == 1:
            self._scales, self._grain = scales.view(1, 1), (rows, columns)
        elif scales.numel() == rows and len(scales) == rows:
            self._scales, self._grain = scales.view(rows, 1), (1, columns)
        elif list(scales.shape) == blocks:
            self._scales, self._grain = scales, (SCALE_BLOCK, SCALE_BLOCK)
        else:
            shape = tuple(scales.shape)
            raise UserError(f"{name} of shape {(rows, columns)} has scales of shape {shape}")

    def get_shape(self) -> list[int]:
        """As safetensors' slices have it."""
        return self.values.get_shape()

    def scales(self, shape: tuple[int, ...]) -> Tensor:
        """f32 of this shape: a scale for as many rows each, and for SCALE_BLOCK columns or for all.

        Raises UserError, without a name, if the file's are finer.
        """
        (height, width), (tall, wide) = shape, self._grain
        each = self.get_shape()[0] // height
        if tall % each or len(self._scales[0]) not in (1, width):
            text = f"has a scale for {tall} rows and {wide} columns; config.json says otherwise"
            raise UserError(text)
        return self._scales.repeat_interleave(-(-tall // each), 0)[:height].expand(-1, width)

    def __getitem__(self, index: tuple[slice, slice]) -> Tensor:
        """[rows, columns] f32."""
        part: torch.Tensor = self.values[index].float()
        for dim, (held, size) in enumerate(zip(index, self.get_shape(), strict=True)):
            start, stop, _ = held.indices(size)
            each = [at // self._grain[dim] for at in range(start, stop)]
            assert part.shape[dim] == len(each)
            if dim == 0:
                of_rows = self._scales[each]
            else:
                part *= of_rows[:, each]
        return part


class EightBits(Format):
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

    def part(self, stored: Any, role: str, shard: Shard) -> Tensor:
        if not isinstance(stored, Scaled):
            raise UserError(f"is {stored.get_dtype()}, config.json says F8_E4M3")
        if role == SCALES:
            return shard.of(stored.scales(shard.stored_shape))
        return whole_of(stored.values, shard)

    def drawn(self, whole: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Tensor]:
        """In blocks as published, however finely their scales are kept.

        So for any number of ranks, and for what multiplies whole blocks.
        """
        height, *width = shapes[SCALES]
        blocks = height
        if height < len(whole) and len(whole) % SCALE_BLOCK == 0:
            blocks = len(whole) // SCALE_BLOCK
        values, scales = quantized(whole, (blocks, *width))
        return {VALUES: values, SCALES: scales.repeat_interleave(height // blocks, 0)}


def quantized(x: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
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
    scales = (blocks.abs().amax((1, 3), keepdim=True) / LARGEST).clamp_(min=1e-12)
    values = (blocks / scales).view(len(rows), -1)[:, :k].to(E4M3)
    return values.view(*lead, k), scales.view(shape)
