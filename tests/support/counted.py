"""What metrics stand at."""

from typing import Any


def value(metric: Any) -> float:
    """Of a counter or gauge of `prometheus_client`, its labels chosen."""
    (family,) = metric.collect()
    return family.samples[0].value
