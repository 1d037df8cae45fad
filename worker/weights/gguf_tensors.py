"""Slices of the tensors of a GGUF file, by their worth and under the checkpoint's names."""

import math
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from worker.config.checkpoint.families import FAMILIES
from worker.config.checkpoint.shape import LayerShape
from worker.config.gguf.file import Stored, num_bytes, read_header
from worker.config.gguf.model import ARCHITECTURES
from worker.config.gguf.tensors import tensors_of

ROWS = 4096  # that are dequantised at a time, as the library takes twice their bytes
IN_PAIRS = {row.served_as for row in ARCHITECTURES.values() if row.in_pairs}


class GgufTensors:
    """A file, used as what `safetensors.safe_open` gives."""

    def __init__(self, file: Path, shape: LayerShape) -> None:
        """shape: of the model; it says in which order rows lie."""
        self._tensors, self._shape = tensors_of(read_header(file), shape.architecture), shape
        self._data = np.memmap(file, np.uint8, "r")
        self.num_numbers = sum(math.prod(x.shape) for x in self._tensors.values())

    def __enter__(self) -> "GgufTensors":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del self._data

    def describe(self) -> str:
        """How many tensors are of which type, for people."""
        counts = Counter(x.type_name for x in self._tensors.values())
        kinds = ", ".join(f"{num} of {kind}" for kind, num in counts.most_common())
        return f"{kinds}, {self._data.nbytes / 1e6:.1f} MB"

    def keys(self) -> list[str]:
        """Of all tensors, by the checkpoint's names."""
        return [*self._tensors]

    def get_slice(self, name: str) -> "GgufTensor":
        """A tensor that is not read yet."""
        stored, shape = self._tensors[name], self._shape
        data = self._data[stored.offset : stored.offset + num_bytes(name, stored)]
        module, features = name.split(".")[-2], FAMILIES[shape.architecture].layers
        heads = {"q_proj": shape.num_heads, "k_proj": shape.num_kv_heads}.get(module, 0)
        return GgufTensor(
            stored,
            data,
            heads=heads if shape.architecture in IN_PAIRS else 0,
            # Their files have 1 added to the norms that the checkpoint stores less 1.
            plus=-1.0 if features.centred and module.endswith("norm") else 0.0,
        )


class GgufTensor:
    """A tensor whose rows are made numbers as they are sliced."""

    def __init__(self, stored: Stored, data: np.ndarray, heads: int, plus: float) -> None:
        """data: its bytes. heads: whose rows lie in pairs, as rope turns them; 0: none do. plus: is
        added to all numbers."""
        self._stored, self._plus = stored, plus
        rows, *columns = stored.shape
        # A vector is taken as a matrix of one column: it is never in blocks.
        self._rows: Any = data.reshape(rows, -1)
        self._columns = columns
        order = np.arange(rows)
        # Of every head the checkpoint has numbers 0, 2, 4, … of the file's, and then 1, 3, 5, …
        self._order = order.reshape(heads, -1, 2).swapaxes(1, 2).ravel() if heads else order

    def get_shape(self) -> list[int]:
        """As safetensors' slices have it."""
        return [*self._stored.shape]

    def get_dtype(self) -> str:
        """As Q4_1."""
        return self._stored.type_name

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """The part, f32."""
        rows, *columns = index
        order, kind = self._order[rows], gguf.GGMLQuantizationType(self._stored.type)
        part = torch.empty(len(order), *map(_length, columns, self._columns))
        for first in range(0, len(order), ROWS):
            held = gguf.dequantize(self._rows[order[first : first + ROWS]], kind)
            part[first : first + ROWS] = torch.from_numpy(held)[:, *(columns or [0])]
        return part.add_(self._plus) if self._plus else part


def _length(part: slice, size: int) -> int:
    return len(range(*part.indices(size)))
