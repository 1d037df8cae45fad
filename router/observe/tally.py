"""Histograms that cost little to observe: plain counts, made into Prometheus' form when scraped.

A step brings a chunk of every stream, and all are observed. prometheus_client's own histogram takes
some 3 µs of locks and method calls for a chunk, as much as all else before it is written.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString  # pyright: ignore[reportUnknownVariableType]

from router.observe.board import Spread

Bucket = tuple[str, float] | tuple[str, float, Exemplar]


class Tally:
    """One series with the upper `bounds`, without infinity. One thread observes, any scrapes."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0  # of all values
        # By bucket the last traced value: its trace id, itself, when it was.
        self._exemplars: list[tuple[str, float, float] | None] = [None] * len(self._counts)

    def observe(self, value: float, trace_id: str = "", number: int = 1) -> None:
        """Count one value `number` times; trace_id: of the trace in which it was measured."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += number
        self.sum += value * number
        if trace_id:
            self._exemplars[bucket] = trace_id, value, time.time()

    def observe_since(self, now: float, times: Sequence[float]) -> None:
        """Count how long ago they were. Where most are equal, one costs nearly nothing."""
        same = len(times) == times.count(times[0])
        for at, number in [(times[0], len(times))] if same else Counter(times).items():
            value = now - at
            self._counts[bisect_left(self._bounds, value)] += number
            self.sum += value * number

    def spread(self) -> Spread:
        """The buckets."""
        return Spread(tuple(self._bounds), tuple(self._counts), self.sum)

    def exemplified(self) -> Iterator[Bucket]:
        """The buckets as `buckets` has them, and exemplars where there are any."""
        for bucket, last in zip(buckets(self.spread()), self._exemplars, strict=True):
            if last is None:
                yield bucket
            else:
                trace_id, *rest = last
                yield *bucket, Exemplar({"trace_id": trace_id}, *rest)


def buckets(spread: Spread) -> list[tuple[str, float]]:
    """As Prometheus has them: (upper bound, values up to it)."""
    names = [floatToGoString(bound) for bound in (*spread.bounds, float("inf"))]
    return list(zip(names, accumulate(spread.counts), strict=True))


def total(counter: Collector) -> float:
    """The sum of a counter's series."""
    return sum(sample.value for family in counter.collect() for sample in family.samples)


class Tallies(Collector):
    """A family of series that differ in labels; made as prometheus_client's Histogram is."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._about = name, text
        self._labels, self._buckets = labels, buckets
        self._series: dict[tuple[str, ...], Tally] = {}
        registry.register(self)

    def labels(self, *values: str) -> Tally:
        """The series with these labels; to be kept, not looked up for a value."""
        return self._series.setdefault(values, Tally(self._buckets))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """For prometheus_client."""
        family = HistogramMetricFamily(*self._about, labels=self._labels)
        for values, tally in self._series.items():
            family.add_metric(values, list(tally.exemplified()), tally.sum)
        yield family
