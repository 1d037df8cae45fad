"""Builds an engine: everything that a worker needs before it can serve."""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from worker.api import PeerId
from worker.cache.book import PageBook
from worker.cache.layout import ModelLayout
from worker.cache.pool import KVPool
from worker.config import Machine, WorkerConfig
from worker.config.checkpoint.shape import ModelShape, read_model_shape
from worker.config.checkpoint.tokens import eos_ids
from worker.config.progress import Progress, no_progress
from worker.drafts.build import read_drafter, regions, within_block
from worker.drafts.drafter_shape import DrafterShape
from worker.errors import Unsupported, UserError
from worker.model.kinds import Cut, kinds_of, regions_of
from worker.observe.fresh import Fresh
from worker.observe.meter import StepMeter
from worker.observe.metrics import WorkerMetrics
from worker.observe.step_log import StepLog
from worker.observe.tracing import tracer_of
from worker.ops.experts.route import load_of
from worker.peers.rank_group import RankGroup
from worker.registry import resolve
from worker.run.base import BucketCheck
from worker.run.runner import ModelRunner
from worker.start.check import check_kv, check_states
from worker.start.engine import Engine, Kept
from worker.start.load import Start, load
from worker.start.tier import add_tier, check_tier
from worker.transfer.base import TRANSPORTS, KVTransport
from worker.transfer.host import addresses_in
from worker.weights.files import as_held
from worker.weights.loader import has_own_head

log = logging.getLogger("kvlane.engine")
# Model and pool depend on these; a process keeps both in another role where they are equal.
SECTIONS = ("tp", "model", "kv", "spec", "transport")
OF_ENGINE = ("device", "num_pages", "state_slots", "memory_fraction", "cpu_pool_bytes")
MAX_GROUPS = 4  # a quarter of the KV is then left to pull after a step; more groups gain little


@dataclass(frozen=True, slots=True)
class Place:
    """Of which worker a process is a part, and where it runs."""

    name: str
    incarnation: str
    host: str  # its address
    rendezvous: str = ""  # of the worker's ranks, "tcp://host:port"; "": it has one rank
    progress: Progress = no_progress

    @property
    def peer(self) -> PeerId:
        """The name under which the worker is addressed."""
        return f"{self.name}/{self.incarnation}"


def build_engine(
    config: WorkerConfig, place: Place, rank: int = 0, kept: Kept | None = None
) -> Engine:
    """Load the model and build everything around it; may take minutes.

    All ranks of a worker call it at once and get the same configuration, but for engine.threads.
    kept: of the worker that this process was before; its model, pool and transport are used.

    Raises:
        UserError: the model directory, the configuration or a library is at fault, or device memory
            is too small. Unsupported: the configuration names others than are kept.
        PeerLost: the other ranks did not come to the rendezvous.
    """
    name, host, leads = place.name, place.host, rank == 0  # only rank 0 has requests
    if kept is not None:
        config = _as_kept(config, kept)
        time.sleep(max(0.0, kept.read_until - time.monotonic()))
    rank_group = RankGroup(rank, config.tp, place.rendezvous, place.peer)
    start = _begin(config, rank_group, place.progress)
    tracer = tracer_of(config.tracing, config.role, name) if leads else None
    loaded = load(start, kept)
    config, pool = loaded.config, loaded.graphs.loaded.pool
    transport = _transport(config, host, pool) if kept is None else kept.transport
    log.debug("%s moves KV by %s/%s", name, transport.name, transport.kind)
    book = _book(config, start.shape, pool)
    metrics = _metrics(config, name, book, loaded.checks)
    if experts := loaded.weights.model.experts:
        counts = Fresh(partial(load_of, [layer.load for layer in experts]))
        metrics.moe_layer_steps.set_function(lambda: counts.get().layer_steps)
        metrics.moe_distinct_experts.set_function(lambda: counts.get().distinct)
        metrics.moe_busiest_share.set_function(lambda: counts.get().busiest_share)
    metrics.transport(f"{transport.name}/{transport.kind}").set(1)
    meter = StepMeter(metrics)
    sums = metrics if rank_group.size > 1 else None
    step_log, device = None, torch.device(str(config.engine.device))
    if leads and config.engine.step_log:
        step_log = StepLog(config.engine.step_log, name, device)
    engine = Engine(
        config=config,
        shape=start.shape,
        model_layout=start.model_layout,
        layout=start.layout,
        identity=start.model_layout.identity(config.model.name, loaded.weights.digest),
        weights=loaded.weights,
        pool=pool,
        book=book,
        runner=ModelRunner(loaded.graphs, meter, step_log, sums),
        transport=transport,
        metrics=metrics,
        meter=meter,
        checks=loaded.checks,
        tracer=tracer,
        rank_group=rank_group,
    )
    add_tier(engine)
    return engine


def _book(config: WorkerConfig, shape: ModelShape, pool: KVPool) -> PageBook:
    return PageBook(
        pool.num_pages,
        int(config.kv.page_size),
        prefix_cache=config.engine.prefix_cache,
        num_slots=pool.num_slots,
        num_snapshots=pool.num_snapshots,
        # Drafters with weights have keys in the pages too, and see all of them.
        span=0 if config.spec.has_weights else shape.span,
        step_tokens=max(int(config.engine.max_prefill_tokens), shape.grain),
    )


def _transport(config: WorkerConfig, host: str, pool: KVPool) -> KVTransport:
    chosen = config.transport
    try:
        hosts = ",".join(addresses_in(chosen.networks)) or host
    except ValueError as e:
        raise UserError(f"transport.networks: {e}", "transport.networks") from e
    transport: KVTransport = resolve("transport", chosen.name, TRANSPORTS)(hosts, chosen.kind)
    transport.register(pool.memory())
    return transport


def _as_kept(config: WorkerConfig, kept: Kept) -> WorkerConfig:
    """`config` with the size of the pool that is there; Unsupported if it names another."""
    before = kept.config
    paths = [path for path in SECTIONS if getattr(config, path) != getattr(before, path)]
    engine, old = config.engine, before.engine
    paths += [f"engine.{n}" for n in OF_ENGINE if getattr(engine, n) != getattr(old, n)]
    shape, drafter = _read_shape(config), kept.weights.drafter
    drafter_shape = None if drafter is None else drafter.shape
    if (shape, read_drafter(config, shape)) != (kept.weights.model.shape, drafter_shape):
        paths.append("model.path")
    if paths:
        raise Unsupported(f"{', '.join(paths)}: not what this process has loaded", paths[0])
    pages, slots = kept.pool.num_pages, kept.pool.num_slots
    sizes = {"num_pages": pages} | ({"state_slots": slots - 1} if slots else {})
    return config.model_copy(update={"engine": engine.model_copy(update=sizes)})


def _read_shape(configured: WorkerConfig) -> ModelShape:
    """The model's, as its files are; its tokenizer's end of a text ends an answer, as in vLLM."""
    directory = configured.model.directory
    shape = read_model_shape(directory).served(configured.model.max_model_len)
    ends = (*shape.eos_token_ids, *eos_ids(directory, shape.vocab_size))
    held, tied = shape.quantization, shape.tie_word_embeddings
    if configured.model.noise is None:
        held, tied = as_held(held, directory), tied and not has_own_head(shape, directory)
    ids = tuple(dict.fromkeys(ends))
    return replace(shape, eos_token_ids=ids, quantization=held, tie_word_embeddings=tied)


def _begin(configured: WorkerConfig, rank_group: RankGroup, progress: Progress) -> Start:
    """Read the models' shapes and resolve the configuration, equally on all ranks."""
    shape = _read_shape(configured)
    drafter_shape = read_drafter(configured, shape)
    config = configured.resolved(
        probe(), model_max_len=shape.max_position_embeddings, model_dtype=shape.dtype
    )
    config = within_block(config, drafter_shape)
    on_gpu = config.engine.device != "cpu"
    capability = torch.cuda.get_device_capability() if on_gpu else None
    check_kv(config.kv.dtype, config.model.dtype, shape, capability)
    check_states(config.kv.state_dtype, shape)
    _check_layers(config, shape)
    check_tier(config, shape)
    if config.engine.device == "cpu":
        torch.set_num_threads(int(config.engine.threads))
    engine_threads = {"engine": {"threads"}}  # may differ: a process takes it from its own CPUs
    text = config.model_dump_json(exclude=engine_threads)
    rank_group.check_equal("configurations", text.encode())
    layout = model_layout(config, shape, drafter_shape)
    max_len = configured.model.max_model_len
    return Start(config, max_len, shape, drafter_shape, layout, rank_group, progress)


def _check_layers(config: WorkerConfig, shape: ModelShape) -> None:
    """Refuse settings with which the model's layers cannot be served."""
    untraced = ["layers of experts"] * (shape.experts is not None)
    for kind in kinds_of(shape).values():
        if int(config.engine.max_prefill_tokens) < kind.grain:
            param = "engine.max_prefill_tokens"
            raise UserError(f"{param} must be at least {kind.grain} for {kind.people}", param)
        if kind.grain > 1 and config.kv.page_size == 1 and config.engine.prefix_cache:
            text = f"kv.page_size must be at least 2 for {kind.people} with engine.prefix_cache"
            raise UserError(text, "kv.page_size")
        untraced += [kind.people] * (not kind.is_traced)
    if untraced and config.engine.graph.prefill == "compiled":
        param = "engine.graph.prefill"
        raise Unsupported(f"{param}: compiled cannot trace {untraced[-1]}", param)


def probe() -> Machine:
    """Look at the device and the CPUs that this process may use."""
    threads = os.environ.get("OMP_NUM_THREADS", "")  # Ray sets it to the number of CPUs granted
    num_cpus = int(threads) if threads.isdigit() else len(os.sched_getaffinity(0))
    return Machine("cuda" if torch.cuda.is_available() else "cpu", max(1, num_cpus))


def model_layout(
    config: WorkerConfig, shape: ModelShape, drafter: DrafterShape | None
) -> ModelLayout:
    """How a KV page of the whole model is laid out, with the drafter's regions if it has any."""
    num_groups = config.kv.num_groups
    if num_groups == "auto":
        # On a CPU a pull is short beside a step: little to gain by hiding it.
        most = 1 if config.engine.device == "cpu" else MAX_GROUPS
        num_groups = max(n for n in range(1, most + 1) if shape.num_kv_layers % n == 0)
        log.debug("kv.num_groups = %d (of %d layers)", num_groups, shape.num_kv_layers)
    page_size, dtype = int(config.kv.page_size), config.model.dtype
    kv_dtype = dtype if config.kv.dtype == "auto" else config.kv.dtype
    cut = Cut(page_size, num_groups, dtype, kv_dtype, config.kv.state_dtype)
    target, state = regions_of(shape, cut)
    drafted = () if drafter is None else regions(drafter, page_size, dtype)
    return ModelLayout((target, *drafted), state)


def _metrics(
    config: WorkerConfig, name: str, book: PageBook, checks: Sequence[BucketCheck]
) -> WorkerMetrics:
    """Make the metrics: constant ones, and those of pages and slots, read at a scrape."""
    metrics = WorkerMetrics(model=config.model.name, role=config.role, worker=name)
    metrics.ranks.set(config.tp)
    metrics.drafter(config.spec.drafter).set(1)
    metrics.pages("available").set_function(lambda: book.num_available)
    metrics.pages("reserved").set_function(lambda: book.num_reserved)
    metrics.pages("private").set_function(lambda: book.num_private)
    metrics.pages("retained").set_function(lambda: book.tree.num_kept)
    metrics.evicted_early.set_function(lambda: book.tree.num_kept_evicted)
    metrics.usage.set_function(lambda: 1 - book.num_available / book.num_pages)
    if book.num_slots:
        metrics.slots("free").set_function(lambda: book.num_free_slots)
        metrics.slots("used").set_function(lambda: book.num_slots - book.num_free_slots)
        metrics.slots("snapshot").set_function(lambda: book.snapshots.num_used)
        metrics.slots("promised").set_function(
            lambda: book.snapshots.num_used - len(book.snapshots.nodes)
        )
    for check in checks:
        for path, took_ms in (("graph", check.graph_ms), ("eager", check.eager_ms)):
            metrics.bucket_seconds(check.kind, check.name, path).set(took_ms / 1e3)
        metrics.bucket_differs(check.kind, check.name).set(not check.equal)
    return metrics
