"""Timeline: the stages of a request on a decode worker, of which `Stages` and spans are made.

    prefill ─▶ pull ─▶ decode_queue ─▶ first_step ─▶ decode       KV from a prefill worker
    prefill ─▶ decode                                             prefilled here
    decode_queue ─▶ first_step ─▶ decode                          all KV was here

A further choice of a request may be in `sibling` before. A failed attempt to get KV is followed by
another `prefill`. A preempted request is in `preempted` until its KV is got anew.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from worker.api import Error, PeerId, Stages

if TYPE_CHECKING:
    from worker.observe.spans import Attributes, Trace

NONE: "Attributes" = {}


@dataclass(slots=True, eq=False)
class Timeline:
    """When a request first reached which stage, in monotonic seconds; its spans, if it is traced.

    0 is not yet. Nothing after a preemption changes the times.
    """

    received_at: float = 0.0
    spans: "Trace | None" = None
    stage: str = ""  # the present one
    prefilled_by: PeerId = ""  # "": all but the last token was in a prefix tree
    prefill_s: float = 0.0  # KVReady.prefill_s, a duration
    announced_at: float = 0.0
    pull_began_at: float = 0.0  # of the first pull
    pull_s: float = 0.0  # in which pulls ran
    pulled_bytes: int = 0
    landed_at: float = 0.0
    row_at: float = 0.0
    first_token_at: float = 0.0
    early: Stages | None = None  # of a first token from a prefill worker, until the row draws one

    @property
    def carried(self) -> str:
        """The present stage as the parent of another process's spans; "": it is not traced."""
        return "" if self.spans is None else self.spans.carried

    def enter(
        self, stage: str, now: float, attributes: "Attributes" = NONE, *, asks: bool = False
    ) -> None:
        """Begin a stage. asks: it waits for another process."""
        self.stage = stage
        if self.spans is not None:
            self.spans.enter(stage, now, attributes, asks=asks)

    def announced(self, now: float, prefill_s: float, peer: PeerId, transport: str) -> None:
        """A prefill worker has announced all KV: pages that are not here yet are pulled."""
        if not self.row_at:
            self.announced_at, self.prefill_s, self.prefilled_by = now, prefill_s, peer
        self.enter("pull", now, {"kvlane.transport": transport})

    def landed(self, now: float) -> None:
        """All KV but the last token's is here: it waits for a row."""
        self.landed_at = self.landed_at or now
        self.enter("decode_queue", now)

    def prefilled_here(self, now: float, me: PeerId, why: str, num_cached_tokens: int) -> None:
        """Its prompt is computed by this worker; why: as in the metric of placements."""
        if not self.row_at:
            self.prefilled_by = me
        self.enter("prefill", now, {"kvlane.worker": me, "kvlane.placed": why})
        if self.spans is not None:
            self.spans.inner = self.spans.below(self.spans.at)
            cached = {"kvlane.cached_tokens": num_cached_tokens}
            self.spans.inner.enter("prefill_queue", now, cached)

    def chunk(self, began_at: float, now: float, num_tokens: int) -> None:
        """A part of the prompt has been computed."""
        if self.spans is not None and self.spans.inner is not None:
            size = {"kvlane.prompt_tokens": num_tokens}
            self.spans.inner.add("prefill_chunk", began_at, now, size)

    def row(self, now: float) -> None:
        """It gets a row: its first step begins, unless its prompt is to be prefilled in it."""
        if self.stage == "decode_queue":
            self.enter("first_step", now)
        self.row_at = self.row_at or now

    def token(self, now: float, *, in_row: bool) -> Stages | None:
        """A token goes to the router; with the first one its stages.

        If that came from a prefill worker they come again, whole, with the first of its row.
        in_row: a step of its row drew it, maybe launched before the request was preempted.
        """
        if in_row and self.stage != "preempted":
            self.enter("decode", now)
        if self.first_token_at:
            early, self.early = self.early, None
            return self._whole(early, now) if early is not None and self.row_at else None
        self.first_token_at = now
        stages = self._stages()
        self.early = None if self.row_at else stages
        return stages

    def pulled(self, num_bytes: int, took_s: float, began_at: float) -> None:
        """So many bytes of KV were pulled; pulls ran for took_s, the first one from began_at on."""
        if not self.row_at:
            self.pulled_bytes, self.pull_s, self.pull_began_at = num_bytes, took_s, began_at
        if self.spans is not None:
            self.spans.note({"kvlane.bytes": num_bytes})

    def fail(self, now: float, error: str, why: str) -> None:
        """The present stage was cut off by an error; error: its code."""
        if self.spans is not None:
            self.spans.leave(now, error=error, why=why)

    def end(self, now: float, num_output_tokens: int, error: Error | None = None) -> None:
        """The request has ended, maybe by an error; a second call does nothing."""
        if self.spans is not None:
            code, why = ("", None) if error is None else (error.code, error.message)
            self.spans.leave(now, {"kvlane.output_tokens": num_output_tokens}, code, why)

    def _whole(self, early: Stages, now: float) -> Stages:
        """All stages: those before the first token, and those after it."""
        return replace(
            early,
            transfer_s=max(0.0, self.landed_at - max(self.announced_at, self.first_token_at)),
            decode_queue_s=max(0.0, self.row_at - max(self.landed_at, self.first_token_at)),
            first_step_s=now - self.row_at,
            late=True,
            **self._pulls,
        )

    @property
    def _pulls(self) -> dict[str, Any]:
        if not self.pulled_bytes:
            return {}
        span_s = self.landed_at - self.pull_began_at
        return {"pull_s": self.pull_s, "pull_span_s": span_s, "pulled_bytes": self.pulled_bytes}

    def _stages(self) -> Stages:
        if not self.row_at:  # the prefill worker drew the token
            whole_s = self.first_token_at - self.received_at
            prefill_s = min(self.prefill_s, whole_s)
            return Stages(whole_s - prefill_s, prefill_s, 0.0, 0.0, 0.0, self.prefilled_by)
        first_step_s = self.first_token_at - self.row_at
        if not self.landed_at:  # prefilled here, in the row
            queue_s = self.row_at - self.received_at
            return Stages(queue_s, first_step_s, 0.0, 0.0, 0.0, self.prefilled_by)
        fetch_s = self.landed_at - self.received_at
        transfer_s = self.landed_at - self.announced_at if self.announced_at else 0.0
        prefill_s = min(self.prefill_s, fetch_s - transfer_s)
        queue_s = fetch_s - transfer_s - prefill_s
        row_wait_s = self.row_at - self.landed_at
        after = transfer_s, row_wait_s, first_step_s
        return Stages(queue_s, prefill_s, *after, self.prefilled_by, **self._pulls)
