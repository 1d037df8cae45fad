"""The best of a row whose columns are divided among ranks: each rank's best, as one integer.

    pair = order of the value · 2³² - id

The largest pair has the largest value and, of equal values, the lowest id, whatever rank it is
from. So ranks that gather 8 bytes a row come to the id that one rank with all columns draws.

A NaN is above every number in the twins, as in torch's argmax, and below every one in the kernels,
as in those that find the best of a row on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.draw.filters_triton import key_of
from worker.ops.jit import gdc_launch_dependents, gdc_wait, tl, triton
from worker.ops.launch import overlap, power_of_two

# Columns of a rank begin at a multiple of it: at whole blocks of noise, and where Triton loads
# several logits at once. Ranks launch the same binaries then, but for the last rank of a vocabulary
# that is no multiple of it.
ALIGNMENT = 16
LARGEST = 0x7FFFFFFF  # beyond the order of every number; negative: below it
BLOCK = 128


@dataclass(frozen=True, slots=True)
class VocabPart:
    """Of which ids a rank has logits, where a vocabulary is divided among ranks."""

    first: int  # id of the first column, a multiple of ALIGNMENT
    vocab_size: int  # ids on all ranks together
    gather: Callable[[Tensor], Tensor]  # [n] i64 of this rank -> [ranks, n], equal on all ranks


def best_pairs_ref(values: Tensor, ids: Tensor) -> Tensor:
    """The pair of each row's best; of NaNs the first.

    values: [n, columns] f32; ids: [columns] i64, ascending. Returns [n] i64; without columns a pair
    that any other is above.
    """
    n, columns = values.shape
    if not columns:
        return torch.full((n,), -LARGEST << 32, dtype=torch.int64, device=values.device)
    at = values.argmax(-1)
    best = values.gather(1, at[:, None])[:, 0]
    bits = best.view(torch.int32).long()
    key = torch.where(bits < 0, -(bits & LARGEST), bits)
    return (torch.where(best.isnan(), LARGEST, key) << 32) - ids[at]


def best_ids_ref(pairs: Tensor) -> Tensor:
    """pairs: [ranks, n] i64 -> [n] i64, the id of the largest of each column."""
    return -pairs.amax(0) & 0xFFFFFFFF


@triton.jit
def id_of(pair):
    """The id in a pair."""
    return -pair & 0xFFFFFFFF


@triton.jit
def _best_pairs_kernel(
    values, ids, pairs, no_id, BLOCKS: tl.constexpr, BLOCKS_2: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program a row: the pair of the best of its blocks."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS_2)
    inside = at < BLOCKS
    value = tl.load(values + row * BLOCKS + at, mask=inside, other=float("-inf"))
    token = tl.load(ids + row * BLOCKS + at, mask=inside, other=no_id).to(tl.int64)
    most = tl.max(value, 0)
    token = tl.minimum(tl.min(tl.where(value == most, token, no_id), 0), no_id)
    key = tl.where(most == most, key_of(most, 32), -2147483647)
    tl.store(pairs + row, (key.to(tl.int64) << 32) - token)


def best_pairs_triton(values: Tensor, ids: Tensor, no_id: int) -> Tensor:
    """The pair of each row's best block; one launch.

    values: [n, blocks] f32, the largest of each; ids: [n, blocks] of integers, their ids.
    no_id: as large as any id; goes with a row of NaN. Returns [n] i64.
    """
    n, blocks = values.shape
    pairs = torch.empty(n, dtype=torch.int64, device=values.device)
    _best_pairs_kernel[(n,)](
        values, ids, pairs, no_id,
        **overlap(values, BLOCKS=blocks, BLOCKS_2=power_of_two(blocks), num_warps=1),
    )  # fmt: skip
    return pairs


@triton.jit(do_not_specialize=["n"])
def _best_ids_kernel(pairs, out, n, RANKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (blocks of rows)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    best = tl.load(pairs + row, mask=inside, other=0)
    for rank in range(1, RANKS):
        best = tl.maximum(best, tl.load(pairs + rank * n + row, mask=inside, other=0))
    tl.store(out + row, id_of(best), mask=inside)


def best_ids_triton(pairs: Tensor) -> Tensor:
    """See best_ids_ref; one launch."""
    assert pairs.is_contiguous()
    ranks, n = pairs.shape
    out = torch.empty(n, dtype=torch.int64, device=pairs.device)
    _best_ids_kernel[(-(-n // BLOCK),)](
        pairs, out, n, **overlap(pairs, RANKS=ranks, BLOCK=BLOCK, num_warps=4)
    )
    return out
