"""The kernel of packed.py: weights in four bits are the left operand, unpacked in registers.

Operands are those of the definition, exact in 16 bits: of integers (q - zero), whose groups' sums
are scaled in f32; of e2m1 the code times its group's scale. So a product differs from the
definition by the order of its f32 additions alone. That order follows from the weights' shape up to
OWN_ROWS rows of x, and a row's result depends on that row alone, bit for bit.
"""

from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from worker.ops.jit import (
    INTERPRETED,
    enter,
    gdc_launch_dependents,
    gdc_wait,
    overlap,
    tl,
    triton,
)
from worker.ops.norms import swiglu
from worker.ops.packed import LINE, SIGNS, packed_product_ref, padded_groups
from worker.ops.product import MAX_PARTIALS, OWN_ROWS, product, workspace_of
from worker.ops.scaled import E4M3
from worker.ops.skinny_triton import AT_ONCE, DTYPES, SkinnyTile, gated_sums, store_sums

# (values, scales, zeros, factors), see packed.worth; contiguous.
Held: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
# What the numbers are, by the dtype of their scales; other dtypes: integers.
INTEGERS, KINDS = 0, {torch.uint8: 1, E4M3: 2}
SIGN_AT = tl.constexpr(SIGNS)
TILE_ROWS, BLOCK_K = 64, 128  # of weights; of a program there are up to 64 rows of x
UNPACKED = 16, 256  # rows of weights and columns of a program that writes numbers
LIBRARY_ROWS = 512  # of x; from so many on a library multiplies what has been unpacked
SLICE_BYTES = 256 << 20  # of its scratch: products of slices are slower
PROGRAMS = 384  # of a product with few rows: almost three a multiprocessor of an H200


@triton.jit
def _of_bits(bits, dtype):
    """What 16 bits are as numbers of `dtype`; bf16 is f32 in the interpreter, which has none."""
    if INTERPRETED and dtype == tl.bfloat16:
        return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return bits.to(tl.uint16).to(dtype, bitcast=True)


# Of 16 bits, two of which are in a register, four as a number of 16, by their place: 128 + them in
# bf16, 1024 + them in f16; or as a code of e2m1 (packed.SIGNS), whose exponent lacks a bias.
def _integer(power: str) -> Any:
    text = "{{ .reg .b32 t; shr.b32 t, $1, {}; lop3.b32 $0, t, 0x000F000F, {}, 0xEA; }}"
    return tl.constexpr(tuple(text.format(4 * place, power) for place in range(4)))


def _code(highest: int) -> Any:
    size = 0x00070007 << highest
    once = "{{ .reg .b32 t; shl.b32 t, $1, {}; and.b32 $0, t, {}; }}"
    twice = "{{ .reg .b32 s, t; shl.b32 s, $1, {}; and.b32 s, s, 0x80008000; {}.b32 t, $1, {}; "
    twice += "lop3.b32 $0, t, {}, s, 0xEA; }}"
    texts = list[str]()
    for place, sign in enumerate(SIGNS):
        up, left = 15 - sign, highest - 3 * place
        way = "shl" if left > 0 else "shr"
        both = once.format(up, size | 0x80008000) if up == left else ""
        texts.append(both or twice.format(up, way, abs(left), size))
    return tl.constexpr(tuple(texts))


INTEGER_BF16, INTEGER_F16 = _integer("0x43004300"), _integer("0x64006400")
CODE_BF16, CODE_F16 = _code(6), _code(9)
# Numbers of e2m1 are 2^-64 of what they are worth in bf16, 2^-10 in f16, so that a code's exponent
# gets its bias and its group's scale by one multiplication, whatever the scale is.
BIAS_BF16, BIAS_F16 = tl.constexpr(2.0**62), tl.constexpr(2.0**4)
REST_BF16, REST_F16 = tl.constexpr(2.0**64), tl.constexpr(2.0**10)


@triton.jit
def _plus_power(q, dtype):
    """128 + q in bf16, 1024 + q in f16, of q below 16."""
    power = 0x4300 if dtype == tl.bfloat16 else 0x6400
    return _of_bits(q.to(tl.uint16) | power, dtype)  # pyright: ignore


@triton.jit
def _number(four, place: tl.constexpr, dtype, KIND: tl.constexpr):
    """What four bits of 16 are, but for zero points and e2m1's bias."""
    BF16: tl.constexpr = dtype == tl.bfloat16
    if INTERPRETED:
        SIGN: tl.constexpr = SIGN_AT[place]
        code = (four >> SIGN & 1) << 15 | (four >> (3 * place) & 7) << (6 if BF16 else 9)
        integer = _plus_power(four >> (4 * place) & 15, dtype)  # pyright: ignore
        return integer if KIND == 0 else _of_bits(code, dtype)  # pyright: ignore
    else:
        OF_F16: tl.constexpr = INTEGER_F16 if KIND == 0 else CODE_F16
        OF_BF16: tl.constexpr = INTEGER_BF16 if KIND == 0 else CODE_BF16
        ASM: tl.constexpr = (OF_BF16 if BF16 else OF_F16)[place]
        found = tl.inline_asm_elementwise(ASM, "=r,r", [four], tl.uint16, True, 2)  # pyright: ignore
        return _of_bits(found, dtype)  # pyright: ignore


@triton.jit
def _numbers(four, dtype, KIND: tl.constexpr):
    """[rows, columns] of `four`, [rows, columns / 4], whose threads hold what they multiply."""
    NUM: tl.constexpr = four.shape[1] // 8  # lines
    pair = tl.join(_number(four, 0, dtype, KIND), _number(four, 2, dtype, KIND))  # pyright: ignore
    other = tl.join(_number(four, 1, dtype, KIND), _number(four, 3, dtype, KIND))  # pyright: ignore
    places = tl.reshape(tl.join(pair, other), (four.shape[0], NUM, 8, 2, 2))
    return tl.reshape(tl.permute(places, (0, 1, 3, 4, 2)), (four.shape[0], NUM * 32))


@triton.jit
def _power(words, place: tl.constexpr, dtype):
    """2^62 times the power of two whose e8m0 is in a byte of 32 bits."""
    bits = (words >> (8 * place) & 255) * 128 + 62 * 128
    return _of_bits(bits.to(tl.uint16), dtype)  # pyright: ignore


@triton.jit
def _steps(
    scales, rows, begin, K, dtype, COLS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr
):
    """What codes of e2m1 in columns from `begin` on are multiplied by, [rows, COLS]."""
    NUM: tl.constexpr = COLS // GROUP
    if KIND == 1 and COLS == 64:  # powers of two, the bits of exponents: two of a word's four
        at, width = begin // 64 + tl.arange(0, 1)[None, :], (K + 127) // 128 * 2
        spot = scales.to(tl.pointer_type(tl.uint16)) + rows[:, None] * width + at
        two = tl.load(spot, mask=at < width, other=0).to(tl.int32)
        found = tl.join(_power(two, 0, dtype), _power(two, 1, dtype))  # pyright: ignore
        found = tl.reshape(found, (rows.shape[0], NUM))
    elif KIND == 1:
        at, width = begin // 128 + tl.arange(0, COLS // 128)[None, :], (K + 127) // 128
        words = tl.load(scales + rows[:, None] * width + at, mask=at < width, other=0)
        pair = tl.join(_power(words, 0, dtype), _power(words, 2, dtype))  # pyright: ignore
        other = tl.join(_power(words, 1, dtype), _power(words, 3, dtype))  # pyright: ignore
        found = tl.reshape(tl.join(pair, other), (rows.shape[0], NUM))
    else:
        at = begin // GROUP + tl.arange(0, NUM)[None, :]
        spot, inside = scales + rows[:, None] * (K // GROUP) + at, at < K // GROUP
        BIAS: tl.constexpr = BIAS_BF16 if dtype == tl.bfloat16 else BIAS_F16
        found = tl.load(spot, mask=inside, other=0.0).to(tl.float32 if INTERPRETED else dtype)
        found *= BIAS
    every = tl.broadcast_to(found[:, :, None], (rows.shape[0], NUM, GROUP))
    return tl.reshape(every, (rows.shape[0], COLS))


@triton.jit
def whole_sums(acc, dtype, KIND: tl.constexpr):
    """What multiply_packed has added up in `acc`."""
    REST: tl.constexpr = REST_BF16 if dtype == tl.bfloat16 else REST_F16
    return acc if KIND == 0 else acc * REST


@triton.jit
def _plus(
    acc, numbers, x_at, here, rows, begin, scales, zeros, K, dtype,
    COLS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """acc + numbers [rows, COLS] times x transposed; integers', by groups, lack zero and scale."""
    if KIND == 0 and GROUP % COLS:
        HALF: tl.constexpr = COLS // 2
        low, high = tl.split(tl.permute(tl.reshape(numbers, (acc.shape[0], 2, HALF)), (0, 2, 1)))
        acc = _plus(  # pyright: ignore
            acc, low, x_at, here, rows, begin, scales, zeros, K, dtype, HALF, KIND, GROUP, EVEN_K
        )
        begin += HALF
        return _plus(  # pyright: ignore
            acc, high, x_at, here, rows, begin, scales, zeros, K, dtype, HALF, KIND, GROUP, EVEN_K
        )
    else:
        at = begin + tl.arange(0, COLS)[None, :]
        x_tile = tl.load(x_at + at, mask=here if EVEN_K else here & (at < K), other=0.0)
        sums = acc
        if KIND == 0:
            group, num_groups = begin // GROUP if GROUP else begin * 0, K // GROUP if GROUP else 1
            of_group, there = rows * num_groups + group, group < num_groups
            if zeros is None:  # a constant tensor would send the numbers through shared memory
                EIGHT: tl.constexpr = 136.0 if dtype == tl.bfloat16 else 1032.0  # pyright: ignore
                numbers -= EIGHT
            else:
                zero = tl.load(zeros + of_group, mask=there, other=8)
                numbers -= _plus_power(zero, dtype)[:, None]  # pyright: ignore
            scale = tl.load(scales + of_group, mask=there, other=0.0).to(tl.float32)[:, None]
            sums = tl.zeros(acc.shape, tl.float32)
        if INTERPRETED:
            numbers, x_tile = numbers.to(tl.float32), x_tile.to(tl.float32)
        sums = tl.dot(numbers, tl.trans(x_tile), sums)
        return acc + sums * scale if KIND == 0 else sums  # pyright: ignore


@triton.jit
def multiply_packed(
    acc, x_at, here, rows, begin, values, scales, zeros, K, dtype,
    BLOCK_K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """acc + the numbers of `rows` of BLOCK_K columns from `begin` on, times x transposed.

    acc: f32 [rows, tokens], see whole_sums; x_at: [tokens, 1], of columns 0; here: [tokens, 1],
    which there are; values: u16, two bytes of packed.worth's; scales, zeros: see there, scales of
    u8 by words_of; GROUP: 0 for one of a row.
    """
    at = begin // 4 + tl.arange(0, BLOCK_K // 4)[None, :]
    stride = (K + 31) // 32 * 8
    spot = values + rows[:, None] * stride + at
    four = tl.load(spot) if EVEN_K else tl.load(spot, mask=at < stride, other=0)
    numbers = _numbers(four, dtype, KIND)  # pyright: ignore
    if KIND != 0:
        numbers *= _steps(scales, rows, begin, K, dtype, BLOCK_K, KIND, GROUP)  # pyright: ignore
    return _plus(  # pyright: ignore
        acc, numbers, x_at, here, rows, begin, scales, zeros, K, dtype, BLOCK_K, KIND, GROUP, EVEN_K
    )


@triton.jit(do_not_specialize=["M"])
def _packed_gemm_kernel(
    x, values, scales, zeros, factors, out, partial, arrivals, M, N, K, stride_x, stride_out,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, STEPS: tl.constexpr, BLOCKS: tl.constexpr,
    STAGES: tl.constexpr, EVEN_K: tl.constexpr, GATED: tl.constexpr, LATE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the weights' rows, SPLIT, tiles of x, of which there is one if SPLIT > 1).

    x: [M, K], out: [M, N], rows contiguous; STEPS, of BLOCKS · BLOCK_K columns, partial, arrivals,
    GATED: see _skinny_gemm_kernel. LATE: the next kernel starts when sums are done.
    """
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # columns of the output
    tile, part = tl.program_id(0), tl.program_id(1)
    within = tl.arange(0, BLOCK_N)
    # Rows of weights beyond N read the last one again and are not stored.
    rows = tl.minimum(tile * WIDTH + (within % WIDTH if GATED else within), N - 1).to(tl.int64)
    if GATED:
        rows += tl.where(within < WIDTH, 0, N)
    tokens = (tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    here = (tokens < M)[:, None]
    x_rows = x + tokens[:, None] * stride_x
    dtype = out.dtype.element_ty
    if PDL:  # the first two lines of all rows are on their way before x is there
        stride = (K + 31) // 32 * 8
        line = tl.minimum(part * (STEPS * BLOCKS * BLOCK_K // 4) + tl.arange(0, 2) * 64, stride - 8)
        line_at = values + rows[:, None] * stride + line[None, :]
        FETCH: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"  # pyright: ignore
        tl.inline_asm_elementwise(FETCH, "=r,l", [line_at], tl.int32, False, 1)  # pyright: ignore
        gdc_wait()
        if not LATE:
            gdc_launch_dependents()
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        for block in tl.static_range(BLOCKS):
            acc = multiply_packed(  # pyright: ignore
                acc, x_rows, here, rows, ((part * STEPS + step) * BLOCKS + block) * BLOCK_K,
                values, scales, zeros, K, dtype, BLOCK_K, KIND, GROUP, EVEN_K,
            )  # fmt: skip
    acc = whole_sums(acc, dtype, KIND)  # pyright: ignore
    if LATE and PDL:
        gdc_launch_dependents()
    if factors is not None:
        acc *= tl.load(factors + rows)[:, None]
    if GATED:
        acc = gated_sums(acc, BLOCK_M, WIDTH, dtype)  # pyright: ignore
    cols = tile * WIDTH + tl.arange(0, WIDTH)
    out_at = out + tokens[:, None] * stride_out + cols[None, :]
    stored = here & (cols < N)[None, :]
    store_sums(  # pyright: ignore
        tl.trans(acc), out_at, stored, here, partial, arrivals, tile, part, BLOCK_M, BLOCK_N, SPLIT
    )


@triton.jit
def _unpack_kernel(
    values, scales, zeros, factors, out, N, K, first,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    GRAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows from `first` on, of columns). out: [N - first.., K], contiguous.

    GRAIN: columns, a power of two, that surely have one scale.
    """
    dtype = out.dtype.element_ty
    within = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    rows, begin = tl.minimum(first + within, N - 1), tl.program_id(1) * BLOCK_K
    stride, at = (K + 31) // 32 * 8, begin // 4 + tl.arange(0, BLOCK_K // 4)[None, :]
    four = tl.load(values + rows[:, None] * stride + at, mask=at < stride, other=0)
    numbers = _numbers(four, dtype, KIND)  # pyright: ignore
    if KIND == 0:
        NUM: tl.constexpr = BLOCK_K // GRAIN
        start = begin + tl.arange(0, NUM)[None, :] * GRAIN
        group = start // GROUP if GROUP else start * 0
        spot = rows[:, None] * (K // GROUP if GROUP else 1) + group
        steps = tl.load(scales + spot, mask=start < K, other=0.0).to(tl.float32)
        POWER: tl.constexpr = 128 if dtype == tl.bfloat16 else 1024  # pyright: ignore
        numbers = tl.reshape(numbers.to(tl.float32), (BLOCK_N, NUM, GRAIN))
        if zeros is None:
            numbers -= POWER + 8
        else:
            zero = tl.load(zeros + spot, mask=start < K, other=8).to(tl.float32)
            numbers -= (POWER + zero)[:, :, None]
        whole = tl.reshape(numbers * steps[:, :, None], (BLOCK_N, BLOCK_K))
    else:
        numbers *= _steps(scales, rows, begin, K, dtype, BLOCK_K, KIND, GROUP)  # pyright: ignore
        whole = whole_sums(numbers.to(tl.float32), dtype, KIND)  # pyright: ignore
    if factors is not None:
        whole *= tl.load(factors + rows)[:, None]
    cols = begin + tl.arange(0, BLOCK_K)[None, :]
    inside = (first + within < N)[:, None] & (cols < K)
    enter(PDL)  # the kernel before may read what `out` had
    tl.store(out + within[:, None] * K + cols, whole.to(dtype), mask=inside)


@cache
def choose_packed(m: int, n: int, k: int, *, product_follows: bool = False) -> SkinnyTile:
    """The tile for x: [m, k] and weights [n, k]; up to OWN_ROWS rows m cuts no sum otherwise.

    A product that follows starts late: early, its programs would crowd on some multiprocessors.
    """
    tokens = min(max(16, 1 << (m - 1).bit_length()), 128)
    if m > OWN_ROWS:
        return SkinnyTile(tokens, 128, BLOCK_K, 1, 8, 4, AT_ONCE)
    num_tiles, wide = -(-n // TILE_ROWS), 2 * BLOCK_K
    most = max(1, min(8, k // 1024, MAX_PARTIALS // (num_tiles * TILE_ROWS * OWN_ROWS)))
    even = [split for split in range(1, most + 1) if split == 1 or k % (wide * split) == 0]
    split = next((s for s in (*even, *range(1, most + 1)) if num_tiles * s >= PROGRAMS), most)
    block_k, num_stages = BLOCK_K, 3 if tokens == 64 else 8 if product_follows else 4
    if tokens == 32 and k % (wide * split) == 0:
        block_k, num_stages = wide, 3
    late = 0 if product_follows else AT_ONCE
    return SkinnyTile(tokens, TILE_ROWS, block_k, split, 4, num_stages, late)


def steps_of(scales: Tensor, k: int) -> tuple[int, int]:
    """(KIND, GROUP); scales: [.., groups] of k columns."""
    kind, groups = KINDS.get(scales.dtype, INTEGERS), scales.shape[-1]
    if scales.dtype == torch.uint8:
        assert groups == padded_groups(k // LINE)
        return kind, LINE
    return kind, 0 if groups == 1 and kind == INTEGERS else k // groups


def words_of(scales: Tensor | None) -> Tensor | None:
    """As kernels load them: e8m0 by fours, as loads of fewer bytes are not overlapped."""
    if scales is None or scales.dtype != torch.uint8:
        return scales
    return scales.view(torch.int32)


def takes(x: Tensor, scales: Tensor) -> bool:
    """Whether kernels do: f16 has too few exponents for e8m0's. x: [m, k]; scales: [.., groups]."""
    least = (torch.bfloat16,) if scales.dtype == torch.uint8 else DTYPES
    return x.dtype in least


def packed_gemm(
    x: Tensor,
    held: Held,
    out: Tensor,
    tile: SkinnyTile,
    *,
    gated: bool = False,
) -> Tensor:
    """out[:] = x times the transposed numbers, or the same bits as its swiglu.

    x: [m, k], out: [m, n], gated [m, n / 2], rows contiguous.
    """
    (m, k), (values, scales, zeros, factors) = x.shape, held
    n, (kind, group), workspace = len(values), steps_of(scales, k), workspace_of(x.device)
    assert takes(x, scales)
    assert x.stride(1) == out.stride(1) == 1
    assert all(part is None or part.is_contiguous() for part in held)
    assert tile.split == 1 or m <= tile.block_m
    assert tile.num_partials(n) <= workspace.partial.numel()
    assert not gated or tile.gates(n)
    steps, num_blocks = -(-k // (tile.block_k * tile.split)), max(1, tile.block_k // BLOCK_K)
    _packed_gemm_kernel[(tile.num_tiles(n), tile.split, -(-m // tile.block_m))](
        x, values.view(torch.uint16), words_of(scales), zeros, factors, out, workspace.partial,
        workspace.arrivals, m, n // 2 if gated else n, k, x.stride(0), out.stride(0),
        **overlap(
            x, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k // num_blocks,
            KIND=kind, GROUP=group, SPLIT=tile.split, STEPS=steps, BLOCKS=num_blocks,
            STAGES=tile.num_stages, EVEN_K=steps * tile.block_k * tile.split == k, GATED=gated,
            LATE=tile.trigger == 0, num_warps=tile.num_warps, num_stages=tile.num_stages,
        ),
    )  # fmt: skip
    return out


def unpack(held: Held, first: int, out: Tensor) -> Tensor:
    """out[:] = the numbers of rows from `first` on, rounded once. out: [rows, k], contiguous."""
    (values, scales, zeros, factors), (rows, k) = held, out.shape
    (kind, group), (block_n, block_k) = steps_of(scales, k), UNPACKED
    grain = min(block_k, group & -group) if group else block_k
    _unpack_kernel[(-(-rows // block_n), -(-k // block_k))](
        values.view(torch.uint16), words_of(scales), zeros, factors, out, first + rows, k, first,
        **overlap(
            out, BLOCK_N=block_n, BLOCK_K=block_k, KIND=kind, GROUP=group, GRAIN=grain, num_warps=4
        ),
    )  # fmt: skip
    return out


def product_by_library(x: Tensor, held: Held, out: Tensor) -> Tensor:
    """out[:] = x times the transposed numbers, rounded to x's dtype. Shapes: see packed_gemm.

    Numbers lie in a scratch in between: the whole matrix, or slices of a very large one.
    """
    n, k = len(held[0]), x.shape[1]
    rows = min(n, SLICE_BYTES // (k * x.itemsize))
    scratch = x.new_empty(rows, k)
    for first in range(0, n, rows):
        part = unpack(held, first, scratch[: n - first])
        if len(part) == n:
            return product(x, part, None, out)
        torch.mm(x, part.t(), out=out[:, first : first + len(part)])
    return out


def packed_product_triton(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    factors: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See packed_product_ref, which computes what no kernel takes."""
    if not takes(x, scales):
        return packed_product_ref(x, values, scales, zeros, factors, gated, out)
    (m, k), n, held = x.shape, len(values), (values, scales, zeros, factors)
    tile = choose_packed(m, n, k, product_follows=gated)
    if gated and (m >= LIBRARY_ROWS or not tile.gates(n)):
        return swiglu(packed_product_triton(x, *held))
    out = x.new_empty(m, n // 2 if gated else n) if out is None else out
    if m >= LIBRARY_ROWS:
        return product_by_library(x, held, out)
    return packed_gemm(x, held, out, tile, gated=gated) if m else out
