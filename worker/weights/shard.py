"""How a checkpoint's tensors, and the model's heads, are divided among tensor-parallel ranks.

Free of torch: what cannot be divided is refused before anything starts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from worker.errors import Unsupported

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """One tensor of the checkpoint: which part of it this rank holds, and where."""

    dest: "Tensor"  # a view of the parameter; same shape as the part
    full_shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    index: tuple[slice, ...]  # the part, one slice per dimension
    plus: float = 0.0  # is added to what the checkpoint has: zero-centred norms are about 1 here
    heads_merged: bool = False  # the first two dimensions of full_shape are one in the checkpoint
    # Of a tensor in eight bits: "values" as they are, its "scales"; "": what it is worth.
    what: str = ""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of the tensor in the checkpoint."""
        shape = self.full_shape
        return (shape[0] * shape[1], *shape[2:]) if self.heads_merged else shape

    def of(self, stored: Any) -> "Tensor":
        """The part; stored: a tensor of the checkpoint, or what slices one, as `what` wants it."""
        index = self.index
        if self.heads_merged:
            heads, _, *inner = self.index
            each = self.full_shape[1]
            index = slice(heads.start * each, heads.stop * each), *inner
        held = stored.eight(index) if self.what == "values" else stored[index]
        return held.unflatten(0, (-1, each))[:, self.index[1]] if self.heads_merged else held

    def fill(self, part: "Tensor") -> None:
        """Store the part, in whatever dtype the checkpoint has it."""
        self.dest.copy_(part.float() + self.plus if self.plus else part)


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of one dimension of a tensor in the checkpoint."""

    size: int  # of the whole dimension
    held: slice

    def __len__(self) -> int:
        return self.held.stop - self.held.start


def all_of(size: int) -> Part:
    """A dimension that every rank holds whole."""
    return Part(size, slice(0, size))


def stacked(dest: "Tensor", parts: Mapping[str, Part], *inner: Part) -> dict[str, Shard]:
    """Shards of the tensors that lie one below the other in `dest`, by name.

    parts: their first dimensions; inner: the dimensions behind it, which they share.
    """
    shards, start = {}, 0
    for name, part in parts.items():
        sizes, index = zip(*((each.size, each.held) for each in (part, *inner)), strict=True)
        shards[name] = Shard(dest[start : start + len(part)].detach(), sizes, index)
        start += len(part)
    return shards


def whole(dest: "Tensor", plus: float = 0.0) -> Shard:
    """A tensor that every rank holds whole."""
    shape = tuple(dest.shape)
    return Shard(dest.detach(), shape, tuple(slice(0, size) for size in shape), plus)


def by_head(
    tensor: str,
    dests: Mapping[str, "Tensor"],
    sizes: Mapping[str, int],
    heads: Part,
    *inner: Part,
) -> dict[str, Shard]:
    """Shards of a tensor whose rows are, head by head, those of several parts.

    dests: where the rows of each part go, by its name; sizes: rows a head, in the tensor's order.
    """
    shards, start = {}, 0
    shape = heads.size, sum(sizes.values()), *(part.size for part in inner)
    for name, size in sizes.items():
        index = heads.held, slice(start, start + size), *(part.held for part in inner)
        dest = dests[name].detach().unflatten(0, (len(heads), size))
        shards[piece(tensor, name)] = Shard(dest, shape, index, heads_merged=True)
        start += size
    return shards


def moved(shard: Shard, head_dim: int, rows: Sequence[tuple[slice, slice]]) -> list[Shard]:
    """The same tensor head by head, and of each head in parts.

    rows: (of a head in the checkpoint, where they lie in `shard.dest`).
    """
    held, *inner = shard.index
    shape = shard.full_shape[0] // head_dim, head_dim, *shard.full_shape[1:]
    heads = slice(held.start // head_dim, held.stop // head_dim)
    dest = shard.dest.unflatten(0, (-1, head_dim))
    return [
        Shard(dest[:, here], shape, (heads, there, *inner), heads_merged=True)
        for there, here in rows
    ]


def joined(tensor: str, parts: Mapping[str, Sequence[Shard]]) -> dict[str, Shard]:
    """Shards of a tensor in which those of several others lie one below the other.

    parts: by name, in the tensor's order; all in rows, or all in heads of one size; there may be
        none.
    """
    shards, start = {}, 0
    total = sum(part[0].full_shape[0] for part in parts.values())
    for name, part in parts.items():
        for i, shard in enumerate(part):
            rows, *inner = shard.index
            index = slice(start + rows.start, start + rows.stop), *inner
            shape = total, *shard.full_shape[1:]
            shards[piece(tensor, f"{name}.{i}")] = replace(shard, full_shape=shape, index=index)
        start += part[0].full_shape[0]
    return shards


def coarse(part: Part, grain: int) -> Part:
    """The same part in steps of so many; Unsupported if it does not begin and end at one."""
    start, stop = part.held.start, part.held.stop
    if start % grain or (stop % grain and stop != part.size):
        text = f"{start} to {stop} of {part.size} rows or columns share scales with another rank's"
        raise Unsupported(f"{text} (steps of {grain}): divide the model among fewer ranks")
    return Part(-(-part.size // grain), slice(start // grain, -(-stop // grain)))


def with_scales(values: Mapping[str, Shard], scales: Mapping[str, Shard]) -> dict[str, Shard]:
    """Shards of values in eight bits, and of their scales; scales: by the keys of their values."""
    shards = {
        key: replace(shard, what="values") if key in scales else shard
        for key, shard in values.items()
    }
    return shards | {scales_of(key): replace(shard, what="scales") for key, shard in scales.items()}


def rearranged(
    shards: Mapping[str, Shard], change: Callable[[dict[str, Shard]], dict[str, Shard]]
) -> dict[str, Shard]:
    """What `change` makes of shards, and of scales', which it sees by the keys of their values."""
    values = {key: shard for key, shard in shards.items() if shard.what != "scales"}
    scales = {key: shards[scales_of(key)] for key in values if scales_of(key) in shards}
    return with_scales(change(values), change(scales))


def scales_of(key: str) -> str:
    """The key of the scales of the shard of this key."""
    return piece(tensor_of(key), f"{key.partition('[')[2].removesuffix(']')} scales".lstrip())


def piece(tensor: str, name: str) -> str:
    """The key of one shard of several that are parts of one tensor of the checkpoint."""
    return f"{tensor}[{name}]"


def tensor_of(key: str) -> str:
    """The checkpoint's tensor that the shard of this key is of."""
    return key.partition("[")[0]


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """This rank's attention heads. With more ranks than kv heads, a kv head is on several ranks."""

    num_heads: int
    num_kv_heads: int
    first_head: int
    first_kv_head: int


def split_heads(num_heads: int, num_kv_heads: int, rank: int, size: int) -> HeadSplit:
    """Divide the heads so that every rank has the kv heads that its query heads use.

    Raises Unsupported if that cannot be done evenly.
    """
    if num_heads % size:
        raise Unsupported(f"{num_heads} attention heads cannot be divided among {size} ranks")
    if num_kv_heads % size and size % num_kv_heads:
        raise Unsupported(
            f"{num_kv_heads} kv heads can be neither divided among {size} ranks nor copied evenly"
        )
    held, held_kv = num_heads // size, max(1, num_kv_heads // size)
    return HeadSplit(held, held_kv, rank * held, rank * num_kv_heads // size)


def split_even(name: str, count: int, rank: int, size: int) -> slice:
    """Rank's part of `count` rows or columns; Unsupported, with `name`, if it is not even."""
    if count % size:
        raise Unsupported(f"{name} {count} cannot be divided among {size} ranks")
    return slice(rank * (count // size), (rank + 1) * (count // size))
