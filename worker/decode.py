"""The decode loop: owns a request from admission to its last token.

`DecodeLoop.turn` is one turn: messages, then plan → launch → settle → reply, as they are due.
`requests/table.py` holds the requests and ends them.
"""

import logging
import time
from functools import partial

from worker.api import (
    Abort,
    Ack,
    Claim,
    FinishReason,
    ForgetPrefixes,
    Generate,
    KVReady,
    Lost,
    PeerId,
    Pong,
    PrefillRefused,
    RenewAck,
    Stop,
    Window,
    WorkerStats,
)
from worker.config.said import Said
from worker.loop import DrainAsked, EngineThread, Incoming, MembersChanged
from worker.observe.window_counts import WindowCounts
from worker.plan import Drawn, Plan
from worker.requests.replies import Last
from worker.requests.table import SWEEP_S, Requests, error_of
from worker.run.flight import Flight
from worker.schedule.decode import DecodeScheduler
from worker.schedule.queues import DecodeQueues
from worker.schedule.req import Phase, Req
from worker.schedule.width import WidthPolicy
from worker.start.engine import Engine
from worker.transfer.fetch import FetchContext
from worker.transfer.inbound import Inbound, poll_after_s
from worker.transfer.peers import PrefillPeers
from worker.transfer.ranked import LeaderPulls, OwnDialled, PeerDialled, PullEnded
from worker.transfer.sources import DialFailed, Link
from worker.transfer.tier.ranks import Loaded

log = logging.getLogger("kvlane.decode")

SIMULATED = "acceptance is SIMULATED (spec.simulate_accept_*), %g tokens a step: answers are junk"


class DecodeLoop:
    """All that the engine thread of a decode worker does."""

    def __init__(self, engine: Engine, thread: EngineThread, incarnation: str) -> None:
        self._engine = engine
        self._thread = thread
        config, metrics = engine.config, engine.metrics
        eos_ids, widths = frozenset(engine.shape.eos_token_ids), _widths(engine)
        self.queues = queues = DecodeQueues(
            engine.book, config.engine, grain=engine.shape.grain, with_text=config.spec.reads_text
        )
        queues.on_preempt, queues.on_row = self._preempted, self._gets_row
        self.scheduler = scheduler = DecodeScheduler(queues, eos_ids, widths, config.spec.block)
        rank, meter = engine.local_rank(), engine.meter
        self._ranks = LeaderPulls(rank, engine.tell_ranks, thread.post, lambda: meter.num_steps)
        alone = partial(rank.dial, answer=thread.post)
        dial = self._ranks.dial if rank.tp_size > 1 else alone
        self.peers = PrefillPeers(rank, dial, thread.connect, thread.disconnect)
        self.measured_paths, self.close = self.peers.measured, self.peers.close
        draws = config.disaggregation.first_token == "prefill"
        context = FetchContext(
            engine.book,
            engine.layout,
            thread.send,
            config.lease,
            config.transport,
            metrics,
            thread.refusals,
            engine.shape.vocab_size,
            draws,
        )
        self._inbound = Inbound(incarnation, context, self.peers)
        self.requests = requests = Requests(engine, thread, scheduler, self._inbound)
        self._said = Said()
        if engine.tier is not None:
            engine.tier.wakes(thread.wake)
        self.flight = Flight(meter, overlap=config.spec.overlap, wake=thread.wake)
        metrics.running.set_function(lambda: len(queues.running))
        metrics.waiting.set_function(lambda: len(requests.reqs) - len(queues.running))
        metrics.sessions.set_function(lambda: len(queues.retention))
        metrics.leases.set_function(lambda: len(self._inbound.fetches))
        metrics.queued("fetch").set_function(lambda: len(self._inbound.fetches))
        metrics.queued("prefill").set_function(lambda: len(queues.local))
        metrics.queued("row").set_function(lambda: len(queues.ready))
        metrics.queued("sibling").set_function(lambda: requests.deferred.num("sibling"))
        metrics.queued("grammar").set_function(lambda: requests.deferred.num("grammar"))
        metrics.queued("preempted").set_function(lambda: len(queues.preempted))

    def counters(self) -> dict[str, int]:
        return {
            "requests": len(self.requests.reqs),
            "fetches": len(self._inbound.fetches),
            "loads": 0 if self._engine.tier is None else len(self._engine.tier.loads),
            "pulls": len(self._inbound.pulls_began_at),
            "unacknowledged": self.requests.replies.num_unacknowledged,
            "siblings": self.requests.deferred.num("sibling"),
            "compiling": self.requests.deferred.num("grammar"),
        }

    def turn(self, events: list[Incoming]) -> float:
        now = time.monotonic()
        flight, runner, replies = self.flight, self._engine.runner, self.requests.replies
        for peer, event in events:
            self._handle(peer, event, now)
        replies.flush(time.monotonic(), read_at=now)  # first tokens wait for no step
        if self._inbound.fetches:
            for fetch in self._inbound.poll(now):
                self.requests.fetch_ended(fetch)
        if (tier := self._engine.tier) is not None and tier.loads:
            for loading in tier.poll(now):
                self.requests.fetch_ended(loading)
        if self.requests.deferred.waiting or self.queues.preempted:
            self.requests.resume()
        num_arriving = len(self._inbound.fetches)
        if flight.launch_due(num_arriving):
            began_at = time.monotonic()
            if (plan := self.scheduler.plan(began_at)) is not None:
                flight.launched(runner.launch(plan), time.monotonic() - began_at)
        if (step := flight.take_ended()) is not None:
            result = runner.settle(step)
            if result.scores:
                self.requests.pass_scores(step.plan, result.scores)
            self._reply(step.plan, result.drawn, time.monotonic())
        if (masked := flight.tail_due) is not None:
            matchers = [req.matcher for req in self.scheduler.launched[masked.plan.step].sampled]
            masks = self.requests.admission.grammars.masks(matchers, masked.drafts())
            flight.tail_launched(runner.launch_tail(masked, masks))
        if self.peers.known or self.peers.closing:
            self.peers.tend(now, self._inbound.uses)
        if now >= self.requests.sweep_at:
            self.requests.sweep(now)
        replies.flush(time.monotonic(), read_at=now)
        self._thread.stats = self._stats()
        idle_s = flight.idle_s(num_arriving)
        idle_s = SWEEP_S if idle_s is None else idle_s
        if num_arriving:
            idle_s = min(idle_s, poll_after_s(self._inbound.pulls_began_at, now))
        return idle_s if tier is None else min(idle_s, tier.tend())

    def _handle(self, peer: PeerId, event: object, now: float) -> None:
        match event:
            case Generate():
                if (whole := self._said.whole(peer, event)) is not None:
                    self.requests.admit(peer, whole, now)
                else:
                    self._thread.refusals.unexpected(peer, event)
            case Claim():
                self.requests.claim(peer, event, now)
            case Stop():
                self.requests.stop(peer, event)
            case Abort():
                self.requests.abort(peer, event)
            case Loaded() if self._engine.tier is not None:
                self._engine.tier.on(event)
            case ForgetPrefixes():
                self._engine.forget_prefixes()
            case Ack():
                self.requests.replies.acknowledged(peer, event.req_id, event.dispatch)
            case KVReady():
                if (req := self._inbound.on_ready(peer, event)) is not None:
                    self.requests.pass_on(req)
            case PrefillRefused():
                self._inbound.on_refused(peer, event)
            case RenewAck():
                self._inbound.on_renew_ack(peer, event)
            case Lost():
                self._said.pop(peer, None)
                self.requests.lose(peer)
            case MembersChanged():
                self.queues.shares.update(event.members)
                for gone in self.peers.update(event.members):
                    self.requests.lose(gone)
            case OwnDialled() | PeerDialled() | PullEnded():
                self._ranks.on(event)
            case Link():
                self.peers.dialled(event)
            case DialFailed():
                self.peers.failed(event)
            case DrainAsked():
                self.requests.admission.draining = True
            case Pong():
                self.peers.heard(peer)
            case _:
                self._engine.metrics.dropped(type(event).__name__).inc()

    def _reply(self, plan: Plan, drawn: list[Drawn], now: float) -> None:
        """Reply with the tokens of a step that has ended; end requests that are complete."""
        meter = self._engine.meter
        if plan.chunks:
            began_at = now - meter.took_s
            for req, chunk in self.scheduler.launched[plan.step].computed:
                req.timeline.chunk(began_at, now, len(chunk.tokens))
        settled = self.scheduler.settle(plan.step, drawn)
        nums = [num for _, _, num, _ in settled]
        self._engine.metrics.generated_tokens.inc(sum(nums))
        widths, width = self.scheduler.widths, plan.width
        if plan.decode and widths.max_width > 1:
            widths.took(len(plan.decode), width, meter.took_s)
            widths.observe(width, drawn)
            meter.verified(width, nums, [result.drafts for _, result, _, _ in settled])
        for req, result, num, reason in settled:
            error = None
            if req.matcher is not None and (found := req.matcher.error) is not None:
                reason, error = FinishReason.ERROR, error_of(found, req.req_id)
            window = None
            if req.sampling.return_trace and plan.decode:
                window = Window(len(req.tokens) - num - 1, width, result.drafts, num - 1)
            last = Last(num, reason, error, result.logprobs, window)
            self.requests.replies.tokens(req, now, last)
            if reason is not None:
                self.requests.end(req, reason, error)

    def _gets_row(self, req: Req, now: float) -> None:
        self.requests.replies.begins(req)
        if not req.timeline.row_at and req.phase is Phase.READY:
            self._engine.metrics.row_wait_seconds.observe(now - req.timeline.landed_at)

    def _preempted(self, req: Req) -> None:
        self._engine.metrics.preemptions.inc()
        req.timeline.enter("preempted", time.monotonic())

    def _stats(self) -> WorkerStats:
        engine, queues = self._engine, self.queues
        book, meter = engine.book, engine.meter
        return WorkerStats(
            num_running=len(queues.running),
            num_waiting=len(self.requests.reqs) - len(queues.running),
            max_num_reqs=int(engine.config.engine.max_num_reqs),
            num_free_pages=book.num_available,
            num_pages=book.num_pages,
            page_size=book.page_size,
            snapshot_grid=book.snapshots.grid * (book.snapshots.num_slots > 0),
            num_queued_tokens=sum(len(req.tokens) - req.num_planned_tokens for req in queues.local),
            prefill_s_per_token=meter.prefill_s_per_token,
            draining=self.requests.admission.draining,
            num_steps=meter.num_steps,
            has_work=self.flight.busy or queues.has_work,
            num_windows=meter.windows.num_windows,
            drafted=tuple(meter.windows.drafted),
            accepted=tuple(meter.windows.accepted),
            tokens_per_row=meter.windows.tokens_per_row,
            turns=queues.retention.turns,
        )


def _widths(engine: Engine) -> WidthPolicy:
    """Make the policy of widths; if acceptance is simulated, log and export that."""
    simulated_len = engine.simulated_accept_len
    simulated, may_miss = simulated_len > 0, engine.config.spec.reads_text
    if simulated:
        log.warning(SIMULATED, simulated_len)
    chosen = engine.config.spec.chosen
    engine.meter.verifies(WindowCounts(max(chosen), simulated=simulated, reads_text=may_miss))
    return WidthPolicy(chosen, engine.step_s, may_miss=may_miss)
