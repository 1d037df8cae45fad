"""The KV pool's memory: all that weights, activations and graphs leave.

Free device memory is measured, and other processes change it. So workers that share a GPU load one
after the other (`DeviceMemory.exclusive`), and take all memory that they will ever need before the
next one begins (`DeviceMemory.taking`).
"""

import errno
import gc
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from worker.cache.layout import KVLayout
from worker.config import MAX_AUTO_REQS, MIN_AUTO_REQS, EngineConfig, WorkerConfig
from worker.errors import UserError

log = logging.getLogger("kvlane.memory")
GIB = 1 << 30
ROW_TOKENS = 1024  # of KV that engine.max_num_reqs = auto grants a request
FEW_PENALTY_ROWS = 16  # engine.penalty_rows = auto, where penalties are rare
SNAPSHOT_SHARE = 8  # one part in so many of the memory of pages and snapshots, for kv.snapshots
POLL_S = 0.1
LOG_EVERY_S = 10.0
# Longest wait for a killed worker's memory. Its peers first have to notice (up to 3 s of missed
# pings), to end the pulls under way (some seconds if reads stall), and to unmap it (1 s, ADR 0015).
RETURN_S = 20.0


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """The memory of one CUDA device as one worker sees it, in bytes."""

    total: int
    free: int  # unused by any process
    weights: int  # reserved by this process, once its weights are loaded
    reserve: int  # for activations and graphs
    fraction: float  # engine.memory_fraction: the worker's share of `total`

    @property
    def why(self) -> str:
        """The numbers."""
        share = self.fraction * self.total
        return (
            f"engine.memory_fraction {self.fraction:g} of {self.total / GIB:.2f} GiB is "
            f"{share / GIB:.2f} GiB; weights take {self.weights / GIB:.2f}, steps and graphs "
            f"{self.reserve / GIB:.2f}; {self.free / GIB:.2f} are free"
        )

    def for_pool(self) -> int:
        """Bytes left for the KV pool; negative if weights and reserve exceed the share.

        Raises:
            UserError: other processes hold memory that belongs to this worker's share. Taking
                less would make the pool's size depend on the order in which workers start.
        """
        share = int(self.fraction * self.total)
        if share > self.weights + self.free:
            raise UserError(
                f"engine.memory_fraction: no room for this worker's share: {self.why}. The rest is "
                "held by other processes and CUDA contexts: the fractions of all workers on one "
                "GPU have to sum up to less than 1, with about 1 GiB to spare for each worker",
                "engine.memory_fraction",
            )
        return share - self.weights - self.reserve


class DeviceMemory:
    """The memory of the device that a worker runs on.

    This one is a CPU's: nothing is measured, and engine.cpu_pool_bytes bounds the KV pool.
    """

    def __init__(self, engine: EngineConfig) -> None:
        self._engine = engine

    def exclusive(self) -> AbstractContextManager[None]:
        """Exclude other processes that load on this device."""
        return nullcontext()

    @property
    def share_bytes(self) -> int:
        """Of the device, that this worker has to itself."""
        return self._engine.cpu_pool_bytes

    def wait_for_share(self) -> None:
        """Wait up to RETURN_S for this worker's share to be free; `num_pages` checks it later.

        Peers may still map, and so keep, the memory of the worker that ran on this GPU before.
        Skipped when engine.num_pages is set: the bytes needed are not known then.
        """

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Measure the peak memory that `work` needs; its result is freed."""
        return 0

    def beside_weights(self) -> int:
        """Bytes of the worker's share that its weights, which are loaded, leave."""
        return self._engine.cpu_pool_bytes

    def pool_pages(
        self, config: WorkerConfig, page_bytes: int, reserve_bytes: int
    ) -> tuple[int, str]:
        """Pages of the pool, and the figures behind it; see `num_pages`."""
        row_pages = -(-int(config.model.max_model_len) // int(config.kv.page_size))
        most, limit = int(config.engine.max_num_reqs) * row_pages + 1, self.beside_weights()
        return min(most, (limit - reserve_bytes) // page_bytes), f"engine.cpu_pool_bytes is {limit}"

    def taking(self, num_bytes: int) -> AbstractContextManager[None]:
        """Keep `num_bytes` for this process: the body takes them, or torch's cache does.

        Other processes on the device then see them as taken, and our first large step finds them.
        """
        return nullcontext()


class CudaMemory(DeviceMemory):
    """Of a GPU, which other workers may share."""

    def exclusive(self) -> AbstractContextManager[None]:
        uuid = torch.cuda.get_device_properties().uuid
        return process_lock(f"kvlane-build-{uuid}", f"GPU {uuid}")

    def free_bytes(self) -> int:
        """Measure free device memory, after emptying this process's allocator cache."""
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    @property
    def share_bytes(self) -> int:
        total = torch.cuda.get_device_properties().total_memory
        return int(float(self._engine.memory_fraction) * total)

    def wait_for_share(self) -> None:
        if self._engine.num_pages != "auto":
            return
        self.free_bytes()  # empties our allocator's cache, which mem_get_info counts as in use
        wait_for_free(self.share_bytes, lambda: torch.cuda.mem_get_info()[0], RETURN_S)

    def peak_bytes(self, work: Callable[[], object]) -> int:
        before, own = self.free_bytes(), torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        made = work()
        torch.cuda.synchronize()
        # mem_get_info also sees memory that torch's allocator does not count: graphs, workspaces.
        # The allocator's cache has not been emptied since, so it still holds the peak.
        free, _ = torch.cuda.mem_get_info()
        # If another process ends meanwhile, `free` is too large: then torch's own count is used.
        reserved = torch.cuda.max_memory_reserved() - own
        del made
        self.free_bytes()
        return max(reserved, before - free)

    def beside_weights(self) -> int:
        return self._share(0).for_pool()

    def pool_pages(
        self, config: WorkerConfig, page_bytes: int, reserve_bytes: int
    ) -> tuple[int, str]:
        share = self._share(reserve_bytes)
        return share.for_pool() // page_bytes, share.why

    @contextmanager
    def taking(self, num_bytes: int) -> Iterator[None]:
        before = torch.cuda.memory_reserved()
        yield
        left = before + num_bytes - torch.cuda.memory_reserved()
        free, _ = torch.cuda.mem_get_info()
        if left > 0:
            torch.empty(min(left, free), dtype=torch.uint8, device="cuda")

    def _share(self, reserve_bytes: int) -> DeviceShare:
        return DeviceShare(
            total=torch.cuda.get_device_properties().total_memory,
            free=self.free_bytes(),
            weights=torch.cuda.memory_reserved(),
            reserve=reserve_bytes,
            fraction=float(self._engine.memory_fraction),
        )


# Of a control group: its limit, what it uses, and of that what can be dropped, by version.
GROUP_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def host_memory(
    groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> tuple[int, str]:
    """Bytes of host memory that this process may still take, and what bounds them.

    groups: where control groups are mounted; own: those of this process.
    """
    bounds = [(psutil.virtual_memory().available, "free on this host")]
    for line in own.read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        version, root = (1, groups / "memory") if kinds else (2, groups)
        place = root / path.strip("/")  # a container may not see it, but its own as the root
        inside = filter(lambda group: group.is_relative_to(root), (place, *place.parents))
        bounds += filter(None, (_left_of(group, version) for group in inside))
    return min(bounds)


def _left_of(group: Path, version: int) -> tuple[int, str] | None:
    """Bytes that a control group leaves, and what says so; None: no limit, or it is not here."""
    limit_file, used_file, cached = GROUP_FILES[version]
    try:
        limit, used = ((group / name).read_text().strip() for name in (limit_file, used_file))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return None
    if limit == "max":
        return None
    why = f"left of the container's {int(limit) / GIB:.2f} GiB ({group / limit_file})"
    return max(0, int(limit) - int(used) + int(stat[cached])), why


def memory_of(engine: EngineConfig) -> DeviceMemory:
    """The memory of the device that the resolved configuration names."""
    return DeviceMemory(engine) if engine.device == "cpu" else CudaMemory(engine)


@contextmanager
def process_lock(name: str, resource: str) -> Iterator[None]:
    """Hold a lock between the processes of a host; `cluster.start_timeout_s` bounds the wait.

    The lock is an abstract socket address: the kernel frees it however the process ends, and no
    file is left. Processes in different network namespaces do not see each other's locks.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lock:
        began_at, logged_at = time.monotonic(), float("-inf")
        while True:
            try:
                lock.bind(f"\0{name}")
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            if (now := time.monotonic()) - logged_at > LOG_EVERY_S:
                waited_s = now - began_at
                log.info("waiting for another process to load on %s (%.0f s)", resource, waited_s)
                logged_at = now
            time.sleep(POLL_S)
        yield


def wait_for_free(wanted_bytes: int, free: Callable[[], int], timeout_s: float) -> bool:
    """Wait until `wanted_bytes` are free, `timeout_s` at most; returns whether they are free."""
    if (now := free()) >= wanted_bytes:
        return True
    log.info(
        "%.2f GiB of device memory are free and %.2f are wanted: waiting up to %.0f s",
        now / GIB, wanted_bytes / GIB, timeout_s,
    )  # fmt: skip
    ends_at = time.monotonic() + timeout_s
    while time.monotonic() < ends_at:
        time.sleep(POLL_S)
        if free() >= wanted_bytes:
            return True
    log.warning("device memory did not come back: %.2f GiB are free", free() / GIB)
    return False


def with_max_num_reqs(
    config: WorkerConfig,
    layout: KVLayout,
    memory: DeviceMemory,
    minimum: Callable[[int], int] = int,
) -> WorkerConfig:
    """Decide engine.max_num_reqs by the memory beside the weights.

    The size of steps and graphs depends on it, so it comes before they are measured. minimum: of
    the ranks' figures. Raises UserError as `num_pages`.
    """
    if config.engine.max_num_reqs != "auto":
        return config
    pages = config.engine.num_pages
    num_bytes = memory.beside_weights() if pages == "auto" else int(pages) * layout.page_bytes
    num_reqs = minimum(reqs_held(config, num_bytes, layout))
    log.debug("engine.max_num_reqs = %d (%.2f GiB beside weights)", num_reqs, num_bytes / GIB)
    return _with_engine(config, max_num_reqs=num_reqs)


def with_penalty_rows(config: WorkerConfig, *, all_requests: bool) -> WorkerConfig:
    """Decide engine.penalty_rows; `all_requests`: all have a penalty by default.

    A penalty row takes 9 bytes an entry of the vocabulary.
    """
    if config.engine.penalty_rows != "auto":
        return config
    num_rows = int(config.engine.max_num_reqs) if all_requests else FEW_PENALTY_ROWS
    log.debug("engine.penalty_rows = %d", num_rows)
    return _with_engine(config, penalty_rows=num_rows)


def _with_engine(config: WorkerConfig, **changes: int) -> WorkerConfig:
    engine = config.engine.model_copy(update=changes)
    return config.model_copy(update={"engine": engine})


def num_slots(config: WorkerConfig, layout: KVLayout) -> int:
    """Slots of state, slot 0 (a sink) included; 0 without recurrent layers."""
    if layout.state is None:
        return 0
    slots = config.engine.state_slots
    return 1 + int(config.engine.max_num_reqs if slots == "auto" else slots)


def num_snapshots(config: WorkerConfig, layout: KVLayout, slots: int, pages: int) -> int:
    """Slots of snapshots behind `slots` of requests, the sink included.

    pages: that there would be without snapshots. More conversations are kept than run at a time, as
    agents wait for their tools: how many, the memory says, and not the rows.
    """
    if layout.state is None or not config.engine.prefix_cache:
        return 0
    if config.kv.snapshots != "auto":
        return config.kv.snapshots
    share = pages * layout.page_bytes // SNAPSHOT_SHARE
    return max(slots // 2, share // layout.state.slot_bytes)


def reqs_held(config: WorkerConfig, num_bytes: int, layout: KVLayout) -> int:
    """How many requests of ROW_TOKENS the bytes hold, within the bounds of auto.

    A larger batch costs memory for steps and graphs, which only pays if its requests have KV pages.
    """
    num_tokens = min(ROW_TOKENS, int(config.model.max_model_len))
    row_bytes = -(-num_tokens // int(config.kv.page_size)) * layout.page_bytes
    if layout.state is not None:  # and of half as many snapshots, as auto makes at least
        row_bytes += layout.state.slot_bytes * 3 // 2
    held = num_bytes // row_bytes // 16 * 16  # as sizes of large decode graphs are
    return max(MIN_AUTO_REQS, min(MAX_AUTO_REQS, held))


def num_pages(
    config: WorkerConfig, layout: KVLayout, memory: DeviceMemory, reserve_bytes: int, slots: int
) -> tuple[int, str]:
    """Number of pages of the pool, page 0 (written by padding) included, beside loaded weights.

    reserve_bytes: of steps and graphs; slots: of states, beside them. With the figures behind it.
    Raises UserError, with them, if the worker's share is not free, or too small for a single page.
    """
    if config.engine.num_pages != "auto":
        return int(config.engine.num_pages), "engine.num_pages"
    beside = reserve_bytes + (0 if layout.state is None else slots * layout.state.slot_bytes)
    pages, why = memory.pool_pages(config, layout.page_bytes, beside)
    if pages < 2:
        raise UserError(
            f"engine.num_pages: no room for a single page of {layout.page_bytes} bytes: {why}",
            "engine.num_pages",
        )
    return int(pages), why


@contextmanager
def explain_shortage(doing: str) -> Iterator[None]:
    """Replace torch's out-of-memory error by a UserError that names `doing` and a remedy."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise UserError(
            f"out of device memory while {doing}: {free / GIB:.2f} of {total / GIB:.2f} GiB are "
            f"free; lower engine.memory_fraction, engine.max_num_reqs or "
            f"engine.max_prefill_tokens ({str(error).split('.')[0]})",
            "engine.memory_fraction",
        ) from error


def fit(config: WorkerConfig, configured_len: int | str, num_pages: int) -> WorkerConfig:
    """Lower max_model_len to the pool's tokens; UserError if the user has set it."""
    holds = (num_pages - 1) * int(config.kv.page_size)
    if int(config.model.max_model_len) <= holds:
        return config
    if configured_len != "auto":
        raise UserError(
            f"model.max_model_len is {configured_len}, but {num_pages - 1} KV pages hold {holds} "
            "tokens: lower it, or raise engine.num_pages or, if that is auto, "
            "engine.memory_fraction (on a CPU engine.cpu_pool_bytes)",
            "model.max_model_len",
        )
    log.debug("model.max_model_len = %d (what the KV pool holds)", holds)
    model = config.model.model_copy(update={"max_model_len": holds})
    return config.model_copy(update={"model": model})
