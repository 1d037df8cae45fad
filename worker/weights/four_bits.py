"""Matrices in four bits, with scales of groups of columns; activations stay in 16."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from worker.config.checkpoint.quantization import Quantization
from worker.errors import Unsupported, UserError
from worker.ops.experts.product import expert_products
from worker.ops.experts.route import Routes
from worker.ops.packed import (
    LINE,
    ZERO,
    as_packed,
    multiplies_packed,
    packed_product,
    padded_groups,
)
from worker.ops.scaled import E4M3
from worker.weights.base import Format, Grid, Matrix, Operand, Parts, whole_of
from worker.weights.layouts import LAYOUTS
from worker.weights.packed_files import FACTORS, ZEROS, PackedFiles, PackedMatrix
from worker.weights.scaled_files import SCALES
from worker.weights.shard import VALUES, Part, Shard, all_of, coarse

F16 = torch.float16
# Of scales in memory; None: the model's, in which compressed-tensors has them.
KINDS: Mapping[str, torch.dtype | None] = {
    "awq": F16, "gptq": F16, "gptq_v2": F16, "int4": None, "mxfp4": torch.uint8, "nvfp4": E4M3,
    "modelopt_nvfp4": E4M3,
}  # fmt: skip


class FourBitMatrix(Matrix):
    """values: u8, two numbers a byte; scales, zeros, factors: see ops.packed."""

    scales: nn.Parameter

    @property
    def operands(self) -> Any:
        """(values, scales, zeros, factors)."""
        return self.values, self.scales, getattr(self, ZEROS, None), getattr(self, FACTORS, None)

    def product(
        self, x: Operand, bias: Tensor | None = None, out: Tensor | None = None, first_row: int = 0
    ) -> Tensor:
        assert isinstance(x, Tensor)
        held: Any = self.operands
        if first_row:
            held = [None if x is None else x[first_row:] for x in held]
        values, scales, zeros, factors = held
        operands = x, values, scales, zeros, factors
        y = packed_product(*operands) if out is None else packed_product(*operands, False, out)
        return y if bias is None else y.add_(bias)

    def gated(self, x: Operand) -> Tensor:
        assert isinstance(x, Tensor)
        values, scales, zeros, factors = self.operands
        return packed_product(x, values, scales, zeros, factors, True)

    def experts(
        self, down: Matrix, x: Operand, routes: Routes, out: Tensor | None = None
    ) -> Tensor:
        assert isinstance(x, Tensor)
        assert isinstance(down, FourBitMatrix)
        assert self.parts.held is not None
        packed = self.operands[1:], down.operands[1:]
        held = self.parts.held
        operands = x, routes, self.values, down.values, held, out
        return expert_products(*operands, packed=packed, finish=self.finish)


class FourBits(Format):
    """A format of LAYOUTS."""

    matrix = FourBitMatrix
    reading = PackedFiles

    def __init__(self, declared: Quantization) -> None:
        super().__init__(declared)
        self._kind, self._group = declared.format, declared.group
        self._has_zeros = declared.has_zeros
        self._has_factors = bool(LAYOUTS[declared.format].factor)
        self.name = f"four bits ({declared.format})"
        self.noise = f"{declared.format} by {declared.group}, zeros: {declared.has_zeros}"

    def multiplies(self, device: torch.device) -> bool:
        return multiplies_packed(device)

    def stores(self, parts: Parts) -> dict[str, Grid]:
        columns = parts.columns
        if self._group and columns.size % self._group:
            text = f"{', '.join(parts.rows)}: {columns.size} columns in groups of {self._group}"
            raise Unsupported(f"{text}: the last is not whole, and no file has such")
        if self._group and columns.size % LINE:
            text = f"{', '.join(parts.rows)}: {columns.size} columns"
            raise Unsupported(f"{text} in groups of {self._group} are no whole lines of {LINE}")
        of_groups = coarse(columns, self._group) if self._group else all_of(1)
        lines, half = coarse(columns, LINE), LINE // 2
        of_bytes = slice(half * lines.held.start, half * lines.held.stop)
        room = padded_groups(len(of_groups)) if KINDS[self._kind] == torch.uint8 else 0
        grids = {
            VALUES: Grid(Part(half * lines.size, of_bytes), dtype=torch.uint8),
            SCALES: Grid(of_groups, dtype=KINDS[self._kind], room=room),
        }
        if self._has_zeros:
            grids[ZEROS] = Grid(of_groups, dtype=torch.uint8)
        if self._has_factors:
            grids[FACTORS] = Grid(all_of(1), dtype=torch.float32)
        return grids

    def part(self, stored: Any, role: str, shard: Shard) -> Tensor:
        if not isinstance(stored, PackedMatrix):
            text = f"is {stored.get_dtype()}, config.json says {self.name}"
            raise UserError(f"{text}: name its module there among those left alone")
        return whole_of(stored.roles[role], shard)

    def drawn(self, whole: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Tensor]:
        """whole: of as many columns as there are bytes; a second number follows from another's."""
        w = torch.stack((whole, -whole.roll(1, -1)), -1).flatten(-2) * 0.5**0.5
        kind = KINDS[self._kind] or torch.float32
        values, scales, factors = as_packed(w, shapes[SCALES][-1], kind)
        zeros = torch.full(shapes[SCALES], ZERO, dtype=torch.uint8, device=whole.device)
        return {VALUES: values, SCALES: scales, ZEROS: zeros, FACTORS: factors}
