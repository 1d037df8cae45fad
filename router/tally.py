"""Histograms that cost little to observe: plain counts, made into Prometheus' form when scraped.

A chunk of each stream is observed every step. prometheus_client's own histogram takes some 3 µs of
locks and method calls for each, as much as all else that a chunk needs before it is written.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString  # pyright: ignore[reportUnknownVariableType]


class Tally:
    """One series. To be observed by one thread; another one may scrape.

    Args:
        bounds: upper bounds of its buckets, without infinity.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_since(self, now: float, times: Sequence[float]) -> None:
        """Count how long ago each of them was. Where most are equal, one costs nearly nothing."""
        same = len(times) == times.count(times[0])
        for at, number in [(times[0], len(times))] if same else Counter(times).items():
            value = now - at
            self._counts[bisect_left(self._bounds, value)] += number
            self._sum += value * number

    def sample(self) -> tuple[list[tuple[str, float]], float]:
        """The buckets as (upper bound, values up to it), and the sum of all values."""
        names = [floatToGoString(bound) for bound in (*self._bounds, float("inf"))]
        return list(zip(names, accumulate(self._counts), strict=True)), self._sum


class Tallies(Collector):
    """A family of series that differ in labels.

    Args:
        name: of the family.
        text: what it counts.
        labels: names of the labels.
        bounds: upper bounds of the buckets, without infinity.
        registry: scrapes it.
    """

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._bounds = bounds
        self._series: dict[tuple[str, ...], Tally] = {}
        registry.register(self)

    def labels(self, *values: str) -> Tally:
        """The series with these labels; to be kept, not looked up for each value."""
        return self._series.setdefault(values, Tally(self._bounds))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """For prometheus_client."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, tally in self._series.items():
            buckets, total = tally.sample()
            family.add_metric(values, buckets, total)
        yield family
