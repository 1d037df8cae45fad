"""The mooncake library itself: its environment, its import, and the engines of one process.

How an engine is destroyed (ADR 0015). Its destructor closes the CUDA IPC handles that the engine
opened, which frees a killed peer's GPU memory, and joins its listener thread. That looks at its
stop flag between two calls of accept(), which last until the receive time-out of the
listening socket, 1 s. The destructor holds the GIL meanwhile, in whichever thread it runs. But the
socket is a descriptor of ours: a thread makes its time-out short, waits for the accept() that began
before, and only then drops the engine. That holds the GIL for 6 ms instead of 1.02 s.
"""

import ctypes
import logging
import mmap
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from worker.cache.layout import MemoryRegion
from worker.errors import Unsupported
from worker.peers.deaf import deafen
from worker.transfer.base import Endpoint
from worker.transfer.doors import cut
from worker.transfer.mooncake_gate import is_connecting, listens, opening, port_of, sockets_at
from worker.transfer.mooncake_libraries import explain

log = logging.getLogger("kvlane.transfer")

# The environment at import chooses the transport, once per process. A variable counts if it is set,
# whatever its value: exactly one may be set.
SELECTION = {"tcp": "MC_FORCE_TCP", "rdma": "MC_FORCE_HCA", "nvlink": "MC_INTRANODE_NVLINK"}
OTHER_SELECTION = (
    *("MC_FORCE_MNNVL", "MC_FORCE_SHM"),
    *("MC_INTRA_NVLINK", "MC_USE_NVLINK_IPC", "MC_USE_TENT"),
)
DEFAULTS = {
    "MC_TCP_SLICE_SIZE": str(1 << 20),
    "MC_TCP_LANES_PER_PEER": "4",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
    "MC_LOG_LEVEL": "ERROR",
}
# Only picks the allocator of buffers that we do not use, not the transport.
PROTOCOL = {"tcp": "tcp", "rdma": "rdma", "nvlink": "nvlink_intra"}

# How long a listener stays in an accept() that it began before its time-out was made short.
ACCEPT_S = 1.1
SHORT_S = 1e-3
SHORT_TIMEOUT = struct.pack("ll", 0, 1000)  # struct timeval: SHORT_S

GLOG_LEVEL = "_ZN3fLI17FLAGS_minloglevelE"  # fLI::FLAGS_minloglevel
GLOG_ERROR, GLOG_FATAL = 2, 3

_chosen: str | None = None
_hushing = threading.Lock()


def configure(kind: str) -> dict[str, str]:
    """Set mooncake's environment for `kind`, before its first import. Returns the variables set.

    A value that the user's environment already holds wins, except for the choice of transport.
    The library reads most of it once, so a process has one kind for all its life: Unsupported if
    this one has another, or the kind is unknown.
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
    """mooncake's TransferEngine class, imported on first use, or MissingLibrary with advice."""
    try:
        return import_module("mooncake.engine").TransferEngine
    except ImportError as e:
        raise explain(e) from e


@contextmanager
def _hushed() -> Iterator[None]:
    """Silence mooncake's error lines: every start of an engine that succeeds prints one, too.

    They go through glog, whose level counts for the process. A level that shows more stays.
    """
    module = sys.modules.get("mooncake.engine")
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL(getattr(module, "__file__", None)), GLOG_LEVEL)
    except ValueError:  # not built with a glog of its own
        yield
        return
    with _hushing:
        before = level.value
        level.value = GLOG_FATAL if before >= GLOG_ERROR else before
        try:
            yield
        finally:
            level.value = before


@dataclass(slots=True, eq=False)
class Engine:
    """One mooncake engine with all our regions registered; it knows one peer at most."""

    raw: Any  # None once destroyed; nobody else keeps a reference to it
    registered: list[int]  # start addresses
    first_read: int  # address that the byte of `warm` is read to
    listeners: list[int]  # descriptors, deaf: of handshakes, and of data over TCP

    def warm(self, name: str, endpoint: Endpoint) -> bool:
        """Resolve the name and open a connection by reading one byte; blocks up to 60 s."""
        theirs = endpoint.regions[0].address
        return self.raw.transfer_sync_read(name, self.first_read, theirs, 1) == 0


class Engines:
    """The engines of one process: one that serves, others that pull from one peer. Thread-safe."""

    def __init__(self, engine_class: type[Any], host: str, kind: str) -> None:
        self.host = host
        self._class = engine_class
        self._kind = kind
        self._device = torch.cuda.current_device() if kind == "nvlink" else None
        self._regions: tuple[MemoryRegion, ...] = ()
        # First reads land here. NVLink registers device memory only, so there they land at the
        # beginning of region 0: in page 0, the sink that nobody reads.
        self._scratch = mmap.mmap(-1, mmap.PAGESIZE)
        self._lock, self._starting = threading.Lock(), threading.Lock()
        self._serving: Engine | None = None
        self._destroying: list[threading.Thread] = []

    def serve(self, regions: Sequence[MemoryRegion]) -> list[int]:
        """Register `regions` for good and start the serving engine; its listeners.

        Raises as `make`.
        """
        self._regions = tuple(regions)
        self._serving = self.make()
        return self._serving.listeners

    def answers(self, name: str) -> bool:
        """Whether an engine answers at `name`; blocks up to 60 s if its process hangs.

        The serving engine asks, and serves on meanwhile. So a peer that is away costs no engine.
        """
        serving = self._serving
        return serving is not None and serving.raw.send_probe(name) == 0

    def make(self) -> Engine:
        """A new engine: a few milliseconds, registration of large memory for RDMA aside.

        Raises Unsupported if it does not start (no card, no port) or refuses the memory.
        """
        self._set_device()
        with self._starting:
            with _hushed():
                raw, listeners = opening(self._started)
            if raw is None:
                raw, listeners = opening(self._started)  # now with its error lines
        if raw is None:
            raise Unsupported(
                f"mooncake does not start over {self._kind}: its log lines on stderr say why "
                "(no card or link of that kind, or no free port)"
            )
        known = [port_of(fd) for fd in listeners]
        if known[:1] != [raw.get_rpc_port()] or len(known) != 1 + (self._kind == "tcp"):
            raise Unsupported("mooncake listens in a way that cannot be guarded")
        addresses = [region.address for region in self._regions]
        sizes = [region.num_bytes for region in self._regions]
        first_read = addresses[0]
        if self._kind != "nvlink":
            first_read = ctypes.addressof(ctypes.c_char.from_buffer(self._scratch))
            addresses.append(first_read)
            sizes.append(len(self._scratch))
        if raw.batch_register_memory(addresses, sizes) != 0:
            raise Unsupported(f"mooncake over {self._kind} refuses to register this memory")
        return Engine(raw, addresses, first_read, listeners)

    def _started(self) -> Any:
        """An engine; None: it does not start."""
        raw = self._class()
        how = self.host, "P2PHANDSHAKE", PROTOCOL[self._kind], ""
        return raw if raw.initialize(*how) == 0 else None

    def finish_copies(self) -> None:
        """Wait until the bytes of ended reads are in device memory.

        TCP copies from pageable memory. When such a copy returns, CUDA may have staged the bytes
        without having sent them. Steps run on a stream that does not wait for the default one.
        """
        if self._kind == "tcp" and self._regions[0].fd is None:
            torch.cuda.default_stream().synchronize()

    def discard(self, engine: Engine) -> None:
        """Destroy `engine`, which nobody uses any more, in a thread of its own; returns at once."""
        thread = threading.Thread(
            target=self._destroy, args=(engine,), name="mooncake-destroy", daemon=True
        )
        with self._lock:
            self._destroying = [t for t in self._destroying if t.is_alive()]
            self._destroying.append(thread)
            thread.start()

    def close(self) -> None:
        """Destroy the serving engine; returns when all that were discarded so far are gone."""
        with self._lock:
            serving, self._serving = self._serving, None
        if serving is not None:
            self.discard(serving)
        for thread in self._destroying:
            thread.join()

    def _destroy(self, engine: Engine) -> None:
        """Destroy it after about ACCEPT_S, as the module describes; no read may be under way."""
        self._set_device()
        port = engine.raw.get_rpc_port()
        engine.raw.batch_unregister_memory(engine.registered)  # RDMA unpins here, without the GIL
        let_listener_stop(port)
        began = time.perf_counter()
        engine.raw = None
        held_ms = (time.perf_counter() - began) * 1e3
        log.debug("destroyed the mooncake engine of port %d: GIL held for %.1f ms", port, held_ms)

    def _set_device(self) -> None:  # IPC handles are opened and closed on this thread's device
        if self._device is not None:
            torch.cuda.set_device(self._device)


def let_listener_stop(port: int) -> None:
    """Return once our listener at `port` looks at its stop flag every few milliseconds.

    It hears nobody any more; with a connection open it might not look for up to 60 s.
    """
    for sock in sockets_at(port):
        if listens(sock):
            deafen(sock.fileno())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, SHORT_TIMEOUT)
    time.sleep(ACCEPT_S)
    for sock in sockets_at(port):
        if not listens(sock):
            cut(sock)
    while is_connecting():  # the destructor, which holds the interpreter's lock, would wait for it
        time.sleep(SHORT_S)
