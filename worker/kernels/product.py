"""x @ w.T for every linear layer: which kernel computes it is decided by shape and device alone."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.kernels.jit import HAS_TRITON
from worker.kernels.skinny_gemm import DTYPES, SkinnyWorkspace, choose, skinny_gemm

# At 64 rows cuBLAS is as fast product by product, and 3 % slower in a chain of them, where its
# kernels do not overlap (benchmarks/results/gemm-h200.json). Beyond, it is faster.
MAX_STREAMED_ROWS = 64
MAX_PARTIALS = 1 << 20  # floats of workspace
MAX_TILES = 1 << 13


def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ w.T + bias: few rows stream the weights through our own kernel, the rest is torch's.

    x: [m, k]; w: [n, k] of x's dtype; bias: [n] or None; returns [m, n]. A row's result depends on
    the row and on which side of `MAX_STREAMED_ROWS` the number of rows is. Not for two streams at
    a time: the kernel's scratch is one a device.
    """
    if bias is not None or not _is_streamed(x, w):
        return F.linear(x, w, bias)
    out = x.new_empty(x.shape[0], w.shape[0])
    return skinny_gemm(x, w, out, _workspace(x.device), pdl=True)


def _is_streamed(x: Tensor, w: Tensor) -> bool:
    if not (HAS_TRITON and x.is_cuda and x.dtype in DTYPES and 0 < x.shape[0] <= MAX_STREAMED_ROWS):
        return False
    tile = choose(x.shape[0], w.shape[0], w.shape[1])
    fits = tile.num_partials(w.shape[0]) <= MAX_PARTIALS and tile.num_tiles(w.shape[0]) <= MAX_TILES
    return fits and _has_dependent_launch(x.device)


@cache
def _has_dependent_launch(device: torch.device) -> bool:
    """Hopper and later start a kernel while the one before it ends."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _workspace(device: torch.device) -> SkinnyWorkspace:
    return SkinnyWorkspace(
        torch.empty(MAX_PARTIALS, dtype=torch.float32, device=device),
        torch.zeros(MAX_TILES, dtype=torch.int32, device=device),
    )
