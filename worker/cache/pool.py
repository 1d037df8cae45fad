"""The KV cache's memory: one allocation per region, seen by kernels as views of its layers."""

import mmap
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from worker.cache.eight_bits import E4M3, exponents_of
from worker.cache.layout import ITEM_BYTES, STATE, KVLayout, KVRegion, MemoryRegion, StateRegion
from worker.errors import UserError
from worker.plan import Copies


class KVPool:
    """`num_pages` zeroed pages of every region of `layout` on `device`, and slots of its state.

    On the CPU a region is an anonymous memfd: the shm transport hands its fd to other processes,
    and nothing stays in /dev/shm when a process dies. Elsewhere it is one device allocation.

    Page 0 and slot 0 are sinks for padded rows and are never handed out. Raises UserError for fewer
    than two pages.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        device: torch.device,
        slots: tuple[int, int] = (0, 0),
    ) -> None:
        """slots: of states of requests, the sink included; of snapshots, behind them."""
        if num_pages < 2:
            text = f"num_pages must be at least 2 (page 0 is a sink), not {num_pages}"
            raise UserError(text, "num_pages")
        self.layout = layout
        self.num_pages = num_pages
        self.device = torch.device(device)
        self._layers: dict[str, list[tuple[Tensor, ...]]] = {}
        self._memory: list[MemoryRegion] = []
        self._pages: list[Tensor] = []  # of each region [num_groups, num_pages, group_bytes] u8
        for region in layout.regions:
            raw = self._allocate(region.name, num_pages * region.page_bytes)
            self._pages.append(raw.view(region.num_groups, num_pages, -1))
            self._layers[region.name] = _layer_views(raw, region, num_pages)
        # Of each layer with a state, see _state_views.
        self.states: list[tuple[Tensor, Tensor]] = []
        self.num_slots, self.num_snapshots = slots
        self._slots: Tensor | None = None  # [slots of both, slot_bytes] u8
        if layout.state is not None:
            num_slots = sum(slots)
            raw = self._allocate(STATE, num_slots * layout.state.slot_bytes)
            self.states = _state_views(raw, layout.state, num_slots)
            self._slots = raw.view(num_slots, -1)

    def _allocate(self, name: str, num_bytes: int) -> Tensor:
        if self.device.type == "cpu":
            raw, fd = _shared_memory(name, num_bytes)
        else:
            raw, fd = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device), None
        self._memory.append(MemoryRegion(name, raw.data_ptr(), num_bytes, fd))
        return raw

    def region(self, name: str = "target") -> KVRegion:
        """The region called `name`; KeyError if the layout has none."""
        return self.layout.region(name)

    def layers(self, region: str = "target") -> list[tuple[Tensor, ...]]:
        """Each layer's parts, as keys and values: views [num_pages, num_kv_heads, rows, head_dim].

        They are strided; head_dim is contiguous, and each head's rows of a page are too. In eight
        bits see `eight_bits.exponents_of`.
        """
        return self._layers[region]

    def layer(self, layer_id: int, region: str = "target") -> tuple[Tensor, ...]:
        """One of `layers`."""
        return self._layers[region][layer_id]

    def page_rows(self, region: str) -> Tensor:
        """[num_pages, head_dim]: all of a region with one row a page, as a tail."""
        ((rows,),) = self._layers[region]
        return rows[:, 0, 0]

    def caches(self, region: str | None = None) -> list[Tensor]:
        """All views of a region, or of all regions; behind a view in eight bits its exponents."""
        names = self._layers if region is None else (region,)
        found = list[Tensor]()
        for part in (part for name in names for parts in self._layers[name] for part in parts):
            found += (part, exponents_of(part)) if part.dtype == E4M3 else (part,)
        return found

    def pieces(self, page: int) -> Iterator[Tensor]:
        """All bytes of a page: [group_bytes] u8 by region and group, contiguous."""
        for groups in self._pages:
            yield from groups[:, page].unbind()

    def slot(self, slot: int) -> Tensor:
        """All bytes of a slot of state: [slot_bytes] u8."""
        assert self._slots is not None
        return self._slots[slot]

    def copy(self, copies: Copies) -> None:
        """Copy states and pages on the current stream."""
        for source, target in copies.slots:
            assert self._slots is not None
            self._slots[target].copy_(self._slots[source])
        for source, target in copies.pages:
            for groups in self._pages:
                groups[:, target].copy_(groups[:, source])

    def memory(self) -> tuple[MemoryRegion, ...]:
        """The allocations, in the layout's order, then the state's; valid until `close`."""
        return tuple(self._memory)

    def close(self) -> None:
        """Give the memory back; it is freed when the last view of it is gone. Idempotent."""
        self._layers.clear()
        self.states.clear()
        self._slots = None
        self._pages.clear()
        for region in self._memory:
            if region.fd is not None:
                os.close(region.fd)
        self._memory.clear()


def _shared_memory(name: str, num_bytes: int) -> tuple[Tensor, int]:
    """Zero bytes in a new memfd: ([num_bytes] u8 that keeps the mapping alive, the fd)."""
    fd = os.memfd_create(f"kvlane-{name}", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes)
        mapping = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError:
        os.close(fd)
        raise
    return torch.frombuffer(mapping, dtype=torch.uint8), fd


def _layer_views(raw: Tensor, region: KVRegion, num_pages: int) -> list[tuple[Tensor, ...]]:
    groups = raw.view(getattr(torch, region.dtype)).view(
        region.num_groups, num_pages, region.num_kv_heads, region.layers_per_group, region.parts, -1
    )
    # A layer is [num_pages, num_kv_heads, parts, rows, head_dim]; exponents lie behind the rows.
    shape = region.rows_per_page, region.head_dim
    groups = groups[..., : shape[0] * shape[1]].unflatten(-1, shape)
    return [layer.unbind(2) for group in groups for layer in group.unbind(2)]


def _state_views(raw: Tensor, state: StateRegion, num_slots: int) -> list[tuple[Tensor, Tensor]]:
    """(states of value heads, raw inputs) of each layer: views of slots and key heads.

    [num_slots, key_heads, numbers] and [num_slots, key_heads, 3, channels], strided.
    """
    shape = num_slots, state.key_heads, state.num_layers, -1
    dtype, of_state = getattr(torch, state.dtype), getattr(torch, state.state_dtype)
    at = state.state_bytes // ITEM_BYTES[state.dtype]
    num = state.state_bytes // ITEM_BYTES[state.state_dtype]
    states = raw.view(of_state).view(shape)[..., :num].unbind(2)
    inputs = raw.view(dtype).view(shape)[..., at:].unflatten(3, (3, -1)).unbind(2)
    return list(zip(states, inputs, strict=True))
