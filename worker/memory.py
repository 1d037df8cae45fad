"""How much memory the KV pool gets: what is left beside weights, activations and graphs."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from worker.cache.layout import KVLayout
from worker.config import WorkerConfig
from worker.errors import UserError

log = logging.getLogger("kvlane.memory")
GIB = 1 << 30


def free_bytes(device: torch.device) -> int:
    """Device memory that nobody uses, this process's cache emptied before."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def cost_of(work: Callable[[], object], device: torch.device) -> int:
    """Bytes of device memory that `work` takes and keeps, its peak included; 0 on the CPU.

    What it made is freed again.
    """
    if device.type == "cpu":
        return 0
    before = free_bytes(device)
    made = work()
    torch.cuda.synchronize(device)
    free, _ = torch.cuda.mem_get_info(device)  # with the allocator's cache: the peak
    del made
    free_bytes(device)
    return max(0, before - free)


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
        UserError: there is no room for a single page; the message has the numbers.
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
        weights = torch.cuda.memory_reserved(device)
        total = torch.cuda.get_device_properties(device).total_memory
        share = int(total * engine.memory_fraction)
        found = (min(share - weights, free) - reserve_bytes) // layout.page_bytes
        why = (
            f"engine.memory_fraction {engine.memory_fraction} of {total / GIB:.2f} GiB is "
            f"{share / GIB:.2f} GiB; weights take {weights / GIB:.2f}, steps and graphs "
            f"{reserve_bytes / GIB:.2f}; {free / GIB:.2f} are free"
        )
        log.info("%d KV pages of %d bytes: %s", max(0, found), layout.page_bytes, why)
    if found < 2:
        raise UserError(
            f"engine.num_pages: no room for a single page of {layout.page_bytes} bytes: {why}",
            "engine.num_pages",
        )
    return int(found)


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
