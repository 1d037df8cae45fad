"""One region of GPU memory a rank, mapped by all ranks of a host (CUDA IPC).

Calls go to the driver's library: its ABI is stable, and every host with a GPU has it. Regions are
the driver's own allocations: memory of torch's allocator may be of a kind that IPC cannot export.
"""

import ctypes
import json
from ctypes import byref, c_char, c_char_p, c_size_t, c_uint, c_uint64
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from worker.errors import Unsupported
from worker.peers.peer_layout import PeerLayout
from worker.peers.rank_group import exchange

LAZY_PEER_ACCESS = 1
BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a host


class Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", c_char * 64),)


class DriverError(RuntimeError):
    """A call of the CUDA driver failed; the message has its name for the reason."""


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemFree_v2.argtypes = [c_uint64]
    library.cuIpcCloseMemHandle.argtypes = [c_uint64]
    library.cuMemAlloc_v2.argtypes = [ctypes.c_void_p, c_size_t]
    library.cuIpcGetMemHandle.argtypes = [ctypes.c_void_p, c_uint64]
    library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, Handle, c_uint]
    return library


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        text = c_char_p()
        _driver().cuGetErrorName(status, byref(text))
        raise DriverError(f"{name}: {(text.value or b'?').decode()}")


class PeerRegions:
    """This rank's region, cleared before peers can write, and where those of peers are mapped.

    Raises, at all ranks together, Unsupported if ranks are on different hosts or GPUs cannot map
    each other's memory, PeerLost if a rank did not come in time.
    """

    def __init__(
        self, rank: int, size: int, layout: PeerLayout, device: torch.device, store: Store
    ) -> None:
        self._rank, self._device = rank, device
        self.addresses = [0] * size
        try:
            handle, reason = self._allocate(layout), ""
        except DriverError as e:
            handle, reason = b"", f"rank {rank} has no memory to share: {e}"
        said = {"boot": BOOT.read_text().strip(), "handle": handle.hex(), "reason": reason}
        regions = exchange(store, "region", rank, size, json.dumps(said))
        reason = self._map([json.loads(region) for region in regions])
        reasons = exchange(store, "mapped", rank, size, reason)
        for reason in filter(None, reasons):
            self.close()
            raise Unsupported(f"peer memory: {reason.decode()}")

    def _allocate(self, layout: PeerLayout) -> bytes:
        """Make this rank's region; its handle for the peers."""
        own, handle = c_uint64(), Handle()
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # the driver's context is there, and current
            _call("cuMemAlloc_v2", byref(own), layout.num_bytes)
            self.addresses[self._rank] = own.value
            _call("cuIpcGetMemHandle", byref(handle), own)
            memory = {"shape": (layout.num_bytes,), "typestr": "|u1", "version": 3}
            memory["data"] = own.value, False
            shared = SimpleNamespace(__cuda_array_interface__=memory)  # a tensor without a copy
            self.region: Tensor = torch.as_tensor(shared, device=self._device)
            layout.clear(self.region)
            torch.cuda.synchronize()
        return bytes(handle)

    def _map(self, regions: list[dict[str, str]]) -> str:
        """Map all peers' regions; why that cannot be, "" if it could."""
        for peer, region in enumerate(regions):
            if region["reason"]:
                return region["reason"]
            if region["boot"] != regions[0]["boot"]:
                return f"ranks 0 and {peer} are on different hosts"
        for peer, region in enumerate(regions):
            if peer == self._rank:
                continue
            handle, mapped = Handle.from_buffer_copy(bytes.fromhex(region["handle"])), c_uint64()
            try:
                with torch.cuda.device(self._device):
                    _call("cuIpcOpenMemHandle_v2", byref(mapped), handle, LAZY_PEER_ACCESS)
            except DriverError as e:
                return f"rank {self._rank} cannot map rank {peer}'s memory: {e}"
            self.addresses[peer] = mapped.value
        return ""

    def close(self) -> None:
        """Unmap the peers' regions and free this rank's; idempotent. No kernel may still run."""
        with torch.cuda.device(self._device):
            for peer, address in enumerate(self.addresses):
                if address:
                    name = "cuMemFree_v2" if peer == self._rank else "cuIpcCloseMemHandle"
                    _call(name, address)
        self.addresses = [0] * len(self.addresses)
