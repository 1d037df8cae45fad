"""The kernel of packed.py: weights in four bits are the left operand, unpacked in registers.

Operands are those of the definition, exact in 16 bits: of integers (q - zero), whose groups' sums
are scaled in f32; of e2m1 the code times its group's scale. So a product differs from the
definition by the order of its f32 additions alone. That order follows from the weights' shape up to
OWN_ROWS rows of x, and a row's result depends on that row alone, bit for bit.

Tiles are chosen by shape: on an H200 two groups of four warps a tile are ahead of one.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from worker.ops.jit import INTERPRETED, enter, gdc_launch_dependents, gdc_wait, overlap, power_of_two, tl, triton
from worker.ops.norms import swiglu
from worker.ops.packed import packed_product_ref
from worker.ops.product import OWN_ROWS, workspace_of
from worker.ops.scaled import E4M3
from worker.ops.skinny_triton import DTYPES, SkinnyTile, gated_sums, store_sums

# What the numbers are, by the dtype of their scales; other dtypes: integers.
INTEGERS, KINDS = 0, {torch.uint8: 1, E4M3: 2}
TILE_ROWS, BLOCK_K = 64, 128  # of weights
NUM_SMS, SHARED = 132, 227 << 10  # multiprocessors, and bytes of shared memory of each
PROGRAMS = 256  # of a product with few rows, at least: almost two a multiprocessor of an H200


@triton.jit
def _of_bits(bits, dtype):
    """What 16 bits are as numbers of `dtype`; bf16 is f32 in the interpreter, which has none."""
    if INTERPRETED and dtype == tl.bfloat16:
        return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return bits.to(tl.uint16).to(dtype, bitcast=True)


# Of 16 bits, two of which are in a register, four as a number of 16, by their place: an integer
# less what is in `less`, where 128 was added in bf16, 1024 in f16; or a code of e2m1, whose
# exponent lacks a bias. All in assembly, or numbers would be paired otherwise than registers are.
def _integers(dtype: str, power: str, less: str) -> Any:
    text = (
        "{{ .reg .b32 t, z; shr.b32 t, $1, {}; lop3.b32 t, t, 0x000F000F, {}, 0xEA; "
        "mov.b32 z, {}; sub.rn.{}x2 $0, t, z; }}"
    )
    return tl.constexpr(tuple(text.format(4 * at, power, less, dtype) for at in range(4)))


def _codes(left: int, mask: str) -> Any:
    text = (
        "{{ .reg .b32 s, t; shl.b32 s, $1, {}; and.b32 s, s, 0x80008000; "
        "{}.b32 t, $1, {}; lop3.b32 $0, t, {}, s, 0xEA; }}"
    )
    moves = ((12 - at, "shl" if left > at else "shr", abs(left - at)) for at in (0, 4, 8, 12))
    return tl.constexpr(tuple(text.format(*move, mask) for move in moves))


BF16, F16 = ("bf16", "0x43004300"), ("f16", "0x64006400")
EIGHT_BF16, EIGHT_F16 = _integers(*BF16, "0x43084308"), _integers(*F16, "0x64086408")
ZERO_BF16, ZERO_F16 = _integers(*BF16, "$2"), _integers(*F16, "$2")
CODE_BF16, CODE_F16 = _codes(6, "0x01C001C0"), _codes(9, "0x0E000E00")


@triton.jit
def _plus_power(q, dtype):
    """128 + q in bf16, 1024 + q in f16, of q below 16."""
    power = 0x4300 if dtype == tl.bfloat16 else 0x6400
    return _of_bits(q.to(tl.uint16) | power, dtype)  # pyright: ignore


@triton.jit
def _code(four, place: tl.constexpr, dtype):
    """A code of e2m1, but for its exponent's bias."""
    if INTERPRETED:
        four, left = four >> (4 * place), 6 if dtype == tl.bfloat16 else 9
        found = (four & 8) << 12 | (four & 7) << left
    else:
        ASM: tl.constexpr = CODE_BF16 if dtype == tl.bfloat16 else CODE_F16
        found = tl.inline_asm_elementwise(ASM[place], "=r,r", [four], tl.uint16, True, 2)
    return _of_bits(found, dtype)  # pyright: ignore


@triton.jit
def _integer(four, place: tl.constexpr, less, zeros, dtype):
    """Less its zero point; less: what _plus_power makes of that; without `zeros` it is 8."""
    if INTERPRETED:
        found = _plus_power(four >> (4 * place) & 15, dtype)  # pyright: ignore
        if zeros is None:
            less = 136.0 if dtype == tl.bfloat16 else 1032.0
        return found - less
    elif zeros is None:
        ASM: tl.constexpr = EIGHT_BF16 if dtype == tl.bfloat16 else EIGHT_F16
        found = tl.inline_asm_elementwise(ASM[place], "=r,r", [four], tl.uint16, True, 2)
        return _of_bits(found, dtype)  # pyright: ignore
    else:
        ASM: tl.constexpr = ZERO_BF16 if dtype == tl.bfloat16 else ZERO_F16
        less = less.to(tl.uint16, bitcast=True)
        found = tl.inline_asm_elementwise(ASM[place], "=r,r,r", [four, less], tl.uint16, True, 2)
        return _of_bits(found, dtype)  # pyright: ignore


@triton.jit
def _of_groups(held, rows, begin, K, other, COLS: tl.constexpr, GROUP: tl.constexpr):
    """[rows, groups] that columns from `begin` on are of, of `held`, [.., groups of K columns]."""
    NUM: tl.constexpr = COLS // GROUP if GROUP and GROUP < COLS else 1
    group, num_groups = begin * 0, 1
    if GROUP:
        group, num_groups = begin // GROUP, K // GROUP
    at = group + tl.arange(0, NUM)[None, :]
    return tl.load(held + rows[:, None] * num_groups + at, mask=at < num_groups, other=other)


@triton.jit
def _spread(of_groups, COLS: tl.constexpr):
    """[rows, COLS] of [rows, groups]."""
    ROWS: tl.constexpr = of_groups.shape[0]
    NUM: tl.constexpr = of_groups.shape[1]
    every = tl.broadcast_to(of_groups[:, :, None], (ROWS, NUM, COLS // NUM))
    return tl.reshape(every, (ROWS, COLS))


@triton.jit
def _in_order(p0, p1, p2, p3, ROWS: tl.constexpr, NUM: tl.constexpr):
    """[ROWS, NUM · 32] of [ROWS, NUM · 8] by places, in threads that hold what they multiply."""
    both = tl.join(tl.join(p0, p2), tl.join(p1, p3))
    lines = tl.permute(tl.reshape(both, (ROWS, NUM, 8, 2, 2)), (0, 1, 3, 4, 2))
    return tl.reshape(lines, (ROWS, NUM * 32))


@triton.jit
def _x_of(x_at, here, begin, K, COLS: tl.constexpr, EVEN_K: tl.constexpr):
    """[tokens, COLS] of x."""
    at = begin + tl.arange(0, COLS)[None, :]
    return tl.load(x_at + at, mask=here if EVEN_K else here & (at < K), other=0.0)


@triton.jit
def _dot(numbers, x_tile, sums):
    """sums + numbers [rows, columns] times x_tile [tokens, columns] transposed."""
    if INTERPRETED:
        numbers, x_tile = numbers.to(tl.float32), x_tile.to(tl.float32)
    return tl.dot(numbers, tl.trans(x_tile), sums)


@triton.jit
def _plus_groups(
    acc, numbers, scale, x_at, here, begin, K, COLS: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """acc + numbers [rows, COLS] times x times scale [rows, groups], a group after the other."""
    ROWS: tl.constexpr = numbers.shape[0]
    NUM: tl.constexpr = scale.shape[1]
    if NUM == 1:
        x_tile = _x_of(x_at, here, begin, K, COLS, EVEN_K)  # pyright: ignore
        return acc + _dot(numbers, x_tile, tl.zeros(acc.shape, tl.float32)) * scale  # pyright: ignore
    else:
        HALF: tl.constexpr = COLS // 2
        low, high = tl.split(tl.permute(tl.reshape(numbers, (ROWS, 2, HALF)), (0, 2, 1)))
        of_low, of_high = tl.split(tl.permute(tl.reshape(scale, (ROWS, 2, NUM // 2)), (0, 2, 1)))
        acc = _plus_groups(acc, low, of_low, x_at, here, begin, K, HALF, EVEN_K)  # pyright: ignore
        return _plus_groups(acc, high, of_high, x_at, here, begin + HALF, K, HALF, EVEN_K)  # pyright: ignore


@triton.jit
def multiply_packed(
    acc, x_at, here, rows, begin, values, scales, zeros, K, dtype,
    BLOCK_K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """acc + the numbers of `rows` of BLOCK_K columns from `begin` on, times x transposed.

    acc: f32 [rows, tokens]; x_at: [tokens, 1], of columns 0; here: [tokens, 1], which there are;
    values: u16, two bytes of packed.worth's; scales, zeros: see there. GROUP: columns of a scale;
    0: all.
    """
    ROWS: tl.constexpr = acc.shape[0]
    WIDTH: tl.constexpr = BLOCK_K // 4
    at = begin // 4 + tl.arange(0, WIDTH)[None, :]
    stride = (K + 31) // 32 * 8
    spot = values + rows[:, None] * stride + at
    four = tl.load(spot) if EVEN_K else tl.load(spot, mask=at < stride, other=0)
    if KIND == 0:
        less = begin
        if zeros is not None:
            zero = _of_groups(zeros, rows, begin, K, 8, BLOCK_K, GROUP)  # pyright: ignore
            less = _spread(_plus_power(zero, dtype), WIDTH)  # pyright: ignore
        numbers = _in_order(  # pyright: ignore
            _integer(four, 0, less, zeros, dtype), _integer(four, 1, less, zeros, dtype),
            _integer(four, 2, less, zeros, dtype), _integer(four, 3, less, zeros, dtype),
            ROWS, BLOCK_K // 32,
        )  # fmt: skip
        scale = _of_groups(scales, rows, begin, K, 0.0, BLOCK_K, GROUP).to(tl.float32)  # pyright: ignore
        return _plus_groups(acc, numbers, scale, x_at, here, begin, K, BLOCK_K, EVEN_K)  # pyright: ignore
    numbers = _in_order(  # pyright: ignore
        _code(four, 0, dtype), _code(four, 1, dtype),
        _code(four, 2, dtype), _code(four, 3, dtype), ROWS, BLOCK_K // 32,
    )  # fmt: skip
    UNIT: tl.constexpr = 2.0**126 if dtype == tl.bfloat16 else 2.0**14
    if KIND == 1:  # a power of two: the bits of an exponent, or the largest subnormal's
        bits = _of_groups(scales, rows, begin, K, 0, BLOCK_K, GROUP).to(tl.uint16)  # pyright: ignore
        steps = _of_bits(tl.where(bits == 0, 64, bits << 7), dtype)  # pyright: ignore
    else:
        steps = _of_groups(scales, rows, begin, K, 0.0, BLOCK_K, GROUP)  # pyright: ignore
        steps = steps.to(tl.float32 if INTERPRETED else dtype)
    numbers = numbers * UNIT * _spread(steps, BLOCK_K)  # pyright: ignore
    return _dot(numbers, _x_of(x_at, here, begin, K, BLOCK_K, EVEN_K), acc)  # pyright: ignore


@triton.jit(do_not_specialize=["M"])
def _packed_gemm_kernel(
    x, values, scales, zeros, factors, out, partial, arrivals, M, N, K, stride_x, stride_out,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
    EVEN_K: tl.constexpr, PDL: tl.constexpr, GATED: tl.constexpr, AHEAD: tl.constexpr,
    UNROLL: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the weights' rows, SPLIT, tiles of x, of which there is one if SPLIT > 1).

    x: [M, K], out: [M, N], rows contiguous; STEPS, partial, arrivals, GATED: see
    _skinny_gemm_kernel.
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
    if AHEAD and PDL:
        stride = (K + 31) // 32 * 8
        first = part * (STEPS * UNROLL * BLOCK_K // 4) + tl.arange(0, AHEAD) * 64
        first = tl.minimum(first, stride - 8)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l",
            [values + rows[:, None] * stride + first[None, :]], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    if LATE:
        if PDL:
            gdc_wait()
    else:
        enter(PDL)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        for i in tl.static_range(UNROLL):
            acc = multiply_packed(  # pyright: ignore
                acc, x_rows, here, rows, ((part * STEPS + step) * UNROLL + i) * BLOCK_K, values,
                scales, zeros, K, out.dtype.element_ty, BLOCK_K, KIND, GROUP, EVEN_K,
            )  # fmt: skip
    if LATE and PDL:
        gdc_launch_dependents()
    if factors is not None:
        acc *= tl.load(factors + rows)[:, None]
    if GATED:
        acc = gated_sums(acc, BLOCK_M, WIDTH, out.dtype.element_ty)  # pyright: ignore
    cols = tile * WIDTH + tl.arange(0, WIDTH)
    out_at = out + tokens[:, None] * stride_out + cols[None, :]
    stored = here & (cols < N)[None, :]
    store_sums(  # pyright: ignore
        tl.trans(acc), out_at, stored, here, partial, arrivals, tile, part, BLOCK_M, BLOCK_N, SPLIT
    )


@cache
def choose_packed(m: int, n: int, k: int) -> SkinnyTile:
    """The tile for x: [m, k] and weights [n, k]; up to OWN_ROWS rows m cuts no sum otherwise."""
    tokens, split = power_of_two(min(max(m, 16), 128)), 1
    if m > OWN_ROWS:
        return SkinnyTile(tokens, 128, BLOCK_K, 1, 8, 4, trigger=0)
    num_tiles = -(-n // TILE_ROWS)
    while num_tiles * split < PROGRAMS and split < 8 and 256 * split <= k:
        split *= 2
    room = SHARED // -(-num_tiles * split // NUM_SMS) - 1024 + TILE_ROWS * BLOCK_K // 2
    num_stages = min(max(3, room // (BLOCK_K * (2 * tokens + TILE_ROWS // 2))), 14)
    return SkinnyTile(tokens, TILE_ROWS, BLOCK_K, split, 4, num_stages, trigger=0)


def steps_of(scales: Tensor, k: int) -> tuple[int, int]:
    """(KIND, GROUP); scales: [.., groups] of k columns."""
    kind, groups = KINDS.get(scales.dtype, INTEGERS), scales.shape[-1]
    return kind, 0 if groups == 1 and kind == INTEGERS else k // groups


def takes(x: Tensor, scales: Tensor) -> bool:
    """Whether kernels do: f16 has too few exponents for e8m0's. x: [m, k]; scales: [.., groups]."""
    least = (torch.bfloat16,) if scales.dtype == torch.uint8 else DTYPES
    return x.dtype in least


def packed_gemm(
    x: Tensor,
    held: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    out: Tensor,
    tile: SkinnyTile,
    *,
    gated: bool = False,
) -> Tensor:
    """out[:] = x times the transposed numbers; x: [m, k], out: [m, n], rows contiguous.

    held: values, scales, zeros, factors, see packed.worth; contiguous.
    """
    (m, k), (values, scales, zeros, factors) = x.shape, held
    n, (kind, group) = len(values) // (2 if gated else 1), steps_of(scales, k)
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
            num_stages=tile.num_stages, GATED=gated, AHEAD=0, UNROLL=1, LATE=False,
        ),
    )  # fmt: skip
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
    (m, k), n = x.shape, len(values)
    tile = choose_packed(m, n, k)
    fused = gated and tile.gates(n)
    y = x.new_empty(m, n // 2 if fused else n) if gated or out is None else out
    if m:
        packed_gemm(x, (values, scales, zeros, factors), y, tile, gated=fused)
    return swiglu(y) if gated and not fused else y
