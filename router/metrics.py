"""The router's metric families, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.registry import Collector

from router.mailbox import Spent
from router.tally import Tallies, Tally

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
STAGES = (
    "router_queue", "prefill_queue", "prefill", "transfer", "decode_queue", "first_step", "decode",
)  # fmt: skip
RETRY_CAUSES = ("refused", "worker_lost", "gap")
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


class RouterMetrics:
    """Every family has the labels in LABELS; none grows with requests.

    Args:
        model: the served name.
        worker: this router's name.
    """

    def __init__(self, model: str, worker: str) -> None:
        disable_created_metrics()  # else every counter has a twin that says when it began
        self.registry = CollectorRegistry()
        self._values = (model, "router", worker)
        self.requests = self._counter(
            "requests", "Choices ended, by outcome: stop, length, abort or an error code", "outcome"
        )
        self.retries = self._counter("retries", "Choices sent to a worker again, by cause", "cause")
        self.stale_chunks = self._counter(
            "stale_messages_dropped", "Messages of earlier dispatches or ended requests", "kind"
        ).labels(*self._values, "chunk")
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens of ended choices"
        ).labels(*self._values)
        self.cached_tokens = self._counter(
            "prompt_tokens_cached", "Prompt tokens found in a prefix cache"
        ).labels(*self._values)
        self.generation_tokens = self._counter(
            "generation_tokens", "Output tokens of ended choices"
        ).labels(*self._values)
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token", TTFT_BUCKETS
        )
        self.itl = self._histogram(
            "inter_token_latency_seconds", "Between two chunks of tokens", ITL_BUCKETS
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end", E2E_BUCKETS
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Spent waiting for a decode worker", E2E_BUCKETS
        )
        stages = Tallies(
            "kvlane_request_stage_seconds",
            "Time of ended choices by stage, in the order in which they pass them",
            (*LABELS, "stage"),
            STAGE_BUCKETS,
            self.registry,
        )
        self._stages = {stage: stages.labels(*self._values, stage) for stage in STAGES}
        for cause in RETRY_CAUSES:
            self.retries.labels(*self._values, cause)

    def ended(self, outcome: str) -> None:
        """Count one end, by its outcome."""
        self.requests.labels(*self._values, outcome).inc()

    def spent(self, spent: Spent, trace_id: str) -> None:
        """Observe where one choice's time went."""
        for stage, seconds in by_stage(spent).items():
            self._stages[stage].observe(seconds, trace_id)

    def retried(self, cause: str) -> None:
        """Count one re-dispatch or return to the queue."""
        self.retries.labels(*self._values, cause).inc()

    def watch(
        self,
        running: Callable[[], int],
        waiting: Callable[[], int],
        alive: Callable[[str], int],
    ) -> None:
        """Gauges that are read when scraped."""
        gauge = self._gauge("requests_running", "Choices that are at a decode worker")
        gauge.labels(*self._values).set_function(running)
        gauge = self._gauge("requests_waiting", "Choices that wait for a decode worker")
        gauge.labels(*self._values).set_function(waiting)
        gauge = self._gauge("workers_alive", "Workers that answer this router", "worker_role")
        for role in WORKER_ROLES:
            gauge.labels(*self._values, role).set_function(lambda role=role: alive(role))

    def render(self, encode: Callable[[Collector], bytes] = generate_latest) -> bytes:
        """The exposition; encode: writes its form."""
        return encode(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvlane_{name}", text, (*LABELS, *labels), registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"kvlane_{name}", text, (*LABELS, *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Tally:
        family = Tallies(f"kvlane_{name}", text, LABELS, buckets, self.registry)
        return family.labels(*self._values)
