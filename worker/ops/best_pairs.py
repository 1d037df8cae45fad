"""The best of a row whose columns are divided among ranks: a rank's best, as one integer.

    pair = order of the value · 2³² - id

The largest pair has the largest value and, of equal values, the lowest id, whatever rank it is
from. So ranks that gather 8 bytes a row come to the id that one rank with all columns draws.

A NaN is above every number in the twins, as in torch's argmax, and below every one in the kernels,
as in those that find the best of a row on one rank.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Columns of a rank begin at a multiple of it: at whole blocks of noise, and where Triton loads
# several logits at once. Ranks launch the same binaries then, but for a last, odd rank.
ALIGNMENT = 16
NAN_ORDER = 0x7FFFFFFF  # beyond the order of any number; negative: below it


@dataclass(frozen=True, slots=True)
class VocabPart:
    """Of which ids a rank has logits, where a vocabulary is divided among ranks."""

    first: int  # id of the first column, a multiple of ALIGNMENT
    vocab_size: int  # ids on all ranks together
    gather: Callable[[Tensor], Tensor]  # [n] i64 of this rank -> [ranks, n], equal on all ranks


def best_pairs_ref(values: Tensor, ids: Tensor) -> Tensor:
    """The pairs of rows' best; of NaNs the first.

    values: [n, columns] f32; ids: [columns] i64, ascending. Returns [n] i64; without columns a pair
    that any other is above.
    """
    n, columns = values.shape
    if not columns:
        return torch.full((n,), -NAN_ORDER << 32, dtype=torch.int64, device=values.device)
    at = values.argmax(-1)
    best = values.gather(1, at[:, None])[:, 0]
    bits = best.view(torch.int32).long()
    key = torch.where(bits < 0, -(bits & NAN_ORDER), bits)
    return (torch.where(best.isnan(), NAN_ORDER, key) << 32) - ids[at]


def best_ids_ref(pairs: Tensor) -> Tensor:
    """pairs: [ranks, n] i64 -> [n] i64, the ids of the columns' largest."""
    return -pairs.amax(0) & 0xFFFFFFFF
