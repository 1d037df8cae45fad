"""The router's metric families, in a registry of their own."""

from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST

from router.observe.exposition import rendered
from router.observe.stages import STAGES, StageTimes, by_stage
from router.observe.tally import Tallies
from router.observe.vllm import Live, VllmMetrics
from router.text.encoder import Encoder
from worker.api import Role
from worker.observe.metrics import WIRE_REFUSED, Families, counter, gauge, histogram, reading

TTFT_BUCKETS = (
    0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1, 1.5, 2.5, 5, 10, 20, 40, 80,
)  # fmt: skip
ITL_BUCKETS = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08,
    0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8,
)  # fmt: skip
E2E_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip

STAGE_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100,
)  # fmt: skip
TOKEN_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
RETRY_CAUSES = ("refused", "worker_lost", "gap")
# Counted from 0 on, so that the first of each shows in a rate; and other codes of errors.
OUTCOMES = (
    "stop", "length", "abort", "busy", "no_worker", "timeout", "internal_error",
)  # fmt: skip
PREFILLS = ("local", "pulled", "cached")
WHERE = ("home", "moved", "new")  # went a turn
WORKER_ROLES: tuple[Role, ...] = ("prefill", "decode")


class RouterMetrics(Families):
    """The families of the router `worker`, which serves `model`; `vllm`: with vLLM's names, too."""

    histogram_type = Tallies

    requests = counter(
        "requests",
        "Choices ended, and requests refused at once: stop, length, abort or an error code",
        "outcome",
    )
    retries = counter("retries", "Choices sent to a worker again, by cause", "cause")
    resumed = counter("resumed", "Choices that went on at another worker after their first token")
    dropped = counter("stale_messages_dropped", "Messages of attempts that are over", "kind")
    wire_refused = WIRE_REFUSED
    prompt_tokens = counter("prompt_tokens", "Prompt tokens of choices that had their first token")
    cached_tokens = counter(
        "prompt_tokens_cached", "Prompt tokens that were found in the prefix tree"
    )
    generation_tokens = counter("generation_tokens", "Output tokens of ended choices")
    ttft = histogram(
        "time_to_first_token_seconds",
        "From arrival to the first token, by where the prompt was prefilled",
        "prefill",
        buckets=TTFT_BUCKETS,
    )
    itl = histogram(
        "inter_token_latency_seconds",
        "Between two tokens; those of one step share the time since the step before",
        buckets=ITL_BUCKETS,
    )
    e2e = histogram("e2e_request_latency_seconds", "From arrival to the end", buckets=E2E_BUCKETS)
    queue_time = histogram(
        "request_queue_time_seconds", "Spent waiting for a decode worker", buckets=E2E_BUCKETS
    )
    prompt_length = histogram(
        "request_prompt_tokens", "Prompt tokens of one choice", buckets=TOKEN_BUCKETS
    )
    output_length = histogram(
        "request_generation_tokens", "Output tokens of one choice", buckets=TOKEN_BUCKETS
    )
    stages = histogram(
        "request_stage_seconds",
        "Time of ended choices by stage, in the order in which they pass them",
        "stage",
        buckets=STAGE_BUCKETS,
    )
    pulls = histogram(
        "request_pull_seconds",
        "Time in which a choice's KV came from a prefill worker",
        buckets=STAGE_BUCKETS,
    )
    pulled_bytes = counter("request_pulled_bytes", "Bytes of KV that choices pulled")
    sessions = gauge("sessions", "Sessions of the last minutes")
    turns = counter(
        "session_turns", "Turns of sessions: home (where the last went), moved, new", "where"
    )
    turn_tokens = counter("session_prompt_tokens", "Prompt tokens of sessions", "where")
    turn_cached = counter(
        "session_prompt_tokens_cached", "Prompt tokens of sessions, found in a cache", "where"
    )
    running = gauge("requests_running", "Choices that are at a decode worker")
    waiting = gauge("requests_waiting", "Choices that wait for a decode worker")
    decoding = gauge("requests_decoding", "Choices that have had their first token")
    alive = gauge("workers_alive", "Workers that answer this router", "worker_role")
    deaths = counter(
        "worker_deaths",
        "Workers that died, with all their ranks, since this router began",
        "worker_role",
    )
    prompt_chars = reading("prompt_chars", "Characters of prompts that were tokenized in parts")
    prompt_chars_known = reading(
        "prompt_chars_known", "Characters of prompts in parts whose tokens were known"
    )

    def __init__(self, model: str, worker: str, *, vllm: bool = True) -> None:
        super().__init__(model=model, role="router", worker=worker)
        self.count_from_zero(
            requests=OUTCOMES, retries=RETRY_CAUSES, ttft=PREFILLS, stages=STAGES,
            deaths=WORKER_ROLES, turns=WHERE, turn_tokens=WHERE, turn_cached=WHERE,
        )  # fmt: skip
        self.stale_chunks = self.dropped("chunk")
        self.first_tokens = tuple(self.ttft(where) for where in PREFILLS)
        self.live = Live()
        self._vllm = VllmMetrics(self) if vllm else None
        if self._vllm is not None:
            self.registry.register(self._vllm)

    def prompt(self, num_tokens: int, num_cached: int, went: str | None = None) -> None:
        """Count the prompt of a choice that has got its first token.

        went: where it went if it is a session's turn.
        """
        self.prompt_tokens.inc(num_tokens)
        self.prompt_length.observe(num_tokens)
        self.cached_tokens.inc(num_cached)
        if went is not None:
            self.turns(went).inc()
            self.turn_tokens(went).inc(num_tokens)
            self.turn_cached(went).inc(num_cached)

    def ended(self, outcome: str) -> None:
        """Count the end of one choice; a request without any counts in `requests` alone."""
        self.requests(outcome).inc()
        if self._vllm is not None:
            self._vllm.ended(outcome)

    def spent(self, spent: StageTimes, num_tokens: int, trace_id: str = "") -> None:
        """Observe where the time of one choice with so many output tokens went."""
        for stage, seconds in by_stage(spent).items():
            self.stages(stage).observe(seconds, trace_id)
        if spent.pull_s:
            self.pulls.observe(spent.pull_s, trace_id)
            self.pulled_bytes.inc(spent.pulled_bytes)
        if self._vllm is not None:
            self._vllm.spent(spent, num_tokens)

    def watch(self, live: Live) -> None:
        """Gauges read from `live` when they are scraped."""
        self.live = live
        self.running.set_function(live.running)
        self.waiting.set_function(live.waiting)
        self.sessions.set_function(live.sessions)
        self.decoding.set_function(lambda: len(live.outputs()))
        for role in WORKER_ROLES:
            self.alive(role).set_function(partial(live.alive, role))

    def watch_encoder(self, encoder: Encoder) -> None:
        """Read these counts when they are scraped."""
        self.prompt_chars.set_function(lambda: encoder.num_chars)
        self.prompt_chars_known.set_function(lambda: encoder.num_known)

    def render(self, form: str = CONTENT_TYPE_LATEST) -> bytes:
        """The page in the form of this content type."""
        return rendered(self.registry, form)
