"""x @ w.T by the algorithm of cuBLASLt that a search found best for one shape on one kind of card.

The library's own heuristic often misses the best algorithm for products of 80 to 256 rows (ADR
0010). `tuned/<device>.json`, of which `benchmarks/results/kernels.md` says how it was made, names a
better one for exact (m, n, k). An algorithm is eight words that only one version of the
library understands. So there is no tuned product for other versions, devices or shapes, nor where
the library refuses an algorithm. None needs scratch, so streams share nothing.

The library is the one that torch has loaded. The constants below are those of its C header.
"""

import ctypes
import logging
import os
from ctypes import addressof, byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from torch import Tensor

log = logging.getLogger("kvlane.kernels")

TUNED = Path(__file__).parent / "tuned"
DTYPE = torch.bfloat16
ALIGNMENT = 16  # bytes, of rows and of the first element
COMPUTE_F32, REAL_F32, REAL_BF16 = 68, 0, 14
TRANSPOSE_A = 3  # attribute of an operation

Shape = tuple[int, int, int]  # m, n, k
Word = Annotated[int, msgspec.Meta(ge=0)]
Words = tuple[Word, Word, Word, Word, Word, Word, Word, Word]  # cublasLtMatmulAlgo_t
AlgorithmWords = c_uint64 * 8


class LtError(RuntimeError):
    """A call of the library failed; CUDA itself may well be in order."""


class HeuristicResult(ctypes.Structure):
    """The library's answer about an algorithm: cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("words", AlgorithmWords),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Table(msgspec.Struct, frozen=True):
    """A file of the best algorithms for products on one kind of device."""

    device: str
    cublaslt: int  # version
    dtype: Literal["bfloat16"]
    algorithms: dict[str, Words]  # by "m,n,k"


def algorithms_for(device: str, version: int, folder: Path = TUNED) -> dict[Shape, Words]:
    """The table for devices of this name and this cuBLASLt, or {}; ValueError: a broken file."""
    path = folder / f"{device.replace(' ', '_').replace('/', '_')}.json"
    if not path.exists():
        return {}
    table = msgspec.json.decode(path.read_bytes(), type=Table)
    if (table.device, table.cublaslt) != (device, version):
        return {}
    algorithms: dict[Shape, Words] = {}
    for key, words in table.algorithms.items():
        m, n, k = map(int, key.split(","))
        algorithms[m, n, k] = words
    return algorithms


class CublasLt:
    """The library, as `loaded` finds it, and one handle; LtError from any call that fails."""

    def __init__(self, library: ctypes.CDLL, device: torch.device) -> None:
        self.library = library
        library.cublasLtMatmul.argtypes = [*[c_void_p] * 14, c_size_t, c_void_p]
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

    def call(self, name: str, *arguments: object) -> None:
        """LtError unless the library's function returns success."""
        if status := getattr(self.library, name)(*arguments):
            raise LtError(f"{name}: cuBLAS status {status}")


class LtMatmul:
    """A product of one shape, described for the library, which is column-major.

    x: [m, k], rows `stride` elements apart; w: [n, k]; out: [m, n]; both contiguous.
    """

    def __init__(self, lt: CublasLt, shape: Shape, stride: int) -> None:
        m, n, k = shape
        self.lt = lt
        self.operation = c_void_p()
        lt.call("cublasLtMatmulDescCreate", byref(self.operation), COMPUTE_F32, REAL_F32)
        transposed = TRANSPOSE_A, byref(c_int(1)), c_size_t(ctypes.sizeof(c_int))
        lt.call("cublasLtMatmulDescSetAttribute", self.operation, *transposed)
        layouts = (k, n, k), (k, m, stride), (n, m, n)
        self.w, self.x, self.out = (self._layout(*layout) for layout in layouts)
        self._one, self._zero = c_float(1), c_float(0)

    def _layout(self, rows: int, columns: int, stride: int) -> c_void_p:
        layout = c_void_p()
        name = "cublasLtMatrixLayoutCreate"
        self.lt.call(name, byref(layout), REAL_BF16, rows, columns, stride)
        return layout

    def takes(self, words: Words) -> bool:
        """Whether the algorithm can compute this product here without scratch."""
        result = HeuristicResult()
        status = self.lt.library.cublasLtMatmulAlgoCheck(
            self.lt.handle, self.operation, self.w, self.x, self.out, self.out,
            byref(AlgorithmWords(*words)), byref(result),
        )  # fmt: skip
        return not (status or result.state or result.workspace)

    def run(self, x: Tensor, w: Tensor, out: Tensor, words: ctypes.Array[c_uint64]) -> None:
        """out[:] = x @ w.T on the current stream; allocates nothing: a CUDA graph may hold it."""
        self.lt.call(
            "cublasLtMatmul", self.lt.handle, self.operation,
            addressof(self._one), w.data_ptr(), self.w, x.data_ptr(), self.x,
            addressof(self._zero), out.data_ptr(), self.out, out.data_ptr(), self.out,
            addressof(words), None, 0,
            torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip


class LtGemm:
    """The tuned products of one device, which has to be the current one."""

    def __init__(self, lt: CublasLt, algorithms: dict[Shape, Words]) -> None:
        self.lt, self.algorithms = lt, algorithms
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
                matmul, words = LtMatmul(self.lt, *key), self.algorithms[shape]
                taken = matmul.takes(words)
                self.plans[key] = (matmul, AlgorithmWords(*words)) if taken else None
            if (plan := self.plans[key]) is None:
                return None
            out = x.new_empty(shape[0], shape[1]) if out is None else out
            plan[0].run(x, w, out, plan[1])
        except LtError as refusal:
            log.warning("product of %s is torch's from now on: %s", shape, refusal)
            self.plans[key] = None
            return None
        return out


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
    if (library := CublasLt.loaded()) is None:
        return None
    library.cublasLtGetVersion.restype = c_size_t
    version = library.cublasLtGetVersion()  # as in its header: 130100 is 13.1.0
    algorithms = algorithms_for(torch.cuda.get_device_name(device), version)
    try:
        return LtGemm(CublasLt(library, device), algorithms) if algorithms else None
    except LtError as refusal:
        log.warning("no tuned products: %s", refusal)
        return None
