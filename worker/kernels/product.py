"""x @ w.T for every linear layer: which kernel computes it is decided by shape and device alone."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.kernels import stream_k_gemm as stream_k
from worker.kernels.jit import HAS_TRITON
from worker.kernels.skinny_gemm import DTYPES, SkinnyTile, SkinnyWorkspace, choose, skinny_gemm
from worker.kernels.stream_k_gemm import StreamTile, stream_k_gemm
from worker.kernels.swiglu import swiglu

# Up to so many rows a product takes the time of reading its weights.
MAX_STREAMED_ROWS = 64
# Up to so many rows, one of `ROW_CLASSES`, a kernel of ours computes it. At 64 rows cuBLAS is as
# fast product by product, and 3 % slower in a chain of them, where its kernels do not overlap
# (benchmarks/results/gemm-h200.json). Beyond, it is faster.
OWN_ROWS = 64
ROW_CLASSES = (32, 64, 128, 256)
# (row class, n, k): what was measured to be best on an H200 (benchmarks.gemm --sweep prints such
# rows). Without one, up to 64 rows take `skinny_gemm.choose`, more take `stream_k_gemm.choose`.
MEASURED: dict[tuple[int, int, int], SkinnyTile | StreamTile] = {}
# Floats of workspace, by `OWN_ROWS`: two f32 tiles of 192 columns for each of 132 programs.
MAX_PARTIALS = {64: 4 << 20, 128: 7 << 20, 256: 13 << 20}[OWN_ROWS]
MAX_TILES = 1 << 13


def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ w.T + bias: few rows stream the weights through our own kernels, the rest is torch's.

    x: [m, k]; w: [n, k] of x's dtype; bias: [n] or None; returns [m, n]. A row's result depends on
    the row and on the class of the number of rows: up to 64 where nothing else was measured, and
    those of `ROW_CLASSES` up to `OWN_ROWS`. Not for two streams at a time: the kernels' scratch is
    one a device.
    """
    tile = None if bias is not None else _tile(x, w)
    if tile is None:
        return F.linear(x, w, bias)
    out = x.new_empty(x.shape[0], w.shape[0])
    return multiply(x, w, out, _workspace(x.device), tile, pdl=True)


def gated_product(x: Tensor, w: Tensor) -> Tensor:
    """swiglu(product(x, w)), bit for bit; of few rows by one kernel.

    x: [m, k]; w: [2 · width, k] of x's dtype, gates before ups; returns [m, width].
    """
    (m, k), n = x.shape, w.shape[0]
    tile = _tile(x, w)
    if not isinstance(tile, SkinnyTile) or not tile.gates(n):
        return swiglu(product(x, w))
    if tile == choose(m, n, k):  # no activation comes between it and the next product
        tile = choose(m, n, k, product_follows=True)
    out = x.new_empty(m, n // 2)
    return skinny_gemm(x, w, out, _workspace(x.device), tile, pdl=True, gated=True)


def multiply(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    workspace: SkinnyWorkspace,
    tile: SkinnyTile | StreamTile,
    *,
    pdl: bool,
) -> Tensor:
    """out[:] = x @ w.T by the kernel that `tile` is of."""
    if isinstance(tile, StreamTile):
        return stream_k_gemm(x, w, out, workspace, tile, pdl=pdl)
    return skinny_gemm(x, w, out, workspace, tile, pdl=pdl)


@cache
def tile_for(m: int, n: int, k: int, num_sms: int) -> SkinnyTile | StreamTile:
    """What computes x: [m, k] times w: [n, k] on a device of so many SMs; m <= 256."""
    rows = next(rows for rows in ROW_CLASSES if m <= rows)
    measured = MEASURED.get((rows, n, k))
    if measured is not None:
        return measured
    return choose(m, n, k) if rows <= 64 else stream_k.choose(rows, n, k, num_sms)


def _tile(x: Tensor, w: Tensor) -> SkinnyTile | StreamTile | None:
    """None: torch's product."""
    m, (n, k) = x.shape[0], w.shape
    if not (HAS_TRITON and x.is_cuda and x.dtype in DTYPES and 0 < m <= OWN_ROWS):
        return None
    num_sms = _num_sms_with_dependent_launch(x.device)
    if not num_sms:
        return None
    tile = tile_for(m, n, k, num_sms)
    if tile.num_partials(n) > MAX_PARTIALS or tile.num_tiles(n) > MAX_TILES:
        return None
    return None if isinstance(tile, StreamTile) and not stream_k.fits(x, w) else tile


@cache
def _num_sms_with_dependent_launch(device: torch.device) -> int:
    """0 before Hopper, whose kernels start while the one before ends."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if properties.major >= 9 else 0


@cache
def _workspace(device: torch.device) -> SkinnyWorkspace:
    return SkinnyWorkspace(
        torch.empty(MAX_PARTIALS, dtype=torch.float32, device=device),
        torch.zeros(MAX_TILES, dtype=torch.int32, device=device),
    )
