"""Metric families: declared as tables, with the worker's own; and the page that serves these.

A worker serves its families on a port of its own (Member.metrics_address), and /live beside
them; the router's /metrics/targets lists the ports of all. The router has a table like this.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple, Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily

from worker.errors import Busy, PeerLost, Revoked, TransferError, TransferTimeout, UserError
from worker.observe.page import Page

STEP_BUCKETS = (
    0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5,
    1.0, 2.0, 5.0,
)  # fmt: skip
WIDTH_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16)
SUM_BUCKETS = tuple(1 << power for power in range(13, 28, 2))  # 8 KiB to 128 MiB
STAGE_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
BY_PLACE = "by place in the window; the first is 1"
NUM_FIRST = 1000  # windows by which a start is judged
# Labels that a decode worker counts from 0 on.
PLACES = ("none", "local", "remote", "alone", "fallback")
OUTCOMES = ("stop", "length", "abort", "error")
RETRY_CAUSES = tuple(
    error.code for error in (Busy, PeerLost, Revoked, TransferError, TransferTimeout)
)

Kind = Literal["counter", "reading", "gauge", "histogram"]


class Family(NamedTuple):
    """A row of a table of families."""

    kind: Kind
    name: str  # without `kvlane_`, and a counter's without `_total`
    text: str
    labels: tuple[str, ...]  # beside those that all families of the process have
    buckets: Sequence[float] = ()  # upper bounds, without infinity


def _declare(kind: Kind, buckets: Sequence[float] = ()) -> Callable[..., Any]:
    def declare(name: str, text: str, *labels: str, buckets: Sequence[float] = buckets) -> Any:
        return Family(kind, name, text, labels, buckets)

    return declare


counter, gauge, histogram = _declare("counter"), _declare("gauge"), _declare("histogram")
reading = _declare("reading")  # a counter that is kept elsewhere, and read when it is scraped
stage = _declare("histogram", STAGE_BUCKETS)


# Of every process that has a wire.
WIRE_REFUSED = reading(
    "wire_refused",
    "Refused: foreign or forged frames, connections without a member's key, messages about what "
    "is another's",
    "what",
)


class Refused(Protocol):
    """Frames, connections and messages that the sockets of a process have refused."""

    num_frames: int
    num_connections: int
    num_messages: int


def watch_wire(series: Callable[[str], Gauge], refused: Refused) -> None:
    """Have WIRE_REFUSED read these counts when it is scraped."""
    series("frame").set_function(lambda: refused.num_frames)
    series("connection").set_function(lambda: refused.num_connections)
    series("message").set_function(lambda: refused.num_messages)


class _Readings(Gauge):
    """Counters that are kept elsewhere."""

    def collect(self) -> Iterator[Metric]:
        for gauge in super().collect():
            family = CounterMetricFamily(gauge.name, gauge.documentation)
            family.samples = [s._replace(name=f"{s.name}_total") for s in gauge.samples]
            yield family


class Families:
    """The families that a subclass declares, in a registry; every name starts with `kvlane_`.

    The attribute of a declaration is, in an object, the series itself, or for families with labels
    a function label values -> series. `set_function` of a gauge or reading takes a function to call
    when it is scraped. bound: labels of all series, with their values.
    """

    histogram_type: Callable[..., Any] = Histogram

    def __init__(self, **bound: str) -> None:
        disable_created_metrics()  # else every counter has a twin that says when it began
        self.registry = CollectorRegistry()
        self.bound = bound
        self.collectors: dict[str, Any] = {}  # by attribute
        types: dict[str, Callable[..., Any]]
        types = {"counter": Counter, "gauge": Gauge, "reading": _Readings}
        for attribute, family in self.table().items():
            made = types.get(family.kind, self.histogram_type)(
                f"kvlane_{family.name}",
                family.text,
                (*bound, *family.labels),
                registry=self.registry,
                **({"buckets": family.buckets} if family.buckets else {}),
            )
            self.collectors[attribute] = made
            # To look a series up takes the library as long as to count.
            series = cache(partial(made.labels, *bound.values()))
            setattr(self, attribute, series if family.labels else series())

    @classmethod
    def table(cls) -> dict[str, Family]:
        """The declarations, by attribute."""
        return {key: value for key, value in vars(cls).items() if isinstance(value, Family)}

    def count_from_zero(self, **values: Sequence[str]) -> None:
        """Make series before anything is counted, so that the first shows in a rate.

        values: by attribute of a family with one label, of which they are values.
        """
        for attribute, names in values.items():
            for value in names:
                getattr(self, attribute)(value)


class WorkerMetrics(Families):
    """All families of one worker."""

    prompt_tokens = counter("prompt_tokens_computed", "Prompt tokens computed here")
    queried_tokens = counter("prompt_tokens_queried", "Prompt tokens looked up in the prefix tree")
    cached_tokens = counter("prompt_tokens_cached", "Prompt tokens found in the prefix tree")
    recomputed_tokens = counter(
        "prompt_tokens_recomputed", "Prompt tokens found, and computed again from a snapshot"
    )
    generated_tokens = counter("generation_tokens", "Output tokens drawn here")
    steps = counter("engine_steps", "Steps settled, by how they were launched", "kind", "path")
    eager_steps = counter("engine_eager_steps", "Steps without a graph, by why", "kind", "reason")
    step_seconds = histogram(
        "engine_step_seconds", "Time of one step on the device", "kind", buckets=STEP_BUCKETS
    )
    preemptions = counter("preemptions", "Rows that gave their pages up")
    requests = counter("requests", "Requests that ended", "outcome")
    wire_refused = WIRE_REFUSED

    spec_steps = reading("spec_steps", "Verify windows: one for each row of a step wider than 1")
    spec_accepted = reading("spec_accepted_tokens", "Drafts accepted; each yields one token more")
    spec_accepted_at = reading(
        "spec_accepted_at_position", f"Drafts that windows accepted, {BY_PLACE}", "position"
    )
    spec_drafted_at = reading(
        "spec_drafted_at_position", f"Windows that had a draft to verify, {BY_PLACE}", "position"
    )
    spec_undrafted = reading(
        "spec_undrafted_steps",
        "Windows without a draft: first steps, behind a step of width 1, prompt lookup found none",
    )
    spec_first_acceptance = gauge(
        "spec_first_acceptance",
        f"Share of first drafts that the first {NUM_FIRST} windows accepted; 0 until then "
        "and with prompt lookup",
    )
    spec_width = histogram(
        "spec_width", "Width of each decode step of a worker that verifies", buckets=WIDTH_BUCKETS
    )
    spec_simulated = gauge("spec_simulated", "1 if acceptance is simulated, and answers are junk")
    drafter = gauge("drafter_info", "1 for what proposes drafts; `none`: nothing", "drafter")

    ranks = gauge("ranks", "Processes of this worker, which ends with the first that does")
    all_reduce_bytes = histogram(
        "all_reduce_bytes", "Size of what a layer sums among the ranks, by what sums it",
        "kind", "algorithm", buckets=SUM_BUCKETS,
    )  # fmt: skip

    placed = counter("prefill_placed", "Where prompts were prefilled", "where")
    pulled_bytes = counter("kv_pulled_bytes", "KV bytes pulled", "transport")
    pulls = counter("kv_pulls", "Pulls that ended, by outcome", "transport", "outcome")
    pull_seconds = stage("kv_pull_seconds", "Time of one pull that landed", "transport")
    fetch_seconds = stage(
        "kv_fetch_seconds",
        "From asking for a request's KV until all had landed",
        "transport",
    )
    transfer_seconds = stage(
        "kv_transfer_seconds",
        "From a request's last announcement, or first token if later, until all KV had landed",
        "transport",
    )
    row_wait_seconds = stage("row_wait_seconds", "Wait of requests whose KV had landed for a row")
    fetch_retries = counter("kv_fetch_retries", "Attempts to fetch KV that failed", "cause")
    lease_expired = counter("lease_expired", "Leases that ran out without a release")
    dropped = counter("stale_messages_dropped", "Messages of attempts that are over", "kind")

    running = gauge("requests_running", "Requests with a row")
    waiting = gauge("requests_waiting", "Requests admitted and without a row")
    queued = gauge("requests_queued", "Requests by the stage they wait in", "stage")
    pages = gauge("kv_pages", "KV pages by state", "state")
    evicted_early = reading("kv_retained_pages_evicted", "Retained pages that were evicted")
    sessions = gauge("sessions_retained", "Sessions with retained pages, evicted last")
    usage = gauge("kv_cache_usage_ratio", "Share of KV pages in use or promised, 0 to 1")
    slots = gauge("state_slots", "Slots of recurrent states, if the model has any", "state")
    moe_layer_steps = reading("moe_layer_steps", "Layers of experts computed, over all steps")
    moe_distinct_experts = reading(
        "moe_distinct_experts", "Experts of this rank that had tokens, summed over those layers"
    )
    moe_busiest_share = gauge(
        "moe_busiest_share",
        "Share of tokens that a layer's busiest expert had, mean of layers; 1 / experts if even",
    )
    tier_tokens = counter(
        "kv_tier_tokens", "Prompt tokens whose KV was found in a tier, verified and used", "tier"
    )
    tier_pages = counter(
        "kv_tier_pages",
        "Settled pages by their copy: kept, torn (freed meanwhile), behind (too many wait), failed",
        "tier", "outcome",
    )  # fmt: skip
    tier_failures = counter(
        "kv_tier_failures",
        "Calls of a tier that came to nothing",
        "tier", "cause",
    )  # fmt: skip
    tier_bytes = gauge("kv_tier_bytes", "Bytes that a tier keeps", "tier")
    tier_evicted = counter(
        "kv_pages_evicted", "Pages that left the pool: kept in a tier, or dropped", "copy"
    )
    tier_early = counter(
        "kv_evicted_early", "Prompts that would have gone on with a page dropped lately"
    )
    leases = gauge("leases", "Transfers under way, each with a lease")
    bucket_seconds = gauge(
        "graph_bucket_seconds", "One step as measured at the start", "kind", "rows", "path"
    )
    bucket_differs = gauge("graph_bucket_differs", "1 where graph and eager differ", "kind", "rows")
    transport = gauge("transport_info", "1 for the transport in use", "transport")

    def __init__(self, *, model: str, role: str, worker: str) -> None:
        super().__init__(model=model, role=role, worker=worker)
        self._page: Page | None = None
        self.ranks.set(1)
        if role == "decode":
            self.count_from_zero(placed=PLACES, requests=OUTCOMES, fetch_retries=RETRY_CAUSES)

    def serve(
        self, host: str, ports: range = range(1), stalled: Callable[[], str] = lambda: ""
    ) -> str:
        """Serve /metrics and /live on the first of `ports` of `host` that is free; its host:port.

        ports: not empty; 0 is any free one. stalled: why the worker is not live, "" if it is.

        Raises UserError if all ports are taken.
        """
        for port in ports:
            try:
                self._page = Page(host, port, self.registry, stalled)
            except OSError as error:
                if port == ports[-1]:
                    path = "cluster.worker_metrics_port"
                    raise UserError(f"{path}: {host}:{port}: {error.strerror}", path) from error
            else:
                break
        assert self._page is not None
        return f"{host}:{self._page.port}"

    def close(self) -> None:
        if self._page is not None:
            self._page.close()
