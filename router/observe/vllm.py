"""The router's figures under vLLM's names (0.22, and those before), for what was made for vLLM.

Endpoint pickers, KEDA's examples and public dashboards ask for them. All are made when scraped,
from counts that the router keeps anyway, but for a choice's end and its time in vLLM's stages.

A gauge is one series, of `engine="0"`: an endpoint picker reads one. All else has the router's
number as its engine. Where routers share a port, `merged_samples` adds up gauges only: a sum of
counters would jump back when a router is replaced.

Decode workers, each an engine here, count what windows drafted and accepted. All routers know the
same of that, so only the first by name exposes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import Counter, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from router.observe.spent import Spent
from router.observe.tally import Tally
from worker.api import WorkerStats

PREFIX = "vllm:"
LABELS = ("model_name", "engine")
ENGINE = "0"
REASONS = ("stop", "length", "abort", "error")
# Gauges of the decode workers, which all routers see alike: they do not add up.
OF_WORKERS = frozenset(
    {"kv_cache_usage_perc", "gpu_cache_usage_perc", "cpu_cache_usage_perc", "cache_config_info",
     "lora_requests_info"}
)  # fmt: skip

OF_DRAFTS = "spec_decode_"  # begins the names of what windows drafted and accepted
DRAFTS = (
    ("num_drafts", "Windows with drafts", CounterMetricFamily),
    ("num_draft_tokens", "Drafts that windows verified", CounterMetricFamily),
    ("num_accepted_tokens", "Drafts that windows accepted", CounterMetricFamily),
    ("num_emitted_tokens", "Tokens that windows yielded", CounterMetricFamily),
    ("draft_acceptance_rate", "Share of the drafts accepted since the worker's start",
     GaugeMetricFamily),
    ("efficiency", "Tokens of the most that windows could yield, since the worker's start",
     GaugeMetricFamily),
)  # fmt: skip


class Shared(NamedTuple):
    """What `router.observe.metrics` counts; the tallies of one family have the same buckets."""

    ttft: Sequence[Tally]
    itl: Sequence[Tally]
    e2e: Sequence[Tally]
    prompt: Sequence[Tally]
    generation: Sequence[Tally]
    cached_tokens: Counter


class Times(NamedTuple):
    """A choice's time in vLLM's stages, in seconds; together all of it until the last token."""

    queue_s: float
    prefill_s: float  # with the transfer of KV and decode's first step
    decode_s: float


def times_of(spent: Spent) -> Times:
    """Our stages as vLLM's."""
    at = spent.stages
    return Times(
        spent.router_queue_s + at.prefill_queue_s + at.decode_queue_s,
        at.prefill_s + at.transfer_s + at.first_step_s,
        spent.decode_s,
    )


class VllmMetrics(Collector):
    """The group of one router, whose name (`worker`) ends with its number."""

    def __init__(
        self,
        model: str,
        worker: str,
        shared: Shared,
        e2e_buckets: Sequence[float],
        itl_buckets: Sequence[float],
    ) -> None:
        self._model = model
        self._gauge_values = (model, ENGINE)
        self._values = (model, worker.rpartition("-")[2])
        self._shared = shared
        self._queue, self._prefill, self._decode, self._inference = (
            Tally(e2e_buckets) for _ in range(4)
        )
        self._per_token = Tally(itl_buckets)
        self._ended = dict.fromkeys(REASONS, 0)
        self._running: Callable[[], int] = int
        self._waiting: Callable[[], int] = int
        self._outputs: Callable[[], Sequence[int]] = tuple
        self._decodes: Callable[[], Sequence[WorkerStats]] = tuple
        self._drafting: Callable[[], Mapping[str, WorkerStats]] = dict

    def watch(
        self,
        running: Callable[[], int],
        waiting: Callable[[], int],
        outputs: Callable[[], Sequence[int]],
        decodes: Callable[[], Sequence[WorkerStats]],
        drafting: Callable[[], Mapping[str, WorkerStats]],
    ) -> None:
        """What is read when scraped; `RouterMetrics.watch` describes it."""
        self._running, self._waiting, self._outputs = running, waiting, outputs
        self._decodes, self._drafting = decodes, drafting

    def ended(self, outcome: str) -> None:
        """Count the end of one choice."""
        self._ended[outcome if outcome in self._ended else "error"] += 1

    def spent(self, spent: Spent, num_tokens: int) -> None:
        """Observe the time of one choice with so many output tokens, in vLLM's stages."""
        queue_s, prefill_s, decode_s = times_of(spent)
        self._queue.observe(queue_s)
        self._prefill.observe(prefill_s)
        self._decode.observe(decode_s)
        self._inference.observe(prefill_s + decode_s)
        if num_tokens > 1:
            self._per_token.observe(spent.decode_s / (num_tokens - 1))

    def collect(self) -> Iterator[Metric]:
        """For prometheus_client."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._drafts()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        at_workers, decoding, stats = self._running(), len(self._outputs()), self._decodes()
        queued, unstarted = self._waiting(), at_workers - decoding
        num_pages = sum(worker.num_pages for worker in stats)
        free = sum(worker.num_free_pages for worker in stats)
        used = 1 - free / num_pages if num_pages else 1.0  # without workers there is no room
        page_size = str(max((worker.page_size for worker in stats), default=0))
        config = {(page_size, str(num_pages)): 1.0} if stats else {}
        reasons = {("capacity",): float(queued), ("deferred",): float(unstarted)}
        for name, text, labels, values in (
            ("num_requests_running", "Choices that have had their first token", (),
             {(): decoding}),
            ("num_requests_waiting", "Choices without a token, queued or at workers", (),
             {(): queued + unstarted}),
            ("num_requests_swapped", "Always 0, as nothing is swapped", (), {(): 0}),
            ("kv_cache_usage_perc", "Share of the decode workers' KV pages in use, 0 to 1", (),
             {(): used}),
            ("gpu_cache_usage_perc", "The former name of kv_cache_usage_perc", (), {(): used}),
            ("cpu_cache_usage_perc", "Always 0, as no KV lies in host memory", (), {(): 0}),
            ("num_requests_waiting_by_reason", "Choices without a token, by reason", ("reason",),
             reasons),
            ("cache_config_info", "KV pages of the decode workers",
             ("block_size", "num_gpu_blocks"), config),
            ("lora_requests_info", "There are no adapters",
             ("max_lora", "running_lora_adapters", "waiting_lora_adapters"), {("0", "", ""): 0}),
        ):  # fmt: skip
            family = GaugeMetricFamily(PREFIX + name, text, labels=(*LABELS, *labels))
            for more, value in values.items():
                family.add_metric((*self._gauge_values, *more), value)
            yield family

    def _counters(self) -> Iterator[Metric]:
        shared = self._shared
        prompt, generation = _together(shared.prompt)[1], _together(shared.generation)[1]
        generation += sum(self._outputs())
        families = shared.cached_tokens.collect()
        cached = sum(sample.value for family in families for sample in family.samples)
        arrived = sum(self._ended.values()) + self._running() + self._waiting()
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of choices that had their first token", prompt),
            ("generation_tokens", "Output tokens", generation),
            ("prompt_tokens_cached", "Prompt tokens found in the prefix tree", cached),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix tree", prompt),
            ("prefix_cache_hits", "Prompt tokens found in the prefix tree", cached),
            ("num_incoming_requests", "Choices that have arrived", arrived),
            ("gpu_prefix_cache_queries", "The former name of prefix_cache_queries", prompt),
            ("gpu_prefix_cache_hits", "The former name of prefix_cache_hits", cached),
        ):
            family = CounterMetricFamily(PREFIX + name, text, labels=LABELS)
            family.add_metric(self._values, value)
            yield family
        labels = *LABELS, "finished_reason"
        family = CounterMetricFamily(
            PREFIX + "request_success", "Choices ended, by reason", labels=labels
        )
        for reason, number in self._ended.items():
            family.add_metric((*self._values, reason), number)
        yield family

    def _drafts(self) -> Iterator[Metric]:
        """Where a worker verifies; a draft is a window's, a draft token one place of it."""
        by_engine = {
            (self._model, name.rpartition("-")[2]): stats
            for name, stats in self._drafting().items()
            if stats.drafted
        }
        figures = {labels: _figures(stats) for labels, stats in by_engine.items()}
        for name, text, kind in DRAFTS:
            family = kind(PREFIX + OF_DRAFTS + name, text, labels=LABELS)
            for labels, values in figures.items():
                family.add_metric(labels, values[name])
            yield family
        name, text = OF_DRAFTS + "num_accepted_tokens_per_pos", "Drafts accepted, by place from 0"
        family = CounterMetricFamily(PREFIX + name, text, labels=(*LABELS, "position"))
        for labels, stats in by_engine.items():
            for place, number in enumerate(stats.accepted):
                family.add_metric((*labels, str(place)), number)
        yield family

    def _histograms(self) -> Iterator[Metric]:
        shared = self._shared
        for name, text, tallies in (
            ("time_to_first_token_seconds", "From arrival to the first token", shared.ttft),
            ("inter_token_latency_seconds", "Between two tokens", shared.itl),
            ("time_per_output_token_seconds", "The former name of inter_token_latency_seconds",
             shared.itl),
            ("request_time_per_output_token_seconds", "Mean time per output token of one choice",
             [self._per_token]),
            ("e2e_request_latency_seconds", "From arrival to the end", shared.e2e),
            ("request_queue_time_seconds", "Time in queues of router and workers", [self._queue]),
            ("request_prefill_time_seconds", "Prefill, transfer and first step", [self._prefill]),
            ("request_decode_time_seconds", "From the first token to the last", [self._decode]),
            ("request_inference_time_seconds", "Prefill and decode together", [self._inference]),
            ("request_prompt_tokens", "Prompt tokens of one choice", shared.prompt),
            ("request_generation_tokens", "Output tokens of one choice", shared.generation),
            ("request_max_num_generation_tokens", "Output tokens, as each choice is a request",
             shared.generation),
        ):  # fmt: skip
            buckets, total = _together(tallies)
            family = HistogramMetricFamily(PREFIX + name, text, labels=LABELS)
            family.add_metric(self._values, buckets, total)
            yield family


def merged_samples(head: str, samples: Sequence[str]) -> str:
    """The samples of a family on one page, from those on each router's; the first is our own."""
    about, kind = head.split("\n")[:2]
    name = about.split(" ")[2].removeprefix(PREFIX)
    if f" {PREFIX}{OF_DRAFTS}" in about:  # twice if one has just taken over from another
        return "".join(_latest("".join(samples).splitlines(True)))
    if f" {PREFIX}" not in about or not kind.endswith(" gauge"):
        return "".join(samples)
    if name in OF_WORKERS:
        return samples[0]
    total: dict[str, float] = {}
    for line in "".join(samples).splitlines():
        series, _, value = line.rpartition(" ")
        total[series] = total.get(series, 0.0) + float(value)
    return "".join(f"{series} {value}\n" for series, value in total.items())


def _latest(lines: Sequence[str]) -> Iterator[str]:
    """One line a series, the one with most: counts of one worker, of which some are older."""
    latest: dict[str, str] = {}
    for line in lines:
        series, _, value = line.rpartition(" ")
        if series not in latest or float(value) > float(latest[series].rpartition(" ")[2]):
            latest[series] = line
    yield from latest.values()


def _figures(of: WorkerStats) -> dict[str, float]:
    """By name, see DRAFTS."""
    drafted, accepted = sum(of.drafted), sum(of.accepted)
    emitted, most = of.num_windows + accepted, of.num_windows + drafted
    return {
        "num_drafts": of.drafted[0],
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "num_emitted_tokens": emitted,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "efficiency": emitted / most if most else 0.0,
    }


def _together(tallies: Sequence[Tally]) -> tuple[list[tuple[str, float]], float]:
    """The buckets and the sum of series with the same bounds."""
    samples = [tally.sample() for tally in tallies]
    buckets: list[tuple[str, float]] = [
        (same[0][0], sum(bucket[1] for bucket in same))
        for same in zip(*(sample[0] for sample in samples), strict=True)
    ]
    return buckets, sum((sample[1] for sample in samples), 0.0)
