"""The router's figures under vLLM's names, so that what was made for vLLM works unchanged.

Endpoint pickers, KEDA's examples and public dashboards ask for them: the names of vLLM 0.22, and
those before them. All are made when scraped, from counts that the router keeps anyway; only the end
of a choice, and its time in vLLM's stages, are counted here.

A gauge is one series, of `engine="0"`: an endpoint picker reads one, and `merged_samples` adds up
those of the routers of a port. All else has the router's number as its engine: a sum of counters
would jump back when a router is replaced. What windows drafted and accepted is a decode worker's,
which is an engine of its own here. All routers know it, so only the first by name exports it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString  # pyright: ignore[reportUnknownVariableType]

from router.observe.stages import StageTimes, vllm_times
from router.observe.tally import Tally, total
from worker.api import Role, WorkerStats
from worker.observe.metrics import Families

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


class VllmMetrics(Collector):
    """The families of one router; `ours` are its own, whose counts they share."""

    def __init__(self, ours: Families) -> None:
        self._model, self._router = ours.bound["model"], ours.bound["worker"]
        self._engine = self._model, self._router.rpartition("-")[2]
        self._ours: Any = ours
        bounds = ours.table()["e2e"].buckets
        self._queue, self._prefill, self._decode, self._inference = (
            Tally(bounds) for _ in range(4)
        )
        self._per_token = Tally(ours.table()["itl"].buckets)
        self._ended = dict.fromkeys(REASONS, 0)

    def ended(self, outcome: str) -> None:
        """Count the end of one choice."""
        self._ended[outcome if outcome in self._ended else "error"] += 1

    def spent(self, spent: StageTimes, num_tokens: int) -> None:
        """Observe the time of one choice with so many output tokens, in vLLM's stages."""
        queue_s, prefill_s, decode_s = vllm_times(spent)
        self._queue.observe(queue_s)
        self._prefill.observe(prefill_s)
        self._decode.observe(decode_s)
        self._inference.observe(prefill_s + decode_s)
        if num_tokens > 1:
            self._per_token.observe(decode_s / (num_tokens - 1))

    def collect(self) -> Iterator[Metric]:
        """For prometheus_client."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._drafts()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        live: Live = self._ours.live
        at_workers, decoding = live.running(), len(live.outputs())
        queued, unstarted, stats = live.waiting(), at_workers - decoding, live.decodes()
        num_pages = sum(worker.num_pages for worker in stats)
        free = sum(worker.num_free_pages for worker in stats)
        used = 1 - free / num_pages if num_pages else 1.0  # without workers there is no room
        page_size = str(max((worker.page_size for worker in stats), default=0))
        config = {(page_size, str(num_pages)): 1} if stats else {}
        reasons = {("capacity",): queued, ("deferred",): unstarted}
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
            figures = {(self._model, ENGINE, *more): value for more, value in values.items()}
            yield _gauge(name, text, figures, *labels)

    def _counters(self) -> Iterator[Metric]:
        ours, live = self._ours, self._ours.live
        (_, prompt), (_, output) = ours.prompt_length.sample(), ours.output_length.sample()
        cached = total(ours.cached_tokens)
        arrived = sum(self._ended.values()) + live.running() + live.waiting()
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of choices that had their first token", prompt),
            ("generation_tokens", "Output tokens", output + sum(live.outputs())),
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
            for name, stats in self._ours.live.drafting(self._router).items()
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
        ours = self._ours
        for name, text, tallies in (
            ("time_to_first_token_seconds", "From arrival to the first token", ours.first_tokens),
            ("inter_token_latency_seconds", "Between two tokens", [ours.itl]),
            ("time_per_output_token_seconds", "The former name of inter_token_latency_seconds",
             [ours.itl]),
            ("request_time_per_output_token_seconds", "Mean time per output token of one choice",
             [self._per_token]),
            ("e2e_request_latency_seconds", "From arrival to the end", [ours.e2e]),
            ("request_queue_time_seconds", "Time in queues of router and workers", [self._queue]),
            ("request_prefill_time_seconds", "Prefill, transfer and first step", [self._prefill]),
            ("request_decode_time_seconds", "From the first token to the last", [self._decode]),
            ("request_inference_time_seconds", "Prefill and decode together", [self._inference]),
            ("request_prompt_tokens", "Prompt tokens of one choice", [ours.prompt_length]),
            ("request_generation_tokens", "Output tokens of one choice", [ours.output_length]),
            ("request_max_num_generation_tokens", "Output tokens, as each choice is a request",
             [ours.output_length]),
        ):  # fmt: skip
            family = HistogramMetricFamily(PREFIX + name, text, labels=LABELS)
            family.add_metric(self._engine, *_together(tallies))
            yield family


def _family(
    make: Callable[..., Any], name: str, text: str, figures: Figures, *labels: str
) -> Metric:
    family = make(PREFIX + name, text, labels=(*LABELS, *labels))
    for values, figure in figures.items():
        family.add_metric(values, figure)
    return family


_gauge, _counter = partial(_family, GaugeMetricFamily), partial(_family, CounterMetricFamily)


def _emitted(stats: WorkerStats) -> int:
    return stats.num_windows + sum(stats.accepted)


# Of one worker: what makes the family, its name, its text, and the figure.
DRAFTS: tuple[tuple[Callable[..., Metric], str, str, Callable[[WorkerStats], float]], ...] = (
    (_counter, "num_drafts", "Windows with drafts", lambda of: of.drafted[0]),
    (_counter, "num_draft_tokens", "Drafts that windows verified", lambda of: sum(of.drafted)),
    (_counter, "num_accepted_tokens", "Drafts that windows accepted", lambda of: sum(of.accepted)),
    (_counter, "num_emitted_tokens", "Tokens that windows yielded", _emitted),
    (_gauge, "draft_acceptance_rate", "Share of the drafts accepted since the worker's start",
     lambda of: sum(of.accepted) / max(1, sum(of.drafted))),
    (_gauge, "efficiency", "Tokens of the most that windows could yield, since the worker's start",
     lambda of: _emitted(of) / max(1, of.num_windows + sum(of.drafted))),
)  # fmt: skip


def merged_samples(head: str, samples: Sequence[str]) -> str:
    """The samples of a family on one page, from those on each router's; the first is our own."""
    about, kind = head.split("\n")[:2]
    name, is_draft = about.split(" ")[2].removeprefix(PREFIX), f" {PREFIX}{OF_DRAFTS}" in about
    if f" {PREFIX}" not in about or not (is_draft or kind.endswith(" gauge")):
        return "".join(samples)
    if name in OF_WORKERS:
        return samples[0]
    values: dict[str, list[float]] = {}
    for line in "".join(samples).splitlines():
        series, _, value = line.rpartition(" ")
        values.setdefault(series, []).append(float(value))
    # Drafts are there twice if one router has just taken over from another: the older counts less.
    one = max if is_draft else sum
    return "".join(f"{each} {floatToGoString(one(values[each]))}\n" for each in values)


def _together(tallies: Sequence[Tally]) -> tuple[list[tuple[str, float]], float]:
    """The buckets and the sum of series with the same bounds."""
    samples = [tally.sample() for tally in tallies]
    buckets: list[tuple[str, float]] = [
        (same[0][0], sum(bucket[1] for bucket in same))
        for same in zip(*(buckets for buckets, _ in samples), strict=True)
    ]
    return buckets, sum((of_all for _, of_all in samples), 0.0)
