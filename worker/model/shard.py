"""How a checkpoint's tensors, and the model's heads, are divided among tensor-parallel ranks.

Free of torch: what cannot be divided is refused before anything starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from worker.errors import Unsupported

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """One tensor of the checkpoint: which part of it this rank holds, and where."""

    dest: Tensor  # a view of the parameter; same shape as the part
    full_shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    index: tuple[slice, ...]  # the part, one slice per dimension


def whole(dest: Tensor) -> Shard:
    """A tensor that every rank holds whole."""
    return Shard(dest, tuple(dest.shape), tuple(slice(0, size) for size in dest.shape))


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """This rank's attention heads. With more ranks than kv heads, ranks hold copies of one."""

    num_heads: int
    num_kv_heads: int
    first_head: int
    first_kv_head: int


def split_heads(num_heads: int, num_kv_heads: int, rank: int, size: int) -> HeadSplit:
    """Divide the heads so that every rank has the kv heads that its query heads use.

    Raises:
        Unsupported: the heads cannot be divided evenly.
    """
    if num_heads % size:
        raise Unsupported(f"{num_heads} attention heads cannot be divided among {size} ranks")
    if num_kv_heads % size and size % num_kv_heads:
        raise Unsupported(
            f"{num_kv_heads} kv heads can be neither divided among {size} ranks nor copied evenly"
        )
    return HeadSplit(
        num_heads=num_heads // size,
        num_kv_heads=max(1, num_kv_heads // size),
        first_head=rank * (num_heads // size),
        first_kv_head=rank * num_kv_heads // size,
    )


def split_even(name: str, count: int, rank: int, size: int) -> slice:
    """Rank's part of `count` rows or columns.

    Raises:
        Unsupported: `count` is not a multiple of `size`; the message names it `name`.
    """
    if count % size:
        raise Unsupported(f"{name} {count} cannot be divided among {size} ranks")
    part = count // size
    return slice(rank * part, (rank + 1) * part)
