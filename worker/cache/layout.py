"""The byte layout of the KV cache, and what two workers must have in common to move it.

A region is [group][page][kv_head][layer in group][part][row][head_dim] (ADR 0018); parts are k and
v, rows are tokens. So a layer group of a run of pages is one range of bytes; it is announced while
later groups still compute. A range of kv heads of a page within a group is one range as well; peers
with unequal tensor parallelism exchange those.

Regions share page ids: what the prefix tree, preemption, pulls and budgets do with a page, they do
with its part of every region. The first region, "target", has the layer groups; the others are
final, and travel, with the last of them.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple

import msgspec

from worker.errors import UserError

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
LAYOUT_VERSION = 6  # of pages, and of how they are announced
STATE = "state"  # name of the region of slots


@dataclass(frozen=True, slots=True)
class KVRegion:
    """Paged state of one stack of layers: of a whole model, or of one rank.

    Keys and values of each token ("target", a drafter's "draft"), or one vector a page ("tail":
    features of its last token, with one layer, one head, one part and `rows` "page").

    Raises UserError for a size below one, a dtype that is not in ITEM_BYTES, other parts than 1 or
    2, and a number of groups that does not divide the layers.
    """

    name: str
    num_layers: int
    num_kv_heads: int  # of the whole model in a ModelLayout, of one rank in a KVLayout
    head_dim: int
    num_groups: int
    page_size: int  # tokens
    dtype: str
    parts: int = 2  # of a row: k and v, or a single one
    rows: Literal["token", "page"] = "token"  # what has a vector of its own

    def __post_init__(self) -> None:
        wrong: dict[str, str] = {}  # field -> text
        for field in ("num_layers", "num_kv_heads", "head_dim", "num_groups", "page_size"):
            if getattr(self, field) < 1:
                wrong[field] = f"must be at least 1, not {getattr(self, field)}"
        if self.dtype not in ITEM_BYTES:
            wrong["dtype"] = f"{self.dtype!r} is not one of: {', '.join(ITEM_BYTES)}"
        if self.parts not in (1, 2):
            wrong["parts"] = f"must be 1 or 2, not {self.parts}"
        if "num_groups" not in wrong and self.num_layers % self.num_groups:
            wrong["num_groups"] = f"{self.num_groups} does not divide num_layers {self.num_layers}"
        if wrong:
            field, text = next(iter(wrong.items()))
            raise UserError(f"KV region {self.name!r}: {field} {text}", field)

    @property
    def layers_per_group(self) -> int:
        """Layers whose KV becomes final, and is announced, together."""
        return self.num_layers // self.num_groups

    @property
    def rows_per_page(self) -> int:
        """Rows that a page has of a layer, head and part."""
        return self.page_size if self.rows == "token" else 1

    @property
    def head_bytes(self) -> int:
        """One kv head within one group of one page."""
        return self.layers_per_group * self.parts * self.part_bytes

    @property
    def part_bytes(self) -> int:
        """Keys or values of one head in one layer of a page; in eight bits with their exponents.

        Then it is a multiple of 128 and of head_dim, so that rows begin at multiples of a row.
        """
        num_bytes = self.rows_per_page * self.head_dim * ITEM_BYTES[self.dtype]
        if ITEM_BYTES[self.dtype] > 1:
            return num_bytes
        grain = math.lcm(self.head_dim, 128)
        return -(-(num_bytes + self.rows_per_page) // grain) * grain

    @property
    def group_bytes(self) -> int:
        """One group of one page."""
        return self.num_kv_heads * self.head_bytes

    @property
    def page_bytes(self) -> int:
        """One page of this region, all its groups together."""
        return self.num_groups * self.group_bytes


@dataclass(frozen=True, slots=True)
class StateRegion:
    """What gated delta nets keep of a request, in a slot of its own and not in pages.

    A slot is [key head][layer][state of its value heads, then 3 raw inputs of its channels]:
    so a range of key heads is one range of bytes, as a range of kv heads of a page is.
    """

    num_layers: int
    key_heads: int  # of the whole model in a ModelLayout, of one rank in a KVLayout
    ratio: int  # value heads of a key head
    key_dim: int
    value_dim: int
    dtype: str  # of the inputs
    state_dtype: str = "float32"

    @property
    def state_bytes(self) -> int:
        """Of the states of one key head's value heads, in one layer."""
        return self.ratio * self.key_dim * self.value_dim * ITEM_BYTES[self.state_dtype]

    @property
    def head_bytes(self) -> int:
        """One key head in all layers."""
        channels = 2 * self.key_dim + self.ratio * self.value_dim
        return self.num_layers * (self.state_bytes + 3 * channels * ITEM_BYTES[self.dtype])

    @property
    def slot_bytes(self) -> int:
        """One request."""
        return self.key_heads * self.head_bytes


@dataclass(frozen=True, slots=True)
class Regions:
    """Regions that share page ids, and so the page size; and slots of state, if there are.

    Raises UserError for no region, two of one name, different page sizes, and layer groups of
    another than the first.
    """

    regions: tuple[KVRegion, ...]
    state: StateRegion | None = None

    def __post_init__(self) -> None:
        names = [region.name for region in self.regions]
        if not names or len(set(names)) < len(names):
            raise UserError(f"a KV layout needs regions of distinct names, not {names}")
        sizes = {region.name: region.page_size for region in self.regions}
        if len(set(sizes.values())) > 1:
            text = f"KV regions share page ids and need one page_size, not {sizes}"
            raise UserError(text, "page_size")
        grouped = [region.name for region in self.regions[1:] if region.num_groups > 1]
        if grouped:
            text = f"KV regions {grouped}: only the first may have several num_groups"
            raise UserError(text, "num_groups")

    @property
    def target(self) -> KVRegion:
        """The first region: that of the model's own layers, which may have layer groups."""
        return self.regions[0]

    @property
    def num_groups(self) -> int:
        """Layer groups that are announced one by one."""
        return self.target.num_groups

    @property
    def page_size(self) -> int:
        """Tokens per page, of every region."""
        return self.target.page_size

    @property
    def page_bytes(self) -> int:
        """One page of all regions together."""
        return sum(region.page_bytes for region in self.regions)


class KVLayout(Regions):
    """All regions of one rank."""

    __slots__ = ()

    def region(self, name: str = "target") -> KVRegion:
        """The region called `name`; KeyError if there is none."""
        return {region.name: region for region in self.regions}[name]

    def describe(self) -> str:
        """Say what a token takes, by region."""
        sizes = (f"{x.name} {x.page_bytes / self.page_size:,.0f}" for x in self.regions)
        state = f"; a request: {self.state.slot_bytes:,d} of state" if self.state else ""
        return f"bytes a token: {', '.join(sizes)}{state}"


class ModelLayout(Regions):
    """All regions of the whole model: what workers have in common, whatever their ranks."""

    __slots__ = ()

    def share(self, tp_size: int, rank: int) -> KVLayout:
        """The layout of one rank, with its kv heads of each region; raises as `rank_heads`."""
        heads = [rank_heads(region.num_kv_heads, tp_size, rank) for region in self.regions]
        ranks = zip(self.regions, heads, strict=True)
        state = self.state
        if state is not None:
            state = replace(state, key_heads=len(rank_heads(state.key_heads, tp_size, rank)))
        regions = tuple(replace(region, num_kv_heads=len(own)) for region, own in ranks)
        return KVLayout(regions, state)

    def identity(self, model: str, digest: str) -> "Identity":
        """Build what peers compare, for a model of that served name and digest (ADR 0025)."""
        fields = asdict(self)
        if self.state is not None and self.state.state_dtype == "float32":
            del fields["state"]["state_dtype"]  # workers of before this field had no other
        text = json.dumps([LAYOUT_VERSION, fields, digest], sort_keys=True)
        return Identity(model, digest, hashlib.sha256(text.encode()).hexdigest()[:16])


class Identity(NamedTuple):
    """Whose KV a worker holds. Peers exchange KV if `layout_hash`, which covers all but the name,
    is the same."""

    model: str  # served name, for people
    digest: str  # of configuration and weights of all models whose KV is in the pages
    layout_hash: str  # 16 hex digits over the digest and every field of the ModelLayout

    def explain(self, other: "Identity") -> str:
        """Say why KV of `other` is of no use here."""
        if self.digest != other.digest:
            ours, theirs = (f"{who.model!r} ({who.digest or 'no digest'})" for who in (self, other))
            return (
                f"it serves {theirs}, we serve {ours}: "
                "configuration, weights and dtype of model and drafter must be the same"
            )
        return (
            f"its KV layout is {other.layout_hash}, ours {self.layout_hash}: "
            "dtypes, page_size, num_groups and the version of the KV layout must be the same"
        )


def rank_heads(num_kv_heads: int, tp_size: int, rank: int) -> range:
    """The model's kv heads that `rank` of `tp_size` holds: its share, or a copy of one head.

    Raises ValueError if neither of num_kv_heads and tp_size divides the other, or for no such rank.
    """
    if not 0 <= rank < tp_size:
        raise ValueError(f"no rank {rank} among {tp_size}")
    if num_kv_heads % tp_size == 0:
        share = num_kv_heads // tp_size
        return range(rank * share, (rank + 1) * share)
    if tp_size % num_kv_heads == 0:
        head = rank // (tp_size // num_kv_heads)
        return range(head, head + 1)
    raise ValueError(f"{num_kv_heads} kv heads cannot be shared by {tp_size} ranks")


class MemoryRegion(msgspec.Struct, frozen=True, array_like=True):
    """One region's memory, as a transport registers it and its peers see it.

    Of n pages, group g of page p starts at address + (g·n + p)·group_bytes. Slots of state lie one
    behind the other.
    """

    name: str
    address: int
    num_bytes: int
    fd: int | None  # the memfd behind it on the CPU, of the owner's process; None on CUDA
