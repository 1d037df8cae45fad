"""What the product exports, from the registries of its own metric classes."""

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
    "role": ROLES,
    "worker_role": ROLES,
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


def breaches(query: str, jobs: set[str]) -> Iterator[str]:
    """What a query (PromQL) asks for that nobody exports, or of jobs that nobody scrapes."""
    names, asked = exported(), set(NAME.findall(query))
    if not asked:
        yield f"asks for nothing of ours: {query}"
    for name in asked - set(names):
        yield f"metric {name} is exported by nobody: {query}"
    for name, inside in MATCHERS.findall(query):
        for label, value in MATCHER.findall(inside):
            if label not in names.get(name, frozenset()) | OF_TARGETS:
                yield f"label {label} of {name}: {query}"
            known = jobs if label == "job" else KNOWN.get(label)
            values = [value] if label == "job" else value.split("|")
            if known is not None and "$" not in value and not known.issuperset(values):
                yield f"{label} {value}, known are {sorted(known)}: {query}"
    known = OF_TARGETS.union(*(names.get(name, frozenset()) for name in asked))
    for label in set(grouped(query)) - known:
        yield f"grouped by {label}: {query}"


def grouped(query: str) -> Iterator[str]:
    for inside in GROUPED.findall(query):
        yield from (label.strip() for label in inside.split(","))


def of(document: dict[str, Any]) -> Iterator[str]:
    """The queries of alerts, dashboards, a HorizontalPodAutoscaler or a ScaledObject."""
    spec = document.get("spec") or {}
    match document["kind"]:
        case "ConfigMap":
            for name, text in document["data"].items():
                if name.endswith(".json"):
                    board = json.loads(text)
                    yield from (query.text for query in queries(board))
                    for variable in board["templating"]["list"]:
                        if variable["type"] == "query":
                            yield variable["query"]["query"].removeprefix("label_values(")
        case "PrometheusRule":
            yield from (rule["expr"] for group in spec["groups"] for rule in group["rules"])
        case "ScaledObject":
            yield from (trigger["metadata"]["query"] for trigger in spec["triggers"])
        case "HorizontalPodAutoscaler":
            yield from (metric["pods"]["metric"]["name"] for metric in spec["metrics"])
        case _:
            pass
