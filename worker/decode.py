"""The decode loop: owns a request from admission to its last token.

`DecodeLoop.turn` is one turn: what has arrived, then plan → launch → settle → reply, each when it
is due.
"""

from __future__ import annotations

import logging
import time
from functools import partial

from worker.api import (
    Abort,
    Ack,
    Error,
    FinishReason,
    Generate,
    KVReady,
    Lost,
    PeerId,
    Pong,
    PrefillRefused,
    Refused,
    RenewAck,
    Stop,
    Window,
    WorkerStats,
)
from worker.draw.grammar import Grammars
from worker.errors import Busy, DeadlinePassed, KvlaneError, LibraryError, PeerLost, UserError
from worker.loop import DrainAsked, EngineThread, Incoming, MembersChanged
from worker.observe.metrics import WorkerMetrics
from worker.plan import Drawn, Plan
from worker.requests.admission import Admission
from worker.requests.replies import Replies
from worker.requests.siblings import Siblings
from worker.requests.traces import DecodeTraces
from worker.run.engine import Engine
from worker.run.flight import Flight
from worker.schedule.decode import DecodeScheduler, has_work, num_queued_tokens
from worker.schedule.req import Phase, Req, finish_reason
from worker.schedule.width import WidthPolicy
from worker.transfer.fetch import Fetch, FetchContext
from worker.transfer.inbound import Inbound, poll_after_s
from worker.transfer.peers import DialFailed, Link, PrefillPeers
from worker.transfer.ranked import LeaderPulls, OwnDialled, PeerDialled, PeerNotDialled, PullEnded

log = logging.getLogger("kvlane.decode")

SWEEP_S = 0.25
SIMULATED = "acceptance is SIMULATED (spec.simulate_accept_*), %g tokens a step: answers are junk"
ABORTED = Error(FinishReason.ABORT.value, "the router aborted the request")


class DecodeLoop:
    """All that the engine thread of a decode worker does."""

    def __init__(self, engine: Engine, thread: EngineThread, incarnation: str) -> None:
        self._engine = engine
        self._thread = thread
        config, metrics, spec = engine.config, engine.metrics, engine.spec
        self._eos_ids = frozenset(spec.eos_token_ids)
        self._traces = DecodeTraces(engine.tracer)
        self.scheduler = scheduler = DecodeScheduler(
            engine.book,
            config.engine,
            self._eos_ids,
            partial(_preempted, metrics, self._traces),
            partial(_gets_row, metrics, self._traces),
            _widths(engine),
            spec=config.spec,
        )
        rank = engine.local_rank()
        self._ranks = LeaderPulls(rank, engine.tell_ranks, thread.post, engine.num_settled)
        self._peers = PrefillPeers(
            rank,
            engine.identity,
            self._ranks.dial,
            thread.connect,
            thread.disconnect,
        )
        self.measured_paths = self._peers.measured
        context = FetchContext(
            engine.book,
            engine.layout,
            thread.send,
            config.lease,
            config.transport,
            metrics,
            prefill_draws=config.disaggregation.first_token == "prefill",
        )
        self._inbound = Inbound(incarnation, context, self._peers)
        self._grammars = Grammars(config.model.directory, spec.vocab_size, spec.eos_token_ids)
        self._admission = Admission(
            thread.me, engine, scheduler, self._grammars, self._inbound, self._peers
        )
        self._replies = Replies(thread.send, config.lease.final_resend_s)
        self._siblings = Siblings()
        self.reqs: dict[tuple[str, int], Req] = {}
        self.flight = Flight(engine.meter, overlap=config.spec.overlap, wake=thread.wake)
        self._sweep_at = 0.0
        metrics.on_scrape(metrics.running, lambda: len(scheduler.running))
        metrics.on_scrape(metrics.waiting, lambda: len(self.reqs) - len(scheduler.running))
        metrics.on_scrape(metrics.leases, lambda: self._inbound.num_fetches)
        metrics.on_scrape(metrics.queued("fetch"), lambda: self._inbound.num_fetches)
        metrics.on_scrape(metrics.queued("prefill"), lambda: len(scheduler.local))
        metrics.on_scrape(metrics.queued("row"), lambda: len(scheduler.ready))
        metrics.on_scrape(metrics.queued("sibling"), lambda: self._siblings.num_waiting)
        metrics.on_scrape(metrics.queued("preempted"), lambda: len(scheduler.preempted))

    def counters(self) -> dict[str, int]:
        """Number of resources held, by kind; all zero when idle. Control-plane threads read it."""
        return {
            "requests": len(self.reqs),
            "fetches": self._inbound.num_fetches,
            "pulls": len(self._inbound.pulls_began_at),
            "unacknowledged": self._replies.num_unacknowledged,
            "siblings": self._siblings.num_waiting,
        }

    def num_peers(self) -> int:
        """Number of prefill workers that can be pulled from."""
        return self._peers.num_connected

    def close(self) -> None:
        """Close the links to prefill workers."""
        self._peers.close()

    def turn(self, events: list[Incoming]) -> float:
        now = time.monotonic()
        self._arrive(events, now)
        flight, num_arriving = self.flight, self._inbound.num_fetches
        if flight.launch_due(num_arriving):
            began_at = time.monotonic()
            if (plan := self.scheduler.plan(began_at)) is not None:
                step = self._engine.runner.launch(plan)
                flight.launched(step, time.monotonic() - began_at)
        if (step := flight.ended()) is not None:
            drawn = self._engine.runner.settle(step)
            self._settled(step.plan, drawn, time.monotonic())
        if (step := flight.tail_due()) is not None:
            sampled, _ = self.scheduler.reqs_of(step.plan.step)
            masks = self._grammars.masks([req.matcher for req in sampled], step.drafts())
            self._engine.runner.launch_tail(step, masks)
        if self._peers.num_known:
            self._peers.tend(now, self._inbound.uses)
        self._sweep(now)
        self._replies.flush(time.monotonic(), read_at=now)
        self._thread.stats = _stats(
            self._engine,
            self.scheduler,
            len(self.reqs) - len(self.scheduler.running),
            draining=self._admission.draining,
            has_work=flight.busy or has_work(self.scheduler),
        )
        idle_s = flight.idle_s(num_arriving)
        poll_s = poll_after_s(self._inbound.pulls_began_at, now)
        return min(SWEEP_S if idle_s is None else idle_s, poll_s)

    def _arrive(self, events: list[Incoming], now: float) -> None:
        """Take messages, pulls that have ended, and requests that waited for others."""
        for peer, event in events:
            self._handle(peer, event, now)
        # A first token from a prefill worker does not wait until a step settles.
        self._replies.flush(time.monotonic(), read_at=now)
        if self._inbound.num_fetches:
            for fetch in self._inbound.poll(now):
                self._fetch_ended(fetch)
        if self._siblings.num_waiting:
            for due in self._siblings.due(self.reqs.values()):
                self._admit(*due, was_deferred=True)
        if self.scheduler.preempted:
            self._admission.resume_preempted()

    def _handle(self, peer: PeerId, event: object, now: float) -> None:
        match event:
            case Generate():
                self._admit(peer, event, now)
            case Stop():
                self._stop(event)
            case Abort():
                self._siblings.abort(event.req_id, event.dispatch)
                if (req := self.reqs.get((event.req_id, event.dispatch))) is not None:
                    self._leave(req, FinishReason.ABORT, ABORTED)
            case Ack():
                self._replies.acknowledged(peer, event.req_id, event.dispatch)
            case KVReady():
                if (req := self._inbound.on_ready(event)) is not None:
                    self._pass_on(req)
            case PrefillRefused():
                self._inbound.on_refused(event)
            case RenewAck():
                self._inbound.on_renew_ack(peer, event)
            case Lost():
                self._lose(peer)
            case MembersChanged():
                for gone in self._peers.update(event.members):
                    self._lose(gone)
            case OwnDialled() | PeerDialled() | PeerNotDialled() | PullEnded():
                self._ranks.on(event)
            case Link():
                self._peers.dialled(event)
            case DialFailed():
                self._peers.failed(event)
            case DrainAsked():
                self._admission.draining = True
            case Pong():
                self._peers.heard(peer)
            case _:
                self._engine.metrics.dropped(type(event).__name__).inc()

    def _admit(
        self, router: PeerId, message: Generate, received_at: float, *, was_deferred: bool = False
    ) -> None:
        key = message.req_id, message.dispatch
        if key in self.reqs or self._siblings.defer(
            router, message, received_at, self.reqs.values()
        ):
            return
        try:
            req = self._admission.admit(router, message, len(self.reqs), received_at)
        except KvlaneError as error:
            retry_after_s = error.retry_after_s if isinstance(error, Busy) else 0.0
            log.debug("req_id=%s from %s refused: %s", message.req_id, router, error)
            if isinstance(error, LibraryError):
                error.log(message.req_id)
            self._thread.send(router, Refused(*key, _told(error), retry_after_s))
            return
        log.debug("req_id=%s from %s admitted, %d tokens", req.req_id, router, len(req.tokens))
        req.marks.received_at = received_at
        if message.trace:
            self._traces.begin(req, message.trace, was_deferred=was_deferred)
        self.reqs[key] = req
        self._admission.place(req)

    def _pass_on(self, req: Req) -> None:
        """Reply with the token that a prefill worker has drawn, before its KV has landed."""
        reason = finish_reason(req, self._eos_ids)
        self._replies.tokens(req, time.monotonic(), reason)
        if reason is not None:
            self._leave(req, reason)

    def _fetch_ended(self, fetch: Fetch) -> None:
        req = fetch.req
        if fetch.ending is not None:
            self._end(req, fetch.ending)
        elif fetch.landed:
            now = time.monotonic()
            req.marks.landed_at = req.marks.landed_at or now
            if req.trace is not None:
                req.trace.enter("decode_queue", now)
            self.scheduler.commit(req)
        else:
            self._admission.place_locally(req, "fallback")

    def _lose(self, peer: PeerId) -> None:
        """Forget a router or a prefill worker that is gone; end the router's requests."""
        self._inbound.on_lost(peer)
        self._peers.lose(peer)
        self._replies.lost(peer)
        self._siblings.lost(peer)
        lost = Error(PeerLost.code, f"{peer} is lost")
        for req in [each for each in self.reqs.values() if each.router == peer]:
            self._leave(req, FinishReason.ABORT, lost)

    def _stop(self, message: Stop) -> None:
        """End a request whose stop string the router found; drop tokens from at_position on."""
        req = self.reqs.get((message.req_id, message.dispatch))
        if req is not None:
            del req.tokens[max(message.at_position, req.num_prompt_tokens) :]
            req.num_computed_tokens = min(req.num_computed_tokens, len(req.tokens))
            self._leave(req, FinishReason.STOP)

    def _leave(self, req: Req, reason: FinishReason, cut_off: Error | None = None) -> None:
        """End `req` without a reply. Its pages are freed once no pull writes to them.

        Args:
            req: the request.
            reason: why it ends.
            cut_off: the error that its trace records; None: it was not cut off.
        """
        if req.trace is not None:
            self._traces.end(req, cut_off)
        if req.phase is Phase.FETCHING:
            req.deadline_at = float("inf")  # or the sweep would send an error while its pulls end
            self._inbound.cancel(req, reason)
        else:
            self._end(req, reason)

    def _settled(self, plan: Plan, drawn: list[Drawn], now: float) -> None:
        """Reply with the tokens of a step that has ended, and end the requests that they end."""
        if self._traces.waiting:
            reqs = self.scheduler.reqs_of(plan.step)
            self._traces.settled(plan, *reqs, now - self._engine.meter.took_s, now)
        settled = self.scheduler.settle(plan.step, drawn)
        nums = [num for _, _, num, _ in settled]
        self._engine.metrics.generated_tokens.inc(sum(nums))
        if plan.decode:
            widths, width = self.scheduler.widths, plan.width
            widths.took(len(plan.decode), width, self._engine.meter.took_s)
            widths.observe(width, drawn)
            if widths.max_width > 1:
                drafts = [each.drafts for _, each, _, _ in settled]
                self._engine.metrics.windows(width, nums, drafts)
        for req, each, num, reason in settled:
            error = None
            if req.matcher is not None and (found := req.matcher.error) is not None:
                reason, error = FinishReason.ERROR, _told(found)
                if isinstance(found, LibraryError):
                    found.log(req.req_id)
                if req.trace is not None:
                    self._traces.end(req, error)
            window = _window(plan, req, each, num) if req.sampling.return_trace else None
            self._replies.tokens(req, now, reason, error, each.logprobs, num, window)
            if reason is not None:
                self._end(req, reason)

    def _end(self, req: Req, reason: FinishReason) -> None:
        if req.trace is not None:
            self._traces.end(req)
        self.scheduler.finish(req)
        self.reqs.pop(req.key, None)
        log.debug("req_id=%s ended: %s, %d tokens", req.req_id, reason, len(req.tokens))
        self._engine.metrics.requests(reason.value).inc()

    def _sweep(self, now: float) -> None:
        """End requests that are past their deadline and that their router should have aborted."""
        if now < self._sweep_at:
            return
        self._sweep_at = now + SWEEP_S
        for req in [each for each in self.reqs.values() if now > each.deadline_at]:
            error = Error(DeadlinePassed.code, "the request's deadline has passed")
            self._replies.error(req, error)
            self._leave(req, FinishReason.ABORT, error)


def _widths(engine: Engine) -> WidthPolicy:
    """Make the policy of widths; logs and exports that acceptance is simulated, if it is."""
    simulated_len = engine.simulated_accept_len
    if simulated_len:
        engine.metrics.simulate()
        log.warning(SIMULATED, simulated_len)
    chosen = engine.config.spec.chosen
    if max(chosen) > 1:
        engine.metrics.verifies(max(chosen))
    may_miss = engine.config.spec.reads_text
    if may_miss:
        engine.metrics.acceptance_follows_text()
    return WidthPolicy(chosen, engine.step_s, simulated=bool(simulated_len), may_miss=may_miss)


def _window(plan: Plan, req: Req, drawn: Drawn, num: int) -> Window | None:
    """What `return_trace` tells of a step that has just added `num` tokens to `req`."""
    if not plan.decode:
        return None
    return Window(len(req.tokens) - num - 1, plan.width, drawn.drafts, num - 1)


def _told(error: KvlaneError) -> Error:
    return Error(error.code, str(error), error.param if isinstance(error, UserError) else None)


def _gets_row(metrics: WorkerMetrics, traces: DecodeTraces, req: Req, now: float) -> None:
    if req.marks.landed_at and not req.marks.row_at:
        metrics.row_wait_seconds.observe(now - req.marks.landed_at)
    if req.trace is not None:
        traces.row(req, now)


def _preempted(metrics: WorkerMetrics, traces: DecodeTraces, req: Req) -> None:
    metrics.preemptions.inc()
    if req.trace is not None:
        traces.preempted(req)


def _stats(
    engine: Engine,
    scheduler: DecodeScheduler,
    num_waiting: int,
    *,
    draining: bool,
    has_work: bool,
) -> WorkerStats:
    return WorkerStats(
        num_running=len(scheduler.running),
        num_waiting=num_waiting,
        max_num_reqs=int(engine.config.engine.max_num_reqs),
        num_free_pages=engine.book.num_available,
        num_pages=engine.book.num_pages,
        page_size=engine.book.page_size,
        num_queued_tokens=num_queued_tokens(scheduler),
        prefill_s_per_token=engine.meter.prefill_s_per_token,
        draining=draining,
        num_steps=engine.meter.num_steps,
        has_work=has_work,
        num_windows=engine.metrics.num_windows,
        drafted=tuple(engine.metrics.drafted),
        accepted=tuple(engine.metrics.accepted),
        tokens_per_row=engine.metrics.tokens_per_row,
    )
