"""The prefill worker: computes prompts, announces their KV, pins it while a lease lives.

One turn: messages, launch step n, settle step n - 1, announce, sweep.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from worker.api import Lost, Member, Prefill, Release, Renew, WorkerStats
from worker.config import WorkerConfig
from worker.engine import build_engine
from worker.loop import MAX_IDLE_S, DrainAsked, EngineLoop, Incoming
from worker.outbound import Outbound
from worker.runner import Step
from worker.schedule.prefill import PrefillScheduler


class PrefillWorker:
    """One prefill worker of one process; the methods are for the control plane's threads."""

    def __init__(self, config: WorkerConfig, *, name: str, incarnation: str, host: str) -> None:
        self._name, self._incarnation, self._host = name, incarnation, host
        self._engine = engine = build_engine(config, name=name, host=host)
        me = f"{name}/{incarnation}"
        self._loop = EngineLoop(me, engine.config.ping, self._turn, lambda: self._stats)
        self._scheduler = PrefillScheduler(engine.book, engine.config.engine)
        self._outbound = Outbound(
            incarnation,
            self._scheduler,
            engine.config.kv.num_groups,
            self._loop.send,
            engine.config.lease,
            engine.metrics,
        )
        self._pending: Step | None = None
        self._stats = WorkerStats()
        self._observe()

    def start(self) -> Member:
        """Begin to serve."""
        metrics_address = self._engine.metrics.serve(self._host)
        address = self._loop.start(self._host)
        return self._engine.member(self._name, self._incarnation, address, metrics_address)

    def update_members(self, members: Sequence[Member]) -> None:
        """Prefill workers are called, they call nobody."""

    def drain(self) -> None:
        """Refuse new prompts; leases that live are served to their end."""
        self._loop.post(DrainAsked())

    def idle(self) -> bool:
        """Nothing is held for anybody."""
        return not any(self.counters().values())

    def counters(self) -> dict[str, int]:
        """What is held now; all zero at rest."""
        book = self._engine.book
        return {
            "holds": book.num_holds,
            "reserved_pages": book.num_reserved,
            "private_pages": book.num_private,
            "leases": self._outbound.num_leases,
            "waiting": len(self._scheduler.waiting),
        }

    def stop(self) -> None:
        """End the loop and give everything back."""
        self._loop.stop()
        self._engine.close()

    def join(self) -> None:
        """Wait until the loop has ended."""
        self._loop.join()

    # The engine's thread.

    def _turn(self, events: list[Incoming]) -> float:
        now = time.monotonic()
        for peer, event in events:
            match event:
                case Prefill():
                    self._outbound.on_prefill(peer, event, now)
                case Renew():
                    self._outbound.on_renew(peer, event, now)
                case Release():
                    self._outbound.on_release(event)
                case DrainAsked():
                    self._outbound.draining = True
                case Lost():
                    pass  # its leases end by themselves: it may be alive and pulling
                case _:
                    self._engine.metrics.dropped(type(event).__name__).inc()
        step = self._launch()
        if self._pending is not None:
            self._settle(self._pending)
        self._pending = step
        self._outbound.sweep(now)
        self._publish()
        return 0.0 if self._pending is not None or self._scheduler.waiting else MAX_IDLE_S

    def _launch(self) -> Step | None:
        plan = self._scheduler.plan()
        if plan is None:
            return None
        self._engine.meter.launched(plan)
        return self._engine.runner.launch(plan)

    def _settle(self, step: Step) -> None:
        step.wait()
        self._engine.meter.settled(step.plan)
        self._outbound.grown(self._scheduler.settle(step.plan.step))

    def _publish(self) -> None:
        """The snapshot that Pongs carry."""
        book = self._engine.book
        self._stats = WorkerStats(
            num_running=self._outbound.num_leases,
            num_waiting=len(self._scheduler.waiting),
            max_num_reqs=self._engine.config.engine.max_num_reqs,
            num_free_pages=book.num_available,
            num_pages=book.num_pages,
            num_queued_tokens=self._scheduler.num_queued_tokens,
            prefill_s_per_token=self._engine.meter.prefill_s_per_token,
            draining=self._outbound.draining,
        )

    def _observe(self) -> None:
        """Gauges are read when they are scraped."""
        metrics = self._engine.metrics
        metrics.on_scrape(metrics.leases, lambda: self._outbound.num_leases)
        metrics.on_scrape(metrics.waiting, lambda: len(self._scheduler.waiting))
