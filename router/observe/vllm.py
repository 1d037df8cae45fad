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
from operator import attrgetter
from typing import Any, NamedTuple

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString  # pyright: ignore[reportUnknownVariableType]

from router.observe.board import together
from router.observe.stages import StageTimes, vllm_times
from router.observe.tally import Tally, buckets, total
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
Figures = dict[tuple[str, ...], float]  # values of the labels -> value of the series


@dataclass(frozen=True)
class Live:
    """What is read when gauges are scraped."""

    running: Callable[[], int] = int  # choices at workers
    waiting: Callable[[], int] = int  # choices in the queue
    outputs: Callable[[], Sequence[int]] = tuple  # output tokens of open choices that have any
    alive: Callable[[Role], int] = lambda role: 0  # workers
    decodes: Callable[[], Sequence[WorkerStats]] = tuple  # what live ones said last
    # The same by name, of those whose drafts a router of this name exports.
    drafting: Callable[[str], Mapping[str, WorkerStats]] = lambda router: {}
    sessions: Callable[[], int] = int  # known, with a turn in the last minutes


class _Scrape:
    """What the figures of one page are made of, read once. ours: the router's own families."""

    def __init__(self, ours: Any, ended: Mapping[str, int]) -> None:
        live: Live = ours.live
        outputs, stats = live.outputs(), live.decodes()
        self.none, self.adapters = 0, {("0", "", ""): 0}
        self.decoding, queued = len(outputs), live.waiting()
        unstarted = live.running() - self.decoding
        self.waiting = queued + unstarted
        self.why: Figures = {("capacity",): queued, ("deferred",): unstarted}
        pages = sum(worker.num_pages for worker in stats)
        free = sum(worker.num_free_pages for worker in stats)
        self.used = 1 - free / pages if pages else 1.0  # without workers all are
        page_size = max((worker.page_size for worker in stats), default=0)
        self.config: Figures = {(str(page_size), str(pages)): 1} if stats else {}
        self.prompt, self.cached = ours.prompt_length.sum, total(ours.cached_tokens)
        self.output = ours.output_length.sum + sum(outputs)
        self.ended: Figures = {(reason,): number for reason, number in ended.items()}
        self.arrived = sum(ended.values()) + self.decoding + self.waiting


def _emitted(of: WorkerStats) -> int:
    return of.num_windows + sum(of.accepted)


Figure = Callable[[Any], float | Figures]


class Row(NamedTuple):
    """One family: its figure is one number, or one by the values of its own `labels`."""

    make: Any
    name: str
    text: str
    figure: Figure
    labels: tuple[str, ...]


def _gauge(name: str, text: str, figure: Figure, *labels: str) -> Row:
    return Row(GaugeMetricFamily, name, text, figure, labels)


def _counter(name: str, text: str, figure: Figure, *labels: str) -> Row:
    return Row(CounterMetricFamily, name, text, figure, labels)


of = attrgetter
FIGURES = (  # of a `_Scrape`
    _gauge("num_requests_running", "Choices that have had their first token", of("decoding")),
    _gauge("num_requests_waiting", "Choices without a token, queued or at workers", of("waiting")),
    _gauge("num_requests_swapped", "Always 0, as nothing is swapped", of("none")),
    _gauge("kv_cache_usage_perc", "Share of the decode workers' KV pages in use, 0 to 1",
           of("used")),
    _gauge("gpu_cache_usage_perc", "The former name of kv_cache_usage_perc", of("used")),
    _gauge("cpu_cache_usage_perc", "Always 0, as no KV lies in host memory", of("none")),
    _gauge("num_requests_waiting_by_reason", "Choices without a token, by reason",
           of("why"), "reason"),
    _gauge("cache_config_info", "KV pages of the decode workers", of("config"),
           "block_size", "num_gpu_blocks"),
    _gauge("lora_requests_info", "There are no adapters", of("adapters"),
           "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    _counter("prompt_tokens", "Prompt tokens of choices that had their first token", of("prompt")),
    _counter("generation_tokens", "Output tokens", of("output")),
    _counter("prompt_tokens_cached", "Prompt tokens found in the prefix tree", of("cached")),
    _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix tree", of("prompt")),
    _counter("prefix_cache_hits", "Prompt tokens found in the prefix tree", of("cached")),
    _counter("num_incoming_requests", "Choices that have arrived", of("arrived")),
    _counter("gpu_prefix_cache_queries", "The former name of prefix_cache_queries", of("prompt")),
    _counter("gpu_prefix_cache_hits", "The former name of prefix_cache_hits", of("cached")),
    _counter("request_success", "Choices ended, by reason", of("ended"), "finished_reason"),
)  # fmt: skip
DRAFTS = (  # of the stats of a worker that verifies: a draft is a window's, a token one place of it
    _counter("num_drafts", "Windows with drafts", lambda of: of.drafted[0]),
    _counter("num_draft_tokens", "Drafts that windows verified", lambda of: sum(of.drafted)),
    _counter("num_accepted_tokens", "Drafts that windows accepted", lambda of: sum(of.accepted)),
    _counter("num_emitted_tokens", "Tokens that windows yielded", _emitted),
    _gauge("draft_acceptance_rate", "Share of the drafts accepted since the worker's start",
           lambda of: sum(of.accepted) / max(1, sum(of.drafted))),
    _gauge("efficiency", "Tokens of the most that windows could yield, since the worker's start",
           lambda of: _emitted(of) / max(1, of.num_windows + sum(of.drafted))),
    _counter("num_accepted_tokens_per_pos", "Drafts accepted, by place from 0",
             lambda of: {(str(i),): number for i, number in enumerate(of.accepted)}, "position"),
)  # fmt: skip
TIMES = (  # a histogram's name, its text, and where its tallies are: in our own families, or here
    ("time_to_first_token_seconds", "From arrival to the first token", "first_tokens"),
    ("inter_token_latency_seconds", "Between two tokens", "itl"),
    ("time_per_output_token_seconds", "The former name of inter_token_latency_seconds", "itl"),
    ("request_time_per_output_token_seconds", "Mean time per output token of one choice", "mean"),
    ("e2e_request_latency_seconds", "From arrival to the end", "e2e"),
    ("request_queue_time_seconds", "Time in queues of router and workers", "queue"),
    ("request_prefill_time_seconds", "Prefill, transfer and first step", "prefill"),
    ("request_decode_time_seconds", "From the first token to the last", "decode"),
    ("request_inference_time_seconds", "Prefill and decode together", "inference"),
    ("request_prompt_tokens", "Prompt tokens of one choice", "prompt_length"),
    ("request_generation_tokens", "Output tokens of one choice", "output_length"),
    ("request_max_num_generation_tokens", "Output tokens, as each choice is a request",
     "output_length"),
)  # fmt: skip
STAGES = ("queue", "prefill", "decode", "inference")  # vLLM's


class VllmMetrics(Collector):
    """The families of one router; `ours` are its own, whose counts they share."""

    def __init__(self, ours: Families) -> None:
        self._model, self._router = ours.bound["model"], ours.bound["worker"]
        self._ours: Any = ours
        table = ours.table()
        self._own = {stage: Tally(table["e2e"].buckets) for stage in STAGES}
        self._own["mean"] = Tally(table["itl"].buckets)
        self._ended: dict[str, int] = dict.fromkeys(REASONS, 0)

    def ended(self, outcome: str) -> None:
        """Count the end of one choice."""
        self._ended[outcome if outcome in self._ended else "error"] += 1

    def spent(self, spent: StageTimes, num_tokens: int) -> None:
        """Observe the time of one choice with so many output tokens, in vLLM's stages."""
        queue_s, prefill_s, decode_s = vllm_times(spent)
        for stage, took_s in zip(
            STAGES, (queue_s, prefill_s, decode_s, prefill_s + decode_s), strict=True
        ):
            self._own[stage].observe(took_s)
        if num_tokens > 1:
            self._own["mean"].observe(decode_s / (num_tokens - 1))

    def collect(self) -> Iterator[Metric]:
        """For prometheus_client."""
        scrape, number = _Scrape(self._ours, self._ended), self._router.rpartition("-")[2]
        for row in FIGURES:
            engine = ENGINE if row.make is GaugeMetricFamily else number
            yield _family(row, row.name, {(self._model, engine): scrape})
        drafting: Mapping[str, WorkerStats] = self._ours.live.drafting(self._router)
        workers = {
            (self._model, name.rpartition("-")[2]): stats
            for name, stats in drafting.items()
            if stats.drafted
        }
        for row in DRAFTS:
            yield _family(row, OF_DRAFTS + row.name, workers)
        for name, text, place in TIMES:
            tallies = self._own.get(place) or getattr(self._ours, place)
            family = HistogramMetricFamily(PREFIX + name, text, labels=LABELS)
            several = [tallies] if isinstance(tallies, Tally) else tallies
            whole = together([tally.spread() for tally in several])
            family.add_metric((self._model, number), buckets(whole), whole.seconds)
            yield family


def _family(row: Row, name: str, engines: Mapping[tuple[str, str], object]) -> Metric:
    """A row's series by engine, from what its figure is of."""
    family = row.make(PREFIX + name, row.text, labels=(*LABELS, *row.labels))
    for engine, source in engines.items():
        figure = row.figure(source)
        for values, number in (figure if isinstance(figure, dict) else {(): figure}).items():
            family.add_metric((*engine, *values), number)
    return family


def merged_samples(head: str, samples: Sequence[str]) -> str:
    """The samples of a family on one page, from those on routers' pages; the first is our own."""
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
    return "".join(f"{name} {floatToGoString(one(found))}\n" for name, found in values.items())
