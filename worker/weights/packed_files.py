"""Matrices that files hold in four bits: by their worth, and as products take them."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from worker.config.checkpoint.quantization import Quantization
from worker.errors import UserError
from worker.ops.packed import MOST_E8M0, ZERO, as_lines, bytes_of, worth, woven
from worker.weights.base import Reading
from worker.weights.files import tensor_names
from worker.weights.layouts import LAYOUTS, Layout, Packed
from worker.weights.scaled_files import SCALES
from worker.weights.shard import VALUES
from worker.weights.stacks import of_stack, stack_of

ZEROS, FACTORS = "zeros", "factors"  # roles
LOW = 0x0F0F0F0F  # the low numbers of four bytes
CHUNK = 1 << 22  # bytes of a matrix that are at once in memory twice


class PackedFiles(Reading):
    """Of the format that config.json declares: their names alone do not say which it is."""

    def __init__(self, files: Sequence[Path], declared: Quantization | None = None) -> None:
        super().__init__(files, declared)
        self._files, self._declared = files, declared
        self._layout = None if declared is None else LAYOUTS.get(declared.format)
        self._readers: dict[Path, Any] = {}
        self._stacks: dict[str, Mapping[str, Any]] = {}  # by their names

    @cached_property
    def _where(self) -> dict[str, Path]:
        return {x: file for file in self._files for x in tensor_names(file.parent, [file])}

    def _slice(self, name: str) -> Any | None:
        """What slices a tensor, whatever file or stack it is in; None: there is none."""
        if (file := self._where.get(name)) is None:
            if (stack := stack_of(name)) not in self._where:
                return None
            if stack not in self._stacks:
                self._stacks[stack] = of_stack(stack, self._slice(stack))
            return self._stacks[stack].get(name)
        if file not in self._readers:
            self._readers[file] = safe_open(file, framework="pt", device="cpu")
        return self._readers[file].get_slice(name)

    def _stem(self, name: str, *ends: str) -> str | None:
        """The module's name and a dot, if what stands behind is one of these."""
        stem, dot, end = name.rpartition(".")
        return stem + dot if end in ends else None

    def tensor_of(self, name: str) -> str:
        if self._layout is None or (stem := self._stem(name, self._layout.values.end)) is None:
            return name
        return f"{stem}weight"

    def opened(self, name: str, stored: Any) -> "PackedMatrix | None":
        layout, declared = self._layout, self._declared
        if layout is None or declared is None or stored.get_dtype() not in ("I32", "U8"):
            return None
        if (stem := self._stem(name, layout.values.end)) is None:
            return None
        others = {end: self._slice(stem + end) for end in layout.ends}
        return PackedMatrix(name, layout, declared, {layout.values.end: stored, **others})

    def is_spent(self, name: str) -> bool:
        if self._layout is None:
            return False
        if name.endswith(".bias"):  # older files of GPTQ have one everywhere
            return not self._slice(name)[:,].any()  # pyright: ignore[reportOptionalSubscript]
        return self._stem(name, *self._layout.ends) is not None

    def owner_of(self, name: str) -> str:
        ends = () if self._layout is None else (self._layout.values.end, *self._layout.ends)
        stem = self._stem(name, *ends)
        return name if stem is None else f"{stem}weight"


class Sliced(NamedTuple):
    """What is read of a file when it is sliced, as safetensors' own."""

    shape: tuple[int, int]
    read: Callable[[slice, slice], Tensor]

    def get_shape(self) -> list[int]:
        """Of the whole."""
        return list(self.shape)

    def __getitem__(self, index: tuple[slice, slice]) -> Tensor:
        """[rows, columns] of it."""
        whole = zip(index, self.shape, strict=True)
        return self.read(*(slice(*part.indices(size)[:2]) for part, size in whole))


class PackedMatrix:
    """A matrix [N, K] of a file; slices are what it is worth."""

    def __init__(
        self, name: str, layout: Layout, declared: Quantization, held: dict[str, Any]
    ) -> None:
        """held: the file's slices by their ends, None for what it lacks.

        Raises UserError if they do not fit.
        """
        self._name, self._layout, self._held, self._declared = name, layout, held, declared
        values = layout.values
        zeros = layout.zeros if declared.has_zeros else None
        for end in filter(None, (layout.scales, zeros and zeros.end, layout.factor, layout.shape)):
            if held[end] is None:
                raise UserError(f"{name} has no {end} beside it")
        shape = list(held[values.end].get_shape())
        self._per = 8 if held[values.end].get_dtype() == "I32" else 2
        shape = shape[::-1] if values.turned else shape
        shape[values.along == "columns"] *= self._per
        if layout.shape:
            said = held[layout.shape][:].tolist()
            if any(not 0 <= shape[i] - said[i] < self._per for i in (0, 1)):
                raise UserError(f"{name} has room for {shape}, {layout.shape} says {said}")
            shape = said
        self._shape = rows, columns = int(shape[0]), int(shape[1])
        width = declared.group or columns
        found = list(held[layout.scales].get_shape())
        found = found[::-1] if layout.turned else found
        if columns % width or found != [rows, columns // width]:
            text = f"{name} of shape {self._shape} has scales of shape {found}"
            raise UserError(f"{text}, config.json says groups of {width} columns")
        groups = columns // width
        self.roles = {
            VALUES: Sliced((rows, bytes_of(columns)), self._values),
            SCALES: Sliced((rows, groups), self._scales),
        }
        order = held.get(layout.order)
        if order is not None and not order[:].equal(torch.arange(columns).int() // width):
            raise UserError(f"{name}: {layout.order} moves columns, as desc_act: true does")
        if layout.factor:
            self.roles[FACTORS] = Sliced((rows, 1), self._factors)
        if zeros is not None:
            self.roles[ZEROS] = Sliced((rows, groups), self._zeros)
        elif layout.zeros is not None and held[layout.zeros.end] is not None:
            self._check_symmetric(layout.zeros, rows, groups)

    def _check_symmetric(self, zeros: Packed, rows: int, groups: int) -> None:
        """As some files of one version of GPTQ call themselves another: 7 and 8 are the same."""
        stored = self._numbers(zeros, slice(0, rows), slice(0, groups)).unique().tolist()
        if stored not in ([ZERO - 1], [ZERO]):
            text = f"{self._name}: {zeros.end} has {stored[:8]}, and sym: true means all {ZERO}"
            raise UserError(f"{text}, or all {ZERO - 1} in older files")

    def get_shape(self) -> list[int]:
        """As safetensors' slices have it."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """For people."""
        return f"four bits of {self._declared.format}"

    def __getitem__(self, index: tuple[slice, slice]) -> Tensor:
        """[rows, columns] f32."""
        rows, columns = index
        start, stop, _ = rows.indices(self._shape[0])
        step = max(1, CHUNK // (8 * self._shape[1]))
        parts = list[Tensor]()
        for begin in range(start, stop, step):
            some = slice(begin, min(begin + step, stop))
            held = {role: sliced[some, :] for role, sliced in self.roles.items()}
            parts.append(worth(**held)[:, : self._shape[1]][:, columns])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _bytes(self, at: Packed, rows: slice, columns: slice) -> tuple[Tensor, int]:
        """(u8 [.., .. · bytes of one], numbers before the first) that hold all of a part."""
        wanted, axis = [rows, columns], int(at.along == "columns")
        start, stop = wanted[axis].start, wanted[axis].stop
        wanted[axis] = slice(start // self._per, -(-stop // self._per))
        stored, skip = self._held[at.end], start % self._per
        part = stored[wanted[1], wanted[0]].t() if at.turned else stored[wanted[0], wanted[1]]
        return part.flatten().contiguous().view(torch.uint8).view(len(part), -1), skip

    def _numbers(self, at: Packed, rows: slice, columns: slice) -> Tensor:
        """u8 [rows, columns], a number a byte, of 32 bits that hold eight rows' neighbours."""
        stored, skip = self._bytes(at, rows, columns)
        nibbles = torch.stack((stored & 15, stored >> 4), -1).view(len(stored), -1, self._per)
        nibbles = nibbles[..., list(at.places)]
        return nibbles.transpose(1, 2).flatten(0, 1).narrow(0, skip, rows.stop - rows.start)

    def _values(self, rows: slice, columns: slice) -> Tensor:
        """Bytes [rows, columns] of lines."""
        at, per = self._layout.values, self._per
        wanted = slice(2 * columns.start, min(2 * columns.stop, self._shape[1]))
        if at.along == "columns":
            stored, skip = self._bytes(at, rows, wanted)
            assert skip == 0, "lines are whole"
            lines = as_lines(stored)
            return lines if self._layout.zeros else woven(lines)  # without zeros they are codes
        start, stop = rows.start // per, -(-rows.stop // per)
        size = columns.stop - columns.start
        values = torch.empty((stop - start) * per, size, dtype=torch.uint8)
        step = max(1, CHUNK // (8 * size))
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            paired = self._pair(self._held[at.end][wanted, begin:end])
            values[(begin - start) * per : (end - start) * per] = as_lines(paired)
        return values.narrow(0, rows.start % per, rows.stop - rows.start)

    def _pair(self, words: Tensor) -> Tensor:
        """Two columns' numbers in a byte, [8 · n, columns / 2], of words [columns, n]."""
        if len(words) % 2:
            words = torch.nn.functional.pad(words, (0, 0, 0, 1))
        even, odd = words[::2], words[1::2]
        out = torch.empty(words.shape[1] * self._per, len(even), dtype=torch.uint8)
        found = out.view(words.shape[1], self._per, -1)
        # Of two columns the low numbers of every byte, at places 0, 2, .., then the high ones.
        for high in (0, 1):
            pair = even >> 4 & LOW | odd & ~LOW if high else even & LOW | (odd & LOW) << 4
            of_bytes = pair.flatten().contiguous().view(torch.uint8).view(len(pair), -1)
            of_bytes = of_bytes.t().contiguous().view(words.shape[1], 4, -1)
            for neighbour, place in enumerate(self._layout.values.places):
                if place % 2 == high:
                    found[:, neighbour] = of_bytes[:, place // 2]
        return out

    def _scales(self, rows: slice, columns: slice) -> Tensor:
        stored = self._held[self._layout.scales]
        found = stored[columns, rows].t() if self._layout.turned else stored[rows, columns]
        if found.dtype == torch.uint8 and (most := int(found.max())) > MOST_E8M0:
            text = f"{self._name}: {self._layout.scales} has a {most}"
            raise UserError(f"{text}: 255 is no number, and none above {MOST_E8M0} is computed")
        return found

    def _zeros(self, rows: slice, columns: slice) -> Tensor:
        assert self._layout.zeros is not None
        return (self._numbers(self._layout.zeros, rows, columns) + self._layout.more) & 15

    def _factors(self, rows: slice, columns: slice) -> Tensor:
        stored = self._held[self._layout.factor]
        factor = stored[:] if stored.get_shape() else stored[...]
        factor = factor.float().view(1, 1)
        factor = 1 / factor if self._layout.divides else factor
        return factor.expand(rows.stop - rows.start, 1)
