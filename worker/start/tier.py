"""Builds the tier below a worker's pool."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from worker.cache.book import PageBook
from worker.cache.layout import Identity
from worker.cache.pool import KVPool
from worker.cache.tier.arena import Arena
from worker.cache.tier.directory import Directory
from worker.cache.tier.objects import Form, owner_of
from worker.cache.tier.rows import Row
from worker.cache.tier.tier import Tier
from worker.config import WorkerConfig
from worker.config.checkpoint.shape import ModelShape
from worker.errors import Unsupported, UserError
from worker.model.kinds import kinds_of
from worker.observe.meter import StepMeter
from worker.observe.metrics import WorkerMetrics
from worker.start.memory import GIB

log = logging.getLogger("kvlane.tier")

# Copied out of the pool at most: a part of what a bus or a disk moves, as steps and loads go first.
HOST_BYTES_PER_S, DISK_BYTES_PER_S = 8e9, 1e9


def check_tier(config: WorkerConfig, shape: ModelShape) -> None:
    """Refuse a tier that cannot serve this model, or has no memory. Raises UserError."""
    tier, path = config.kv.tier, "kv.tier"
    if not tier.is_on:
        return
    if not config.engine.prefix_cache:
        raise UserError(f"{path} needs engine.prefix_cache, which is off", path)
    if shape.span and not config.spec.has_weights:
        raise Unsupported(f"{path} does not serve models whose layers all have a window", path)
    if any(kind.grain > 1 for kind in kinds_of(shape).values()):
        raise Unsupported(f"{path} does not keep the states of recurrent layers yet", path)
    if config.tp > 1:
        raise Unsupported(f"{path} serves workers of one rank, not tp = {config.tp}, yet", path)
    free = psutil.virtual_memory().available
    if tier.host_bytes > free:
        raise UserError(
            f"{path}.host_bytes: {tier.host_bytes / GIB:.2f} GiB, but {free / GIB:.2f} are free "
            "on this host; lower it",
            f"{path}.host_bytes",
        )


def build_tier(
    config: WorkerConfig, identity: Identity, book: PageBook, pool: KVPool,
    metrics: WorkerMetrics, meter: StepMeter,
) -> Tier[Any] | None:  # fmt: skip
    """The tier that the configuration asks for; None: none.

    Its memory is taken, and its directory read, in threads of its rows. Raises UserError if
    host_bytes hold no page.
    """
    tier, layout, on_gpu = config.kv.tier, pool.layout, pool.device.type == "cuda"
    if not tier.is_on:
        return None
    owner = owner_of(identity.layout_hash, config.tp, 0)
    form = Form(owner, layout.page_size, layout.page_bytes)
    size, rows = form.object_bytes, list[Row]()
    rest = pool, form, metrics
    if tier.host_bytes:
        if tier.host_bytes < size + 4096:
            path = "kv.tier.host_bytes"
            raise UserError(f"{path}: a page has {size:,} bytes; set it to many times that", path)
        make = partial(Arena, tier.host_bytes, size, registered=on_gpu)
        rows.append(Row("host", make, *rest, HOST_BYTES_PER_S))
    if tier.directory:
        where = Path(tier.directory), owner.decode(), tier.directory_bytes
        make = partial(Directory, *where, size, pinned=on_gpu)
        rows.append(Row("disk", make, *rest, DISK_BYTES_PER_S))
    kept = f"{tier.host_bytes / GIB:.2f} GiB of host memory, " if tier.host_bytes else ""
    kept += tier.directory
    log.info("KV tier: %s; %s bytes a page of %d tokens", kept, f"{size:,}", form.page_size)
    return Tier(book, form, rows, metrics, lambda: meter.prefill_s_per_token)
