"""Keys and values in eight bits as operands of the tensor cores (cache/eight_bits.py).

In tiles of few rows (`in_words`) a program loads words of four numbers and widens them in the
registers that the tensor cores read. So the wide numbers need not go through shared memory again. A
thread has four dims in a row there, where an operand's layout has others. So tiles count dims in an
order of their own: `key_dims` and `value_tiles` say which dim stands at a place. A tensor core adds
sixteen products at once, in no order, and keys keep their dims within such sixteen: sums have the
bits of those over keys and values that were 16 bits wide.

Keys become f16, for which there is an instruction, and queries with them: multiplied by a power of
two a row, they keep all bits unless one is 2^31 times smaller than the row's largest. Values
become bf16 by integers, 2^-120 of themselves: weights make up one half of that, sums the other. So
decode is exact for rows of values whose largest number is at most 2^75, and for sums from 2^-66 on.
A value that is NaN reads as 480 there.

All other tiles are converted before they are laid out for the tensor cores (`in_16_bits`). From 64
rows on wgmma reads keys from shared memory: a kernel that widened words for it gave wrong sums and
read illegal addresses on an H200 (Triton 3.6).
"""

from typing import Any

import torch

from worker.ops.jit import INTERPRETED, tl, triton

# One instruction of sm_89 and later widens two numbers to f16, which holds all of e4m3, NaN too.
_KEYS: Any = tl.constexpr("""{
    .reg .b16 s, t; .reg .b32 a, b;
    mov.b32 {s, t}, $4;
    cvt.rn.f16x2.e4m3x2 a, s; cvt.rn.f16x2.e4m3x2 b, t;
    mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b;
}""")
# Weights have too wide a range for f16. A byte S EEEE MMM in the upper half of 16 bits becomes bf16
# S 0000EEEE MMM0000, which is 2^120 times too small, subnormal or not.
_VALUES: Any = tl.constexpr(
    "{ .reg .b32 a, t;"
    + "".join(
        f"""prmt.b32 a, $4, $5, 0x{4 + i}{4 + i}{i}{i};
        shr.b32 t, a, 4; and.b32 t, t, 0x07f007f0;
        lop3.b32 ${i}, a, 0x80008000, t, 0xea;"""
        for i in range(4)
    )
    + "}"
)


FEW_ROWS = 32  # tiles of at most so many rows are multiplied by mma, whose warps divide the keys


def in_words(dtype: torch.dtype, block_m: int, block_d: int) -> bool:
    """Whether tiles of block_m rows read keys and values of this dtype in words.

    Only where their value tiles, quarters of a row, are wider than high. Else Triton has
    warps divide rows and not keys, which adds up softmax weights otherwise than over 16 bits.
    """
    is_wide = block_d // 4 > block_m
    return dtype == torch.float8_e4m3fn and block_m <= FEW_ROWS and is_wide


@triton.jit
def exponents_at(head, at, seen):
    """Of keys or values, as their page holds them; at: bytes from `head` on."""
    return tl.load(head.to(tl.pointer_type(tl.uint8)) + at, mask=seen, other=127)


@triton.jit
def power_of(exponents):
    """The powers of two that these bytes mean, f32."""
    return (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_for(amax):
    """Of rows with these largest numbers, and what to multiply the rows by: i32, f32; see
    eight_bits.quantized."""
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.maximum(exponent, 1)
    return exponent, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def queries_for_words(q_tile, DTYPE: tl.constexpr):
    """q_tile [rows, dims] in DTYPE, times a power of two a row that takes its largest number
    below 2^15; and the factors that undo that: [rows] f32."""
    wide = q_tile.to(tl.float32)
    highest = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) >> 23
    highest = tl.minimum(tl.maximum(highest, 15), 254)
    raised = wide * power_of(268 - highest)[:, None]
    return raised.to(DTYPE), power_of(highest - 14)  # pyright: ignore[reportArgumentType]


@triton.jit
def weight_power(exponents, MORE: tl.constexpr):
    """Factors of softmax weights for their values' exponents, times 2^MORE: f32.

    It is finite for any byte, so a masked key's weight stays 0.
    """
    return power_of(tl.minimum(exponents + MORE, 254))


@triton.jit
def in_16_bits(tile, DTYPE: tl.constexpr):
    """A tile, converted before it is laid out for the tensor cores.

    Triton would convert it behind that, and then add products in another order than those of a
    tile that was 16 bits wide. It does not look behind code that may have effects.
    """
    if not INTERPRETED:
        tile = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=4
        )
    return tile.to(DTYPE)  # pyright: ignore[reportArgumentType]


@triton.jit
def _widened(
    words, ASM: tl.constexpr, REGISTERS: tl.constexpr, PACK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The four numbers of words, by instructions that take PACK words at once."""
    if INTERPRETED:
        a = (words & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        b = ((words >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        c = ((words >> 16) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        d = ((words >> 24) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            ASM,  # pyright: ignore[reportArgumentType]
            REGISTERS,  # pyright: ignore[reportArgumentType]
            [words],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True,
            pack=PACK,  # pyright: ignore[reportArgumentType]
        )
        a = a.to(DTYPE, bitcast=True)  # pyright: ignore[reportArgumentType]
        b = b.to(DTYPE, bitcast=True)  # pyright: ignore[reportArgumentType]
        c = c.to(DTYPE, bitcast=True)  # pyright: ignore[reportArgumentType]
        d = d.to(DTYPE, bitcast=True)  # pyright: ignore[reportArgumentType]
    return a, b, c, d


@triton.jit
def key_dims(BLOCK_D: tl.constexpr):
    """The dims of a key tile's places."""
    at = tl.arange(0, BLOCK_D)
    return at // 32 * 32 + at // 2 % 2 * 16 + at // 4 % 4 * 4 + at // 16 % 2 * 2 + at % 2


@triton.jit
def key_tile(words, DTYPE: tl.constexpr):
    """[keys, BLOCK_D / 4] i32 as numbers [BLOCK_D, keys], in the order of key_dims."""
    a, b, c, d = _widened(words, _KEYS, "=h,=h,=h,=h,r", 1, tl.float16)  # type: ignore[misc]
    KEYS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    pairs = tl.join(tl.join(a, b), tl.join(c, d))  # [.., of a pair, which pair]
    tile = tl.permute(tl.reshape(pairs, (KEYS, WORDS // 8, 2, 4, 2, 2)), (1, 5, 3, 2, 4, 0))
    return tl.reshape(tile, (4 * WORDS, KEYS)).to(DTYPE)


@triton.jit
def value_tiles(words, DTYPE: tl.constexpr):
    """[keys, BLOCK_D / 4] i32 as the words' first numbers, their second ones, ...

    They are 2^-120 of the true numbers.
    """
    a, b, c, d = _widened(words, _VALUES, "=r,=r,=r,=r,r,r", 2, tl.bfloat16)  # type: ignore[misc]
    if INTERPRETED:
        low: tl.constexpr = 2**-120
        a, b = a.to(tl.float32) * low, b.to(tl.float32) * low
        c, d = c.to(tl.float32) * low, d.to(tl.float32) * low
    return a.to(DTYPE), b.to(DTYPE), c.to(DTYPE), d.to(DTYPE)  # pyright: ignore[reportArgumentType]


@triton.jit
def in_order(a, b, c, d):
    """Sums over those tiles, four [rows, BLOCK_D / 4], as [rows, BLOCK_D]."""
    ROWS: tl.constexpr = a.shape[0]
    WORDS: tl.constexpr = a.shape[1]
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, 4 * WORDS))


@triton.jit
def apart(sums):
    """Inverse of in_order."""
    ROWS: tl.constexpr = sums.shape[0]
    WORDS: tl.constexpr = sums.shape[1] // 4
    ac, bd = tl.split(tl.reshape(sums, (ROWS, WORDS, 2, 2)))
    a, c = tl.split(ac)
    b, d = tl.split(bd)
    return a, b, c, d
