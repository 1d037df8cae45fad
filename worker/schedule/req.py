"""Req and PrefillReq: one request on one worker, as plain host state.

`Admission` creates a Req and `PrefillScheduler.admit` a PrefillReq. The loop, its scheduler and the
pull protocol change them, and `PageBook` fills their holds.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from worker.api import Candidate, PeerId, Sampling
from worker.cache.book import Hold
from worker.observe.timeline import Timeline
from worker.plan import tail_index

if TYPE_CHECKING:
    from worker.draw.grammar import Matcher
    from worker.observe.spans import Trace


class Phase(Enum):
    """Where a decode request is. FINISHED can follow every phase.

    NEW | PREEMPTED -> FETCHING      admitted
    FETCHING -> READY                all KV but the last token's is here
    FETCHING -> LOCAL                prefilled here: cheaper, or no prefill worker is left
    LOCAL -> RUNNING                 its last chunk has been planned
    READY -> RUNNING -> PREEMPTED    got a row; lost it and its pages
    """

    NEW = auto()
    # Admitted; a prefill worker computes its prompt, or a pull runs. Its first token may be here.
    FETCHING = auto()
    LOCAL = auto()  # waits for, or is in, its own prefill chunks
    READY = auto()  # waits for a row
    RUNNING = auto()  # decodes, or its last chunk is in flight
    PREEMPTED = auto()  # waits for pages
    FINISHED = auto()


class Draw(NamedTuple):
    """What a request needs of a step beyond the forward; equal for most requests of a batch."""

    tail: int  # index into TAILS of the cheapest sampling tail that can serve it
    penalized: bool
    num_logprobs: int
    masked: bool


@dataclass(slots=True, eq=False)
class Req:
    """A request on a decode worker. Its id there is (req_id, dispatch)."""

    req_id: str
    dispatch: int
    router: PeerId  # "": nobody wants it for now
    tokens: list[int]  # prompt, then every token that has settled
    num_prompt_tokens: int
    sampling: Sampling
    deadline_at: float  # monotonic, this host
    candidates: tuple[Candidate, ...] = ()
    arrival: int = 0  # order of first admission; the youngest is preempted first
    phase: Phase = Phase.NEW
    hold: Hold | None = None
    row: int = 0  # 0 = none
    # Tokens whose KV is in `hold`; grows when a fetch or local prefill ends, then by tokens.
    num_computed_tokens: int = 0
    num_planned_tokens: int = 0  # local prefill: tokens whose chunks have been launched
    num_passed_tokens: int = 0  # local prefill: see `schedule.order`
    num_table_pages: int = 0  # pages that are in the device's page table, or queued for it
    num_in_flight: int = 0  # launched steps that draw for it and have not settled
    num_scored_tokens: int = 0  # of the prompt: up to here logprobs are planned, if it wants them
    num_slots_in_flight: int = 0  # tokens that these steps may add: the sum of their widths
    # Where layers are recurrent: tokens of its state after the last step that has settled, and at
    # most after the last one launched.
    num_folded: int = 0
    num_folded_ub: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in a prefix tree
    is_sibling: bool = False  # a further choice (n > 1), sent with Generate.after
    leads: bool = False  # `Generate.leads`
    matcher: "Matcher | None" = None  # of its grammar; None = free text
    timeline: Timeline = field(default_factory=Timeline)
    claim_key: str = ""  # `Generate.key`
    session: str = ""  # `Generate.session`, as the next
    keep_s: float = 0.0
    salt: str = ""  # `Generate.salt`; kept here, as a preempted request has no hold
    sent: bytearray | None = None  # all of it, under whatever id, if it can be claimed: `kept.keep`
    max_len: int = field(init=False)  # tokens of prompt + output at which it ends with LENGTH
    draw: Draw = field(init=False)

    def __post_init__(self) -> None:
        """Compute once what every step asks for."""
        sampling = self.sampling
        self.max_len = self.num_prompt_tokens + sampling.max_tokens
        self.draw = Draw(
            tail_index(sampling), sampling.changes_logits, sampling.logprobs, bool(sampling.grammar)
        )

    @property
    def is_to_score(self) -> bool:
        """Whether logprobs of its prompt are wanted and not planned yet: it is computed here."""
        wanted = self.sampling.prompt_logprobs >= 0
        return wanted and max(self.num_scored_tokens, 1) < self.num_prompt_tokens

    def to_score(self, start: int, end: int) -> tuple[int, ...]:
        """The tokens behind those from `start` to `end` that are to be scored; they are noted."""
        if not self.is_to_score:
            return ()
        self.num_scored_tokens = min(end + 1, self.num_prompt_tokens)
        return tuple(self.tokens[start + 1 : self.num_scored_tokens])

    @property
    def key(self) -> tuple[str, int]:
        """Its identity on this worker."""
        return self.req_id, self.dispatch


@dataclass(slots=True, eq=False)
class PrefillReq:
    """A prompt on a prefill worker, for KV of tokens[:-1], or of all tokens and the next token."""

    tokens: tuple[int, ...]
    hold: Hold
    link_bytes_per_s: float  # to its decode worker, as measured there; 0 = not known
    sampling: Sampling | None  # to draw the token that follows; None: decode draws it
    num_prompt_tokens: int  # with `sampling`: how many of `tokens` are prompt, not output
    num_computed_tokens: int  # settled
    num_planned_tokens: int  # launched
    num_passed_tokens: int = 0  # see `schedule.order`
    num_cached_tokens: int = 0  # from where on it is computed
    row: int = 0
    num_table_pages: int = 0
    num_announced_pages: int = 0  # decode had them, or they are settled and announced whole
    num_announced_groups: int = 0  # of the current chunk's pages; 0 again when it has settled
    started_at: float = 0.0  # monotonic: when its first step was planned
    token: int | None = None  # drawn and settled
    prefill_s: float = 0.0  # from started_at until its last page and token were announced
    loads: bool = False  # a tier brings pages of it; it is not computed meanwhile
    dropped: bool = False  # given back; a step in flight may still compute it
    trace: "Trace | None" = None  # its stages here; None = not traced

    @property
    def num_target_tokens(self) -> int:
        """Tokens whose KV is to be computed."""
        return len(self.tokens) - (self.sampling is None)

    @property
    def num_stored_tokens(self) -> int:
        """Tokens whose KV is there. It may be deeper than the state from which it is computed."""
        return max(self.num_computed_tokens, self.hold.num_matched)

    @property
    def awaits_token(self) -> bool:
        """Whether its token is still to be drawn, or in flight."""
        return self.sampling is not None and self.token is None
