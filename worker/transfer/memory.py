"""Registered memory as buffers for sockets: itself on the CPU, by way of pinned memory on a GPU."""

import ctypes
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from worker.cache.layout import MemoryRegion

PORTION_BYTES = 4 << 20  # most that one request names, and that a lane stages


class Piece(NamedTuple):
    """Bytes of a region."""

    region: int  # by order of registration
    offset: int
    num_bytes: int


class Lane(Protocol):
    """Buffers of one thread, to send from and receive into, for PORTION_BYTES of pieces at most.
    A buffer is good until the next call."""

    def outgoing(self, pieces: Sequence[Piece]) -> list[memoryview]:
        """Buffers that hold the bytes of the pieces, in their order."""
        ...

    def incoming(self, pieces: Sequence[Piece]) -> list[memoryview]:
        """Buffers for the bytes of the pieces; `landed` comes when they are full."""
        ...

    def landed(self, pieces: Sequence[Piece]) -> None:
        """The bytes are in the pieces when this returns."""
        ...


class DirectLane:
    """Memory of the CPU."""

    def __init__(self, regions: Sequence[MemoryRegion]) -> None:
        self._views = [memoryview(bytes_of(region)).cast("B") for region in regions]

    def outgoing(self, pieces: Sequence[Piece]) -> list[memoryview]:
        return [self._views[region][at : at + size] for region, at, size in pieces]

    incoming = outgoing

    def landed(self, pieces: Sequence[Piece]) -> None:
        pass


class StagedLane:
    """Memory of a GPU, by a stream and PORTION_BYTES of pinned memory of the lane's own.

    device: "cpu" copies in the same way without a stream; for tests.
    """

    def __init__(self, regions: Sequence[MemoryRegion], device: torch.device) -> None:
        self._device, on_gpu = device, device.type == "cuda"
        self._regions = [_tensor(region, device) for region in regions]
        self._staged = torch.empty(PORTION_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
        self._view = memoryview(self._staged.numpy().data)
        self._stream = torch.cuda.Stream(device) if on_gpu else None

    def outgoing(self, pieces: Sequence[Piece]) -> list[memoryview]:
        return [self._view[: self._copy(pieces, outwards=True)]]

    def incoming(self, pieces: Sequence[Piece]) -> list[memoryview]:
        return [self._view[: sum(piece.num_bytes for piece in pieces)]]

    def landed(self, pieces: Sequence[Piece]) -> None:
        self._copy(pieces, outwards=False)

    def _copy(self, pieces: Sequence[Piece], *, outwards: bool) -> int:
        """Between the pieces and staged memory, where they lie one behind the other; its length."""
        end = 0
        with torch.cuda.stream(self._stream):
            for region, at, size in pieces:
                ours = self._regions[region][at : at + size]
                staged = self._staged[end : end + size]
                target, source = (staged, ours) if outwards else (ours, staged)
                target.copy_(source, non_blocking=True)
                end += size
        if self._stream is not None:
            self._stream.synchronize()
        return end


def bytes_of(region: MemoryRegion) -> "ctypes.Array[ctypes.c_uint8]":
    """The region itself, memory of the CPU, without a copy."""
    return (ctypes.c_uint8 * region.num_bytes).from_address(region.address)


def _tensor(region: MemoryRegion, device: torch.device) -> Tensor:
    """[num_bytes] u8 over the region itself."""
    if device.type == "cuda":
        at = {"data": (region.address, False), "shape": (region.num_bytes,)}
        memory = {"typestr": "|u1", "version": 3, **at}
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=memory), device=device)
    return torch.frombuffer(bytes_of(region), dtype=torch.uint8)


def lanes_of(regions: Sequence[MemoryRegion]) -> Callable[[], Lane]:
    """A maker of lanes, for threads that call it. Memory without a memfd is on the current GPU."""
    if all(region.fd is not None for region in regions):
        return lambda: DirectLane(regions)
    device = torch.device("cuda", torch.cuda.current_device())
    return lambda: StagedLane(regions, device)
