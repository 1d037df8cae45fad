"""The header of a GGUF file: metadata, and where its tensors lie.

The form is described at github.com/ggml-org/ggml, in its docs. The reader of the library `gguf`
takes 2 s for a vocabulary of 49,152 tokens, this one a tenth of a second.
"""

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from worker.errors import Unsupported, UserError

VERSIONS = (2, 3)
# Types of metadata: of numbers, by how `struct` reads them, and the two others.
NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
STRING, ARRAY = 8, 9


class Stored(NamedTuple):
    """One tensor."""

    path: Path  # of the file
    shape: tuple[int, ...]  # as the checkpoint had it, rows first
    type: int  # a gguf.GGMLQuantizationType
    offset: int  # of its first byte in the file

    @property
    def type_name(self) -> str:
        """As Q4_1."""
        import gguf  # here, as it takes a fifth of a second

        try:
            return gguf.GGMLQuantizationType(self.type).name
        except ValueError:
            return f"number {self.type}"


class Header(NamedTuple):
    """What a file, or the files of a model together, say before the tensors."""

    path: Path  # of the first
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Stored]


class _Bytes:
    """The file from one place on."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.at = data, 0

    def numbers(self, form: str) -> tuple[Any, ...]:
        """Little-endian ones, as `struct` has them."""
        found = struct.unpack_from(f"<{form}", self._data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return found

    def number(self, form: str) -> Any:
        return self.numbers(form)[0]

    def text(self) -> str:
        size: int = self.number("Q")
        if size > len(self._data) - self.at:
            raise struct.error("a string is longer than the file")
        self.at += size
        return str(self._data[self.at - size : self.at], "utf-8")

    def value(self, kind: int) -> Any:
        """One of metadata."""
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.number(NUMBERS[kind])
        inner, count = self.numbers("IQ")
        if inner in NUMBERS:
            return list(self.numbers(f"{count}{NUMBERS[inner]}"))
        return [self.value(inner) for _ in range(count)]


def read_header(path: Path) -> Header:
    """The header of one file.

    Raises UserError for what is no GGUF file, or cut short within its header; Unsupported for
    another version, or the byte order of machines that are not served.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _header(path, _Bytes(data))
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, struct.error) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: cut short or not a GGUF file: {error}") from error


def read_model(files: Sequence[Path]) -> Header:
    """Of a model's files, in their order; the first has the metadata. Raises as `read_header`."""
    first, *others = map(read_header, files)
    tensors = dict(first.tensors)
    for header in others:
        tensors |= header.tensors
    return first._replace(tensors=tensors)


def _header(path: Path, data: _Bytes) -> Header:
    if data.number("4s") != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version: int = data.number("I")
    if version not in VERSIONS:
        is_swapped = version & 0xFFFF == 0  # as GGUF's own readers find out
        what = "big-endian" if is_swapped else f"of version {version}"
        text = f"a GGUF file that is {what}; read: versions 2 and 3, little-endian"
        raise Unsupported(f"{path}: {text}: convert the model anew")
    num_tensors, num_values = data.numbers("QQ")
    metadata = dict[str, Any]()
    for _ in range(num_values):
        key = data.text()
        metadata[key] = data.value(data.number("I"))
    found = dict[str, Stored]()
    for _ in range(num_tensors):
        name = data.text()
        sizes = data.numbers(f"{data.number('I')}Q")
        found[name] = Stored(path, sizes[::-1], *data.numbers("IQ"))
    align = metadata.get("general.alignment", 32)
    start = -(-data.at // align) * align
    tensors = {name: x._replace(offset=start + x.offset) for name, x in found.items()}
    return Header(path, metadata, tensors)


def check_tensors(header: Header) -> None:
    """Raise a UserError for a file that is cut short, Unsupported for a type that nothing reads."""
    for name, stored in header.tensors.items():
        if stored.offset + num_bytes(name, stored) > stored.path.stat().st_size:
            raise UserError(f"{stored.path}: cut short: it ends before or within {name}")


def num_bytes(name: str, stored: Stored) -> int:
    """Of a tensor in its file; raises Unsupported if it cannot be read."""
    import gguf
    import numpy

    path = stored.path
    try:
        known = gguf.GGMLQuantizationType(stored.type)
        block, block_bytes = gguf.GGML_QUANT_SIZES[known]
        gguf.dequantize(numpy.zeros((1, block_bytes), numpy.uint8), known)
    except (ValueError, KeyError, NotImplementedError):
        text = f"{name} is of type {stored.type_name}, which the library gguf does not read"
        raise Unsupported(f"{path}: {text}: take a file of another type, as Q8_0") from None
    if stored.shape[-1] % block:
        raise UserError(f"{path}: {name}: {stored.shape[-1]} numbers are no blocks of {block}")
    return math.prod(stored.shape) // block * block_bytes
