"""One engine put together from its parts, the same way for both roles."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import msgspec
import torch

from worker.api import Member
from worker.attention.base import ATTENTION
from worker.cache.book import PageBook
from worker.cache.layout import KVLayout, KVRegion
from worker.cache.pool import KVPool
from worker.comm.single import SingleCollective
from worker.config import WorkerConfig
from worker.errors import UserError
from worker.graph.base import GRAPHS
from worker.machine import probe
from worker.meter import StepMeter
from worker.metrics import WorkerMetrics
from worker.models.config import ModelSpec, read_model_spec
from worker.models.loader import load_model
from worker.plan import Drawn, Plan
from worker.registry import resolve
from worker.runner import ModelRunner, Step
from worker.state import StepState
from worker.transfer.base import TRANSPORTS, KVTransport

log = logging.getLogger("kvlane.engine")
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

    def launch(self, plan: Plan | None) -> Step | None:
        """Enqueue a step, if there is one to do."""
        if plan is None:
            return None
        self.meter.launched(plan)
        return self.runner.launch(plan)

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
        UserError: the model directory, the configuration or a library is at fault.
    """
    spec = read_model_spec(config.model.directory)
    asked_len = config.model.max_model_len
    config = config.resolved(
        probe(), model_max_len=spec.max_position_embeddings, model_dtype=spec.dtype
    )
    engine = config.engine
    device = torch.device(engine.device)
    if device.type == "cpu":
        torch.set_num_threads(int(engine.threads))
    layout = _layout(config, spec)
    num_pages = _num_pages(config, layout, device)
    config = _fit(config, asked_len, num_pages)
    pool = KVPool(layout, num_pages, device)
    attention = resolve("attention backend", engine.attention, ATTENTION)(
        pool, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim**-0.5
    )
    model = load_model(
        config.model.directory,
        spec,
        SingleCollective(),
        device=device,
        dtype=DTYPES[config.model.dtype],
        load_format=config.model.load_format,
        seed=config.model.seed,
    )
    graph = resolve("graph runner", engine.graph, GRAPHS)(model, attention)
    graph.capture()
    page_size = int(config.kv.page_size)
    max_pages = -(-int(config.model.max_model_len) // page_size) + 1
    state = StepState(
        engine.max_num_reqs,
        max_pages,
        spec.eos_token_ids,
        device,
        num_extras=engine.penalty_rows if config.role == "decode" else 0,
        vocab_size=spec.vocab_size,
    )
    transport = resolve("transport", config.transport.name, TRANSPORTS)(host, config.transport.kind)
    transport.register(pool.memory())
    metrics = WorkerMetrics(model=config.model.name, role=config.role, worker=name)
    metrics.transport(f"{transport.name}/{transport.kind}").set(1)
    log.info("%s moves KV by %s/%s", name, transport.name, transport.kind)
    book = PageBook(num_pages, page_size, prefix_cache=engine.prefix_cache)
    _watch(metrics, book)
    runner = ModelRunner(model, graph, state, page_size)
    meter = StepMeter(metrics, engine.graph)
    return Engine(config, spec, layout, pool, book, runner, transport, metrics, meter)


def _layout(config: WorkerConfig, spec: ModelSpec) -> KVLayout:
    target = KVRegion(
        name="target",
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_groups=config.kv.num_groups,
        page_size=int(config.kv.page_size),
        dtype=config.model.dtype,
    )
    return KVLayout((target,), config.model.name)


def _num_pages(config: WorkerConfig, layout: KVLayout, device: torch.device) -> int:
    """Pages of the pool, the sink included."""
    engine, page_size = config.engine, int(config.kv.page_size)
    max_len = int(config.model.max_model_len)
    if engine.num_pages != "auto":
        num_pages = int(engine.num_pages)
    elif device.type == "cpu":
        most = engine.max_num_reqs * -(-max_len // page_size) + 1
        num_pages = min(most, engine.cpu_pool_bytes // layout.page_bytes)
    else:
        free, total = torch.cuda.mem_get_info(device)
        used = total - free
        num_pages = int(total * engine.memory_fraction - used) // layout.page_bytes
    if num_pages < 2:
        raise UserError(
            f"engine.num_pages: no room for a single page of {layout.page_bytes} bytes",
            "engine.num_pages",
        )
    return num_pages


def _fit(config: WorkerConfig, asked_len: int | str, num_pages: int) -> WorkerConfig:
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


def _watch(metrics: WorkerMetrics, book: PageBook) -> None:
    """Page gauges, read whenever they are scraped."""
    metrics.on_scrape(metrics.pages("available"), lambda: book.num_available)
    metrics.on_scrape(metrics.pages("reserved"), lambda: book.num_reserved)
    metrics.on_scrape(metrics.pages("private"), lambda: book.num_private)
    metrics.on_scrape(metrics.usage, lambda: 1 - book.num_available / book.num_pages)
