"""The prefill loop: computes prompts, draws first tokens, announces KV, keeps it under a lease.

`PrefillLoop.turn` is one turn: messages, plan and launch step n, settle step n - 1 once it has
ended, sweep. While step n - 1 computes, its layer groups are announced as they become final:
between the layers of step n's launch, and in all turns until step n - 1 ends.
"""

import time
from collections.abc import Sequence

from worker.api import ForgetPrefixes, Lost, Prefill, Release, Renew, WorkerStats
from worker.loop import MAX_IDLE_S, DrainAsked, EngineThread, Incoming, MembersChanged, Role
from worker.plan import Drawn, Plan
from worker.run.base import BucketCheck
from worker.run.flight import Flight, Launched, Step
from worker.run.layer_groups import LayerGroups
from worker.schedule.asked import PromptLimits
from worker.schedule.pace import Pace, StepTime, Stretch
from worker.schedule.prefill import PrefillScheduler
from worker.start.engine import Engine
from worker.transfer.outbound import Outbound
from worker.transfer.tier.ranks import Loaded

# Share of a step's expected time that it takes at least. What is launched behind it waits so long.
SURE = 0.95


class PrefillLoop(Role):
    """All that the engine thread of a prefill worker does."""

    def __init__(self, engine: Engine, thread: EngineThread, incarnation: str) -> None:
        self._engine = engine
        self._thread = thread
        config = engine.config
        self._pace = Pace(
            step_times(engine.checks),
            engine.layout.num_groups,
            engine.model_layout.page_bytes // engine.book.page_size,
            int(config.engine.max_prefill_tokens),
            engine.shape.num_kv_layers,
            1 - engine.layout.target.page_bytes / engine.layout.page_bytes,
        )
        engine.meter.chunks_s = lambda plan: SURE * self._pace.step_s(_stretches(plan))
        limits = PromptLimits(
            int(config.model.max_model_len),
            engine.shape.vocab_size,
            len(engine.shape.eos_token_ids),
            engine.shape.grain,
        )
        self.scheduler = PrefillScheduler(engine.book, config.engine, limits, self._pace)
        self.scheduler.tier = self._tier = engine.tier
        if self._tier is not None:
            self._tier.wakes(thread.wake)
        metrics = engine.metrics
        self._outbound = outbound = Outbound(
            incarnation, self.scheduler, self._pace.num_groups, thread.send, config.lease,
            metrics, thread.refusals, engine.tracer,
        )  # fmt: skip
        self.flight = Flight(engine.meter, overlap=config.spec.overlap, wake=thread.wake)
        self._num_groups_announced = 0  # of the layer groups of the step that is pending
        metrics.leases.set_function(lambda: outbound.num_leases)
        waiting = self.scheduler.waiting
        metrics.waiting.set_function(lambda: len(waiting))
        metrics.queued("prefill").set_function(lambda: len(waiting))
        # A scrape may come between the two counts.
        metrics.queued("pull").set_function(lambda: max(0, outbound.num_leases - len(waiting)))

    def counters(self) -> dict[str, int]:
        return {
            "leases": self._outbound.num_leases,
            "waiting": len(self.scheduler.waiting),
            "loads": 0 if self._tier is None else len(self._tier.loads),
        }

    def turn(self, events: list[Incoming]) -> float:
        now, flight = time.monotonic(), self.flight
        for peer, event in events:
            self._handle(peer, event, now)
        self._announce_groups(flight.running)
        if self._tier is not None and self._tier.loads:
            for loading in self._tier.poll(now):
                self.scheduler.loaded(loading.req)
                self._outbound.announce_found(loading.req)
        num_arriving = int(self.scheduler.may_get_short(now))
        if flight.launch_due(num_arriving):
            began_at = time.monotonic()
            if (plan := self.scheduler.plan(began_at)) is not None:
                step = self._engine.runner.launch(plan, self._layer_groups(plan))
                flight.launched(step, time.monotonic() - began_at)
        if (step := flight.take_ended()) is not None:
            self._announce_rest(step)
            self._settled(step.plan, self._engine.runner.settle(step).drawn)
        self._outbound.sweep(now)
        self._publish()
        idle_s = flight.idle_s(num_arriving)
        if idle_s is None:
            idle_s = 0.0 if any(not req.loads for req in self.scheduler.waiting) else MAX_IDLE_S
        return idle_s if self._tier is None else min(idle_s, self._tier.tend())

    def _layer_groups(self, plan: Plan) -> LayerGroups | None:
        """Make a step's layer hook, if its layer groups are worth announcing one by one."""
        if self._engine.config.kv.num_groups != "auto":
            worth = self._pace.num_groups > 1
        else:
            computed = self.scheduler.launched[plan.step]
            num_tokens = sum(len(chunk.tokens) for _, chunk in computed)
            rates = [req.link_bytes_per_s for req, _ in computed if req.link_bytes_per_s]
            worth = self._pace.announce_groups(num_tokens, min(rates, default=0.0))
        if not worth:
            return None
        return self._engine.layer_groups(lambda: self._announce_groups(self.flight.running))

    def _settled(self, plan: Plan, drawn: list[Drawn]) -> None:
        """Announce what a step that has ended has computed, with the first tokens that it drew."""
        chunks = self.scheduler.launched[plan.step]
        self._pace.took(_stretches(plan), self._engine.meter.took_s)
        computed = self.scheduler.settle(plan.step, drawn)
        self._engine.metrics.generated_tokens.inc(sum(req.token is not None for req in computed))
        self._outbound.announce_settled(computed, time.monotonic())
        for req, chunk in chunks:
            if req.trace is not None and not req.dropped:
                ended_at = req.started_at + req.prefill_s  # for decode: when it was announced
                began_at, size = ended_at - self._engine.meter.took_s, len(chunk.tokens)
                req.trace.add("prefill_chunk", began_at, ended_at, {"kvlane.prompt_tokens": size})
        self.scheduler.commit(computed)

    def _announce_rest(self, step: Step) -> None:
        """Wait for the layer groups of a step that is about to end, to announce them one by one."""
        if step.groups is not None:
            for group in range(step.groups.num_groups):
                step.groups.wait(group)
                self._announce_groups(step)
        self._num_groups_announced = 0

    def _announce_groups(self, step: Launched | None) -> None:
        """Announce the layer groups of the running step that are final since the last call."""
        if step is None or step.groups is None:
            return
        if self._num_groups_announced == step.groups.num_groups:
            return  # all are announced: later layers of a launch need not ask an event
        num_final = step.groups.num_final
        if num_final > self._num_groups_announced:
            self._engine.runner.check_ranks()  # groups look final, too, if an all-reduce gave up
            self._num_groups_announced = num_final
            chunks = self.scheduler.launched[step.plan.step]
            self._outbound.announce_groups(chunks, num_final, time.monotonic())

    def _handle(self, peer: str, event: object, now: float) -> None:
        match event:
            case Prefill():
                self._outbound.on_prefill(peer, event, now)
            case Renew():
                self._outbound.on_renew(peer, event, now)
            case Release():
                self._outbound.on_release(peer, event)
            case Loaded() if self._tier is not None:
                self._tier.on(event)
            case ForgetPrefixes():
                self._engine.forget_prefixes()
            case DrainAsked():
                self._outbound.draining = True
            case MembersChanged():
                self._outbound.shares.update(event.members)
            case Lost():
                pass  # a lost peer may be alive and pull: its leases end by themselves
            case _:
                self._engine.metrics.dropped(type(event).__name__).inc()

    def _publish(self) -> None:
        book = self._engine.book
        self._thread.stats = WorkerStats(
            num_running=self._outbound.num_leases,  # prompts held for decode, computed or not
            num_waiting=len(self.scheduler.waiting),
            max_num_reqs=int(self._engine.config.engine.max_num_reqs),
            num_free_pages=book.num_available,
            num_pages=book.num_pages,
            page_size=book.page_size,
            snapshot_grid=book.snapshots.grid * (book.snapshots.num_slots > 0),
            num_queued_tokens=self.scheduler.num_queued_tokens,
            prefill_s_per_token=self._engine.meter.prefill_s_per_token,
            draining=self._outbound.draining,
            num_steps=self._engine.meter.num_steps,
            has_work=bool(self.scheduler.waiting) or self.flight.busy,
        )


def _stretches(plan: Plan) -> list[Stretch]:
    return [(len(chunk.tokens), chunk.start) for chunk in plan.chunks]


def step_times(checks: Sequence[BucketCheck]) -> list[StepTime]:
    """Read the times of steps off the start-up check of the prefill graphs; ascending."""
    chunks = sorted((check for check in checks if check.kind == "prefill"), key=lambda c: c.bucket)
    times = []
    for check in chunks:
        if check.fixed_len:
            continue
        grouped_ms = min(check.graph_ms, check.eager_ms)
        full_ms = (c.graph_ms for c in chunks if c.bucket == check.bucket and c.fixed_len)
        fastest_ms = min([grouped_ms, *full_ms])
        times.append(StepTime(check.bucket, fastest_ms / 1e3, grouped_ms / 1e3))
    return times
