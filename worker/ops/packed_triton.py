"""The kernel of packed.py: weights in four bits are the left operand, unpacked in registers.

Operands are those of the definition, exact in 16 bits: of integers (q - zero), whose groups' sums
are scaled in f32; of e2m1 the code times its group's scale. So a product differs from the
definition by the order of its f32 additions alone. That order follows from the weights' shape up to
OWN_ROWS rows of x, and a row's result depends on that row alone, bit for bit.

Tiles are chosen by shape, and not tuned yet.
"""

import math
from functools import cache

import torch
from torch import Tensor

from worker.ops.jit import INTERPRETED, enter, overlap, power_of_two, tl, triton
from worker.ops.packed import packed_product_ref
from worker.ops.product import OWN_ROWS, workspace_of
from worker.ops.scaled import E4M3
from worker.ops.skinny_triton import DTYPES, SkinnyTile, store_sums

# What the numbers are, by the dtype of their scales; other dtypes: integers.
INTEGERS, KINDS = 0, {torch.uint8: 1, E4M3: 2}
PROGRAMS = 132  # of a product with few rows, at least: a multiprocessor of an H200 has one


@triton.jit
def _of_bits(bits, dtype):
    """What 16 bits are as numbers of `dtype`; bf16 is f32 in the interpreter, which has none."""
    if INTERPRETED and dtype == tl.bfloat16:
        return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return bits.to(tl.uint16).to(dtype, bitcast=True)


@triton.jit
def _plus_power(q, dtype):
    """128 + q in bf16, 1024 + q in f16, of q below 16."""
    power = 0x4300 if dtype == tl.bfloat16 else 0x6400
    return _of_bits(q.to(tl.uint16) | power, dtype)  # pyright: ignore


@triton.jit
def _code(q, dtype):
    """e2m1's number: sign, exponent and the one bit behind it where `dtype` has its own."""
    place = 6 if dtype == tl.bfloat16 else 9
    bias = 2.0**126 if dtype == tl.bfloat16 else 2.0**14
    wide = q.to(tl.uint16)
    return _of_bits((wide & 8) << 12 | (wide & 7) << place, dtype) * bias  # pyright: ignore


@triton.jit
def multiply_packed(
    acc, x_tile, rows, begin, values, scales, zeros, K, dtype,
    BLOCK_K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """acc + the numbers of `rows` of BLOCK_K columns from `begin` on, times x_tile transposed.

    acc: f32 [rows, tokens]; x_tile: [tokens, BLOCK_K], zero beyond K; values, scales, zeros: see
    packed.worth, contiguous. GROUP: columns of a scale, which of integers no step passes; 0: all.
    """
    ROWS: tl.constexpr = acc.shape[0]
    at = begin // 2 + tl.arange(0, BLOCK_K // 2)
    spot = values + rows[:, None] * ((K + 1) // 2) + at[None, :]
    two = tl.load(spot) if EVEN_K else tl.load(spot, mask=(2 * at < K)[None, :], other=0)
    q = tl.reshape(tl.join(two & 15, two >> 4), (ROWS, BLOCK_K))
    if KIND == 0:
        group, num_groups = begin * 0, 1
        if GROUP:
            group, num_groups = begin // GROUP, K // GROUP
        of_group = rows * num_groups + group
        there = group < num_groups
        if zeros is None:
            zero = tl.full((ROWS,), 8, tl.uint8)
        else:
            zero = tl.load(zeros + of_group, mask=there, other=8)
        numbers = _plus_power(q, dtype) - _plus_power(zero, dtype)[:, None]  # pyright: ignore
        scale = tl.load(scales + of_group, mask=there, other=0.0).to(tl.float32)
    else:
        NUM: tl.constexpr = BLOCK_K // GROUP
        groups = begin // GROUP + tl.arange(0, NUM)
        of_groups = scales + rows[:, None] * (K // GROUP) + groups[None, :]
        inside = (groups * GROUP < K)[None, :]
        if KIND == 1:  # a power of two: the bits of an exponent, or the largest subnormal's
            bits = tl.load(of_groups, mask=inside, other=0).to(tl.uint16)
            steps = _of_bits(tl.where(bits == 0, 64, bits << 7), dtype)  # pyright: ignore
        else:
            steps = tl.load(of_groups, mask=inside, other=0.0).to(
                tl.float32 if INTERPRETED else dtype
            )
        codes = tl.reshape(_code(q, dtype), (ROWS, NUM, GROUP))  # pyright: ignore
        numbers = tl.reshape(codes * steps[:, :, None], (ROWS, BLOCK_K))
    if INTERPRETED:
        numbers, x_tile = numbers.to(tl.float32), x_tile.to(tl.float32)
    if KIND == 0:
        return acc + tl.dot(numbers, tl.trans(x_tile)) * scale[:, None]
    return tl.dot(numbers, tl.trans(x_tile), acc)


@triton.jit(do_not_specialize=["M"])
def _packed_gemm_kernel(
    x, values, scales, zeros, factors, out, partial, arrivals, M, N, K, stride_x, stride_out,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
    EVEN_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the weights' rows, SPLIT, tiles of x, of which there is one if SPLIT > 1).

    x: [M, K], out: [M, N], rows contiguous; STEPS, partial, arrivals: see _skinny_gemm_kernel.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows of weights beyond N read the last one again and are not stored.
    rows = tl.minimum(cols, N - 1).to(tl.int64)
    tokens = (tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    here = (tokens < M)[:, None]
    enter(PDL)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        begin = (part * STEPS + step) * BLOCK_K
        ks = begin + tl.arange(0, BLOCK_K)
        known = here if EVEN_K else here & (ks < K)[None, :]
        x_tile = tl.load(x + tokens[:, None] * stride_x + ks[None, :], mask=known, other=0.0)
        acc = multiply_packed(  # pyright: ignore
            acc, x_tile, rows, begin, values, scales, zeros, K, out.dtype.element_ty,
            BLOCK_K, KIND, GROUP, EVEN_K,
        )  # fmt: skip
    if factors is not None:
        acc *= tl.load(factors + rows)[:, None]
    out_at = out + tokens[:, None] * stride_out + cols[None, :]
    stored = here & (cols < N)[None, :]
    store_sums(  # pyright: ignore
        tl.trans(acc), out_at, stored, here, partial, arrivals, tile, part, BLOCK_M, BLOCK_N, SPLIT
    )


@cache
def choose_packed(m: int, n: int, k: int, block_k: int) -> SkinnyTile:
    """The tile for x: [m, k] and weights [n, k]; up to OWN_ROWS rows m cuts no sum otherwise."""
    tokens = power_of_two(min(max(m, 16), 128))
    split, rows = 1, 128 if tokens == 128 else 64
    while m <= OWN_ROWS and -(-n // rows) * split < PROGRAMS and split < 8 and 256 * split <= k:
        split *= 2
    return SkinnyTile(tokens, rows, block_k, split, 8 if tokens == 128 else 4, 4, trigger=0)


def steps_of(scales: Tensor, k: int) -> tuple[int, int, int]:
    """(KIND, GROUP, most columns of a step); scales: [.., groups] of k columns."""
    kind, groups = KINDS.get(scales.dtype, INTEGERS), scales.shape[-1]
    group = 0 if groups == 1 and kind == INTEGERS else k // groups
    return kind, group, math.gcd(128, group) if kind == INTEGERS and group else 128


def takes(x: Tensor, scales: Tensor) -> bool:
    """Whether kernels do: f16 has too few exponents for e8m0's. x: [m, k]; scales: [.., groups]."""
    least = (torch.bfloat16,) if scales.dtype == torch.uint8 else DTYPES
    return x.dtype in least


def packed_gemm(
    x: Tensor,
    held: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    out: Tensor,
    tile: SkinnyTile,
) -> Tensor:
    """out[:] = x times the transposed numbers; x: [m, k], out: [m, n], rows contiguous.

    held: values, scales, zeros, factors, see packed.worth; contiguous.
    """
    (m, k), (values, scales, zeros, factors) = x.shape, held
    n, (kind, group, _) = len(values), steps_of(scales, k)
    assert takes(x, scales)
    assert x.stride(1) == out.stride(1) == 1
    assert all(part is None or part.is_contiguous() for part in held)
    assert tile.split == 1 or m <= tile.block_m
    steps, workspace = -(-k // (tile.block_k * tile.split)), workspace_of(x.device)
    _packed_gemm_kernel[(tile.num_tiles(n), tile.split, -(-m // tile.block_m))](
        x, values, scales, zeros, factors, out, workspace.partial, workspace.arrivals,
        m, n, k, x.stride(0), out.stride(0),
        **overlap(
            x, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, KIND=kind,
            GROUP=group, SPLIT=tile.split, STEPS=steps, STAGES=tile.num_stages,
            EVEN_K=steps * tile.block_k * tile.split == k, num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        ),
    )  # fmt: skip
    return out


def packed_product_triton(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    factors: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See packed_product_ref, which computes what no kernel takes."""
    if not takes(x, scales):
        return packed_product_ref(x, values, scales, zeros, factors, out)
    (m, k), n = x.shape, len(values)
    out = x.new_empty(m, n) if out is None else out
    if m == 0:
        return out
    tile = choose_packed(m, n, k, steps_of(scales, k)[2])
    return packed_gemm(x, (values, scales, zeros, factors), out, tile)
