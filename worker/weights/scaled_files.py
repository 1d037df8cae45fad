"""Tensors that files hold as small numbers and scales of their rows or blocks."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from worker.config.checkpoint.quantization import SCALE_BLOCK, WEIGHT_SCALES, Quantization
from worker.errors import UserError
from worker.weights.base import Format, Reading, whole_of
from worker.weights.files import tensor_names
from worker.weights.shard import Shard

SCALES = "scales"  # a role
# Of activations and of KV in eight bits: neither is quantised here, or not by a fixed scale.
KV_SCALES = ("k_scale", "v_scale", "kv_scale", "output_scale")
OTHER_SCALES = ("input_scale", "q_scale", *KV_SCALES)


class ScaledFiles(Reading):
    """Tensors of one dtype, and their scales, which may lie in another file."""

    dtype: str  # of the tensors, as safetensors has it

    def __init__(self, files: Sequence[Path], declared: Quantization | None = None) -> None:
        super().__init__(files, declared)
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
        if stored.get_dtype() != self.dtype:
            return None
        stem = name.removesuffix("weight")
        found = next((stem + end for end in WEIGHT_SCALES if stem + end in self._where), None)
        if found is None:
            raise UserError(f"{name} is {self.dtype}, and there is no {stem}{WEIGHT_SCALES[0]}")
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
    """A tensor [N, K] that is multiplied by its scales as it is sliced."""

    def __init__(self, name: str, stored: Any, scales: Tensor) -> None:
        """stored: what slices it without them. Raises UserError if they are of no form's shape."""
        self.values = stored
        if scales.dim() == 4:  # [blocks, 1, blocks, 1], as ModelOpt has them
            scales = scales[:, 0, :, 0]
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

    def get_dtype(self) -> str:
        """Without the scales."""
        return self.values.get_dtype()

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


class ScaledFormat(Format):
    """A format whose matrices have the files' numbers and their SCALES."""

    reading: type[ScaledFiles]

    def part(self, stored: Any, role: str, shard: Shard) -> Tensor:
        if (found := stored.get_dtype()) != self.reading.dtype:
            raise UserError(f"is {found}, config.json says {self.reading.dtype}")
        if role == SCALES:
            return shard.of(stored.scales(shard.stored_shape))
        return whole_of(stored.values, shard)
