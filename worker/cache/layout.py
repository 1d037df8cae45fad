"""The byte layout of the KV cache, and what two workers must agree on to move it.

A region is [group][page][kv_head][layer in group][k|v][token][head_dim] (ADR 0018). So a layer
group of a run of pages is one range of bytes; it is announced while later groups still compute. A
range of kv heads of a page within a group is one range as well; peers with unequal tensor
parallelism exchange those.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from worker.errors import UserError

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
LAYOUT_VERSION = 2


@dataclass(frozen=True, slots=True)
class KVRegion:
    """Paged KV of one stack of layers ("target", a drafter's) on one rank.

    Raises:
        ValueError: a size below one, a dtype that is not in ITEM_BYTES, or a number of groups
            that does not divide the layers.
    """

    name: str
    num_layers: int
    num_kv_heads: int  # of this rank
    head_dim: int
    num_groups: int
    page_size: int  # tokens
    dtype: str

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim", "num_groups", "page_size"):
            if getattr(self, field) < 1:
                raise UserError(
                    f"KV region {self.name!r}: {field} must be at least 1, "
                    f"not {getattr(self, field)}",
                    param=field,
                )
        if self.dtype not in ITEM_BYTES:
            raise UserError(
                f"KV region {self.name!r}: dtype {self.dtype!r} is not one of: "
                f"{', '.join(ITEM_BYTES)}",
                param="dtype",
            )
        if self.num_layers % self.num_groups:
            raise UserError(
                f"KV region {self.name!r}: num_groups {self.num_groups} does not divide "
                f"num_layers {self.num_layers}",
                param="num_groups",
            )

    @property
    def layers_per_group(self) -> int:
        """Layers whose KV becomes final, and is announced, together."""
        return self.num_layers // self.num_groups

    @property
    def head_bytes(self) -> int:
        """One kv head within one group of one page."""
        item = ITEM_BYTES[self.dtype]
        return self.layers_per_group * 2 * self.page_size * self.head_dim * item

    @property
    def group_bytes(self) -> int:
        """One group of one page."""
        return self.num_kv_heads * self.head_bytes

    @property
    def page_bytes(self) -> int:
        """One page of this region, all its groups together."""
        return self.num_groups * self.group_bytes


@dataclass(frozen=True, slots=True)
class KVLayout:
    """All regions of one rank. Regions share page ids, so they share the page size.

    Raises:
        ValueError: no region, two of one name, or different page sizes.
    """

    regions: tuple[KVRegion, ...]
    model_id: str  # of the weights that the KV depends on

    def __post_init__(self) -> None:
        names = [region.name for region in self.regions]
        if not names or len(set(names)) < len(names):
            raise UserError(f"a KV layout needs regions of distinct names, not {names}")
        sizes = {region.name: region.page_size for region in self.regions}
        if len(set(sizes.values())) > 1:
            raise UserError(
                f"KV regions share page ids and need one page_size, not {sizes}", param="page_size"
            )

    @property
    def page_size(self) -> int:
        """Tokens per page, of every region."""
        return self.regions[0].page_size

    @property
    def page_bytes(self) -> int:
        """One page of all regions together."""
        return sum(region.page_bytes for region in self.regions)

    @property
    def hash(self) -> str:
        """16 hex digits over every field; peers whose hashes differ never exchange KV."""
        text = json.dumps([LAYOUT_VERSION, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """One region's memory, as a transport registers it.

    Of n pages, group g of page p starts at address + (g·n + p)·group_bytes.
    """

    name: str
    address: int
    num_bytes: int
    fd: int | None  # the memfd behind it on the CPU, owned by the pool; None on CUDA
