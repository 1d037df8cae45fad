"""Builds an engine: everything that a worker needs before it can serve."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from worker.cache.book import PageBook
from worker.cache.layout import KVRegion, ModelLayout
from worker.config import WorkerConfig
from worker.drafts.build import read_drafter, regions, within_block
from worker.drafts.drafter_shape import DrafterShape
from worker.model.shape import ModelSpec, read_model_spec
from worker.observe.meter import StepMeter
from worker.observe.metrics import Progress, WorkerMetrics, untold
from worker.observe.step_log import StepLog
from worker.observe.tracing import tracer_of
from worker.peers.rank_group import RankGroup
from worker.registry import resolve
from worker.run.base import BucketCheck
from worker.run.engine import Engine
from worker.run.runner import ModelRunner
from worker.run.sums import Sums
from worker.start.load import load
from worker.start.machine import probe
from worker.transfer.base import TRANSPORTS

log = logging.getLogger("kvlane.engine")
MAX_GROUPS = 4  # a quarter of the KV is then left to pull after a step; more groups gain little


def build_engine(
    config: WorkerConfig,
    *,
    name: str,
    host: str,
    rank_group: RankGroup | None = None,
    progress: Progress = untold,
) -> Engine:
    """Load the model and build everything around it; may take minutes.

    All ranks of a worker call it at once and get the same configuration, but for engine.threads.

    Args:
        config: of the worker.
        name: of the worker, for logs and metrics.
        host: address for its transport.
        rank_group: of its ranks; None: the worker has a single rank.
        progress: told how far it is.

    Raises:
        UserError: the model directory, the configuration or a library is at fault, or device memory
            is too small.
    """
    rank_group = rank_group or RankGroup()
    assert rank_group.size == config.tp
    leads = rank_group.rank == 0  # and alone knows of requests
    tracer = tracer_of(config.tracing, config.role, name) if leads else None
    spec = read_model_spec(config.model.directory)
    drafter = read_drafter(config, spec)
    configured_len = config.model.max_model_len
    config = config.resolved(
        probe(), model_max_len=spec.max_position_embeddings, model_dtype=spec.dtype
    )
    config = within_block(config, drafter)
    if config.engine.device == "cpu":
        torch.set_num_threads(int(config.engine.threads))
    whole = _model_layout(config, spec, drafter)
    layout = whole.share(rank_group.size, rank_group.rank)
    engine_threads = {"engine": {"threads"}}  # may differ: each process takes it from its own CPUs
    rank_group.check_equal(
        "configurations", config.model_dump_json(exclude=engine_threads).encode()
    )
    config, loaded, graphs, checks, digest = load(
        config, spec, drafter, layout, configured_len, rank_group, progress
    )
    identity = whole.identity(config.model.name, digest)
    pool = loaded.pool
    transport = resolve("transport", config.transport.name, TRANSPORTS)(host, config.transport.kind)
    transport.register(pool.memory())
    metrics = _metrics(config, name, f"{transport.name}/{transport.kind}", checks)
    log.debug("%s moves KV by %s/%s", name, transport.name, transport.kind)
    book = PageBook(
        pool.num_pages, int(config.kv.page_size), prefix_cache=config.engine.prefix_cache
    )
    _watch(metrics, book)
    meter = StepMeter(metrics)
    sums = Sums(loaded.model, metrics) if rank_group.size > 1 else None
    runner = ModelRunner(loaded, graphs, meter, _step_log(config, name) if leads else None, sums)
    return Engine(
        config, spec, whole, layout, identity, pool, book, runner, transport, metrics, meter,
        checks, tracer, rank_group,
    )  # fmt: skip


def _step_log(config: WorkerConfig, name: str) -> StepLog | None:
    if not config.engine.step_log:
        return None
    return StepLog(config.engine.step_log, name, torch.device(str(config.engine.device)))


def _model_layout(
    config: WorkerConfig, spec: ModelSpec, drafter: DrafterShape | None
) -> ModelLayout:
    target = KVRegion(
        name="target",
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_groups=_num_groups(config, spec.num_layers),
        page_size=int(config.kv.page_size),
        dtype=config.model.dtype,
    )
    if drafter is None:
        return ModelLayout((target,))
    return ModelLayout((target, *regions(drafter, target.page_size, target.dtype)))


def _num_groups(config: WorkerConfig, num_layers: int) -> int:
    if config.kv.num_groups != "auto":
        return config.kv.num_groups
    if config.engine.device == "cpu":  # a pull is short beside a step: little to gain by hiding it
        return 1
    chosen = max(n for n in range(1, MAX_GROUPS + 1) if num_layers % n == 0)
    log.debug("kv.num_groups = %d (of %d layers)", chosen, num_layers)
    return chosen


def _metrics(
    config: WorkerConfig, name: str, transport: str, checks: Sequence[BucketCheck]
) -> WorkerMetrics:
    """Make the metrics, and set those that stay constant."""
    metrics = WorkerMetrics(model=config.model.name, role=config.role, worker=name)
    metrics.transport(transport).set(1)
    metrics.ranks.set(config.tp)
    metrics.drafter(config.spec.drafter).set(1)
    for check in checks:
        for path, took_ms in (("graph", check.graph_ms), ("eager", check.eager_ms)):
            metrics.bucket_seconds(check.kind, check.name, path).set(took_ms / 1e3)
        metrics.bucket_differs(check.kind, check.name).set(not check.equal)
    return metrics


def _watch(metrics: WorkerMetrics, book: PageBook) -> None:
    """Register the page gauges, which are read whenever they are scraped."""
    metrics.on_scrape(metrics.pages("available"), lambda: book.num_available)
    metrics.on_scrape(metrics.pages("reserved"), lambda: book.num_reserved)
    metrics.on_scrape(metrics.pages("private"), lambda: book.num_private)
    metrics.on_scrape(metrics.usage, lambda: 1 - book.num_available / book.num_pages)
