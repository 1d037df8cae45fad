"""Req: one request on one worker, as plain host state.

Who fills it: the worker's loop creates it, its scheduler moves it along, `PageBook` its hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from worker.api import Candidate, FinishReason, PeerId, Sampling, Stages
from worker.cache.book import Hold

if TYPE_CHECKING:
    from worker.sampling.grammar import Matcher


class Phase(Enum):
    """Where a decode request is. Every arrow may also go to FINISHED.

    FETCHING -> READY (KV landed)     LOCAL -> RUNNING (sampled from its own prefill)
    FETCHING -> LOCAL (no prefill worker left)
    READY -> RUNNING -> PREEMPTED -> FETCHING | LOCAL | READY
    """

    FETCHING = auto()  # a prefill worker computes, or a pull runs
    LOCAL = auto()  # waits for, or is in, its own prefill chunks
    READY = auto()  # all KV but the last token's is here; waits for a row
    RUNNING = auto()  # has an active row
    PREEMPTED = auto()  # gave its pages up; waits for room
    FINISHED = auto()


@dataclass(slots=True)
class Marks:
    """When a decode request first passed each point of its way; monotonic seconds, 0 = not yet."""

    received_at: float = 0.0  # filled by the loop
    announced_at: float = 0.0  # its prefill worker had computed all; filled by its fetch
    prefill_s: float = 0.0  # that worker's own figure; filled by its fetch
    prefilled_by: str = ""  # PeerId; filled by its fetch or at admission
    landed_at: float = 0.0  # all KV is here, without a step of its own; filled by the loop
    row_at: float = 0.0  # filled by the scheduler
    first_token_at: float = 0.0  # filled by the loop

    def stages(self) -> Stages:
        """The durations between the marks, once there is a first token."""
        if not self.landed_at:  # prefilled here, in the row
            queue_s = self.row_at - self.received_at
            prefill_s = self.first_token_at - self.row_at
            return Stages(queue_s, prefill_s, 0.0, 0.0, 0.0, self.prefilled_by)
        fetch_s = self.landed_at - self.received_at
        transfer_s = self.landed_at - self.announced_at if self.announced_at else 0.0
        prefill_s = min(self.prefill_s, fetch_s - transfer_s)
        return Stages(
            fetch_s - transfer_s - prefill_s,
            prefill_s,
            transfer_s,
            self.row_at - self.landed_at,
            self.first_token_at - self.row_at,
            self.prefilled_by,
        )


@dataclass(slots=True, eq=False)
class Req:
    """A request on a decode worker. Its id there is (req_id, dispatch)."""

    req_id: str
    dispatch: int
    router: PeerId
    tokens: list[int]  # prompt, then every token that has settled
    num_prompt_tokens: int
    sampling: Sampling
    deadline_at: float  # monotonic, this host
    candidates: tuple[Candidate, ...] = ()
    arrival: int = 0  # admission order; the youngest is preempted first
    phase: Phase = Phase.PREEMPTED
    hold: Hold | None = None
    row: int = 0  # 0 = none
    num_computed_tokens: int = 0  # tokens whose KV is in `hold`, as far as settled
    num_planned_tokens: int = 0  # the same, counting the step in flight (prefill chunks)
    num_table_pages: int = 0  # pages the device table knows
    num_in_flight: int = 0  # launched steps that have not settled
    num_cached_tokens: int = 0  # of the prompt, found in a prefix tree
    finish_reason: FinishReason | None = None
    is_sibling: bool = False  # it came with Generate.after
    matcher: Matcher | None = None  # of its grammar; None = free text
    marks: Marks = field(default_factory=Marks)

    @property
    def max_len(self) -> int:
        """Tokens of prompt + output at which the request ends with LENGTH."""
        return self.num_prompt_tokens + self.sampling.max_tokens

    @property
    def key(self) -> tuple[str, int]:
        """Its identity on this worker."""
        return self.req_id, self.dispatch


@dataclass(slots=True, eq=False)
class PrefillReq:
    """A prompt on a prefill worker; KV of tokens[:-1] is wanted."""

    key: str
    tokens: tuple[int, ...]
    hold: Hold
    row: int = 0
    num_computed_tokens: int = 0  # settled
    num_planned_tokens: int = 0  # launched
    link_bytes_per_s: float = 0.0  # to its decode worker, as measured there; 0 = not known
    num_table_pages: int = 0
    num_announced_pages: int = 0  # with all their layer groups
    num_announced_groups: int = 0  # of the pages of the chunk that is being computed
    started_at: float = 0.0  # monotonic: when its first step was planned
    prefill_s: float = 0.0  # from then until the last that was computed was announced
    dropped: bool = False  # given back; a step in flight may still compute it

    @property
    def num_target_tokens(self) -> int:
        """Tokens whose KV is to be computed."""
        return len(self.tokens) - 1
