"""The router's figures under vLLM's names, so that what was made for vLLM works unchanged.

Endpoint pickers, KEDA's examples and public dashboards ask for them: the names of vLLM 0.22, and
those before them. All are made when scraped, from counts that the router keeps anyway; only the end
of a choice, and its time in vLLM's stages, are counted here.

A gauge is one series, of `engine="0"`: an endpoint picker reads one, and `merged_samples` adds up
those of the routers of a port. All else has the router's number as its engine: a sum of counters
would jump back when a router is replaced. What windows drafted and accepted is a decode worker's,
which is an engine of its own here. All routers know it, so only the first by name exports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import Counter, Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from router.observe.spent import Spent
from router.observe.tally import Tally
from worker.api import Role, WorkerStats

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
Figures = Mapping[tuple[str, ...], float]  # values of the labels -> value of the series


@dataclass(frozen=True)
class Live:
    """What is read when gauges are scraped."""

    running: Callable[[], int] = int  # choices at workers
    waiting: Callable[[], int] = int  # choices in the queue
    outputs: Callable[[], Sequence[int]] = tuple  # output tokens of each open choice that has any
    alive: Callable[[Role], int] = lambda role: 0  # workers
    decodes: Callable[[], Sequence[WorkerStats]] = tuple  # what each live one said last
    # The same by name, of those whose drafts a router of this name exports.
    drafting: Callable[[str], Mapping[str, WorkerStats]] = lambda router: {}


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
    """The group of one router.

    Args:
        model: the served name.
        worker: the router's name, which ends with its number.
        shared: counts.
        e2e_buckets: of the stages of requests.
        itl_buckets: of a request's mean time per token.
    """

    def __init__(
        self,
        model: str,
        worker: str,
        shared: Shared,
        e2e_buckets: Sequence[float],
        itl_buckets: Sequence[float],
    ) -> None:
        self.live = Live()
        self._model, self._router = model, worker
        self._engine = (model, worker.rpartition("-")[2])
        self._shared = shared
        self._queue, self._prefill, self._decode, self._inference = (
            Tally(e2e_buckets) for _ in range(4)
        )
        self._per_token = Tally(itl_buckets)
        self._ended = dict.fromkeys(REASONS, 0)

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
        at_workers, decoding = self.live.running(), len(self.live.outputs())
        queued, unstarted, stats = self.live.waiting(), at_workers - decoding, self.live.decodes()
        num_pages = sum(each.num_pages for each in stats)
        free = sum(each.num_free_pages for each in stats)
        used = 1 - free / num_pages if num_pages else 1.0  # without workers there is no room
        engine = self._model, ENGINE
        for name, text, value in (
            ("num_requests_running", "Choices that have had their first token", decoding),
            ("num_requests_waiting", "Choices without a token, queued or at workers",
             queued + unstarted),
            ("num_requests_swapped", "Always 0, as nothing is swapped", 0),
            ("kv_cache_usage_perc", "Share of the decode workers' KV pages in use, 0 to 1", used),
            ("gpu_cache_usage_perc", "The former name of kv_cache_usage_perc", used),
            ("cpu_cache_usage_perc", "Always 0, as no KV lies in host memory", 0),
        ):  # fmt: skip
            yield _gauge(name, text, {engine: value})
        name, text = "num_requests_waiting_by_reason", "Choices without a token, by reason"
        reasons = {(*engine, "capacity"): queued, (*engine, "deferred"): unstarted}
        yield _gauge(name, text, reasons, "reason")
        page_size = str(max((each.page_size for each in stats), default=0))
        pages = {(*engine, page_size, str(num_pages)): 1} if stats else {}
        name, text = "cache_config_info", "KV pages of the decode workers"
        yield _gauge(name, text, pages, "block_size", "num_gpu_blocks")
        name, adapters = "lora_requests_info", {(*engine, "0", "", ""): 0}
        labels = "max_lora", "running_lora_adapters", "waiting_lora_adapters"
        yield _gauge(name, "There are no adapters", adapters, *labels)

    def _counters(self) -> Iterator[Metric]:
        shared, live = self._shared, self.live
        prompt, generation = (_together(each)[1] for each in (shared.prompt, shared.generation))
        families = shared.cached_tokens.collect()
        cached = sum(sample.value for family in families for sample in family.samples)
        arrived = sum(self._ended.values()) + live.running() + live.waiting()
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of choices that had their first token", prompt),
            ("generation_tokens", "Output tokens", generation + sum(live.outputs())),
            ("prompt_tokens_cached", "Prompt tokens found in the prefix tree", cached),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix tree", prompt),
            ("prefix_cache_hits", "Prompt tokens found in the prefix tree", cached),
            ("num_incoming_requests", "Choices that have arrived", arrived),
            ("gpu_prefix_cache_queries", "The former name of prefix_cache_queries", prompt),
            ("gpu_prefix_cache_hits", "The former name of prefix_cache_hits", cached),
        ):
            yield _counter(name, text, {self._engine: value})
        ended = {(*self._engine, reason): number for reason, number in self._ended.items()}
        yield _counter("request_success", "Choices ended, by reason", ended, "finished_reason")

    def _drafts(self) -> Iterator[Metric]:
        """Where a worker verifies; a draft is a window's, a draft token one place of it."""
        stats = {
            (self._model, name.rpartition("-")[2]): stats
            for name, stats in self.live.drafting(self._router).items()
            if stats.drafted
        }
        for make, name, text, figure in DRAFTS:
            yield make(OF_DRAFTS + name, text, {key: figure(each) for key, each in stats.items()})
        places = {
            (*key, str(place)): number
            for key, each in stats.items()
            for place, number in enumerate(each.accepted)
        }
        name, text = OF_DRAFTS + "num_accepted_tokens_per_pos", "Drafts accepted, by place from 0"
        yield _counter(name, text, places, "position")

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
            family = HistogramMetricFamily(PREFIX + name, text, labels=LABELS)
            family.add_metric(self._engine, *_together(tallies))
            yield family


def _gauge(name: str, text: str, figures: Figures, *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(PREFIX + name, text, labels=(*LABELS, *labels)), figures)


def _counter(name: str, text: str, figures: Figures, *labels: str) -> Metric:
    return _filled(CounterMetricFamily(PREFIX + name, text, labels=(*LABELS, *labels)), figures)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, figures: Figures) -> Metric:
    for labels, value in figures.items():
        family.add_metric(labels, value)
    return family


def _emitted(stats: WorkerStats) -> int:
    return stats.num_windows + sum(stats.accepted)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


# Of one worker: what makes the family, its name, its text, and the figure.
DRAFTS: tuple[tuple[Callable[..., Metric], str, str, Callable[[WorkerStats], float]], ...] = (
    (_counter, "num_drafts", "Windows with drafts", lambda of: of.drafted[0]),
    (_counter, "num_draft_tokens", "Drafts that windows verified", lambda of: sum(of.drafted)),
    (_counter, "num_accepted_tokens", "Drafts that windows accepted", lambda of: sum(of.accepted)),
    (_counter, "num_emitted_tokens", "Tokens that windows yielded", _emitted),
    (_gauge, "draft_acceptance_rate", "Share of the drafts accepted since the worker's start",
     lambda of: _share(sum(of.accepted), sum(of.drafted))),
    (_gauge, "efficiency", "Tokens of the most that windows could yield, since the worker's start",
     lambda of: _share(_emitted(of), of.num_windows + sum(of.drafted))),
)  # fmt: skip


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
    found: dict[str, str] = {}
    for line in lines:
        series, _, value = line.rpartition(" ")
        if series not in found or float(value) > float(found[series].rpartition(" ")[2]):
            found[series] = line
    yield from found.values()


def _together(tallies: Sequence[Tally]) -> tuple[list[tuple[str, float]], float]:
    """The buckets and the sum of series with the same bounds."""
    found = [tally.sample() for tally in tallies]
    buckets: list[tuple[str, float]] = [
        (same[0][0], sum(each[1] for each in same))
        for same in zip(*(each[0] for each in found), strict=True)
    ]
    return buckets, sum((each[1] for each in found), 0.0)
