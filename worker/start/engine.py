"""Engine: the parts of one worker, put together in the same way for both roles."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch

from worker.api import Member
from worker.cache.book import PageBook
from worker.cache.layout import Identity, KVLayout, KVRegion, ModelLayout
from worker.cache.pool import KVPool
from worker.config import WorkerConfig
from worker.drafts.build import read_drafter, regions, within_block
from worker.drafts.drafter_spec import DrafterSpec
from worker.forward.draws import Masks
from worker.model.shape import ModelShape, read_model_shape
from worker.observe.meter import StepMeter
from worker.observe.metrics import Progress, WorkerMetrics, untold
from worker.observe.step_log import StepLog
from worker.observe.tracing import tracer_of
from worker.peers.meeting import Meeting
from worker.plan import Drawn, Plan
from worker.registry import resolve
from worker.run.base import BucketCheck
from worker.run.groups import LayerGroups
from worker.run.ranks import FromLeader, Ranks
from worker.run.runner import ModelRunner, Step, padded_shape
from worker.run.sums import Sums
from worker.start.load import load
from worker.start.machine import probe
from worker.transfer.base import TRANSPORTS, KVTransport
from worker.transfer.sources import LocalRank

if TYPE_CHECKING:
    from worker.observe.spans import Tracer

log = logging.getLogger("kvlane.engine")
MAX_GROUPS = 4  # a quarter of the KV is then left to pull after a step; more groups gain little


@dataclass(slots=True)
class Engine:
    """The parts of one worker. Filled by `build_engine` only."""

    config: WorkerConfig  # resolved
    spec: ModelShape
    model_layout: ModelLayout
    layout: KVLayout  # of this rank
    identity: Identity
    pool: KVPool
    book: PageBook
    runner: ModelRunner
    transport: KVTransport
    metrics: WorkerMetrics
    meter: StepMeter
    sums: Sums | None  # None: the worker has one rank
    step_log: StepLog | None
    checks: Sequence[BucketCheck]  # of the start-up check: each kind and bucket that was compared
    tracer: Tracer | None
    meeting: Meeting
    ranks: Ranks | None = None  # set by `Worker` on the leader of several

    def launch(self, plan: Plan | None, groups: LayerGroups | None = None) -> Step | None:
        """Enqueue the step of `plan`, if there is one; groups: see ModelRunner.launch."""
        if plan is None:
            return None
        log = self.step_log
        began, began_at = log.event() if log is not None else None, time.monotonic()
        shape = padded_shape(self.runner.graphs, plan, hooked=groups is not None)
        if self.ranks is not None:
            self.ranks.launch(plan, shape)
        step = self.runner.launch(plan, groups, shape)
        self.meter.launched(plan)
        if log is not None:
            log.launched(plan, began, time.monotonic() - began_at)
        return step

    def launch_tail(self, step: Step, masks: Masks) -> None:
        """Enqueue the tail of a masked step; see ModelRunner."""
        if self.ranks is not None:
            self.ranks.launch_tail(masks)
        self.runner.launch_tail(step, masks)
        if self.step_log is not None:
            self.step_log.tail_launched(step.plan)

    def layer_groups(self, while_launching: Callable[[], None]) -> LayerGroups:
        """Make a layer hook for `launch`; it records when each layer group of the KV is final."""
        return LayerGroups(self.layout, self.pool.device, while_launching, self.meeting.size)

    def settle(self, step: Step) -> list[Drawn]:
        """Wait for a step and read its tokens.

        A turn waits for the device only here, in `LayerGroups.wait` and in `Step.drafts`.

        Raises:
            PeerLost: another rank was late in an all-reduce; the step's tokens are invalid.
        """
        began_at, cpu_at = time.monotonic(), time.thread_time()
        drawn = step.wait()
        self.check_ranks()
        if self.ranks is not None:
            self.ranks.settled(step, drawn)
        self.meter.settled(step.plan, step.path)
        if self.sums is not None:
            self.sums.settled(step)
        if (log := self.step_log) is not None:
            wait_s, wait_cpu_s = time.monotonic() - began_at, time.thread_time() - cpu_at
            log.settled(step.plan, step.path, wait_s, wait_cpu_s, drawn)
        return drawn

    @property
    def step_s(self) -> dict[tuple[int, int], float]:
        """Seconds of a decode step by (rows, width), as measured at the start; none on the CPU."""
        return {
            (each.bucket, each.width): each.graph_ms / 1e3
            for each in self.checks
            if each.kind == "decode"
        }

    @property
    def simulated_accept_len(self) -> float:
        """Mean tokens that a row keeps of a step by simulated acceptance; 0: not simulated."""
        decodes = self.config.role == "decode"
        return self.config.spec.simulated_len if decodes else 0.0

    def tell_ranks(self, message: FromLeader) -> None:
        """Send to the other ranks, if there are any."""
        if self.ranks is not None:
            self.ranks.tell(message)

    def check_ranks(self) -> None:
        """Raise PeerLost if another rank was late in an all-reduce; its results are invalid."""
        self.runner.loaded.model.collective.check()

    def num_settled(self) -> int:
        """How many steps have been settled."""
        return self.meter.num_steps

    def local_rank(self) -> LocalRank:
        """This rank, as the destination of its pulls."""
        return LocalRank(
            self.transport, self.model_layout, self.pool.num_pages,
            self.config.transport.connect_timeout_s, self.meeting.size, self.meeting.rank,
        )  # fmt: skip

    def endpoint(self) -> bytes:
        """Where this rank's pages can be pulled from, as `Member` has it."""
        return msgspec.msgpack.encode(self.transport.endpoint())

    def member(
        self,
        name: str,
        incarnation: str,
        address: str,
        metrics_address: str,
        endpoints: tuple[bytes, ...] = (),
    ) -> Member:
        """Build the record under which other processes know this worker.

        endpoints: of all its ranks; none: this one is alone.
        """
        return Member(
            name=name,
            role=self.config.role,
            incarnation=incarnation,
            address=address,
            metrics_address=metrics_address,
            model=self.identity.model,
            max_model_len=int(self.config.model.max_model_len),
            layout_hash=self.identity.layout_hash,
            transport=f"{self.transport.name}/{self.transport.kind}",
            endpoints=endpoints or (self.endpoint(),),
            node=os.uname().nodename,
            pid=os.getpid(),
            digest=self.identity.digest,
            simulated_accept_len=self.simulated_accept_len,
            drafter="" if self.config.spec.drafter == "none" else self.config.spec.drafter,
        )

    def close(self) -> None:
        """Free everything; the transport before the pool, whose memory it has registered."""
        self.runner.close()
        self.transport.close()
        self.pool.close()
        self.runner.loaded.model.collective.close()
        self.meeting.close()
        self.metrics.close()
        if self.step_log is not None:
            self.step_log.close()
        if self.tracer is not None:
            self.tracer.close()


def build_engine(
    config: WorkerConfig,
    *,
    name: str,
    host: str,
    meeting: Meeting | None = None,
    progress: Progress = untold,
) -> Engine:
    """Load the model and build everything around it; may take minutes.

    All ranks of a worker call it at once and get the same configuration, but for engine.threads.

    Args:
        config: of the worker.
        name: of the worker, for logs and metrics.
        host: address for its transport.
        meeting: of its ranks; None: the worker has a single rank.
        progress: told how far it is.

    Raises:
        UserError: the model directory, the configuration or a library is at fault, or device memory
            is too small.
    """
    meeting = meeting or Meeting()
    assert meeting.size == config.tp
    leads = meeting.rank == 0  # and alone knows of requests
    tracer = tracer_of(config.tracing, config.role, name) if leads else None
    spec = read_model_shape(config.model.directory)
    drafter = read_drafter(config, spec)
    configured_len = config.model.max_model_len
    config = config.resolved(
        probe(), model_max_len=spec.max_position_embeddings, model_dtype=spec.dtype
    )
    config = within_block(config, drafter)
    if config.engine.device == "cpu":
        torch.set_num_threads(int(config.engine.threads))
    whole = _model_layout(config, spec, drafter)
    layout = whole.share(meeting.size, meeting.rank)
    engine_threads = {"engine": {"threads"}}  # may differ: each process takes it from its own CPUs
    meeting.agree("configurations", config.model_dump_json(exclude=engine_threads).encode())
    config, loaded, graphs, checks, digest = load(
        config, spec, drafter, layout, configured_len, meeting, progress
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
    runner, meter = ModelRunner(loaded, graphs), StepMeter(metrics)
    sums = Sums(loaded.model, metrics) if meeting.size > 1 else None
    return Engine(
        config, spec, whole, layout, identity, pool, book, runner, transport, metrics, meter, sums,
        _step_log(config, name) if leads else None, checks, tracer, meeting,
    )  # fmt: skip


def _step_log(config: WorkerConfig, name: str) -> StepLog | None:
    if not config.engine.step_log:
        return None
    return StepLog(config.engine.step_log, name, torch.device(str(config.engine.device)))


def _model_layout(
    config: WorkerConfig, spec: ModelShape, drafter: DrafterSpec | None
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
