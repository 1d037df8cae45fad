"""The router's metric families, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from router.observe.exposition import text
from router.observe.spent import Spent
from router.observe.tally import Tallies, Tally
from router.observe.vllm import Shared, VllmMetrics
from router.text.encoder import Encoder
from worker.api import PeerId, Stages, WorkerStats

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
STAGES = (
    "router_queue", "prefill_queue", "prefill", "transfer", "decode_queue", "first_step", "decode",
)  # fmt: skip
RETRY_CAUSES = ("refused", "worker_lost", "gap")
# Counted from 0 on, so that the first of each shows in a rate; and other codes of errors.
OUTCOMES = (
    "stop", "length", "abort", "busy", "worker_lost", "no_worker", "timeout", "internal_error",
)  # fmt: skip
PREFILLS = ("local", "pulled", "cached")
WORKER_ROLES = ("prefill", "decode")
LABELS = ("model", "role", "worker")  # worker is the name of the process, a router's here


def by_stage(spent: Spent) -> dict[str, float]:
    """Seconds by name of the stage, in the order of `STAGES`."""
    at = spent.stages
    return {
        "router_queue": spent.router_queue_s,
        "prefill_queue": at.prefill_queue_s,
        "prefill": at.prefill_s,
        "transfer": at.transfer_s,
        "decode_queue": at.decode_queue_s,
        "first_step": at.first_step_s,
        "decode": spent.decode_s,
    }


def prefilled(stages: Stages | None, decoded_by: PeerId, *, cached: bool) -> str:
    """Where a prompt's KV was computed, one of PREFILLS: elsewhere, before, or where it decodes.

    Args:
        stages: of the choice.
        decoded_by: the worker that it is at.
        cached: less than a page of it was left to compute.
    """
    if stages is not None and stages.prefilled_by not in ("", decoded_by):
        return "pulled"
    return "cached" if cached else "local"


class RouterMetrics:
    """Every family has the labels in LABELS; none grows with requests.

    Args:
        model: the served name.
        worker: this router's name.
        vllm: the group of families with vLLM's names as well.
    """

    deaths: dict[str, Counter]  # of workers, by role; from `watch` on

    def __init__(self, model: str, worker: str, *, vllm: bool = True) -> None:
        disable_created_metrics()  # else every counter has a twin that says when it began
        self.registry = CollectorRegistry()
        self._values = (model, "router", worker)
        text = "Choices ended, and requests refused at once: stop, length, abort or an error code"
        self.requests = self._counter("requests", text, "outcome")
        self._ended = {each: self.requests.labels(*self._values, each) for each in OUTCOMES}
        self.retries = self._counter("retries", "Choices sent to a worker again, by cause", "cause")
        self.stale_chunks = self._counter(
            "stale_messages_dropped", "Messages of attempts that are over", "kind"
        ).labels(*self._values, "chunk")
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens of choices that had their first token"
        ).labels(*self._values)
        self._cached_tokens = self._counter(
            "prompt_tokens_cached", "Prompt tokens that were found in the prefix tree"
        )
        self.cached_tokens = self._cached_tokens.labels(*self._values)
        self.generation_tokens = self._counter(
            "generation_tokens", "Output tokens of ended choices"
        ).labels(*self._values)
        self.ttft = self._histograms(
            "time_to_first_token_seconds",
            "From arrival to the first token, by where the prompt was prefilled",
            TTFT_BUCKETS,
            prefill=PREFILLS,
        )
        self.itl = self._histogram(
            "inter_token_latency_seconds",
            "Between two tokens; those of one step share the time since the step before",
            ITL_BUCKETS,
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end", E2E_BUCKETS
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Spent waiting for a decode worker", E2E_BUCKETS
        )
        self.prompt_length = self._histogram(
            "request_prompt_tokens", "Prompt tokens of one choice", TOKEN_BUCKETS
        )
        self.output_length = self._histogram(
            "request_generation_tokens", "Output tokens of one choice", TOKEN_BUCKETS
        )
        self._stages = self._histograms(
            "request_stage_seconds",
            "Time of ended choices by stage, in the order in which they pass them",
            STAGE_BUCKETS,
            stage=STAGES,
        )
        for cause in RETRY_CAUSES:
            self.retries.labels(*self._values, cause)
        self._vllm: VllmMetrics | None = None
        if vllm:
            shared = Shared(
                tuple(self.ttft.values()), (self.itl,), (self.e2e,),
                (self.prompt_length,), (self.output_length,), self._cached_tokens,
            )  # fmt: skip
            self._vllm = VllmMetrics(model, worker, shared, E2E_BUCKETS, ITL_BUCKETS)
            self.registry.register(self._vllm)

    def first_token(self, where: str, seconds: float, trace_id: str = "") -> None:
        """Observe one choice's first token; where: see `prefilled`."""
        self.ttft[where].observe(seconds, trace_id)

    def prompt(self, num_tokens: int, num_cached: int) -> None:
        """Count the prompt of a choice that has got its first token."""
        self.prompt_tokens.inc(num_tokens)
        self.prompt_length.observe(num_tokens)
        self.cached_tokens.inc(num_cached)

    def ended(self, outcome: str) -> None:
        """Count the end of one choice."""
        self._count(outcome)
        if self._vllm is not None:
            self._vllm.ended(outcome)

    def refused(self, outcome: str) -> None:
        """Count a request of which no choice was made, by the code of its error."""
        self._count(outcome)

    def _count(self, outcome: str) -> None:
        if outcome not in self._ended:  # the codes of errors are few
            self._ended[outcome] = self.requests.labels(*self._values, outcome)
        self._ended[outcome].inc()

    def spent(self, spent: Spent, num_tokens: int, trace_id: str = "") -> None:
        """Observe where the time of one choice with so many output tokens went."""
        for stage, seconds in by_stage(spent).items():
            self._stages[stage].observe(seconds, trace_id)
        if self._vllm is not None:
            self._vllm.spent(spent, num_tokens)

    def retried(self, cause: str) -> None:
        """Count one re-dispatch or return to the queue."""
        self.retries.labels(*self._values, cause).inc()

    def watch(
        self,
        running: Callable[[], int],
        waiting: Callable[[], int],
        outputs: Callable[[], Sequence[int]],
        alive: Callable[[str], int],
        decodes: Callable[[], Sequence[WorkerStats]],
        drafting: Callable[[str], Mapping[str, WorkerStats]] = lambda router: {},
    ) -> None:
        """Gauges that are read when scraped.

        Args:
            running: choices at workers.
            waiting: choices in the queue.
            outputs: output tokens of each open choice that has any.
            alive: workers of a role.
            decodes: what each live decode worker said last.
            drafting: the same by name, of those whose drafts a router of this name tells of.
        """
        gauge = self._gauge("requests_running", "Choices that are at a decode worker")
        gauge.labels(*self._values).set_function(running)
        gauge = self._gauge("requests_waiting", "Choices that wait for a decode worker")
        gauge.labels(*self._values).set_function(waiting)
        gauge = self._gauge("requests_decoding", "Choices that have had their first token")
        gauge.labels(*self._values).set_function(lambda: len(outputs()))
        gauge = self._gauge("workers_alive", "Workers that answer this router", "worker_role")
        text = "Workers that died, each with all of its ranks, since this router has been here"
        deaths = self._counter("worker_deaths", text, "worker_role")
        self.deaths = {role: deaths.labels(*self._values, role) for role in WORKER_ROLES}
        for role in WORKER_ROLES:
            gauge.labels(*self._values, role).set_function(lambda role=role: alive(role))
        if self._vllm is not None:
            router = self._values[2]
            self._vllm.watch(running, waiting, outputs, decodes, lambda: drafting(router))

    def watch_encoder(self, encoder: Encoder) -> None:
        """Counts that are read when scraped."""
        text = "Characters of prompts that were tokenized in parts"
        known = "Characters of prompts in parts whose tokens were known"
        for count in (
            _Count("kvlane_prompt_chars", text, self._values, lambda: encoder.num_chars),
            _Count("kvlane_prompt_chars_known", known, self._values, lambda: encoder.num_known),
        ):
            self.registry.register(count)

    def render(self, encode: Callable[[Collector], bytes] = text) -> bytes:
        """The exposition; encode: writes its form."""
        return encode(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvlane_{name}", text, (*LABELS, *labels), registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"kvlane_{name}", text, (*LABELS, *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Tally:
        family = Tallies(f"kvlane_{name}", text, LABELS, buckets, self.registry)
        return family.labels(*self._values)

    def _histograms(
        self, name: str, text: str, buckets: tuple[float, ...], **label: Sequence[str]
    ) -> dict[str, Tally]:
        """A family with one more label; by the values of that, all of which are there at once."""
        ((key, values),) = label.items()
        labels = *LABELS, key
        family = Tallies(f"kvlane_{name}", text, labels, buckets, self.registry)
        return {value: family.labels(*self._values, value) for value in values}


class _Count(Collector):
    """A counter that somebody else keeps."""

    def __init__(
        self, name: str, text: str, values: tuple[str, ...], read: Callable[[], int]
    ) -> None:
        self._name, self._text, self._values, self._read = name, text, values, read

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._text, labels=LABELS)
        family.add_metric(self._values, self._read())  # pyright: ignore[reportUnknownMemberType]
        yield family
