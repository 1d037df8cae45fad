"""What passes between the parts of the harness.

    arrivals, prompts, traces ─> Workload ─> drive (client, pacer) ─> Outcome ─> measure ─> Result

All times are seconds since the run's own beginning (`Outcome`) or plain durations; everything is
msgspec, so that it crosses process borders and becomes JSON without further code.
"""

from typing import Any

import msgspec

Prompt = str | list[Any]  # text; whole messages (chat only)


class Turn(msgspec.Struct, frozen=True):
    """One request. Later turns of a session carry the conversation so far before their prompt."""

    prompt: Prompt
    max_tokens: int
    think_s: float = 0.0  # from the end of the turn before it (of the first: from the start)
    extra: dict[str, Any] = {}  # further fields of the body
    num_prompt_tokens: int = 0  # what the source meant it to be, without the template; 0 = unknown
    is_whole: bool = False  # the prompt is all of the conversation, in place of what came before


class Session(msgspec.Struct, frozen=True):
    """Turns that follow one another; `start_s` is when the first one is due, None: when a slot is
    free (closed loop)."""

    turns: tuple[Turn, ...]
    start_s: float | None = None


class Workload(msgspec.Struct, frozen=True):
    """All that a run sends. Made from a seed; the same seed makes the same bytes."""

    sessions: tuple[Session, ...]
    about: dict[str, Any] = {}  # how it was made, for the report

    @property
    def num_requests(self) -> int:
        """Turns of all sessions."""
        return sum(len(session.turns) for session in self.sessions)


class Outcome(msgspec.Struct):
    """One request as its client saw it. Filled by `client.ask`, the first block by `drive`.

    Latencies count from `intended_s`, when a user would have asked: by the schedule (open loop), a
    think time after the turn before, or when a slot was free (closed loop).
    """

    session: int  # index in the workload
    turn: int
    intended_s: float
    sent_s: float = 0.0  # handed to the socket
    headers_s: float | None = None
    chunk_s: list[float] = []  # arrival of every piece of output (text, reasoning, tool call)
    end_s: float = 0.0  # last byte, or the failure
    error: str = ""  # class: http_429, timeout, connection, cut, stream_error, ...; "" = served
    message: str = ""  # what the server said about it, cut short
    num_prompt_tokens: int = 0  # the server's usage
    num_cached_tokens: int = 0
    num_output_tokens: int = 0  # the server's usage; pieces counted where there is none
    counted: bool = False  # whether the server sent its usage
    num_text_tokens: int | None = None  # the text through our own tokenizer, after the run
    text: str = ""  # of the answer; dropped once it is counted
    finish_reason: str = ""
    stages: dict[str, Any] | None = None  # kvlane's own account, if asked for

    @property
    def ttft_s(self) -> float | None:
        """From intention to the first piece of output."""
        return self.chunk_s[0] - self.intended_s if self.chunk_s else None

    @property
    def e2e_s(self) -> float:
        """From intention to the last byte."""
        return self.end_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Per output token after the first: (last piece - first piece) / (tokens - 1)."""
        if self.num_output_tokens < 2 or len(self.chunk_s) < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between each piece of output and the next: what a reader sees as stutter."""
        return [b - a for a, b in zip(self.chunk_s, self.chunk_s[1:], strict=False)]

    @property
    def lag_s(self) -> float:
        """The harness's own delay: from intention to the socket."""
        return self.sent_s - self.intended_s


class Lag(msgspec.Struct):
    """How late one client process itself was; the server has no part in it."""

    process: int
    loop_s: list[float] = []  # lateness of a timer that fires all the time, sampled
    cpu_s: float = 0.0  # CPU time used by the process during the run
    wall_s: float = 0.0


class Run(msgspec.Struct):
    """One run: what was sent and what came back."""

    outcomes: list[Outcome]
    lags: list[Lag]
    begun_at: str  # ISO 8601, UTC
    wall_s: float  # from the first intention to the last end
    schedule: list[float] = []  # intended starts, for the report's offered rate


class Objectives(msgspec.Struct, frozen=True):
    """What a served request has to hold to count as good, in seconds; None = no matter."""

    ttft_s: float | None = None
    itl_s: float | None = None  # mean time between tokens, as aiperf and vLLM (tpot) judge it
    stall_s: float | None = None  # the longest gap
    e2e_s: float | None = None

    def met_by(self, outcome: Outcome) -> bool:
        """Whether `outcome` is served and within every objective."""
        if outcome.error:
            return False
        pairs = (
            (self.ttft_s, outcome.ttft_s),
            (self.itl_s, outcome.tpot_s),
            (self.stall_s, max(outcome.gaps_s, default=None)),
            (self.e2e_s, outcome.e2e_s),
        )
        return all(value is None or limit is None or value <= limit for limit, value in pairs)


# Of a row of /v1/models, and then of summaries: the server's acceptance of drafts is simulated, so
# the figures are no real model's.
SIMULATED = "simulated_accept_len"


class Result(msgspec.Struct):
    """The JSON file: one or more runs of one workload, and their figures."""

    kind: str  # "kvlane.load/1"
    options: dict[str, Any]
    machine: dict[str, Any]
    workload: dict[str, Any]
    summaries: list[dict[str, Any]]  # one a run, see measure.summary
    runs: list[Run]
    search: list[dict[str, Any]] = []  # probes of the search for the highest rate

    def named(self, name: str) -> str:
        """`name`, with the mark of a result that is simulated."""
        length = max((each.get(SIMULATED, 0) for each in self.summaries), default=0)
        return f"{name} (SIMULATED: {length:g} tokens a step)" if length else name
