"""Metrics in Prometheus' text form and in OpenMetrics', several times as fast as prometheus_client.

A page is written on the router's loop, which it holds up, and an endpoint picker may ask for one
twenty times a second. What a series is called does not change, so that is made once. OpenMetrics
by prometheus_client 0.26 would also have `vllm_` for `vllm:` in samples alone.
"""

from functools import lru_cache

from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString  # pyright: ignore[reportUnknownVariableType]

NUM_SERIES = 8192  # a router has 650
EOF = "# EOF\n"  # of OpenMetrics


def form_of(accepted: str) -> str:
    """The content type of the form that a scraper's `Accept` asks for."""
    return OPENMETRICS if OPENMETRICS.partition(";")[0] in accepted else CONTENT_TYPE_LATEST


def rendered(registry: Collector, form: str = CONTENT_TYPE_LATEST) -> bytes:
    """Counters, gauges and histograms as `prometheus_client.generate_latest` writes them.

    OpenMetrics also has exemplars, which no other form has; samples of its counters have `_total`,
    but their families do not.
    """
    parts: list[str] = []
    is_open = form == OPENMETRICS
    for family in registry.collect():
        name = family.name if is_open or family.type != "counter" else f"{family.name}_total"
        about = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
        parts.append(f"# HELP {name} {about}\n# TYPE {name} {family.type}\n")
        for sample in family.samples:
            labels = _labels(tuple(sample.labels.items()))
            parts.append(f"{sample.name}{labels} {floatToGoString(sample.value)}")
            if is_open and (last := sample.exemplar) is not None:
                trace_id, value = last.labels["trace_id"], floatToGoString(last.value)
                parts.append(f' # {{trace_id="{trace_id}"}} {value} {last.timestamp:.3f}')
            parts.append("\n")
    return "".join([*parts, EOF] if is_open else parts).encode()


@lru_cache(NUM_SERIES)
def _labels(labels: tuple[tuple[str, str], ...]) -> str:
    """In the form of a sample's line."""
    pairs: list[str] = []
    for key, value in sorted(labels):
        escaped = value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
        pairs.append(f'{key}="{escaped}"')
    return f"{{{','.join(pairs)}}}"
