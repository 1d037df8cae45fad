"""The stages of traced requests on a decode worker.

    prefill ─▶ pull ─▶ decode_queue ─▶ first_step ─▶ decode       KV from a prefill worker
    prefill ─▶ decode                                             prefilled here
    decode_queue ─▶ first_step ─▶ decode                          all KV was here

A further choice of a request may be in `sibling` before. A failed attempt to get KV is followed by
another `prefill`. `Fetch` begins those that other workers compute, and `pull`. A preempted request
is in `preempted` until its KV is got anew.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from worker.api import Error, PeerId
from worker.plan import Plan
from worker.schedule.req import Req

if TYPE_CHECKING:
    from worker.observe.spans import Trace, Tracer


class DecodeTraces:
    """Begins and ends the stages that depend on steps; others begin where their cause is.

    `waiting` are the traced requests that have no token of this worker's own yet: while there are
    none, a step costs one look.
    """

    def __init__(self, tracer: Tracer | None) -> None:
        self.waiting: set[Req] = set()
        self._tracer = tracer

    def begin(self, req: Req, carried: str, *, was_deferred: bool = False) -> None:
        """Trace a request that has just been admitted.

        Args:
            req: the request.
            carried: Generate.trace.
            was_deferred: it had to wait for a sibling's prompt.
        """
        if self._tracer is not None:
            received_at = req.marks.received_at
            req.trace = self._tracer.carried(carried, received_at)
            if was_deferred:
                req.trace.enter("sibling", received_at)
            self.waiting.add(req)

    def row(self, req: Req, now: float) -> None:
        """It gets a row."""
        assert req.trace is not None
        req.trace.enter("first_step", now)

    def settled(
        self,
        plan: Plan,
        sampled: Sequence[Req],
        computed: Sequence[Req],
        began_at: float,
        now: float,
    ) -> None:
        """The step of `plan` has ended; of it the scheduler knows nothing yet.

        Args:
            plan: what it did.
            sampled: the requests that it drew tokens for.
            computed: those of its chunks.
            began_at: when the device began with it.
            now: when it had ended.
        """
        for req, chunk in zip(computed, plan.chunks, strict=True):
            if req.trace is not None and req.trace.inner is not None:
                size = {"kvlane.prompt_tokens": len(chunk.tokens)}
                req.trace.inner.add("prefill_chunk", began_at, now, size)
        for req in self.waiting.intersection(sampled):
            assert req.trace is not None
            if req.trace.stage != "preempted":  # since this step was launched
                req.trace.enter("decode", now)
                self.waiting.discard(req)

    def preempted(self, req: Req) -> None:
        """It is to give its row and pages up."""
        assert req.trace is not None
        req.trace.enter("preempted", time.monotonic())
        self.waiting.add(req)

    def end(self, req: Req, error: Error | None = None) -> None:
        """It has ended; a second call does nothing."""
        assert req.trace is not None
        told = {"kvlane.output_tokens": len(req.tokens) - req.num_prompt_tokens}
        code, why = (error.code, error.message) if error is not None else ("", None)
        req.trace.leave(time.monotonic(), told, code, why)
        self.waiting.discard(req)


def prefill_here(req: Req, trace: Trace, why: str, me: PeerId) -> None:
    """Its prompt is computed by this worker; why: as in the metric of placements."""
    now = time.monotonic()
    trace.attempt("prefill", now, {"kvlane.worker": me, "kvlane.placed": why})
    trace.inner = trace.below(trace.at)
    trace.inner.enter("prefill_queue", now, {"kvlane.cached_tokens": req.num_computed_tokens})
