"""One engine put together from its parts, the same way for both roles."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from worker.api import Member
from worker.cache.book import PageBook
from worker.cache.layout import KVLayout, KVRegion
from worker.cache.pool import KVPool
from worker.config import WorkerConfig
from worker.engine.groups import LayerGroups
from worker.engine.load import load
from worker.engine.machine import probe
from worker.engine.meter import StepMeter
from worker.engine.runner import ModelRunner, Step
from worker.graph.base import BucketCheck, Capabilities
from worker.metrics import WorkerMetrics
from worker.models.config import ModelSpec, read_model_spec
from worker.plan import Drawn, Plan
from worker.registry import resolve
from worker.transfer.base import TRANSPORTS, KVTransport

log = logging.getLogger("kvlane.engine")
MAX_GROUPS = 4  # what is left to pull after a step is then a quarter; more is little more


@dataclass(slots=True)
class Engine:
    """The parts of one worker. Filled by `build_engine` alone."""

    config: WorkerConfig  # resolved
    spec: ModelSpec
    layout: KVLayout
    pool: KVPool
    book: PageBook
    runner: ModelRunner
    transport: KVTransport
    metrics: WorkerMetrics
    meter: StepMeter
    checks: Sequence[BucketCheck]  # of the graphs, made at the start

    def launch(self, plan: Plan | None, groups: LayerGroups | None = None) -> Step | None:
        """Enqueue a step, if there is one to do.

        Args:
            plan: the step.
            groups: see ModelRunner.launch.
        """
        if plan is None:
            return None
        step = self.runner.launch(plan, groups)
        self.meter.launched(plan)
        return step

    def layer_groups(self, while_launching: Callable[[], None]) -> LayerGroups:
        """For `launch`: says when each layer group of the step's KV is final; see LayerGroups."""
        (region,) = self.layout.regions  # another region's KV would be final after these events
        return LayerGroups(region, self.pool.device, while_launching)

    def settle(self, step: Step) -> list[Drawn]:
        """Wait for a step: the only host sync of a turn."""
        drawn = step.wait()
        self.meter.settled(step.plan, step.path)
        return drawn

    def member(self, name: str, incarnation: str, address: str, metrics_address: str) -> Member:
        """This worker as the others are told of it."""
        return Member(
            name=name,
            role=self.config.role,
            incarnation=incarnation,
            address=address,
            metrics_address=metrics_address,
            model=self.config.model.name,
            max_model_len=int(self.config.model.max_model_len),
            layout_hash=self.layout.hash,
            transport=f"{self.transport.name}/{self.transport.kind}",
            endpoint=msgspec.msgpack.encode(self.transport.endpoint()),
            node=os.uname().nodename,
            pid=os.getpid(),
        )

    def close(self) -> None:
        """Give everything back, transports before the memory they serve."""
        self.runner.close()
        self.transport.close()
        self.pool.close()
        self.metrics.close()


def build_engine(config: WorkerConfig, *, name: str, host: str) -> Engine:
    """Load the model and build everything around it; may take minutes.

    Raises:
        UserError: the model directory, the configuration, a library or too little memory.
    """
    spec = read_model_spec(config.model.directory)
    asked_len = config.model.max_model_len
    config = config.resolved(
        probe(), model_max_len=spec.max_position_embeddings, model_dtype=spec.dtype
    )
    if config.engine.device == "cpu":
        torch.set_num_threads(int(config.engine.threads))
    layout = _layout(config, spec)
    config, loaded, graphs, checks = load(config, spec, layout, capabilities(config), asked_len)
    pool = loaded.pool
    transport = resolve("transport", config.transport.name, TRANSPORTS)(host, config.transport.kind)
    transport.register(pool.memory())
    metrics = WorkerMetrics(model=config.model.name, role=config.role, worker=name)
    metrics.transport(f"{transport.name}/{transport.kind}").set(1)
    for check in checks:
        for path, took_ms in (("graph", check.graph_ms), ("eager", check.eager_ms)):
            metrics.bucket_seconds(check.kind, str(check.bucket), path).set(took_ms / 1e3)
        metrics.bucket_differs(check.kind, str(check.bucket)).set(not check.equal)
    log.info("%s moves KV by %s/%s", name, transport.name, transport.kind)
    book = PageBook(
        pool.num_pages, int(config.kv.page_size), prefix_cache=config.engine.prefix_cache
    )
    _watch(metrics, book)
    runner, meter = ModelRunner(loaded, graphs), StepMeter(metrics)
    return Engine(config, spec, layout, pool, book, runner, transport, metrics, meter, checks)


def capabilities(config: WorkerConfig) -> Capabilities:
    """What the loop of the worker's role launches.

    With a number of layer groups in the configuration, every step announces them one by one.
    """
    if config.role == "decode":
        return Capabilities(decodes=True)
    return Capabilities(decodes=False, hooks_every_chunk=config.kv.num_groups not in ("auto", 1))


def _layout(config: WorkerConfig, spec: ModelSpec) -> KVLayout:
    target = KVRegion(
        name="target",
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_groups=_num_groups(config, spec.num_layers),
        page_size=int(config.kv.page_size),
        dtype=config.model.dtype,
    )
    return KVLayout((target,), config.model.name)


def _num_groups(config: WorkerConfig, num_layers: int) -> int:
    asked = config.kv.num_groups
    if asked != "auto":
        return asked
    if config.engine.device == "cpu":  # where a pull takes no time beside a step
        return 1
    chosen = max(n for n in range(1, MAX_GROUPS + 1) if num_layers % n == 0)
    log.info("kv.num_groups = %d (of %d layers)", chosen, num_layers)
    return chosen


def _watch(metrics: WorkerMetrics, book: PageBook) -> None:
    """Page gauges, read whenever they are scraped."""
    metrics.on_scrape(metrics.pages("available"), lambda: book.num_available)
    metrics.on_scrape(metrics.pages("reserved"), lambda: book.num_reserved)
    metrics.on_scrape(metrics.pages("private"), lambda: book.num_private)
    metrics.on_scrape(metrics.usage, lambda: 1 - book.num_available / book.num_pages)
