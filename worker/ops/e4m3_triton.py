"""Numbers in e4m3, as kernels make them."""

from worker.ops.jit import tl, triton


@triton.jit
def to_e4m3(x, INTERPRETED: tl.constexpr):
    """To nearest, ties to even, as the hardware does; the interpreter loses a carry, so it gets
    numbers that need no rounding."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        small = (x + 24576.0) - 24576.0  # its last place is that of e4m3 below 2^-6
        x = tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    return x.to(tl.float8e4nv)


@triton.jit
def block_in_e4m3(x, INTERPRETED: tl.constexpr):
    """128 columns of rows, [rows, 128], and the rows' scales, f32 [rows]; as eight_bits_ref."""
    x = x.to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(x), 1), 1e-10)
    values = x * tl.div_rn(448.0, amax)[:, None]
    return to_e4m3(values, INTERPRETED), amax * (1 / 448.0)


@triton.jit
def store_in_e4m3(
    x, values, scales, row, first, width, stride_scales, BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Columns `first` .. of a row, BLOCK of them, zero from `width` on, and their scales.

    x: [BLOCK], a multiple of 128; values: [rows, width]; scales: a column every `stride_scales`.
    """
    parts: tl.constexpr = BLOCK // 128
    blocks_of_x = tl.reshape(x, (parts, 128))
    eight, scale = block_in_e4m3(blocks_of_x, INTERPRETED)  # pyright: ignore
    at = first + tl.arange(0, parts)[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(values + row * width + at, eight, mask=at < width)
    blocks = first // 128 + tl.arange(0, parts)
    tl.store(scales + blocks.to(tl.int64) * stride_scales + row, scale, mask=blocks * 128 < width)
