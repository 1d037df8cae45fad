"""The kernel of packed.py: weights in four bits are the left operand, unpacked in registers.

Operands are those of the definition, exact in 16 bits: of integers (q - zero), whose groups' sums
are scaled in f32; of e2m1 the code times its group's scale. So a product differs from the
definition by the order of its f32 additions alone. That order follows from the weights' shape up to
OWN_ROWS rows of x, and a row's result depends on that row alone, bit for bit.

Tiles are chosen by shape: on an H200 two groups of four warps a tile are ahead of one.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from worker.ops.jit import INTERPRETED, enter, overlap, power_of_two, tl, triton
from worker.ops.packed import packed_product_ref
from worker.ops.product import OWN_ROWS, workspace_of
from worker.ops.scaled import E4M3
from worker.ops.skinny_triton import DTYPES, SkinnyTile, store_sums

# What the numbers are, by the dtype of their scales; other dtypes: integers.
INTEGERS, KINDS = 0, {torch.uint8: 1, E4M3: 2}
PROGRAMS = 192  # of a product with few rows, at least: more than an H200 has multiprocessors


@triton.jit
def _of_bits(bits, dtype):
    """What 16 bits are as numbers of `dtype`; bf16 is f32 in the interpreter, which has none."""
    if INTERPRETED and dtype == tl.bfloat16:
        return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return bits.to(tl.uint16).to(dtype, bitcast=True)


def _places(text: str, **words: str) -> Any:
    """A constant of kernels: assembly for all four bits of 16."""
    for name, word in words.items():
        text = text.replace(name, word)
    return tl.constexpr(tuple(text.replace("PLACE", str(4 * place)) for place in range(4)))


# Of 16 bits, two of which are in a register, four as a number of 16: 128 + them in bf16,
# 1024 + them in f16; or as a code of e2m1, whose exponent lacks a bias.
INTEGER = "{ .reg .b32 t; shr.b32 t, $1, PLACE; lop3.b32 $0, t, 0x000F000F, POWER, 0xEA; }"
CODE = (
    "{ .reg .b32 s, t; shr.b32 t, $1, PLACE; shl.b32 s, t, 12; and.b32 s, s, 0x80008000; "
    "shl.b32 t, t, LEFT; lop3.b32 $0, t, MASK, s, 0xEA; }"
)
INTEGER_BF16 = _places(INTEGER, POWER="0x43004300")
INTEGER_F16 = _places(INTEGER, POWER="0x64006400")
CODE_BF16 = _places(CODE, MASK="0x01C001C0", LEFT="6")
CODE_F16 = _places(CODE, MASK="0x0E000E00", LEFT="9")


@triton.jit
def _plus_power(q, dtype):
    """128 + q in bf16, 1024 + q in f16, of q below 16."""
    power = 0x4300 if dtype == tl.bfloat16 else 0x6400
    return _of_bits(q.to(tl.uint16) | power, dtype)  # pyright: ignore


@triton.jit
def _number(four, place: tl.constexpr, dtype, KIND: tl.constexpr):
    """What four bits of 16 are, but for zero points and e2m1's bias."""
    if INTERPRETED:
        four = four >> (4 * place)
    if KIND == 0:
        if INTERPRETED:
            return _plus_power(four & 15, dtype)  # pyright: ignore
        ASM: tl.constexpr = INTEGER_BF16 if dtype == tl.bfloat16 else INTEGER_F16
    else:
        if INTERPRETED:
            left = 6 if dtype == tl.bfloat16 else 9
            return _of_bits((four & 8) << 12 | (four & 7) << left, dtype)  # pyright: ignore
        ASM: tl.constexpr = CODE_BF16 if dtype == tl.bfloat16 else CODE_F16
    found = tl.inline_asm_elementwise(ASM[place], "=r,r", [four], tl.uint16, is_pure=True, pack=2)
    return _of_bits(found, dtype)  # pyright: ignore


@triton.jit
def _steps(
    scales, rows, first, K, dtype, NUM: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr
):
    """What a quarter's numbers are multiplied by, [rows, NUM · 8]; first: its column of line 0."""
    at = first + tl.arange(0, NUM) * 32
    inside = (at < K)[None, :]
    spot = scales + rows[:, None] * (K // GROUP) + (at // GROUP)[None, :]
    if KIND == 1:  # a power of two: the bits of an exponent, or the largest subnormal's
        bits = tl.load(spot, mask=inside, other=0).to(tl.uint16)
        found = _of_bits(tl.where(bits == 0, 64, bits << 7), dtype)  # pyright: ignore
    else:
        found = tl.load(spot, mask=inside, other=0.0).to(tl.float32 if INTERPRETED else dtype)
    ROWS: tl.constexpr = found.shape[0]
    return tl.reshape(tl.broadcast_to(found[:, :, None], (ROWS, NUM, 8)), (ROWS, NUM * 8))


@triton.jit
def _dot(numbers, x_tile, sums):
    """sums + numbers [rows, columns] times x_tile [tokens, columns] transposed."""
    if INTERPRETED:
        numbers, x_tile = numbers.to(tl.float32), x_tile.to(tl.float32)
    return tl.dot(numbers, tl.trans(x_tile), sums)


@triton.jit
def multiply_packed(
    acc, x_at, here, rows, begin, values, scales, zeros, K, dtype,
    BLOCK_K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """acc + the numbers of `rows` of BLOCK_K columns from `begin` on, times x transposed.

    acc: f32 [rows, tokens]; x_at: [tokens, 1], of columns 0; here: [tokens, 1], which there are;
    values: u16, two bytes of packed.worth's; scales, zeros: see there. GROUP: columns of a scale,
    which of integers no step passes; 0: all.
    """
    ROWS: tl.constexpr = acc.shape[0]
    NUM: tl.constexpr = BLOCK_K // 32
    of_line = tl.arange(0, NUM * 8)
    column = begin + (of_line // 8 * 32 + of_line % 8)
    spot = values + rows[:, None] * ((K + 31) // 32 * 8) + (begin // 4 + of_line)[None, :]
    four = tl.load(spot) if EVEN_K else tl.load(spot, mask=(column < K)[None, :], other=0)
    if KIND == 0:
        group, num_groups = begin * 0, 1
        if GROUP:
            group, num_groups = begin // GROUP, K // GROUP
        of_group = rows * num_groups + group
        there = group < num_groups
        if zeros is None:
            zero = tl.full((ROWS,), 8, tl.uint16)
        else:
            zero = tl.load(zeros + of_group, mask=there, other=8).to(tl.uint16)
        less = _plus_power(zero, dtype)[:, None]  # pyright: ignore
        scale = tl.load(scales + of_group, mask=there, other=0.0).to(tl.float32)[:, None]
        sums = tl.zeros(acc.shape, tl.float32)
    else:
        unit = 2.0**126 if dtype == tl.bfloat16 else 2.0**14
        bias = tl.full((1, 1), unit, tl.float32 if INTERPRETED and dtype == tl.bfloat16 else dtype)
        steps = _steps(scales, rows, begin, K, dtype, NUM, GROUP, KIND)  # pyright: ignore
        sums = acc
    if NUM == 1:  # a step of 32 columns: too few for products of quarters
        pair = tl.join(_number(four, 0, dtype, KIND), _number(four, 2, dtype, KIND))  # pyright: ignore
        other = tl.join(_number(four, 1, dtype, KIND), _number(four, 3, dtype, KIND))  # pyright: ignore
        numbers = tl.reshape(tl.permute(tl.join(pair, other), (0, 2, 3, 1)), (ROWS, 32)) - less
        at = begin + tl.arange(0, 32)
        known = here if EVEN_K else here & (at < K)[None, :]
        x_tile = tl.load(x_at + at[None, :], mask=known, other=0.0)
        sums = _dot(numbers, x_tile, sums)  # pyright: ignore
    for place in tl.static_range(4 if NUM > 1 else 0):
        at = column + 8 * place
        known = here if EVEN_K else here & (at < K)[None, :]
        x_tile = tl.load(x_at + at[None, :], mask=known, other=0.0)
        numbers = _number(four, place, dtype, KIND)  # pyright: ignore
        if KIND == 0:
            numbers -= less
        else:
            if GROUP == 16 and place == 2:
                steps = _steps(scales, rows, begin + 16, K, dtype, NUM, GROUP, KIND)  # pyright: ignore
            numbers = numbers * bias * steps
        sums = _dot(numbers, x_tile, sums)  # pyright: ignore
    return acc + sums * scale if KIND == 0 else sums


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
    x_rows = x + tokens[:, None] * stride_x
    enter(PDL)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        acc = multiply_packed(  # pyright: ignore
            acc, x_rows, here, rows, (part * STEPS + step) * BLOCK_K, values, scales, zeros, K,
            out.dtype.element_ty, BLOCK_K, KIND, GROUP, EVEN_K,
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
    tokens, rows, split = power_of_two(min(max(m, 16), 128)), 128, 1
    while m <= OWN_ROWS and -(-n // rows) * split < PROGRAMS and split < 8 and 256 * split <= k:
        split *= 2
    return SkinnyTile(tokens, rows, block_k, split, 8, 4, trigger=0)


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
        x, values.view(torch.uint16), scales, zeros, factors, out,
        workspace.partial, workspace.arrivals, m, n, k, x.stride(0), out.stride(0),
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
