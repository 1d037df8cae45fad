"""Metrics of a running cluster, summed."""

from collections import defaultdict

import httpx
from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, str, str], float]


def scrape(base_url: str) -> Samples:
    """(sample name, role, transport) -> sum over all workers that the router lists."""
    found: Samples = defaultdict(float)
    with httpx.Client() as client:
        groups = client.get(f"{base_url}/metrics/targets").json()
        targets = [target for group in groups for target in group["targets"]]
        texts = [client.get(f"http://{target}/metrics").text for target in targets]
    for text in texts:
        for family in text_string_to_metric_families(text):
            if family.name.startswith("vllm:"):
                continue
            assert family.name.startswith("kvlane_")
            for sample in family.samples:
                key = sample.name, sample.labels["role"], sample.labels.get("transport", "")
                found[key] += sample.value
    return found
