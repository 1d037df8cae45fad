"""Host memory of a worker's own node, as a store: one memfd, cut into slots of one object.

It is taken whole before the first object, by threads that touch it, and registered with CUDA once,
so that copies do not go by way of other memory. It ends with its process.
"""

import mmap
import os
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from worker.transfer.tier.base import Fill, PageStore, Take

PAGE = 4096
TOUCHED_BYTES = 64 << 20  # by a thread at once
MOST_THREADS = 16
SAMPLED = 64  # our own memory, as the pool is: so few of its blocks are checked, for our own bugs
RUN = 8  # pages for which a thread waits once


class Arena(PageStore):
    """num_bytes of host memory for objects of one length; at least one fits."""

    name, every, run = "host", SAMPLED, RUN

    def __init__(self, num_bytes: int, object_bytes: int, *, registered: bool) -> None:
        """registered: with CUDA, in whose context the caller is. Raises OSError: no memory."""
        self._slot_bytes = -(-object_bytes // PAGE) * PAGE
        num_slots = num_bytes // self._slot_bytes
        assert num_slots > 0
        self._object_bytes, self._is_registered = object_bytes, registered
        fd = os.memfd_create("kvlane-tier", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, num_slots * self._slot_bytes)
            self._mapping = mmap.mmap(fd, num_slots * self._slot_bytes, mmap.MAP_SHARED)
        finally:
            os.close(fd)
        self._view = memoryview(self._mapping)
        self._touch(registered=registered)
        self._lock = threading.Lock()
        self._used = OrderedDict[bytes, int]()  # slots by key, least recently used first
        self._free = [*range(num_slots)]

    def _touch(self, *, registered: bool) -> None:
        memory = torch.frombuffer(self._mapping, dtype=torch.uint8)
        parts = memory.split(TOUCHED_BYTES)
        with ThreadPoolExecutor(min(MOST_THREADS, len(parts))) as threads:
            list(threads.map(lambda part: part[::PAGE].zero_(), parts))
        if registered:
            error = int(_cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
            if error:
                raise OSError(f"cudaHostRegister of {memory.numel()} bytes: error {error}")

    @property
    def num_bytes(self) -> int:  # kept
        """Of the slots in use."""
        return len(self._used) * self._slot_bytes

    def exists(self, key: bytes) -> bool:
        return key in self._used

    def put(self, key: bytes, fill: Fill) -> bool:
        with self._lock:
            if key in self._used:
                self._used.move_to_end(key)
                return True
            slot = self._free.pop() if self._free else self._used.popitem(last=False)[1]
        filled = False
        try:
            filled = fill(self._object(slot))
        finally:
            with self._lock:
                if filled:
                    self._used[key] = slot
                else:
                    self._free.append(slot)
        return filled

    def get(self, key: bytes, take: Take) -> None:
        # Slots are given away by `put` alone, while nobody reads; one that is forgotten meanwhile
        # stays as it is until then.
        with self._lock:
            slot = self._used[key]
            self._used.move_to_end(key)
        take(self._object(slot))

    def forget(self, key: bytes = b"") -> None:
        with self._lock:
            keys = [key] if key in self._used else [] if key else [*self._used]
            self._free += [self._used.pop(x) for x in keys]

    def close(self) -> None:
        if self._is_registered:
            self._is_registered = False
            address = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()
            _cudart().cudaHostUnregister(address)
        self._used.clear()
        self._free.clear()

    def _object(self, slot: int) -> memoryview:
        at = slot * self._slot_bytes
        return self._view[at : at + self._object_bytes]


def _cudart() -> Any:
    return torch.cuda.cudart()
