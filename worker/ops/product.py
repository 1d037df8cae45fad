"""x @ w.T for every linear layer: which kernel computes it is decided by shape and device alone."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.ops.jit import HAS_TRITON, has_dependent_launch
from worker.ops.lt_gemm import tuned_gemm
from worker.ops.norms import swiglu
from worker.ops.scaled import E4M3
from worker.ops.skinny_triton import DTYPES, SkinnyTile, SkinnyWorkspace, choose, skinny_gemm

# Up to so many rows a product takes the time of reading its weights.
MAX_STREAMED_ROWS = 64
# Up to so many rows our own kernel computes it. At 64 rows on an H200 cuBLAS is as fast product by
# product, but 3 % slower in a chain, where its kernels do not overlap. At 96 and 128 rows the
# libraries are 4 to 9 % faster than our best tiles (benchmarks/results/kernels.md, ADR 0010).
OWN_ROWS = 64
MAX_PARTIALS, MAX_BOXED_PARTIALS = 1 << 21, 1 << 22  # floats: the most of `choose`, choose_boxed
MAX_TILES = 1 << 13


def product(x: Tensor, w: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x @ w.T + bias: by our own kernel for few rows, otherwise by a library.

    x: [m, k]; w: [n, k] of x's dtype; bias: [n] or None; out: [m, n], contiguous, where the result
    goes, bit for bit the same; None: to new memory. Returns [m, n]. Up to `OWN_ROWS` rows a row's
    result depends on that row alone, beyond also on the number of rows. A device has one scratch,
    so only one stream at a time may call this.
    """
    if bias is not None:
        return F.linear(x, w, bias) if out is None else torch.addmm(bias, x, w.t(), out=out)
    if (tile := _tile(x, w)) is not None:
        out = x.new_empty(x.shape[0], w.shape[0]) if out is None else out
        return skinny_gemm(x, w, out, workspace_of(x.device), tile, pdl=True)
    tuned = tuned_gemm(x.device) if x.is_cuda and x.shape[0] > OWN_ROWS else None
    if tuned is not None and (result := tuned(x, w, out)) is not None:
        return result
    return F.linear(x, w) if out is None else torch.mm(x, w.t(), out=out)


def gated_product(x: Tensor, w: Tensor) -> Tensor:
    """swiglu(product(x, w)), bit for bit; for few rows by one kernel.

    x: [m, k]; w: [2 · width, k] of x's dtype, gates before ups; returns [m, width].
    """
    m, n = x.shape[0], w.shape[0]
    tile = _tile(x, w, product_follows=True)  # no activation comes between it and the next product
    if tile is None or not tile.gates(n):
        return swiglu(product(x, w))
    out = x.new_empty(m, n // 2)
    return skinny_gemm(x, w, out, workspace_of(x.device), tile, pdl=True, gated=True)


def _tile(x: Tensor, w: Tensor, *, product_follows: bool = False) -> SkinnyTile | None:
    """The tile of our own kernel; None: the product is a library's."""
    if not (x.is_cuda and HAS_TRITON and has_dependent_launch(x)):
        return None
    return tile_for(len(x), w, x.dtype, product_follows=product_follows)


def tile_for(
    m: int, w: Tensor, dtype: torch.dtype, *, product_follows: bool = False
) -> SkinnyTile | None:
    """The tile for m rows of x, w: [n, k] and a result of `dtype`; None: there are too many."""
    if dtype not in DTYPES or not 0 < m <= OWN_ROWS:
        return None
    tile = choose(m, *w.shape, product_follows=product_follows, eight=w.dtype == E4M3)
    return tile if tile.num_tiles(len(w)) <= MAX_TILES else None


@cache
def workspace_of(device: torch.device) -> SkinnyWorkspace:
    """The one scratch of a device."""
    return SkinnyWorkspace(
        torch.empty(MAX_BOXED_PARTIALS, dtype=torch.float32, device=device),
        torch.zeros(MAX_TILES, dtype=torch.int32, device=device),
    )
