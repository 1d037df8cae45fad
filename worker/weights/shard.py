"""How a checkpoint's tensors, and the model's heads, are divided among tensor-parallel ranks.

Free of torch: what cannot be divided is refused before anything starts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from worker.errors import Unsupported

if TYPE_CHECKING:
    from torch import Tensor


VALUES = "values"  # a role: a tensor's own numbers


class Key(NamedTuple):
    """Names a shard of one model."""

    tensor: str  # of the checkpoint
    piece: str = ""  # which of the tensor's parts that lie apart here; "": they do not
    role: str = VALUES  # which of the tensors that its format stores it as

    def __str__(self) -> str:
        """As digests and noise name it: digests of all releases agree on that."""
        inner = " ".join(filter(None, (self.piece, "" if self.role == VALUES else self.role)))
        return f"{self.tensor}[{inner}]" if inner else self.tensor


class Codec(Protocol):
    """What reads and draws tensors that are stored otherwise than as plain numbers; see
    weights.base.Format."""

    def part(self, stored: Any, role: str, shard: "Shard") -> "Tensor":
        """This rank's part of a tensor, for `shard`, which is of this role."""
        ...

    def drawn(
        self, whole: "Tensor", shapes: Mapping[str, tuple[int, ...]]
    ) -> "Mapping[str, Tensor]":
        """A drawn tensor by roles; shapes: of the whole tensor of each role."""
        ...


@dataclass(frozen=True, slots=True)
class Shard:
    """One tensor of the checkpoint: which part of it this rank holds, and where."""

    dest: "Tensor"  # a view of the parameter; same shape as the part
    full_shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    index: tuple[slice, ...]  # the part, one slice per dimension
    plus: float = 0.0  # is added to what the checkpoint has: zero-centred norms are about 1 here
    heads_merged: bool = False  # the first two dimensions of full_shape are one in the checkpoint
    codec: Codec | None = None  # None: the tensor's numbers are taken by their worth

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of the tensor in the checkpoint."""
        shape = self.full_shape
        return (shape[0] * shape[1], *shape[2:]) if self.heads_merged else shape

    def of(self, stored: Any) -> "Tensor":
        """The part; stored: of `stored_shape`, a tensor or what slices one."""
        if not self.heads_merged:
            return stored[self.index]
        heads, rows, *inner = self.index
        each = self.full_shape[1]
        held = stored[slice(heads.start * each, heads.stop * each), *inner]
        return held.unflatten(0, (-1, each))[:, rows]

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


def stacked(dest: "Tensor", parts: Mapping[str, Part], *inner: Part) -> dict[Key, Shard]:
    """Shards of the tensors that lie one below the other in `dest`.

    parts: by tensor, their first dimensions; inner: the dimensions behind it, which they share.
    """
    shards, start = dict[Key, Shard](), 0
    for name, part in parts.items():
        sizes, index = zip(*((each.size, each.held) for each in (part, *inner)), strict=True)
        shards[Key(name)] = Shard(dest[start : start + len(part)].detach(), sizes, index)
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
) -> dict[Key, Shard]:
    """Shards of a tensor whose rows are, head by head, those of several parts.

    dests: where the rows of each part go, by its name, those of all heads in one dimension or in
    two; sizes: rows a head, in the tensor's order.
    """
    shards, start = dict[Key, Shard](), 0
    shape = heads.size, sum(sizes.values()), *(part.size for part in inner)
    for name, size in sizes.items():
        index = heads.held, slice(start, start + size), *(part.held for part in inner)
        dest = dests[name].detach()
        dest = dest.view(len(heads), size, *dest.shape[dest.dim() - len(inner) :])
        shards[Key(tensor, name)] = Shard(dest, shape, index, heads_merged=True)
        start += size
    return shards


def moved_rows(
    head_dim: int, rotary_dim: int, *, interleaved: bool
) -> tuple[tuple[slice, slice], ...]:
    """(rows of each head of q and of k in the checkpoint, where they lie here); (): all stay.

    Kernels turn numbers i and i + rotary_dim/2 of a head where all or at most half of it is
    rotated. Where a model turns others, the rows lie here so that i and i + head_dim/2 are
    turned, the pairs that it leaves alone by nothing: no product of q and k changes by that.
    """
    if not interleaved and (rotary_dim == head_dim or rotary_dim <= head_dim // 2):
        return ()
    half, pairs = head_dim // 2, rotary_dim // 2
    first, second = slice(0, pairs), slice(pairs, rotary_dim)
    if interleaved:
        first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    turned = (first, slice(0, pairs)), (second, slice(half, half + pairs))
    if rotary_dim == head_dim:
        return turned
    middle = rotary_dim + half - pairs  # of what is not turned
    still = slice(rotary_dim, middle), slice(pairs, half)
    return (*turned, still, (slice(middle, head_dim), slice(half + pairs, head_dim)))


def moved(shard: Shard, head_dim: int, rows: Sequence[tuple[slice, slice]]) -> list[Shard]:
    """The same tensor head by head, and of each head in parts.

    rows: (of a head in the checkpoint, where they lie in `shard.dest`).
    """
    held, *inner = shard.index
    shape = shard.full_shape[0] // head_dim, head_dim, *shard.full_shape[1:]
    heads = slice(held.start // head_dim, held.stop // head_dim)
    dest = shard.dest.unflatten(0, (-1, head_dim))
    whole = replace(shard, full_shape=shape, heads_merged=True)
    return [
        replace(whole, dest=dest[:, here], index=(heads, there, *inner)) for there, here in rows
    ]


def joined(tensor: str, parts: Mapping[str, Sequence[Shard]]) -> dict[Key, Shard]:
    """Shards of a tensor in which those of several others lie one below the other.

    parts: by name, in the tensor's order; all in rows, or all in heads of one size; there may be
        none.
    """
    shards, start = dict[Key, Shard](), 0
    total = sum(part[0].full_shape[0] for part in parts.values())
    for name, part in parts.items():
        for i, shard in enumerate(part):
            rows, *inner = shard.index
            index = slice(start + rows.start, start + rows.stop), *inner
            shape = total, *shard.full_shape[1:]
            shards[Key(tensor, f"{name}.{i}")] = replace(shard, full_shape=shape, index=index)
        start += part[0].full_shape[0]
    return shards


def coarse(part: Part, grain: int) -> Part:
    """The same part in steps of so many; Unsupported if it does not begin and end at one."""
    start, stop = part.held.start, part.held.stop
    if start % grain or (stop % grain and stop != part.size):
        text = f"{start} to {stop} of {part.size} rows or columns share scales with another rank's"
        raise Unsupported(f"{text} (steps of {grain}): divide the model among fewer ranks")
    return Part(-(-part.size // grain), slice(start // grain, -(-stop // grain)))


def rearranged(
    shards: Mapping[Key, Shard], change: Callable[[dict[str, Shard]], dict[Key, Shard]]
) -> dict[Key, Shard]:
    """What `change` makes of the shards of each role, which it sees by their tensors."""
    found = dict[Key, Shard]()
    for role in dict.fromkeys(key.role for key in shards):
        of_role = {key.tensor: shard for key, shard in shards.items() if key.role == role}
        found |= {key._replace(role=role): shard for key, shard in change(of_role).items()}
    return found


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
