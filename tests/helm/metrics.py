"""What the product exports, from the registries of its own metric classes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from router.errors import STATUS
from router.observe.metrics import RETRY_CAUSES, RouterMetrics
from tests.helm.dashboards import queries
from worker.observe.metrics import PLACES, WorkerMetrics

NAME = re.compile(r"\bkvlane_\w+")
MATCHERS = re.compile(r"(kvlane_\w+)\{([^}]*)\}")
MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"([^\"]*)\"")
GROUPED = re.compile(r"\b(?:by|without)\s*\(([^)]*)\)")
OF_TARGETS = {"namespace", "job", "pod", "service", "container", "endpoint", "instance"}
ROLES = {"prefill", "decode", "router"}
# Values of labels, of which queries may name no others.
KNOWN = {
    "where": set(PLACES),
    "cause": set(RETRY_CAUSES),
    "outcome": {"stop", "length", "abort", *STATUS},
}
COMMON = frozenset({"model", "role", "worker"})
SUFFIXES = {
    "counter": ("_total",),
    "reading": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_count", "_sum"),
}


@cache
def exported() -> dict[str, frozenset[str]]:
    """Name of a series -> its labels, without those that Prometheus adds."""
    found: dict[str, frozenset[str]] = {}
    for family in (*RouterMetrics.table().values(), *WorkerMetrics.table().values()):
        for suffix in SUFFIXES[family.kind]:
            name = f"kvlane_{family.name}{suffix}"
            le = ["le"] if suffix == "_bucket" else []
            found[name] = found.get(name, COMMON).union(family.labels, le)
    return found


def breaches(query: str, jobs: set[str], names: dict[str, frozenset[str]]) -> Iterator[str]:
    """What a query asks for that is exported by nobody.

    Args:
        query: PromQL.
        jobs: that Prometheus scrapes.
        names: series -> labels.
    """
    asked = set(NAME.findall(query))
    if not asked:
        yield f"asks for nothing of ours: {query}"
    for name in asked - set(names):
        yield f"metric {name} is exported by nobody: {query}"
    for name, inside in MATCHERS.findall(query):
        for label, value in MATCHER.findall(inside):
            if label not in names.get(name, frozenset()) | OF_TARGETS:
                yield f"label {label} of {name}: {query}"
            if "$" in value:  # a variable of Grafana
                continue
            if label == "job" and value not in jobs:
                yield f"job {value} is scraped by nobody, only {sorted(jobs)}: {query}"
            if label in ("role", "worker_role") and not ROLES.issuperset(value.split("|")):
                yield f"{label} {value}: {query}"
            if label in KNOWN and not KNOWN[label].issuperset(value.split("|")):
                yield f"{label} {value} is said by nobody: {query}"
    known = OF_TARGETS.union(*(names.get(name, frozenset()) for name in asked))
    for inside in GROUPED.findall(query):
        for label in (each.strip() for each in inside.split(",")):
            if label not in known:
                yield f"grouped by {label}: {query}"


def of(document: dict[str, Any]) -> Iterator[str]:
    """The queries of alerts, dashboards, a HorizontalPodAutoscaler or a ScaledObject."""
    spec = document.get("spec") or {}
    if document["kind"] == "ConfigMap":
        boards = {name: text for name, text in document["data"].items() if name.endswith(".json")}
        yield from (each.text for text in boards.values() for each in queries(json.loads(text)))
    if document["kind"] == "PrometheusRule":
        yield from (rule["expr"] for group in spec["groups"] for rule in group["rules"])
    elif document["kind"] == "ScaledObject":
        yield from (each["metadata"]["query"] for each in spec["triggers"])
    elif document["kind"] == "HorizontalPodAutoscaler":
        yield from (each["pods"]["metric"]["name"] for each in spec["metrics"])
