"""Requests: all requests of a decode worker, from their admission to their end."""

import logging
import time
from collections.abc import Sequence
from itertools import islice

from worker.api import (
    Abort,
    Claim,
    Claimed,
    Error,
    FinishReason,
    Generate,
    PeerId,
    Refused,
    Stop,
    TokenLogprob,
)
from worker.errors import Busy, DeadlinePassed, KvlaneError, LibraryError, PeerLost, UserError
from worker.loop import EngineThread
from worker.plan import Plan
from worker.requests.admission import BUSY_RETRY_S, DEADLINE_GRACE_S, Admission
from worker.requests.deferred import Deferred
from worker.requests.kept import KeptAnswers
from worker.requests.replies import Last, Replies
from worker.schedule.decode import DecodeScheduler, finish_reason
from worker.schedule.req import Phase, Req
from worker.start.engine import Engine
from worker.transfer.fetch import Fetch
from worker.transfer.inbound import Inbound
from worker.transfer.tier.tier import Loading

log = logging.getLogger("kvlane.decode")

SWEEP_S = 0.25
TAKEN_OVER = Error(
    "taken_over", "the same Idempotency-Key was sent again: that one goes on with it"
)
ABORTED = Error(FinishReason.ABORT.value, "the router aborted the request")


class Requests:
    """The requests that a decode worker owns; a request ends once, by `end`."""

    def __init__(
        self, engine: Engine, thread: EngineThread, scheduler: DecodeScheduler, inbound: Inbound
    ) -> None:
        config = engine.config
        self.reqs: dict[tuple[str, int], Req] = {}
        self.admission = Admission(engine, thread, scheduler.queues, inbound)
        self.deferred = Deferred(self.admission, self.reqs)
        self.replies = Replies(thread.send, config.lease.final_resend_s)
        self.kept = KeptAnswers()
        self._engine, self._thread = engine, thread
        self._scheduler, self._inbound = scheduler, inbound
        self.sweep_at = 0.0

    def admit(
        self, router: PeerId, message: Generate, received_at: float, *, waited_for: str = ""
    ) -> None:
        """Admit a request, or refuse it; waited_for: the stage in which it was deferred."""
        key = message.req_id, message.dispatch
        try:
            if key in self.reqs:
                if self._owned(router, message) is None:
                    raise Busy("another router has a request of this id", BUSY_RETRY_S)
                return
            if self.deferred.take(router, message, received_at):
                return
            req = self.admission.admit(router, message, self.reqs.values(), received_at)
        except KvlaneError as error:
            retry_after_s = error.retry_after_s if isinstance(error, Busy) else 0.0
            log.debug("req_id=%s from %s refused: %s", message.req_id, router, error)
            refused = Refused(*key, error_of(error, message.req_id), retry_after_s)
            self._thread.send(router, refused)
            return
        log.debug("req_id=%s from %s admitted, %d tokens", req.req_id, router, len(req.tokens))
        if waited_for:
            req.timeline.enter(waited_for, received_at)
        self.reqs[key] = req
        if req.claim_key:
            self.kept.begin(req)
        same = (x for x in self.reqs.values() if (x.req_id, x.router) == (message.after, router))
        self.admission.place(req, next(same, None) if message.after else None)

    def claim(self, router: PeerId, message: Claim, now: float) -> None:
        """Hand a request with a key, or its complete answer, to whoever asks for it now."""
        key = message.req_id, message.dispatch
        found = None if key in self.reqs else self.kept.find(message.key)  # ids are given once
        self._thread.send(router, Claimed(*key, found is not None))
        if found is None:
            return
        req, chunks = found
        self.replies.again(router, key, chunks)
        if req is None:
            return
        if req.router:
            self._thread.send(req.router, Refused(*req.key, TAKEN_OVER))
        log.debug("req_id=%s goes on as %s at %s", req.req_id, message.req_id, router)
        del self.reqs[req.key]
        req.router, (req.req_id, req.dispatch) = router, key
        req.deadline_at = now + message.timeout_s + DEADLINE_GRACE_S
        self.reqs[key] = req

    def resume(self) -> None:
        """Admit requests that waited for a grammar or a sibling's prompt, and preempted ones."""
        for router, (message, received_at, stage) in self.deferred.ready():
            self.admit(router, message, received_at, waited_for=stage)
        self.admission.resume_preempted()

    def pass_on(self, req: Req) -> None:
        """Reply with the token that a prefill worker has drawn, before its KV has landed."""
        reason = finish_reason(req, self._scheduler.eos_ids)
        self.replies.tokens(req, time.monotonic(), Last(reason=reason))
        if reason is not None:
            self.leave(req, reason)

    def pass_scores(self, plan: Plan, scores: Sequence[TokenLogprob]) -> None:
        """Reply with the scores of prompts that a step, not settled yet, has computed."""
        left = iter(scores)
        for req, chunk in self._scheduler.launched[plan.step].computed:
            found = list(islice(left, len(chunk.scored)))
            if found and req.phase is not Phase.FINISHED:
                self.replies.scores(req, found)

    def fetch_ended(self, fetch: Fetch | Loading[Req]) -> None:
        """Go on with a fetch's request: KV landed, or no worker is left to ask, or it shall end."""
        req = fetch.req
        if fetch.ending is not None:
            self.end(req, fetch.ending)
        elif isinstance(fetch, Loading):
            self.admission.found(req, fetch.hold)
        elif fetch.landed:
            self.admission.queue_for_row(req)
        else:
            self.admission.place_locally(req, "fallback")

    def lose(self, peer: PeerId) -> None:
        """Forget a router or a prefill worker that is gone; end the router's requests."""
        self._inbound.peers.lose(peer)
        self._inbound.on_lost(peer)
        self.replies.lost(peer)
        self.deferred.forget(lambda key: key[0] == peer)
        lost = Error(PeerLost.code, f"{peer} is lost")
        for req in [req for req in self.reqs.values() if req.router == peer]:
            self._unwanted(req, lost)

    def stop(self, router: PeerId, message: Stop) -> None:
        """End a request whose stop string the router found; drop tokens from at_position on."""
        if (req := self._owned(router, message)) is not None:
            del req.tokens[max(message.at_position, req.num_prompt_tokens) :]
            req.num_computed_tokens = min(req.num_computed_tokens, len(req.tokens))
            self.leave(req, FinishReason.STOP)

    def abort(self, router: PeerId, message: Abort) -> None:
        """End a request that its router no longer wants."""
        ended = router, message.req_id, message.dispatch
        self.deferred.forget(lambda key: key == ended)
        if (req := self._owned(router, message)) is not None:
            self._unwanted(req, ABORTED, keep=message.keep)

    def leave(self, req: Req, reason: FinishReason, cut_off: Error | None = None) -> None:
        """End `req` without a reply; at once, or once no pull writes to its pages.

        cut_off: the error that its trace records; None: it was not cut off.
        """
        _end_timeline(req, cut_off)
        self.kept.end(req, reason, time.monotonic())
        if req.phase is Phase.FETCHING:
            req.deadline_at = float("inf")  # or the sweep would send an error while its pulls end
            self._inbound.cancel(req, reason)
            if self._engine.tier is not None:
                self._engine.tier.cancel(req, reason)
        else:
            self.end(req, reason)

    def end(self, req: Req, reason: FinishReason, error: Error | None = None) -> None:
        """Give back all that `req` holds; no pull into its pages may run."""
        _end_timeline(req, error)
        self.kept.end(req, reason, time.monotonic())
        self._scheduler.queues.finish(req)
        self.reqs.pop(req.key, None)
        log.debug("req_id=%s ended: %s, %d tokens", req.req_id, reason, len(req.tokens))
        self._engine.metrics.requests(reason.value).inc()

    def sweep(self, now: float) -> None:
        """End requests that are past their deadline. Their routers should have aborted them."""
        self.sweep_at = now + SWEEP_S
        self.kept.sweep(now)
        self._scheduler.queues.retention.sweep()
        for req in [req for req in self.reqs.values() if now > req.deadline_at]:
            error = Error(DeadlinePassed.code, "the request's deadline has passed")
            self.replies.error(req, error)
            self.leave(req, FinishReason.ABORT, error)

    def _owned(self, router: PeerId, message: Generate | Stop | Abort) -> Req | None:
        """The request that a message names, if it is here and the router's."""
        req = self.reqs.get((message.req_id, message.dispatch))
        if req is None or req.router == router:
            return req
        if req.router:  # else its router has given it up, and the message was under way
            self._thread.refusals.foreign(router, message)
        return None

    def _unwanted(self, req: Req, cut_off: Error, *, keep: bool = True) -> None:
        """End `req`, unless its client may come back for it."""
        if not (keep and self.kept.orphan(req, time.monotonic())):
            self.leave(req, FinishReason.ABORT, cut_off)


def error_of(error: KvlaneError, req_id: str) -> Error:
    """What goes to the router; a library's failure is logged."""
    if isinstance(error, LibraryError):
        error.log(req_id)
    return Error(error.code, str(error), error.param if isinstance(error, UserError) else None)


def _end_timeline(req: Req, error: Error | None) -> None:
    req.timeline.end(time.monotonic(), len(req.tokens) - req.num_prompt_tokens, error)
