"""`compare a.json b.json`: how much better or worse is b, and is that more than chance?

The interval of each ratio b/a is a bootstrap's: 95 % of the ratios found when requests are drawn
again, with replacement. Requests that follow one another share a queue and so are not independent:
they are drawn in blocks of neighbours (rates: in slices of time). Of several runs, runs are drawn
first. If both files sent the same requests, the same ones are drawn from both, so that what they
have in common (long prompts, a crowded second) does not count as chance.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.load import result
from benchmarks.load.measure import median, ms, number, pick
from benchmarks.load.records import Objectives, Outcome, Result, Run

NUM_SLICES = 40  # of a run's wall time
CONFIDENCE = 0.95
NUM_DRAWS = 1000
MIN_DRAWS = 200
MAX_WORK = 200_000_000  # values weighed per metric; fewer draws beyond


class Metric(msgspec.Struct, frozen=True):
    """One figure that is compared: where it stands in a summary, and what is good."""

    path: tuple[str, ...]
    higher_is_better: bool = False
    is_latency: bool = True


def latency(name: str, *columns: str) -> dict[str, Metric]:
    """The metrics of one entry of a summary's latencies."""
    short = name.removesuffix("_s")
    return {f"{short}_{column}": Metric(("latency", name, column)) for column in columns}


def throughput(name: str, *path: str) -> dict[str, Metric]:
    """A rate, of which more is better."""
    return {name: Metric(path, higher_is_better=True, is_latency=False)}


METRICS = {
    **throughput("requests_per_s", "throughput", "requests_per_s"),
    **throughput("output_tokens_per_s", "throughput", "output_tokens_per_s"),
    **throughput("good_per_s", "goodput", "good_per_s"),
    **latency("ttft_s", "mean", "p50", "p90", "p99"),
    **latency("tpot_s", "mean", "p50", "p99"),
    **latency("gaps_s", "mean", "p50", "p99"),
    **latency("e2e_s", "mean", "p50", "p99"),
}


class Compared(msgspec.Struct):
    """One metric of both files. `a` and `b` are medians over the runs, with their extremes."""

    metric: str
    a: float | None
    b: float | None
    a_range: tuple[float, float] | None
    b_range: tuple[float, float] | None
    ratio: float | None  # b / a
    interval: tuple[float, float] | None  # of the ratio, 95 %

    @property
    def significant(self) -> bool:
        """Whether chance alone is an unlikely reason for the difference."""
        return self.interval is not None and not self.interval[0] <= 1 <= self.interval[1]

    @property
    def better(self) -> bool:
        """Whether b is the better one, by chance or not."""
        higher = METRICS[self.metric].higher_is_better
        return self.ratio is not None and (self.ratio > 1) == higher and self.ratio != 1

    @property
    def regression(self) -> float:
        """The least percentage by which b is worse, as far as the interval tells; below 0: maybe
        none. Infinite where b has no figure and a has one."""
        if self.a is not None and self.b is None:
            return float("inf")
        if self.interval is None:
            return 0.0
        low, high = self.interval
        return (1 - high) * 100 if METRICS[self.metric].higher_is_better else (low - 1) * 100


def compare(
    a: Result, b: Result, seed: int = 0, metrics: Sequence[str] = tuple(METRICS)
) -> list[Compared]:
    """Those of `metrics` that at least one of the files has."""
    together = paired(a, b)
    compared = []
    for name in metrics:
        metric = METRICS[name]
        values = [median(each.summaries, *metric.path) for each in (a, b)]
        if values == [None, None]:
            continue
        ratio = values[1] / values[0] if values[0] and values[1] is not None else None
        interval = None
        if ratio is not None:
            rng = np.random.default_rng(seed)
            both = [
                [Sample.of(run, metric, objectives_of(each)) for run in each.runs]
                for each in (a, b)
            ]
            interval = interval_of(both[0], both[1], together, rng)
        ranges = [extremes(each, metric) for each in (a, b)]
        compared.append(Compared(name, *values, *ranges, ratio, interval))
    return compared


def objectives_of(found: Result) -> Objectives:
    """By which its requests were judged."""
    limits = found.summaries[0]["goodput"]["objectives"] if found.summaries else {}
    return Objectives(**limits)


def extremes(found: Result, metric: Metric) -> tuple[float, float] | None:
    """Lowest and highest of the runs, None for a single one."""
    values = [v for each in found.summaries if (v := pick(each, *metric.path)) is not None]
    return (min(values), max(values)) if len(values) > 1 else None


def paired(a: Result, b: Result) -> bool:
    """Whether run i of both sent the same requests."""

    def sent(run: Run) -> list[tuple[int, int]]:
        return sorted((outcome.session, outcome.turn) for outcome in run.outcomes)

    same = a.workload == b.workload and len(a.runs) == len(b.runs)
    return same and all(sent(x) == sent(y) for x, y in zip(a.runs, b.runs, strict=True))


class Sample(msgspec.Struct):
    """One run's values of a metric, and the block of neighbours to which each belongs."""

    values: np.ndarray  # ascending, for a percentile
    blocks: np.ndarray  # [len(values)]
    num_blocks: int
    quantile: float | None  # None: the mean

    @classmethod
    def of(cls, run: Run, metric: Metric, objectives: Objectives) -> Sample:
        """The values behind `metric` in `run`."""
        if metric.is_latency:
            return latencies_of(run, metric.path[1], metric.path[2])
        return cls(
            per_slice(run, metric.path[1], objectives), np.arange(NUM_SLICES), NUM_SLICES, None
        )


def latencies_of(run: Run, name: str, column: str) -> Sample:
    """Values in seconds, in blocks of n**(1/3) requests in the order of their sessions and turns,
    which two runs of one workload share."""
    outcomes = sorted(run.outcomes, key=lambda outcome: (outcome.session, outcome.turn))
    size = max(1, round(len(outcomes) ** (1 / 3)))
    values: list[float] = []
    blocks: list[int] = []
    for index, outcome in enumerate(outcomes):
        if not outcome.error:
            found = VALUES[name](outcome)
            values += found
            blocks += [index // size] * len(found)
    order = np.argsort(values, kind="stable")
    quantile = None if column == "mean" else float(column[1:]) / 100
    num_blocks = -(-len(outcomes) // size)
    return Sample(
        np.array(values, float)[order], np.array(blocks, int)[order], num_blocks, quantile
    )


def one_or_none(value: float | None) -> list[float]:
    """As a list."""
    return [] if value is None else [value]


VALUES: dict[str, Callable[[Outcome], list[float]]] = {
    "ttft_s": lambda outcome: one_or_none(outcome.ttft_s),
    "tpot_s": lambda outcome: one_or_none(outcome.tpot_s),
    "gaps_s": lambda outcome: outcome.gaps_s,
    "e2e_s": lambda outcome: [outcome.e2e_s],
}


def per_slice(run: Run, name: str, objectives: Objectives) -> np.ndarray:
    """[NUM_SLICES] per second: requests that ended in each slice of the wall time, good ones, or
    the output tokens that came in it. Their mean is the run's rate."""
    begin = min((outcome.intended_s for outcome in run.outcomes), default=0.0)
    edges = begin + np.linspace(0, run.wall_s or 1.0, NUM_SLICES + 1)
    times: list[float] = []
    weights: list[float] = []
    for outcome in run.outcomes:
        if outcome.error or (name == "good_per_s" and not objectives.met_by(outcome)):
            continue
        if name == "output_tokens_per_s" and outcome.chunk_s:
            times += outcome.chunk_s
            weights += [outcome.num_output_tokens / len(outcome.chunk_s)] * len(outcome.chunk_s)
        elif name != "output_tokens_per_s":
            times.append(outcome.end_s)
            weights.append(1.0)
    inside = np.clip(times, edges[0], edges[-1])
    return np.histogram(inside, edges, weights=weights)[0] / (edges[1] - edges[0])


def interval_of(
    a: Sequence[Sample], b: Sequence[Sample], together: bool, rng: np.random.Generator
) -> tuple[float, float] | None:
    """Bounds of the ratio of medians over runs, b / a; None if nothing can be drawn."""
    num_values = sum(sample.values.size for sample in (*a, *b))
    draws = int(np.clip(MAX_WORK // max(1, num_values), MIN_DRAWS, NUM_DRAWS))
    ratios = []
    for _ in range(draws):
        seed = int(rng.integers(2**63))
        first = drawn(a, np.random.default_rng(seed))
        second = drawn(b, np.random.default_rng(seed if together else seed + 1))
        if first and second is not None:
            ratios.append(second / first)
    if not ratios:
        return None
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def drawn(samples: Sequence[Sample], rng: np.random.Generator) -> float | None:
    """The median over as many runs, each made of blocks drawn from one of the real ones."""
    figures = []
    for index in rng.integers(len(samples), size=len(samples)) if samples else ():
        sample = samples[index]
        picks = rng.integers(sample.num_blocks, size=sample.num_blocks)
        weights = np.bincount(picks, minlength=sample.num_blocks)[sample.blocks]
        if (figure := weighted(sample.values, weights, sample.quantile)) is not None:
            figures.append(figure)
    return float(np.median(figures)) if figures else None


def weighted(values: np.ndarray, weights: np.ndarray, quantile: float | None) -> float | None:
    """Mean, or percentile with linear interpolation, of ascending `values` of which each stands
    `weights` times; None if none does."""
    upto = np.cumsum(weights)
    if not values.size or not upto[-1]:
        return None
    if quantile is None:
        return float(values @ weights / upto[-1])
    place = quantile * (upto[-1] - 1)
    low, high = np.searchsorted(upto, [np.floor(place), np.ceil(place)], side="right")
    return float(values[low] + (values[high] - values[low]) * (place - np.floor(place)))


def warnings(a: Result, b: Result) -> list[str]:
    """Reasons to doubt the comparison."""
    found = []
    for what in ("workload", "machine"):
        old, new = getattr(a, what), getattr(b, what)
        ignored = ("date", "commit", "dirty") if what == "machine" else ()
        keys = [key for key in {**old, **new} if key not in ignored]
        apart = [f"{k}: {old.get(k)} / {new.get(k)}" for k in keys if old.get(k) != new.get(k)]
        if apart:
            found.append(f"the {what}s differ ({'; '.join(apart)})")
    if objectives_of(a) != objectives_of(b):
        found.append("the objectives differ, so good_per_s means two things")
    for name, each in (("a", a), ("b", b)):
        if not all(figures["harness_ok"] for figures in each.summaries):
            found.append(f"{name}: the harness did not keep up; its figures may be its own")
        failed = sum(figures["requests"]["failed"] for figures in each.summaries)
        if failed:
            sent = sum(figures["requests"]["sent"] for figures in each.summaries)
            found.append(f"{name}: {failed} of {sent} requests failed; latencies leave them out")
    if min(len(a.runs), len(b.runs)) < 2:
        found.append("a single run: intervals do not know how much runs differ (--repeat)")
    return found


def table(compared: Sequence[Compared], doubts: Sequence[str]) -> str:
    """The text for the terminal."""
    shown = Table(box=SIMPLE, pad_edge=False)
    shown.add_column("metric (latencies in ms)")
    for column in ("a", "min..max", "b", "min..max", "b/a", "95 % interval"):
        shown.add_column(column, justify="right")
    shown.add_column("")
    for row in compared:
        style = ms if METRICS[row.metric].is_latency else number
        between = "-" if row.interval is None else "{:.3f}..{:.3f}".format(*row.interval)
        ranges = [
            f"{style(each[0])}..{style(each[1])}" if each else ""
            for each in (row.a_range, row.b_range)
        ]
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        verdict = ("better" if row.better else "WORSE") if row.significant else ""
        cells = (style(row.a), ranges[0], style(row.b), ranges[1], ratio, between, verdict)
        shown.add_row(row.metric, *cells)
    console = Console(width=120, highlight=False)
    with console.capture() as text:
        console.print(shown)
        for doubt in doubts:
            console.print(f"warning: {doubt}", markup=False)
    return text.get()


def limit(text: str) -> tuple[str, float]:
    """`metric=PERCENT` of --max-regression."""
    name, _, value = text.partition("=")
    if name not in METRICS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(METRICS)}")
    try:
        percent = float(value)
    except ValueError:
        percent = -1.0
    if not percent >= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: write {name}=5 for 5 %")
    return name, percent


def parser() -> argparse.ArgumentParser:
    """The command line's."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.load compare",
        description="How much better or worse is b, and is that more than chance?",
    )
    found.add_argument("a", help="result file, the base")
    found.add_argument("b", help="result file")
    found.add_argument("--json", action="store_true", help="print JSON instead of a table")
    found.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    found.add_argument(
        "--max-regression",
        type=limit,
        action="append",
        default=[],
        metavar="METRIC=PERCENT",
        help="exit with 1 if b is surely worse by more than this; may be given several times",
    )
    return found


def main(argv: Sequence[str]) -> int:
    """0: no regression beyond the limits, 1: one.

    Raises ValueError if a file is not a result.
    """
    args = parser().parse_args(argv)
    a, b = result.read(args.a), result.read(args.b)
    compared = compare(a, b, args.seed)
    doubts = warnings(a, b)
    by_name = {row.metric: row for row in compared}
    failures = []
    for name, percent in args.max_regression:
        if name not in by_name:
            failures.append(f"{name}: neither file has a figure")
        elif (worse := by_name[name].regression) > percent:
            failures.append(f"{name}: worse by at least {worse:.1f} %, allowed are {percent:g} %")
    if args.json:
        print(json.dumps(as_json(compared, doubts, failures), indent=2))
    else:
        print(table(compared, doubts), end="")
        for failure in failures:
            print(f"REGRESSION {failure}")
    return 1 if failures else 0


def as_json(
    compared: Sequence[Compared], doubts: Sequence[str], failures: Sequence[str]
) -> dict[str, Any]:
    """What --json prints."""
    rows = [
        msgspec.to_builtins(row) | {"significant": row.significant, "better": row.better}
        for row in compared
    ]
    return {"metrics": rows, "warnings": list(doubts), "regressions": list(failures)}
