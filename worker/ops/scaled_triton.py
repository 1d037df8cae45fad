"""Kernels of scaled.py: x into eight bits, and products of many rows.

norms_triton has what makes x and brings it into eight bits, skinny_triton products of few rows.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.ops.e4m3_triton import block_in_e4m3
from worker.ops.jit import INTERPRETED, enter, tl, triton
from worker.ops.launch import aligned, overlap
from worker.ops.norms_triton import MANY_ROWS, launch_rms_norm, launch_swiglu
from worker.ops.product import MAX_TILES, OWN_ROWS, workspace_of
from worker.ops.scaled import BLOCK, E4M3, strides_of
from worker.ops.scaled_library import agrees, multiplied, suits
from worker.ops.skinny_triton import DTYPES, SkinnyTile, choose, skinny_gemm

# Of x, that a program brings into eight bits. A GPU starts some 0.8 programs a ns, so that few rows
# each hold many up: 8192 x 4096 takes 40 us with 8, 25 with 32; 64 x 4096 takes 1.4 with 8.
ROWS, ROWS_OF_MANY = 8, 32


@triton.jit(do_not_specialize=["M", "stride_scales"])
def _eight_bits_kernel(
    x, values, scales, M, K, stride_x, stride_scales,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of columns, rows / ROWS)."""
    block = tl.program_id(0)
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    here = rows < M
    inside = here[:, None] & (at < K)[None, :]
    enter(PDL)
    x_tile = tl.load(x + rows[:, None] * stride_x + at[None, :], mask=inside, other=0.0)
    eight, scale = block_in_e4m3(x_tile, INTERPRETED)  # pyright: ignore
    tl.store(values + rows[:, None] * K + at[None, :], eight, mask=inside)
    tl.store(scales + block.to(tl.int64) * stride_scales + rows, scale, mask=here)


def _room(m: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For values [m, k] and their scales, whose columns begin at multiples of 16 bytes."""
    values = torch.empty(m, k, dtype=E4M3, device=device)
    scales = torch.empty(-(-k // BLOCK), aligned(m), dtype=torch.float32, device=device)
    return values, scales.t()[:m]


def eight_bits_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    assert x.stride(1) == 1
    values, scales = _room(m, k, x.device)
    rows = ROWS_OF_MANY if m >= MANY_ROWS else ROWS
    _eight_bits_kernel[(scales.shape[1], -(-m // rows))](
        x, values, scales, m, k, x.stride(0), scales.stride(1),
        **overlap(x, ROWS=rows, BLOCK=BLOCK, INTERPRETED=INTERPRETED, num_warps=4),
    )  # fmt: skip
    return values, scales


def add_rms_norm_eight_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    values, scales = _room(x.shape[0], x.shape[1], x.device)
    total = torch.empty_like(x) if total is None else total
    launch_rms_norm(x, residual, weight, values, total, eps, scales)
    return values, scales, total


def swiglu_eight_triton(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    m, width = gate_up.shape
    values, scales = _room(m, width // 2, gate_up.device)
    launch_swiglu(gate_up, values, scales)
    return values, scales


@triton.jit(do_not_specialize=["M", "stride_column"])
def _scaled_gemm_kernel(
    x, of_rows, w, of_weights, out, M, N, K, stride_column, stride_rows, stride_blocks, stride_out,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, GRAIN: tl.constexpr,
    STAGES: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of x · tiles of w); GROUP tiles of x follow one another over all tiles of w.

    x: [M, K], w: [N, K], contiguous; of_rows: [M, blocks of K], contiguous along M; of_weights:
    [N / GRAIN, blocks of K]; out: [M, N], rows contiguous. STAGES: see _skinny_gemm_kernel.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0) // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    within = tl.program_id(0) % (GROUP * tiles_n)
    tokens = (first + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows beyond the last read it again and are not stored.
    rows, lines = tl.minimum(tokens, M - 1).to(tl.int64), tl.minimum(cols, N - 1).to(tl.int64)
    ks = tl.arange(0, BLOCK)
    x_at, w_at = x + rows[:, None] * K + ks[None, :], w + lines[:, None] * K + ks[None, :]
    row_at, weight_at = of_rows + rows, of_weights + lines // GRAIN * stride_rows
    enter(PDL)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in tl.range(0, K, BLOCK, num_stages=STAGES):
        if EVEN_K:
            x_tile, w_tile = tl.load(x_at), tl.load(w_at)
        else:
            inside = (begin + ks < K)[None, :]
            x_tile = tl.load(x_at, mask=inside, other=0.0)
            w_tile = tl.load(w_at, mask=inside, other=0.0)
        if UPCAST:
            x_tile, w_tile = x_tile.to(tl.float32), w_tile.to(tl.float32)
        scale = tl.load(row_at)[:, None] * tl.load(weight_at)[None, :]
        acc += tl.dot(x_tile, tl.trans(w_tile)) * scale
        x_at += BLOCK
        w_at += BLOCK
        row_at += stride_column
        weight_at += stride_blocks
    out_at = out + tokens.to(tl.int64)[:, None] * stride_out + cols[None, :]
    stored = (tokens < M)[:, None] & (cols < N)[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=stored)


@dataclass(frozen=True, slots=True)
class ScaledTile:
    """How a product of many rows is cut into programs."""

    rows: int  # of x
    columns: int  # of the result
    num_warps: int
    num_stages: int


@cache
def choose_scaled(m: int, n: int) -> ScaledTile:
    """The tile for [m, n], measured on an H200; sums do not depend on it."""
    return ScaledTile(128, 64, 4, 4 if m * n >= 1 << 20 else 6)


def scaled_gemm(
    x: Tensor, of_rows: Tensor, w: Tensor, scales: Tensor, out: Tensor, tile: ScaledTile
) -> Tensor:
    """out[:] = (x · of_rows) (w · scales)ᵀ; a row's result depends on that row alone, bit for bit.

    x: [m, k] e4m3; of_rows: [m, blocks of k] f32, contiguous along m; w, scales: see
    scaled_product_ref.
    """
    (m, k), n = x.shape, len(w)
    assert x.dtype == w.dtype == E4M3
    assert x.is_contiguous()
    assert w.is_contiguous()
    assert out.stride(1) == 1
    assert of_rows.stride(0) == 1
    num_tiles = -(-m // tile.rows) * -(-n // tile.columns)
    _scaled_gemm_kernel[(num_tiles,)](
        x, of_rows, w, scales, out, m, n, k, of_rows.stride(1), *strides_of(scales), out.stride(0),
        **overlap(
            x, BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK=BLOCK, GRAIN=n // len(scales),
            STAGES=tile.num_stages, GROUP=8, EVEN_K=k % BLOCK == 0, UPCAST=INTERPRETED,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        ),
    )  # fmt: skip
    return out


def scaled_product_triton(
    x: Tensor,
    of_rows: Tensor,
    w: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    whole_blocks: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See scaled_product_ref.

    A row's result is the same in any batch of up to OWN_ROWS rows. Beyond it depends on the number
    of rows, too, if torch's library computes it.
    """
    m, n = len(x), len(w)
    if m > OWN_ROWS and whole_blocks and suits(w, scales, dtype) and agrees(x.device):
        product = multiplied(*_in_fours(x, of_rows), w, scales)[:m]
        return product if out is None else out.copy_(product)
    out = torch.empty(m, n, dtype=dtype, device=x.device) if out is None else out
    if m == 0:
        return out
    if (tile := _tile(m, w, dtype)) is not None:
        return _streamed(x, of_rows, w, scales, out, tile)
    return scaled_gemm(x, of_rows, w, scales, out, choose_scaled(m, n))


def scaled_gated_product_triton(
    x: Tensor,
    of_rows: Tensor,
    w: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    whole_blocks: bool = False,
) -> tuple[Tensor, Tensor]:
    m, n = len(x), len(w)
    tile = _tile(m, w, dtype, product_follows=True)
    if tile is None or not tile.gates(n):
        y = scaled_product_triton(x, of_rows, w, scales, dtype, whole_blocks)
        return swiglu_eight_triton(y)
    out = torch.empty(m, n // 2, dtype=dtype, device=x.device)
    return eight_bits_triton(_streamed(x, of_rows, w, scales, out, tile, gated=True))


def _in_fours(x: Tensor, of_rows: Tensor) -> tuple[Tensor, Tensor]:
    """The same, and rows up to a multiple of 4, whose products nobody reads."""
    if (more := -len(x) % 4) == 0:
        return x, of_rows
    longer = F.pad(x.view(torch.uint8), (0, 0, 0, more)).view(x.dtype)
    return longer, F.pad(of_rows.t(), (0, more)).t()


def _tile(
    m: int, w: Tensor, dtype: torch.dtype, *, product_follows: bool = False
) -> SkinnyTile | None:
    """That of the kernel for few rows; None: there are many."""
    if dtype not in DTYPES or not 0 < m <= OWN_ROWS:
        return None
    tile = choose(m, *w.shape, product_follows=product_follows, eight=True)
    return tile if tile.num_tiles(len(w)) <= MAX_TILES else None


def _streamed(
    x: Tensor,
    of_rows: Tensor,
    w: Tensor,
    scales: Tensor,
    out: Tensor,
    tile: SkinnyTile,
    *,
    gated: bool = False,
) -> Tensor:
    workspace, pdl = workspace_of(x.device), overlap(x)["PDL"]
    scaled = of_rows, scales
    return skinny_gemm(x, w, out, workspace, tile, pdl=pdl, gated=gated, scaled=scaled)
