"""The decode worker: owns a request from admission to its last token.

One turn: messages, pulls, launch step n, settle step n - 1, replies, sweep.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from worker.admission import Admission
from worker.api import (
    Abort,
    Ack,
    Error,
    FinishReason,
    Generate,
    KVReady,
    Lost,
    Member,
    PeerId,
    Pong,
    PrefillRefused,
    Refused,
    RenewAck,
    Stop,
    TokenChunk,
    WorkerStats,
)
from worker.config import WorkerConfig
from worker.engine import build_engine
from worker.errors import Busy, KvlaneError
from worker.inbound import Arrived, Inbound
from worker.loop import DrainAsked, EngineLoop, Incoming, MembersChanged
from worker.peers import PeerConnected, PeerFailed, PrefillPeers
from worker.replies import Replies
from worker.req import Phase, Req
from worker.runner import Step
from worker.schedule.decode import DecodeScheduler

PULL_POLL_S = 0.0005
SWEEP_S = 0.25


class DecodeWorker:
    """One decode worker of one process; the public methods are for the control plane's threads."""

    def __init__(self, config: WorkerConfig, *, name: str, incarnation: str, host: str) -> None:
        self._name, self._incarnation, self._host = name, incarnation, host
        self._engine = engine = build_engine(config, name=name, host=host)
        self._config = config = engine.config
        me = f"{name}/{incarnation}"
        self._loop = loop = EngineLoop(me, config.ping, self._turn, lambda: self._stats)
        eos_ids = frozenset(engine.spec.eos_token_ids)
        self._scheduler = DecodeScheduler(engine.book, config.engine, eos_ids)
        self._peers = PrefillPeers(
            engine.transport,
            engine.layout.hash,
            config.transport.connect_timeout_s,
            loop.post,
            loop.connect,
            loop.disconnect,
        )
        self._inbound = Inbound(
            incarnation,
            engine.book,
            engine.layout,
            self._peers,
            loop.send,
            config.lease,
            config.transport,
            engine.metrics,
        )
        self._admission = Admission(engine, self._scheduler, self._inbound, self._peers)
        self._replies = Replies(loop.send, config.lease.final_resend_s)
        self._reqs: dict[tuple[str, int], Req] = {}
        self._pending: Step | None = None
        self._sweep_at = 0.0
        self._stats = WorkerStats()
        self._observe()

    def start(self) -> Member:
        """Begin to serve."""
        metrics_address = self._engine.metrics.serve(self._host)
        address = self._loop.start(self._host)
        return self._engine.member(self._name, self._incarnation, address, metrics_address)

    def update_members(self, members: Sequence[Member]) -> None:
        """The control plane's list of live members, whole."""
        self._loop.post(MembersChanged(tuple(members)))

    def drain(self) -> None:
        """Refuse new requests; finish those that are here."""
        self._loop.post(DrainAsked())

    def idle(self) -> bool:
        """No request is left."""
        return not any(self.counters().values())

    def counters(self) -> dict[str, int]:
        """What is held now; all zero at rest."""
        book = self._engine.book
        return {
            "requests": len(self._reqs),
            "holds": book.num_holds,
            "reserved_pages": book.num_reserved,
            "private_pages": book.num_private,
            "fetches": self._inbound.num_fetches,
            "pulls": self._inbound.num_pulls,
            "unacknowledged": self._replies.num_unacknowledged,
        }

    def num_peers(self) -> int:
        """Prefill workers that can be pulled from."""
        return self._peers.num_connected

    def stop(self) -> None:
        """End the loop and give everything back."""
        self._loop.stop()
        self._peers.close()
        self._engine.close()

    def join(self) -> None:
        """Wait until the loop has ended."""
        self._loop.join()

    # The engine's thread.

    def _turn(self, events: list[Incoming]) -> float:
        now = time.monotonic()
        for peer, event in events:
            self._handle(peer, event, now)
        for arrived in self._inbound.poll(now):
            self._arrive(arrived)
        self._admission.resume_preempted()
        step = self._launch()
        if self._pending is not None:
            self._settle(self._pending)
        self._pending = step
        self._peers.tend(now, self._inbound.uses)
        self._sweep(now)
        self._replies.flush(now)
        self._publish()
        if self._pending is not None or self._scheduler.local or self._scheduler.ready:
            return 0.0
        return PULL_POLL_S if self._inbound.num_pulls else SWEEP_S

    def _handle(self, peer: PeerId, event: object, now: float) -> None:
        match event:
            case Generate():
                self._admit(peer, event, now)
            case Stop():
                self._cut(event)
            case Abort():
                self._abort(self._reqs.get((event.req_id, event.dispatch)))
            case Ack():
                self._replies.acknowledged(peer, event.req_id, event.dispatch)
            case KVReady():
                self._inbound.on_ready(event, now)
            case PrefillRefused():
                self._inbound.on_refused(event, now)
            case RenewAck():
                self._inbound.on_renew_ack(peer, event)
            case Lost():
                self._lose(peer)
            case MembersChanged():
                for gone in self._peers.update(event.members):
                    self._lose(gone)
            case PeerConnected():
                self._peers.connected(event)
            case PeerFailed():
                self._peers.failed(event)
            case DrainAsked():
                self._admission.draining = True
            case Pong():
                pass
            case _:
                self._engine.metrics.dropped(type(event).__name__).inc()

    def _admit(self, router: PeerId, message: Generate, now: float) -> None:
        key = message.req_id, message.dispatch
        if key in self._reqs:
            return
        try:
            req = self._admission.admit(router, message, len(self._reqs), now)
        except KvlaneError as error:
            retry_after_s = error.retry_after_s if isinstance(error, Busy) else 0.0
            said = Error(error.code, str(error))
            self._loop.send(router, Refused(*key, said, retry_after_s))
            return
        self._reqs[key] = req
        self._admission.place(req)

    def _arrive(self, arrived: Arrived) -> None:
        req = arrived.req
        if arrived.aborted:
            self._end(req, FinishReason.ABORT)
        elif arrived.landed:
            self._scheduler.commit(req)
        else:
            self._admission.place_locally(req, "fallback")

    def _lose(self, peer: PeerId) -> None:
        """A router or a prefill worker is gone."""
        self._inbound.on_lost(peer)
        self._peers.lose(peer)
        self._replies.lost(peer)
        for req in [each for each in self._reqs.values() if each.router == peer]:
            self._abort(req)

    def _cut(self, message: Stop) -> None:
        """The router found a stop string: nothing from at_position on counts."""
        req = self._reqs.get((message.req_id, message.dispatch))
        if req is not None and req.phase is not Phase.FETCHING:
            del req.tokens[max(message.at_position, req.num_prompt_tokens) :]
            req.num_computed_tokens = min(req.num_computed_tokens, len(req.tokens))
            self._end(req, FinishReason.STOP)

    def _abort(self, req: Req | None) -> None:
        """No final chunk is wanted. Running pulls are awaited before pages are given back."""
        if req is None:
            return
        if req.phase is Phase.FETCHING:
            self._inbound.abort(req)
        else:
            self._end(req, FinishReason.ABORT)

    def _launch(self) -> Step | None:
        plan = self._scheduler.plan()
        if plan is None:
            return None
        self._engine.meter.launched(plan)
        return self._engine.runner.launch(plan)

    def _settle(self, step: Step) -> None:
        drawn = step.wait()
        self._engine.meter.settled(step.plan)
        now = time.monotonic()
        for req, token, reason in self._scheduler.settle(step.plan.step, drawn):
            self._engine.metrics.generated_tokens.inc()
            self._replies.add(req.router, _chunk(req, (token,), reason), now)
            if reason is not None:
                self._end(req, reason)

    def _end(self, req: Req, reason: FinishReason) -> None:
        self._scheduler.finish(req, reason)
        self._reqs.pop(req.key, None)
        self._engine.metrics.requests(reason.value).inc()

    def _sweep(self, now: float) -> None:
        """Backstop for requests whose router has forgotten their deadline."""
        if now < self._sweep_at:
            return
        self._sweep_at = now + SWEEP_S
        for req in [each for each in self._reqs.values() if now > each.deadline_at]:
            error = Error("timeout", "the request's deadline has passed")
            self._replies.add(req.router, _chunk(req, (), FinishReason.ERROR, error), now)
            self._abort(req)

    def _publish(self) -> None:
        """The snapshot that Pongs carry."""
        book, scheduler = self._engine.book, self._scheduler
        self._engine.metrics.preemptions.inc(scheduler.take_num_preempted())
        self._stats = WorkerStats(
            num_running=len(scheduler.running),
            num_waiting=len(self._reqs) - len(scheduler.running),
            max_num_reqs=self._config.engine.max_num_reqs,
            num_free_pages=book.num_available,
            num_pages=book.num_pages,
            num_queued_tokens=scheduler.num_queued_tokens,
            prefill_s_per_token=self._engine.meter.prefill_s_per_token,
            draining=self._admission.draining,
        )

    def _observe(self) -> None:
        """Gauges are read when they are scraped."""
        metrics, scheduler = self._engine.metrics, self._scheduler
        metrics.on_scrape(metrics.running, lambda: len(scheduler.running))
        metrics.on_scrape(metrics.waiting, lambda: len(self._reqs) - len(scheduler.running))
        metrics.on_scrape(metrics.leases, lambda: self._inbound.num_fetches)


def _chunk(
    req: Req, tokens: tuple[int, ...], reason: FinishReason | None, error: Error | None = None
) -> TokenChunk:
    """`tokens` are the last ones of req.tokens."""
    return TokenChunk(
        req.req_id,
        req.dispatch,
        len(req.tokens) - len(tokens),
        tokens,
        reason,
        error,
        req.num_cached_tokens,
    )
