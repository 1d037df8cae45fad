"""Admission of requests on a decode worker, and the choice of where a prompt is prefilled."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worker.api import MAX_LOGPROBS, MAX_STOP_IDS, Candidate, Generate, PeerId
from worker.config import DisaggregationConfig
from worker.draw.grammar import Grammars
from worker.errors import Busy, KvlaneError, UserError
from worker.loop import EngineThread
from worker.observe.timeline import Timeline
from worker.schedule.asked import fits, known
from worker.schedule.order import num_before
from worker.schedule.queues import DecodeQueues
from worker.schedule.req import Req
from worker.seldom import Seldom
from worker.start.engine import Engine
from worker.transfer.inbound import Inbound

if TYPE_CHECKING:
    from worker.cache.hold import Hold

log = logging.getLogger("kvlane.admission")

# The worker ends a request this long after its deadline, in case its router has not.
DEADLINE_GRACE_S = 5.0
BUSY_RETRY_S = 0.2
ASKING_S = 0.003  # fixed cost of asking a prefill worker, in the estimate
DEARER = 1.25  # times the cheapest estimate: a candidate that costs more is asked after the others


class Admission:
    """Checks and admits requests, and decides where their prompts are prefilled."""

    def __init__(
        self, engine: Engine, thread: EngineThread, queues: DecodeQueues, inbound: Inbound
    ) -> None:
        self.draining = False
        self._me = thread.me
        self._engine = engine
        self._queues, self.shares = queues, queues.shares
        config = engine.config.engine
        self.max_reqs = int(config.max_num_reqs) + config.max_waiting
        shape = engine.shape
        path = engine.config.model.directory
        self.grammars = Grammars(path, shape.vocab_size, shape.eos_token_ids, thread.wake)
        self._inbound, self._log = inbound, Seldom()

    def admit(self, router: PeerId, message: Generate, reqs: Collection[Req], now: float) -> Req:
        """Admit a request beside `reqs`, and reserve its pages.

        Raises:
            UserError: this model or this pool can never serve it.
            Busy: there is no room now, or none for this router, or the worker drains.
        """
        if self.draining:
            raise Busy("the worker is draining", BUSY_RETRY_S)
        left, taken = self.max_reqs - len(reqs) - 1, ((req.router, 1) for req in reqs)
        if not self.shares.allow(router, self.max_reqs, left, taken):
            raise Busy("too many requests", BUSY_RETRY_S)
        self._check(message)  # looks at every token, so it comes after the checks of load
        tracer = self._engine.tracer
        spans = tracer.carried(message.trace, now) if tracer and message.trace else None
        req = Req(
            message.req_id, message.dispatch, router, list(message.tokens),
            message.num_prompt_tokens, message.sampling,
            now + message.timeout_s + DEADLINE_GRACE_S, message.candidates,
            is_sibling=bool(message.after), leads=message.leads, timeline=Timeline(now, spans),
            claim_key=message.key, salt=message.salt,
            session=message.session, keep_s=message.keep_s,
        )  # fmt: skip
        if not self._queues.admit(req):
            raise Busy("no KV pages or slots of state left", BUSY_RETRY_S)
        if message.session:
            self._queues.retention.begun(message.session)
        if message.sampling.grammar:  # it is compiled
            output = message.tokens[message.num_prompt_tokens :]
            try:
                req.matcher = self.grammars.matcher(message.sampling.grammar, output)
            except KvlaneError:
                self._queues.finish(req)
                raise
        self._engine.metrics.queried_tokens.inc(len(req.tokens))
        self._engine.metrics.cached_tokens.inc(req.num_computed_tokens)
        return req

    def compiles(self, message: Generate) -> bool:
        """Whether its grammar is still being compiled; then it is not to be admitted yet."""
        grammar = message.sampling.grammar
        return bool(grammar) and not self.grammars.ready(grammar)

    def place(self, req: Req, leader: Req | None = None, *, looked: bool = False) -> None:
        """Get the prompt's missing KV, if any: from a tier, then pull it, or prefill here.

        leader: the choice that has come first. looked: the tier has brought what it has.
        """
        assert req.hold is not None
        if leader is not None and self._queues.fork(req, leader):
            self._engine.metrics.placed("none").inc()
            self.queue_for_row(req)
            return
        num_stored, snapshots = len(req.tokens) - 1, self._engine.book.snapshots
        num_uncached = num_stored - snapshots.resumable(req.hold, num_stored)
        if num_uncached == 0:
            snapshots.resume(req.hold, num_stored)
            self._engine.metrics.placed("none").inc()
            self.queue_for_row(req)
            return
        if req.is_to_score:
            self.place_locally(req, "local")
            return
        tier = None if looked else self._engine.tier
        if tier is not None and tier.begin(req, req.hold, req.tokens, num_stored):
            return  # `found` goes on
        now, peers, queues = time.monotonic(), self._inbound.peers, self._queues
        candidates = peers.eligible(req.candidates)
        inputs = PlacementInputs(
            num_uncached_tokens=num_uncached,
            num_missing_tokens=num_stored - req.num_computed_tokens,
            num_uncached_there=num_stored if req.hold.slot else num_uncached,
            num_tokens=num_stored,
            num_running=len(queues.running),
            num_queued_tokens=num_before(queues.local, num_uncached + 1, queues.rows.are_scarce),
            s_per_token=self._engine.meter.prefill_s_per_token,
            kv_bytes_per_token=self._engine.model_layout.page_bytes // self._engine.book.page_size,
            state_bytes=state.slot_bytes if (state := self._engine.model_layout.state) else 0,
            span=self._engine.book.span,
            pull_bytes_per_s={
                candidate.peer: peers.bytes_per_s(candidate.peer, now) for candidate in candidates
            },
        )
        asked = to_ask(inputs, candidates, self._engine.config.disaggregation)
        # A sibling has matched the first choice's whole pages, and less than a page is missing; or
        # than what lies between snapshots.
        grain = snapshots.grid if req.hold.slot else self._engine.book.page_size
        if req.is_sibling and num_uncached < grain:
            asked = []
        if not asked:
            self._tell_of_slow_roads(inputs, candidates)
            self.place_locally(req, "local" if candidates else "alone")
        elif self._inbound.start(req, asked, now):
            if req.hold.slot and len(req.tokens) == req.num_prompt_tokens:
                req.num_cached_tokens = 0  # what is computed there is said with the KV
            self._engine.metrics.placed("remote").inc()
        else:
            self.place_locally(req, "alone")

    def found(self, req: Req, hold: Hold) -> None:
        """Go on with a request for which a tier has brought what it had."""
        req.num_computed_tokens = hold.num_matched
        if len(req.tokens) == req.num_prompt_tokens:
            snapshots = self._engine.book.snapshots
            req.num_cached_tokens = snapshots.resumable(hold, len(req.tokens) - 1)
        self.place(req, looked=True)

    def place_locally(self, req: Req, why: str) -> None:
        """Prefill the rest here; `why`, for the metric: "local" (cheaper), "alone", "fallback"."""
        assert req.hold is not None
        metrics = self._engine.metrics
        metrics.placed(why).inc()
        self._queues.prefill_locally(req)
        cached = req.num_planned_tokens
        metrics.recomputed_tokens.inc(max(0, req.hold.num_matched - cached))
        req.timeline.prefilled_here(time.monotonic(), self._me, why, cached)

    def _tell_of_slow_roads(self, inputs: PlacementInputs, candidates: list[Candidate]) -> None:
        """Warn where a prefill worker computes KV faster than the link to it moves KV."""
        for candidate in candidates:
            rate = inputs.pull_bytes_per_s[candidate.peer]
            moved, computed = rate / inputs.kv_bytes_per_token, candidate.prefill_s_per_token
            if (
                computed
                and moved * computed < 1
                and self._log.news(candidate.peer, "is reached by a slow link")
            ):
                log.warning(
                    "the link to %s moves %.3g GB/s, %s tokens/s of this model, and a prefill "
                    "worker computes %s: most prompts are prefilled here (disaggregation.mode)",
                    candidate.peer, rate / 1e9, f"{moved:,.0f}", f"{1 / computed:,.0f}",
                )  # fmt: skip

    def queue_for_row(self, req: Req) -> None:
        """All KV but the last token's is here."""
        req.timeline.landed(time.monotonic())
        self._queues.make_ready(req)

    def resume_preempted(self) -> None:
        """Admit preempted requests again, oldest first, until one does not fit."""
        for req in list(self._queues.preempted):
            if not self._queues.admit(req):
                return
            self.place(req)

    def _check(self, message: Generate) -> None:
        shape, sampling = self._engine.shape, message.sampling
        vocab_size = shape.vocab_size
        max_len = message.num_prompt_tokens + sampling.max_tokens
        limit = int(self._engine.config.model.max_model_len)
        max_logprobs = min(MAX_LOGPROBS, vocab_size)
        max_stops = MAX_STOP_IDS - len(shape.eos_token_ids)
        if not 1 <= message.num_prompt_tokens <= len(message.tokens) < max_len:
            raise UserError("prompt and max_tokens leave nothing to generate", "max_tokens")
        if max_len > limit:
            raise UserError(f"{max_len} tokens of prompt and output; the limit is {limit}")
        if not known([token for token, _ in sampling.logit_bias], vocab_size):
            raise UserError(f"token ids must be below {vocab_size}", "logit_bias")
        if not -1 <= sampling.logprobs <= max_logprobs:
            raise UserError(f"at most {max_logprobs} alternatives", "top_logprobs")
        if not -1 <= sampling.prompt_logprobs <= max_logprobs:
            raise UserError(f"at most {max_logprobs} alternatives", "prompt_logprobs")
        if not fits(sampling):
            raise UserError("a sampling parameter is not finite or out of range", "temperature")
        if not known(message.tokens, vocab_size):
            raise UserError(f"token ids must be below {vocab_size}", "prompt")
        if len(sampling.stop_ids) > max_stops or not known(sampling.stop_ids, vocab_size):
            text = f"at most {max_stops} stop ids below {vocab_size}"
            raise UserError(text, "stop_token_ids")


@dataclass(slots=True, frozen=True)
class PlacementInputs:
    """Numbers of the request and of this worker from which both costs are estimated."""

    num_uncached_tokens: int  # tokens to prefill here
    num_running: int  # decode rows that a local prefill would stall
    s_per_token: float  # of local prefill; 0 = not measured yet
    kv_bytes_per_token: int
    pull_bytes_per_s: Mapping[PeerId, float]  # of the candidates
    num_queued_tokens: int = 0  # of prompts that are prefilled here before
    state_bytes: int = 0  # of a request, where layers are recurrent
    span: int = 0  # so many tokens are pulled at most; 0: all
    num_missing_tokens: int = 0  # whose KV is not here, and would be pulled
    num_uncached_there: int = 0  # tokens to prefill at a worker of which nothing else is known
    num_tokens: int = 0  # of the prompt


def to_ask(
    inputs: PlacementInputs, candidates: list[Candidate], config: DisaggregationConfig
) -> list[Candidate]:
    """Whom to ask for the prompt's KV, one after another; nobody: decode prefills by itself.

    A local prefill costs the queue here, its compute time once for the request and once for every
    decode row that it stalls, a remote one the candidate's queue, its compute time and the pull.
    (To disaggregate only what pays is DistServe's and Dynamo's idea; the estimate is our own.) The
    router's order stands, but for candidates that cost much more than the cheapest.
    """
    if not candidates or config.mode == "never":
        return []
    # An unmeasured rate is borrowed: our own from the fastest candidate, a candidate's from us.
    measured = filter(None, (candidate.prefill_s_per_token for candidate in candidates))
    s_per_token = inputs.s_per_token or min(measured, default=0.0)
    if config.mode == "always" or s_per_token == 0:
        return candidates
    num_pulled = min(inputs.num_missing_tokens, inputs.span or inputs.num_missing_tokens)
    num_bytes = num_pulled * inputs.kv_bytes_per_token + inputs.state_bytes

    def remote_s(candidate: Candidate) -> float:
        num_uncached = max(0, inputs.num_tokens - candidate.num_cached_tokens)
        num_uncached = min(inputs.num_uncached_there, num_uncached)
        rate = candidate.prefill_s_per_token or s_per_token
        compute_s = (candidate.num_queued_tokens + num_uncached) * rate
        pull_s = num_bytes / max(1.0, inputs.pull_bytes_per_s[candidate.peer])
        return ASKING_S + compute_s + pull_s

    stalled = inputs.num_uncached_tokens * (1 + inputs.num_running)
    costs = [remote_s(candidate) for candidate in candidates]
    least = min(costs)
    if (inputs.num_queued_tokens + stalled) * s_per_token <= least:
        return []
    ranked = zip(costs, candidates, strict=True)
    return [candidate for _, candidate in sorted(ranked, key=lambda pair: pair[0] > DEARER * least)]
