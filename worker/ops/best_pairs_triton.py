"""Kernels of best_pairs.py."""

import torch
from torch import Tensor

from worker.ops.jit import enter, tl, triton
from worker.ops.launch import overlap

ROWS = 128  # of a program


@triton.jit
def key_of(x, BITS: tl.constexpr):
    """Signed integers in the order of x, which is not -0; BITS = 16: of a bf16, as many bits."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    if BITS == 16:
        key = key >> 16
    return key


@triton.jit
def value_of(key, BITS: tl.constexpr):
    """The f32 that has this key."""
    if BITS == 16:
        key = key << 16
    bits = tl.where(key < 0, -key | -2147483648, key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def id_of(pair):
    """The id in a pair."""
    return -pair & 0xFFFFFFFF


@triton.jit
def _best_pairs_kernel(values, ids, pairs, no_id, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """One program a row: the pair of the best of its blocks."""
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, triton.next_power_of_2(BLOCKS))
    inside = at < BLOCKS
    value = tl.load(values + row * BLOCKS + at, mask=inside, other=float("-inf"))
    token = tl.load(ids + row * BLOCKS + at, mask=inside, other=no_id).to(tl.int64)
    most = tl.max(value, 0)
    token = tl.minimum(tl.min(tl.where(value == most, token, no_id), 0), no_id)
    key = tl.where(most == most, key_of(most, 32), -2147483647)
    tl.store(pairs + row, (key.to(tl.int64) << 32) - token)


def best_pairs_triton(values: Tensor, ids: Tensor, no_id: int) -> Tensor:
    """The pairs of rows' best blocks; one launch.

    values: [n, blocks] f32, the blocks' largest; ids: [n, blocks] of integers, their ids.
    no_id: as large as any id; goes with a row of NaN. Returns [n] i64.
    """
    n, blocks = values.shape
    pairs = torch.empty(n, dtype=torch.int64, device=values.device)
    _best_pairs_kernel[(n,)](
        values, ids, pairs, no_id, **overlap(values, BLOCKS=blocks, num_warps=1)
    )
    return pairs


@triton.jit(do_not_specialize=["n"])
def _best_ids_kernel(pairs, out, n, RANKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (blocks of rows)."""
    enter(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    best = tl.load(pairs + row, mask=inside, other=0)
    for rank in range(1, RANKS):
        best = tl.maximum(best, tl.load(pairs + rank * n + row, mask=inside, other=0))
    tl.store(out + row, id_of(best), mask=inside)


def best_ids_triton(pairs: Tensor) -> Tensor:
    assert pairs.is_contiguous()
    ranks, n = pairs.shape
    out = torch.empty(n, dtype=torch.int64, device=pairs.device)
    _best_ids_kernel[(-(-n // ROWS),)](
        pairs, out, n, **overlap(pairs, RANKS=ranks, BLOCK=ROWS, num_warps=4)
    )
    return out
