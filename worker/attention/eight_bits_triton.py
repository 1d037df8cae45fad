"""Keys and values in eight bits as kernels read them (cache/eight_bits.py)."""

from worker.ops.jit import tl, triton


@triton.jit
def exponents_at(head, at, seen):
    """Of keys or values, as their page holds them; at: bytes from `head` on."""
    return tl.load(head.to(tl.pointer_type(tl.uint8)) + at, mask=seen, other=127)


@triton.jit
def power_of(exponents):
    """What these bytes are worth, f32."""
    return (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def block_exponents(
    k_head, v_head, page, stride_page, keys, end, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr
):
    """Those of a block of keys and values; where they are not in eight bits, nothing."""
    if k_head.dtype.element_ty == tl.float8e4nv:
        at = page * stride_page + PAGE * HEAD_DIM + keys % PAGE
        return exponents_at(k_head, at, keys < end), exponents_at(v_head, at, keys < end)
    else:
        return end, end


@triton.jit
def in_16_bits(tile, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """A tile, converted before it is laid out for the tensor cores.

    Triton would convert it behind that, and then add products in another order than those of a
    tile that was 16 bits wide. It does not look behind what may have effects.
    """
    if not INTERPRETED:
        tile = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=4
        )
    return tile.to(DTYPE)  # pyright: ignore[reportArgumentType]
