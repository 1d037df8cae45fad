"""Builds the tier below a worker's pool."""

import logging
from functools import partial
from pathlib import Path

from worker.config import WorkerConfig
from worker.config.checkpoint.shape import ModelShape
from worker.errors import Unsupported, UserError
from worker.start.engine import Engine
from worker.start.memory import GIB, host_memory
from worker.transfer.tier.ahead import CopyAhead
from worker.transfer.tier.arena import PAGE, Arena
from worker.transfer.tier.directory import Directory
from worker.transfer.tier.objects import Form
from worker.transfer.tier.rows import Row
from worker.transfer.tier.tier import Tier

log = logging.getLogger("kvlane.tier")

# Copied out of the pool at most: a part of what a bus or a disk moves, as steps and loads go first.
HOST_BYTES_PER_S, DISK_BYTES_PER_S = 8e9, 2e9


def check_tier(config: WorkerConfig, shape: ModelShape) -> None:
    """Refuse a tier that cannot serve this model, or has no memory. Raises UserError."""
    tier, path = config.kv.tier, "kv.tier"
    if not tier.is_on:
        return
    if not config.engine.prefix_cache:
        raise UserError(f"{path} needs engine.prefix_cache, which is off", path)
    if shape.span and not config.spec.has_weights:
        raise Unsupported(f"{path} does not serve models whose layers all have a window", path)
    (free, why), path = host_memory(), f"{path}.host_bytes"
    if tier.host_bytes // config.tp > free:
        wanted = f"{tier.host_bytes / config.tp / GIB:.2f} GiB a rank (of {config.tp})"
        text = f"{path}: {wanted}, but {free / GIB:.2f} are {why}; lower it, or grant more memory"
        raise UserError(text, path)


def add_tier(engine: Engine) -> None:
    """Give an engine the tier that its configuration asks for, at the leader what is over the rows.

    Its memory is taken, and its directory read, in threads of its rows. Raises UserError if
    host_bytes hold no page.
    """
    tier, pool, group = engine.config.kv.tier, engine.pool, engine.rank_group
    if not tier.is_on:
        return
    layout, state = pool.layout, pool.layout.state
    form = Form(
        engine.identity.layout_hash, group.rank, group.size, layout.page_size, layout.page_bytes,
        0 if state is None else state.slot_bytes,
    )  # fmt: skip
    host_bytes, rest = tier.host_bytes // group.size, (pool, form, engine.metrics)
    rows = list[Row]()
    on_gpu = pool.device.type == "cuda"
    if host_bytes:
        if host_bytes < form.object_bytes + PAGE:
            path, size = "kv.tier.host_bytes", f"{form.object_bytes * group.size:,}"
            raise UserError(f"{path}: a page has {size} bytes; set it to many times that", path)
        make = partial(Arena, host_bytes, form.object_bytes, registered=on_gpu)
        rows.append(Row("host", make, HOST_BYTES_PER_S, *rest))
    if tier.directory:
        root, most = Path(tier.directory), tier.directory_bytes
        make = partial(Directory, root, form, most, pinned=on_gpu)
        rows.append(Row("disk", make, DISK_BYTES_PER_S, *rest))
    where, size = tier.directory or "no directory", f"{form.object_bytes:,}"
    free, why = host_memory()
    pinned = "pinned " * on_gpu
    kept = f"{host_bytes / GIB:.2f} GiB of {pinned}host memory ({free / GIB:.2f} {why}), {where}"
    log.info("KV tier: %s; %s bytes a page of %d tokens", kept, size, form.page_size)
    engine.rows = rows
    if group.rank == 0:
        book, meter = engine.book, engine.meter
        rest = engine.metrics, engine.tell_ranks, lambda: meter.num_steps
        engine.tier = Tier(CopyAhead(book, form, rows, *rest), lambda: meter.prefill_s_per_token)
