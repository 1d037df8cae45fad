"""x @ w.T by the algorithm of cuBLASLt that a search found best for one shape on one kind of card.

The library's own heuristic often misses the best algorithm for products of 80 to 256 rows (ADR
0010). `tuned/<device>.json`, of which `benchmarks/results/kernels.md` says how it was made, names a
better one for each exact (m, n, k). An algorithm is eight words that only one version of the
library understands. So there is no tuned product for other versions, devices or shapes, nor where
the library refuses an algorithm. None needs scratch, so streams share nothing.

The library is the one that torch has loaded. The constants below are those of its C header.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
from ctypes import addressof, byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

log = logging.getLogger("kvlane.kernels")

TUNED = Path(__file__).parent / "tuned"
DTYPE = torch.bfloat16
WORDS = 8  # of an algorithm
ALIGNMENT = 16  # bytes, of rows and of the first element
COMPUTE_F32, REAL_F32, REAL_BF16 = 68, 0, 14
TRANSPOSE_A = 3  # attribute of an operation

Shape = tuple[int, int, int]  # m, n, k
Words = tuple[int, ...]  # an algorithm: cublasLtMatmulAlgo_t
AlgorithmWords = c_uint64 * WORDS


class LtError(RuntimeError):
    """A call of the library failed; CUDA itself may well be in order."""


class HeuristicResult(ctypes.Structure):
    """What the library says of an algorithm: cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("words", AlgorithmWords),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class Table:
    """The best algorithms for products of bf16, by (m, n, k)."""

    device: str
    version: int  # of cuBLASLt
    algorithms: dict[Shape, Words]

    @staticmethod
    def parse(text: str) -> Table:
        """Inverse of `dump`. ValueError: not a table."""
        try:
            raw = json.loads(text)
            table = Table(raw["device"], raw["cublaslt"], _algorithms(raw["algorithms"]))
            dtype = raw["dtype"]
        except (KeyError, TypeError, AttributeError) as failure:
            raise ValueError(f"not a table of algorithms: {failure!r}") from failure
        if dtype != str(DTYPE).removeprefix("torch."):
            raise ValueError(f"a table for {dtype}")
        return table

    def dump(self) -> str:
        """As JSON, with one line for each algorithm."""
        rows = [
            f'  "{m},{n},{k}": {json.dumps(words)}'
            for (m, n, k), words in sorted(self.algorithms.items())
        ]
        head = {
            "device": self.device,
            "cublaslt": self.version,
            "dtype": str(DTYPE).removeprefix("torch."),
        }
        lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        body = "{\n" + ",\n".join(rows) + "\n }" if rows else "{}"
        return "\n".join(["{", *lines, f' "algorithms": {body}', "}"]) + "\n"


def _algorithms(raw: dict[str, object]) -> dict[Shape, Words]:
    found = {}
    for key, words in raw.items():
        m, n, k = (int(each) for each in key.split(","))
        if not (isinstance(words, list) and len(words) == WORDS):
            raise ValueError(f"{key}: an algorithm has {WORDS} words")
        if not all(isinstance(each, int) and 0 <= each < 1 << 64 for each in words):
            raise ValueError(f"{key}: words are unsigned and have 64 bits")
        found[m, n, k] = tuple(words)
    return found


def table_of(device: str, folder: Path = TUNED) -> Table | None:
    """The table in `folder` for devices of this name, or None. ValueError: it is broken."""
    path = folder / f"{device.replace(' ', '_').replace('/', '_')}.json"
    if not path.exists():
        return None
    table = Table.parse(path.read_text())
    return table if table.device == device else None


class CublasLt:
    """The library and one handle, for one device.

    Args:
        library: as `loaded` finds it.
        device: a CUDA device.

    Raises:
        LtError: from any call of the library that fails.
    """

    def __init__(self, library: ctypes.CDLL, device: torch.device) -> None:
        self.library = library
        library.cublasLtGetVersion.restype = c_size_t
        pointers, size = [c_void_p] * 14, c_size_t
        library.cublasLtMatmul.argtypes = [*pointers, size, c_void_p]
        library.cublasLtMatrixLayoutCreate.argtypes = [c_void_p, c_int, c_uint64, c_uint64, c_int64]
        self.handle = c_void_p()
        with torch.cuda.device(device):
            self.call("cublasLtCreate", byref(self.handle))

    @staticmethod
    def loaded() -> ctypes.CDLL | None:
        """The library in this process, which torch loads on machines with CUDA."""
        major = (torch.version.cuda or "").partition(".")[0]
        try:
            return ctypes.CDLL(f"libcublasLt.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            return None

    @property
    def version(self) -> int:
        """As in its header: 130100 is 13.1.0."""
        return self.library.cublasLtGetVersion()

    def call(self, name: str, *arguments: object) -> None:
        """LtError unless the library's function returns success."""
        if status := getattr(self.library, name)(*arguments):
            raise LtError(f"{name}: cuBLAS status {status}")


class LtMatmul:
    """A product of one shape, described for the library, which is column-major.

    Args:
        lt: the library.
        shape: (m, n, k): x is [m, k], w [n, k] and contiguous, out [m, n] and contiguous.
        stride: elements between rows of x.
    """

    def __init__(self, lt: CublasLt, shape: Shape, stride: int) -> None:
        m, n, k = shape
        self.lt = lt
        self.operation = c_void_p()
        lt.call("cublasLtMatmulDescCreate", byref(self.operation), COMPUTE_F32, REAL_F32)
        set_attribute(lt, "cublasLtMatmulDesc", self.operation, TRANSPOSE_A, c_int(1))
        self.w, self.x, self.out = (
            self._layout(k, n, k),
            self._layout(k, m, stride),
            self._layout(n, m, n),
        )
        self._one, self._zero = c_float(1), c_float(0)

    def _layout(self, rows: int, columns: int, stride: int) -> c_void_p:
        layout = c_void_p()
        name = "cublasLtMatrixLayoutCreate"
        self.lt.call(name, byref(layout), REAL_BF16, rows, columns, stride)
        return layout

    def refusal(self, words: Words) -> str | None:
        """Why the algorithm cannot compute this product here without scratch; None: it can."""
        result = HeuristicResult()
        status = self.lt.library.cublasLtMatmulAlgoCheck(
            self.lt.handle, self.operation, self.w, self.x, self.out, self.out,
            byref(AlgorithmWords(*words)), byref(result),
        )  # fmt: skip
        if status or result.state:
            return f"refused with cuBLAS status {status or result.state}"
        return "need scratch" if result.workspace else None

    def run(self, x: Tensor, w: Tensor, out: Tensor, words: ctypes.Array[c_uint64]) -> None:
        """out[:] = x @ w.T on the current stream; allocates nothing: a CUDA graph may hold it."""
        self.lt.call(
            "cublasLtMatmul", self.lt.handle, self.operation,
            addressof(self._one), w.data_ptr(), self.w, x.data_ptr(), self.x,
            addressof(self._zero), out.data_ptr(), self.out, out.data_ptr(), self.out,
            addressof(words), None, 0,
            torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip


def set_attribute(
    lt: CublasLt, kind: str, of: c_void_p, attribute: int, value: c_int | c_uint32 | c_uint64
) -> None:
    """<kind>SetAttribute of the library."""
    size = c_size_t(ctypes.sizeof(value))
    lt.call(f"{kind}SetAttribute", of, c_int(attribute), byref(value), size)


class LtGemm:
    """The tuned products of one device, which has to be the current one.

    Args:
        lt: the library, of the version that the table is for.
        table: what was found best.
    """

    def __init__(self, lt: CublasLt, table: Table) -> None:
        self.lt, self.algorithms = lt, table.algorithms
        self.plans: dict[tuple[Shape, int], tuple[LtMatmul, ctypes.Array[c_uint64]] | None] = {}

    def __call__(self, x: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor | None:
        """x @ w.T, or None: not a product of the table.

        x: [m, k] bf16, rows contiguous; w: [n, k] bf16, contiguous; out: [m, n], contiguous and
        aligned, where the result goes; None: to new memory. Returns [m, n].
        """
        shape = x.shape[0], w.shape[0], w.shape[1]
        if shape not in self.algorithms or not _takes(x, w):
            return None
        key = shape, x.stride(0)
        try:
            if key not in self.plans:
                self.plans[key] = self._plan(*key)
            if (plan := self.plans[key]) is None:
                return None
            matmul, words = plan
            out = x.new_empty(shape[0], shape[1]) if out is None else out
            matmul.run(x, w, out, words)
        except LtError as refusal:
            log.warning("product of %s is torch's from now on: %s", shape, refusal)
            self.plans[key] = None
            return None
        return out

    def _plan(self, shape: Shape, stride: int) -> tuple[LtMatmul, ctypes.Array[c_uint64]] | None:
        matmul, words = LtMatmul(self.lt, shape, stride), self.algorithms[shape]
        return (matmul, AlgorithmWords(*words)) if matmul.refusal(words) is None else None


def _takes(x: Tensor, w: Tensor) -> bool:
    """Whether dtype, strides and alignment suit the table's algorithms."""
    return (
        x.dtype == w.dtype == DTYPE
        and x.stride(1) == 1
        and w.is_contiguous()
        and (x.stride(0) * x.itemsize) % ALIGNMENT == 0
        and x.data_ptr() % ALIGNMENT == w.data_ptr() % ALIGNMENT == 0
    )


@cache
def tuned_gemm(device: torch.device) -> LtGemm | None:
    """The tuned products of a CUDA device; None: no table for it and for this library."""
    table, library = table_of(torch.cuda.get_device_name(device)), CublasLt.loaded()
    if table is None or library is None or not table.algorithms:
        return None
    try:
        lt = CublasLt(library, device)
    except LtError as refusal:
        log.warning("no tuned products: %s", refusal)
        return None
    return LtGemm(lt, table) if lt.version == table.version else None
