"""The mooncake library itself: its environment, its import, and the engines of one process."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.cache.layout import MemoryRegion
from worker.errors import MissingLibrary, Unsupported
from worker.transfer.base import Endpoint

# Presence counts, not the value: exactly one variable that selects may be set.
SELECTION = {
    "tcp": "MC_FORCE_TCP",
    "rdma": "MC_FORCE_HCA",
    "nvlink": "MC_INTRANODE_NVLINK",
}
OTHER_SELECTION = (
    "MC_FORCE_MNNVL",
    "MC_FORCE_SHM",
    "MC_INTRA_NVLINK",
    "MC_USE_NVLINK_IPC",
    "MC_USE_TENT",
)
DEFAULTS = {
    "MC_TCP_SLICE_SIZE": str(1 << 20),
    "MC_TCP_LANES_PER_PEER": "4",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
    "MC_LOG_LEVEL": "ERROR",
}
# Only picks the allocator of buffers that we do not use; the transport is chosen by SELECTION.
PROTOCOL = {"tcp": "tcp", "rdma": "rdma", "nvlink": "nvlink_intra"}

# System libraries that the wheels link against: Debian package, or what else helps.
APT_PACKAGES = {
    "libibverbs.so": "libibverbs1",
    "libmlx5.so": "ibverbs-providers",
    "librdmacm.so": "librdmacm1",
    "libnuma.so": "libnuma1",
    "libcurl.so": "libcurl4",
}
OTHER_LIBRARIES = {
    "libcuda.so": "the NVIDIA driver; without a GPU use the CPU wheel, pip install 'kvlane[cpu]'",
    "libcudart.so": "the CUDA runtime of the wheel's CUDA version: pip install 'kvlane[cuda]'",
}

_chosen: str | None = None


def configure(kind: str) -> dict[str, str]:
    """Set mooncake's environment for `kind`; must come before its first import. What it set.

    A value that the user's environment already holds wins, except for the choice of transport.
    The library reads most of it once, so a process has one kind for all its life.

    Raises:
        Unsupported: unknown kind, or this process already uses another one.
    """
    global _chosen
    if kind not in SELECTION:
        raise Unsupported(f"mooncake has no kind {kind!r}; choose one of {', '.join(SELECTION)}")
    if _chosen not in (None, kind):
        raise Unsupported(f"this process already runs mooncake over {_chosen}, not {kind}")
    _chosen = kind
    for variable in (*SELECTION.values(), *OTHER_SELECTION):
        os.environ.pop(variable, None)
    settings = {name: os.environ.get(name, value) for name, value in DEFAULTS.items()}
    settings[SELECTION[kind]] = "1"
    os.environ.update(settings)
    return settings


def load() -> type[Any]:
    """mooncake's TransferEngine class, imported on first use.

    Raises:
        MissingLibrary: the package or a system library is missing; says what to install.
    """
    try:
        return import_module("mooncake.engine").TransferEngine
    except ImportError as e:
        raise explain(e) from e


def explain(error: ImportError) -> MissingLibrary:
    """What to install so that `error` does not happen again."""
    if isinstance(error, ModuleNotFoundError):
        return MissingLibrary(
            "transport mooncake needs mooncake-transfer-engine: pip install 'kvlane[cpu]', "
            "or 'kvlane[cuda]' on a machine with NVIDIA GPUs (never both wheels in one venv)"
        )
    text = str(error)
    for library, package in APT_PACKAGES.items():
        if library in text:
            return MissingLibrary(
                f"mooncake needs the system library {library}, package {package}: "
                f"apt-get install -y --no-install-recommends {package} ({text})"
            )
    for library, remedy in OTHER_LIBRARIES.items():
        if library in text:
            return MissingLibrary(f"mooncake needs {library}: {remedy} ({text})")
    return MissingLibrary(f"mooncake is installed but cannot be loaded: {text}")


@dataclass(slots=True, eq=False)
class Engine:
    """One mooncake engine with all our regions registered.

    `dialled` says which process stood behind each name that the engine ever resolved: it caches
    a name's addresses for ever, so for another process of that name it is useless.
    """

    raw: Any
    first_read: int  # address that the byte of `warm` is read to
    dialled: dict[str, tuple[str, int, int]] = field(default_factory=dict)

    def fits(self, endpoint: Endpoint) -> bool:
        """Whether what the engine remembers of the name is still true."""
        return self.dialled.get(endpoint.name, endpoint.process) == endpoint.process

    def warm(self, endpoint: Endpoint) -> bool:
        """Resolve the name and open a connection by reading one byte; blocks up to 60 s."""
        self.dialled[endpoint.name] = endpoint.process
        theirs = endpoint.regions[0].address
        return self.raw.transfer_sync_read(endpoint.name, self.first_read, theirs, 1) == 0


class Engines:
    """The engines of one process: one that serves, and a free list of those that pull.

    Thread-safe. Engines are made on demand and used again; their number is that of the peers that
    were connected, or hung in first contact, at the same time.
    """

    def __init__(self, engine_class: type[Any], host: str, kind: str) -> None:
        self.host = host
        self._class = engine_class
        self._kind = kind
        self._device = _current_device() if kind == "nvlink" else None
        self._regions: tuple[MemoryRegion, ...] = ()
        # First reads land here: NVLink registers device memory only and uses region 0 instead,
        # which begins with page 0, the sink that nobody reads.
        self._scratch = mmap.mmap(-1, mmap.PAGESIZE)
        self._lock = threading.Lock()
        self._serving: Engine | None = None
        self._free: list[Engine] = []
        self._closed = False

    def serve(self, regions: Sequence[MemoryRegion]) -> int:
        """Register `regions` for good and start the serving engine; its port.

        Raises:
            Unsupported: see `_make`.
        """
        self._regions = tuple(regions)
        self._serving = self._make()
        return self._serving.raw.get_rpc_port()

    def take(self, endpoint: Endpoint) -> Engine:
        """An engine for `endpoint`, free or new, used by nobody else until it is given back.

        Raises:
            Unsupported: see `_make`.
        """
        if self._device is not None:
            _set_device(self._device)  # of this thread: IPC handles are opened on it
        with self._lock:
            for engine in self._free:
                if engine.fits(endpoint):
                    self._free.remove(engine)
                    return engine
        return self._make()

    def give_back(self, engine: Engine) -> None:
        """`engine` has nothing under way and is free for another peer."""
        with self._lock:
            if not self._closed:
                self._free.append(engine)

    def close(self) -> None:
        """Destroy the engines, those in use when they are given back: 1 s each, GIL held."""
        with self._lock:
            self._closed = True
            self._free.clear()
            self._serving = None

    def _make(self) -> Engine:
        """A new engine: a few milliseconds, registration of large memory for RDMA aside.

        Raises:
            Unsupported: it does not start (no card, no port) or refuses the memory.
        """
        raw = self._class()
        if raw.initialize(self.host, "P2PHANDSHAKE", PROTOCOL[self._kind], "") != 0:
            raise Unsupported(
                f"mooncake does not start over {self._kind}: its log lines on stderr say why "
                "(no card or link of that kind, or no free port)"
            )
        addresses = [region.address for region in self._regions]
        sizes = [region.num_bytes for region in self._regions]
        first_read = addresses[0]
        if self._kind != "nvlink":
            first_read = _address(self._scratch)
            addresses.append(first_read)
            sizes.append(len(self._scratch))
        if raw.batch_register_memory(addresses, sizes) != 0:
            raise Unsupported(f"mooncake over {self._kind} refuses to register this memory")
        return Engine(raw, first_read)


def _address(buffer: mmap.mmap) -> int:
    view: NDArray[np.uint8] = np.frombuffer(buffer, np.uint8)
    return view.ctypes.data


def _current_device() -> int:
    import torch

    return torch.cuda.current_device()


def _set_device(device: int) -> None:
    import torch

    torch.cuda.set_device(device)
