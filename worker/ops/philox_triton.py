"""Kernels of philox.py."""

from typing import Any

from worker.ops.jit import HAS_TRITON, INTERPRETED, tl, triton

_log: Any = tl.extra.cuda.libdevice.log if HAS_TRITON else None  # pyright: ignore


@triton.jit
def natural_log(x):
    """log of f32: CUDA's accurate one (the fast one fails near 1), or the interpreter's."""
    if INTERPRETED:
        return tl.log(x)
    return _log(x)


@triton.jit
def gumbel_at(seed, position, ids):
    """gumbel_ref's noise of one row for the tokens `ids`, in f32; four times gumbel_block's work.

    seed, position: i64 scalars; ids: i64, any block of token ids.
    """
    block = (ids // 4).to(tl.uint32)
    zero = block * 0
    words = tl.philox(seed, block, zero + position.to(tl.uint32), zero, zero)
    word = ids % 4
    low, high = tl.where(word == 0, words[0], words[1]), tl.where(word == 2, words[2], words[3])
    bits = tl.where(word < 2, low, high)
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * (2.0**-23)
    return -natural_log(-natural_log(uniform))


@triton.jit
def gumbel_block(seed, position, start, BLOCK: tl.constexpr):
    """gumbel_ref's noise of one row for the tokens start .. start + BLOCK - 1, as [BLOCK] f32.

    seed, position: i64 scalars; start: a multiple of 4. The words are bit for bit philox_ref's.
    """
    block = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = block * 0
    at = zero + position.to(tl.uint32)
    words = tl.philox(seed, block, at, zero, zero)
    even, odd = tl.interleave(words[0], words[2]), tl.interleave(words[1], words[3])
    bits = tl.interleave(even, odd)
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * (2.0**-23)
    return -natural_log(-natural_log(uniform))
