"""One engine put together from its parts, the same way for both roles."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import torch

from worker.api import Member
from worker.attention.base import build_attentions
from worker.cache.book import PageBook
from worker.cache.layout import KVLayout, KVRegion
from worker.cache.pool import KVPool
from worker.comm.single import SingleCollective
from worker.config import WorkerConfig
from worker.engine import memory
from worker.engine.machine import probe
from worker.engine.meter import StepMeter
from worker.engine.runner import ModelRunner, Step, step_stream
from worker.graph.base import GraphRunner, Parts
from worker.graph.build import build_graphs
from worker.metrics import WorkerMetrics
from worker.models.config import ModelSpec, read_model_spec
from worker.models.decoder import Decoder
from worker.models.loader import load_model
from worker.plan import Drawn, Plan
from worker.registry import resolve
from worker.step.buffers import BatchBuffers
from worker.step.state import StepState
from worker.transfer.base import TRANSPORTS, KVTransport

log = logging.getLogger("kvlane.engine")
MAX_GROUPS = 4  # what is left to pull after a step is then a quarter; more is little more
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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

    def launch(self, plan: Plan | None, at_layer: Callable[[], None] | None = None) -> Step | None:
        """Enqueue a step, if there is one to do.

        Args:
            plan: the step.
            at_layer: its layer groups are wanted one by one; see ModelRunner.launch_in_groups.
        """
        if plan is None:
            return None
        if at_layer is not None:
            step = self.runner.launch_in_groups(plan, at_layer)
        else:
            step = self.runner.launch(plan)
        self.meter.launched(plan, self.runner.path)
        return step

    def settle(self, step: Step) -> list[Drawn]:
        """Wait for a step: the only host sync of a turn."""
        drawn = step.wait()
        self.meter.settled(step.plan)
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
    device = torch.device(config.engine.device)
    if device.type == "cpu":
        torch.set_num_threads(int(config.engine.threads))
    layout = _layout(config, spec)
    with memory.turn(device), _on_step_stream(device):
        config, parts, graph = _on_device(config, spec, layout, asked_len)
    pool, num_pages = parts.pool, parts.pool.num_pages
    transport = resolve("transport", config.transport.name, TRANSPORTS)(host, config.transport.kind)
    transport.register(pool.memory())
    metrics = WorkerMetrics(model=config.model.name, role=config.role, worker=name)
    metrics.transport(f"{transport.name}/{transport.kind}").set(1)
    for check in graph.checks:
        for path, took_ms in (("graph", check.graph_ms), ("eager", check.eager_ms)):
            metrics.bucket_seconds(check.kind, str(check.bucket), path).set(took_ms / 1e3)
        metrics.bucket_differs(check.kind, str(check.bucket)).set(not check.equal)
    log.info("%s moves KV by %s/%s", name, transport.name, transport.kind)
    book = PageBook(num_pages, int(config.kv.page_size), prefix_cache=config.engine.prefix_cache)
    _watch(metrics, book)
    runner = ModelRunner(parts, graph)
    return Engine(config, spec, layout, pool, book, runner, transport, metrics, StepMeter(metrics))


@contextmanager
def _on_step_stream(device: torch.device) -> Iterator[None]:
    """On CUDA, what is made within lies in the memory of the stream of steps, ready afterwards."""
    if device.type == "cpu":
        yield
        return
    with torch.cuda.stream(step_stream(device)):
        yield
    torch.cuda.synchronize(device)


def _on_device(
    config: WorkerConfig, spec: ModelSpec, layout: KVLayout, asked_len: int | str
) -> tuple[WorkerConfig, Parts, GraphRunner]:
    """Weights, pool and graphs, and the config with a max_model_len that the pool holds.

    Raises:
        UserError: see `build_engine`.
    """
    device = torch.device(config.engine.device)
    memory.await_share(config, device)
    with memory.clear_error("loading the weights", device):
        model = load_model(
            config.model.directory,
            spec,
            SingleCollective(),
            device=device,
            dtype=DTYPES[config.model.dtype],
            load_format=config.model.load_format,
            seed=config.model.seed,
        )
    with memory.clear_error("trying the largest steps", device):
        reserve_bytes = memory.cost_of(lambda: _trial(config, spec, layout, model), device)
    num_pages = memory.num_pages(config, layout, device, reserve_bytes)
    config = memory.fit(config, asked_len, num_pages)
    with memory.clear_error("allocating the KV pool and the graphs", device):
        pool = KVPool(layout, num_pages, device)
        with memory.taking(reserve_bytes, device):
            parts = _parts(config, spec, pool, model)
            graph = build_graphs(parts)
            graph.capture()
    return config, parts, graph


def _parts(config: WorkerConfig, spec: ModelSpec, pool: KVPool, model: Decoder) -> Parts:
    """Everything that a step's device work needs, over `pool`."""
    engine, page_size = config.engine, int(config.kv.page_size)
    names, scale = engine.attention.model_dump(), spec.head_dim**-0.5
    attention = build_attentions(
        names, pool, spec.num_heads, spec.num_kv_heads, spec.head_dim, scale
    )
    max_len = int(config.model.max_model_len)
    state = StepState(
        engine.max_num_reqs,
        -(-max_len // page_size) + 1,
        spec.eos_token_ids,
        pool.device,
        num_extras=engine.penalty_rows if config.role == "decode" else 0,
        vocab_size=spec.vocab_size,
    )
    buffers = BatchBuffers(state, page_size, int(engine.max_prefill_tokens))
    return Parts(model, attention, pool, state, buffers, config, max_len)


def _trial(config: WorkerConfig, spec: ModelSpec, layout: KVLayout, model: Decoder) -> object:
    """The largest steps, once, over a pool of two pages; what they keep."""
    pool = KVPool(layout, 2, torch.device(config.engine.device))
    parts = _parts(config, spec, pool, model)
    graph = build_graphs(parts)
    graph.trial()
    pool.close()
    return graph


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
