"""How much memory the KV pool gets: what is left beside weights, activations and graphs.

What a device has free is measured, and every process on it changes that. So workers of one device
are built in turn (`turn`), and one that was built holds all that it will ever need (`taking`).
"""

from __future__ import annotations

import errno
import gc
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from worker.cache.layout import KVLayout
from worker.config import WorkerConfig
from worker.errors import UserError

log = logging.getLogger("kvlane.memory")
GIB = 1 << 30
POLL_S = 0.1
SAY_EVERY_S = 10.0
# A killed worker's memory comes back when those that pulled from it have noticed and let go: pings
# missed for up to 3 s, pulls under way, and 1 s more (ADR 0015).
RETURN_S = 20.0


@contextmanager
def turn(device: torch.device) -> Iterator[None]:
    """Only one process of this host at a time is inside for one CUDA device; nothing on the CPU."""
    if device.type == "cpu":
        yield
        return
    uuid = torch.cuda.get_device_properties(device).uuid
    with alone(f"kvlane-build-{uuid}", f"GPU {uuid}"):
        yield


@contextmanager
def alone(name: str, what: str) -> Iterator[None]:
    """One process at a time is inside for one `name`; the others wait, and say so in the log.

    The lock is an abstract socket address, which the kernel frees whatever way the process ends and
    which leaves no file. Its reach is the network namespace. `cluster.start_timeout_s` bounds the
    wait.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lock:
        began_at = said_at = time.monotonic()
        while not _bound(lock, name):
            now = time.monotonic()
            if said_at == began_at or now - said_at > SAY_EVERY_S:
                log.info(
                    "waiting for another process that is building on %s (%.0f s)",
                    what, now - began_at,
                )  # fmt: skip
                said_at = now
            time.sleep(POLL_S)
        yield


def _bound(lock: socket.socket, name: str) -> bool:
    """Whether `lock` has the name now, which one socket at a time can have."""
    try:
        lock.bind(f"\0{name}")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def free_bytes(device: torch.device) -> int:
    """Device memory that nobody uses, this process's cache emptied before."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def await_share(config: WorkerConfig, device: torch.device) -> None:
    """Give a predecessor's memory RETURN_S to come back; `num_pages` judges what there is then.

    Not where engine.num_pages is named: nobody knows then what the worker will take.
    """
    if device.type == "cpu" or config.engine.num_pages != "auto":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    share = int(float(config.engine.memory_fraction) * total)
    free_bytes(device)  # what this process's allocator keeps is no predecessor's
    is_there(share, lambda: torch.cuda.mem_get_info(device)[0], RETURN_S)


def is_there(share: int, free: Callable[[], int], patience_s: float) -> bool:
    """Whether `share` bytes are free, by `patience_s` seconds from now."""
    if (now := free()) >= share:
        return True
    log.info(
        "%.2f GiB of device memory are free and %.2f are wanted: waiting up to %.0f s",
        now / GIB, share / GIB, patience_s,
    )  # fmt: skip
    ends_at = time.monotonic() + patience_s
    while time.monotonic() < ends_at:
        time.sleep(POLL_S)
        if free() >= share:
            return True
    log.warning("device memory did not come back: %.2f GiB are free", free() / GIB)
    return False


def cost_of(work: Callable[[], object], device: torch.device) -> int:
    """Bytes of device memory that `work` takes and keeps, its peak included; 0 on the CPU.

    What it made is freed again.
    """
    if device.type == "cpu":
        return 0
    before, own = free_bytes(device), torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    made = work()
    torch.cuda.synchronize(device)
    free, _ = torch.cuda.mem_get_info(device)  # with the allocator's cache: the peak
    # What is free changes with other processes, too: one that ends meanwhile must not hide ours.
    allocated = torch.cuda.max_memory_reserved(device) - own
    del made
    free_bytes(device)
    return max(allocated, before - free)


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of one CUDA device as one worker sees it, in bytes."""

    total: int
    free: int  # nobody uses it
    weights: int  # of this worker, on the device
    reserve: int  # what its steps and graphs need
    fraction: float  # of `total` that is for this worker

    @property
    def why(self) -> str:
        """The numbers, for people."""
        share = self.fraction * self.total
        return (
            f"engine.memory_fraction {self.fraction:g} of {self.total / GIB:.2f} GiB is "
            f"{share / GIB:.2f} GiB; weights take {self.weights / GIB:.2f}, steps and graphs "
            f"{self.reserve / GIB:.2f}; {self.free / GIB:.2f} are free"
        )

    def for_pool(self) -> int:
        """What is left for the KV pool; negative if the rest does not fit already.

        Raises:
            UserError: others hold so much that the worker's share is not there. A smaller pool
                instead would depend on who was faster.
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


def num_pages(
    config: WorkerConfig, layout: KVLayout, device: torch.device, reserve_bytes: int
) -> int:
    """Pages of the pool, the sink included; weights are on the device already.

    Args:
        config: resolved.
        layout: of a page.
        device: that the pool is for.
        reserve_bytes: what steps and graphs need beside weights and pool.

    Raises:
        UserError: there is no room for a single page, or not for this worker's share; the message
            has the numbers.
    """
    engine, page_size = config.engine, int(config.kv.page_size)
    if engine.num_pages != "auto":
        return int(engine.num_pages)
    if device.type == "cpu":
        most = engine.max_num_reqs * -(-int(config.model.max_model_len) // page_size) + 1
        found = min(most, engine.cpu_pool_bytes // layout.page_bytes)
        why = f"engine.cpu_pool_bytes is {engine.cpu_pool_bytes}"
    else:
        free = free_bytes(device)
        room = Room(
            total=torch.cuda.get_device_properties(device).total_memory,
            free=free,
            weights=torch.cuda.memory_reserved(device),
            reserve=reserve_bytes,
            fraction=float(engine.memory_fraction),
        )
        found, why = room.for_pool() // layout.page_bytes, room.why
        log.info("%d KV pages of %d bytes: %s", max(0, found), layout.page_bytes, why)
    if found < 2:
        raise UserError(
            f"engine.num_pages: no room for a single page of {layout.page_bytes} bytes: {why}",
            "engine.num_pages",
        )
    return int(found)


@contextmanager
def taking(num_bytes: int, device: torch.device) -> Iterator[None]:
    """What the body leaves of `num_bytes` stays in the allocator's cache: the next process on this
    device sees it taken, and this one's first large step finds it."""
    if device.type == "cpu":
        yield
        return
    before = torch.cuda.memory_reserved(device)
    yield
    left = before + num_bytes - torch.cuda.memory_reserved(device)
    free, _ = torch.cuda.mem_get_info(device)
    if left > 0:
        torch.empty(min(left, free), dtype=torch.uint8, device=device)


@contextmanager
def clear_error(what: str, device: torch.device) -> Iterator[None]:
    """Turn running out of device memory while `what` is made into one clear error.

    Raises:
        UserError: it happened.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise UserError(
            f"out of device memory while {what}: {free / GIB:.2f} of {total / GIB:.2f} GiB are "
            f"free; lower engine.memory_fraction, engine.max_num_reqs or "
            f"engine.max_prefill_tokens ({str(error).split('.')[0]})",
            "engine.memory_fraction",
        ) from error


def fit(config: WorkerConfig, asked_len: int | str, num_pages: int) -> WorkerConfig:
    """`config` with a max_model_len that the pool can hold.

    Raises:
        UserError: more was asked for by name.
    """
    holds = (num_pages - 1) * int(config.kv.page_size)
    if int(config.model.max_model_len) <= holds:
        return config
    if asked_len != "auto":
        raise UserError(
            f"model.max_model_len is {asked_len}, but {num_pages - 1} KV pages hold {holds} tokens:"
            " lower it or raise engine.num_pages",
            "model.max_model_len",
        )
    log.info("model.max_model_len = %d (what the KV pool holds)", holds)
    model = config.model.model_copy(update={"max_model_len": holds})
    return config.model_copy(update={"model": model})
