"""Numbers in e4m3, as kernels make them."""

from worker.ops.jit import tl, triton


@triton.jit
def to_e4m3(x, INTERPRETED: tl.constexpr):
    """To nearest, ties to even, as the hardware does; the interpreter loses a carry, so it gets
    what needs no rounding."""
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
