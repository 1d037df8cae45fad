"""Metrics in Prometheus' text form, written several times as fast as by prometheus_client.

A page is written on the router's loop, which it holds up, and an endpoint picker may ask for one
twenty times a second. What a series is called does not change, so that is made once.
"""

from __future__ import annotations

from functools import lru_cache

from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString  # pyright: ignore[reportUnknownVariableType]

NUM_SERIES = 8192  # a router has 650


def text(registry: Collector) -> bytes:
    """What `prometheus_client.generate_latest` makes of counters, gauges and histograms."""
    parts: list[str] = []
    for family in registry.collect():
        name = family.name + "_total" if family.type == "counter" else family.name
        about = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
        parts.append(f"# HELP {name} {about}\n# TYPE {name} {family.type}\n")
        for sample in family.samples:
            series = _series(sample.name, tuple(sample.labels.items()))
            parts.append(f"{series} {floatToGoString(sample.value)}\n")
    return "".join(parts).encode()


@lru_cache(NUM_SERIES)
def _series(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    """Name and labels, in the form of a sample's line."""
    return f"{name}{{{','.join(f'{key}={_quoted(value)}' for key, value in sorted(labels))}}}"


def _quoted(value: str) -> str:
    escaped = value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return f'"{escaped}"'
