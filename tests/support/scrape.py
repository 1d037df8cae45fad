"""Metrics of a running cluster, summed."""

from __future__ import annotations

from collections import defaultdict

import httpx
from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, str, str], float]


def scrape(base_url: str) -> Samples:
    """(sample name, role, transport) -> sum over all workers that the router lists."""
    found: Samples = defaultdict(float)
    for group in httpx.get(f"{base_url}/metrics/targets").json():
        for target in group["targets"]:
            text = httpx.get(f"http://{target}/metrics").text
            for family in text_string_to_metric_families(text):
                assert family.name.startswith("kvlane_")
                for sample in family.samples:
                    key = sample.name, sample.labels["role"], sample.labels.get("transport", "")
                    found[key] += sample.value
    return found
