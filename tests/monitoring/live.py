"""Every query of every dashboard and alert, asked of a Prometheus that scrapes a real cluster.

    tests/monitoring/install; python -m tests.monitoring.live          # as root, 5 minutes

Two routers, two prefill and two decode workers on this machine, under load, of which some are
killed and others stand still; clients go away, ask for nonsense, and more than there is room for.
A query that fails, has no data or nothing but NaN is an error. Of an alert's query, each side of
`or`, `and` and `unless` is asked without its comparison; which alerts fired is printed, too. What
only a GPU's worker has, the times of its graphs, is served beside, made up.
"""

import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import start_http_server

from helm.generate import COMPOSE, alerts
from tests.e2e.harness import Serve, enter_namespace_of
from tests.helm import dashboards
from tests.monitoring.load import ARGUMENTS, disturb, steady
from tests.support.prometheus import Prometheus, Series
from worker.observe.metrics import WorkerMetrics

OF_GRAPHS = ["kvlane_graph_bucket_seconds", "kvlane_graph_bucket_differs"]
SCRAPE_S = 1  # of a run of minutes; Compose's is for days
STEP_S, RATE_INTERVAL = 2.0, "15s"
# Asked for is what is not there, so that the alert about it fires.
FILLED = {"PREFILL": 2, "DECODE": 2, "TRANSPORT": "mooncake/rdma"}
COMPARISON = re.compile(r"\s*(?<![=!~<>])(?:[<>]=?|==)\s*[\d.]+")
SIDES = re.compile(r"\s+(?:or|unless|and on \(\))\s+")


def serve_graphs() -> str:
    metrics = WorkerMetrics(model="qwen3-8b", role="prefill", worker="prefill-h200")
    for tokens in (64, 512, 4096):
        metrics.bucket_seconds("prefill", str(tokens), "graph").set(tokens / 5e4)
        metrics.bucket_differs("prefill", str(tokens)).set(0)
    registry: Any = metrics.registry.restricted_registry(OF_GRAPHS)
    server, _ = start_http_server(0, "127.0.0.1", registry)
    return f"127.0.0.1:{server.server_port}"


def prometheus_of(root: Path, targets: list[str]) -> Prometheus:
    """A Prometheus that scrapes as deploy/compose/prometheus.yml says, and `targets` as well."""
    config = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())
    (job,), (name,) = config["scrape_configs"], config["rule_files"]
    for each in job["http_sd_configs"]:
        each["refresh_interval"] = "1s"
    job["static_configs"] = [{"targets": targets}]
    rules = re.sub(r"( for: )\d+m", rf"\g<1>{2 * SCRAPE_S}s", alerts(**FILLED))
    (root / name).write_text(rules)
    return Prometheus(root, [job], SCRAPE_S, (name,))


def sides(query: str) -> Iterator[str]:
    """Of an alert's query, without comparisons and `absent`."""
    for side in SIDES.split(query.replace(" or vector(0)", "")):
        yield re.sub(r"^min\(absent\((.*)\)\)$", r"\1", COMPARISON.sub("", side))


class Asked:
    """A Prometheus and the time of a run; collects what is wrong."""

    def __init__(self, prometheus: Prometheus, start: float, end: float) -> None:
        self.wrong: list[str] = []
        self.num = 0
        self._prometheus = prometheus
        self._start, self._end = start, end

    def __call__(self, what: str, query: str) -> list[Series]:
        self.num += 1
        try:
            found = self._prometheus.range(query, self._start, self._end, STEP_S)
        except ValueError as error:
            self.wrong.append(f"{what}: {error}: {query}")
            return []
        if not any(each.points for each in found):
            self.wrong.append(f"{what}: {'only NaN' if found else 'no data'}: {query}")
        return found

    def board(self, name: str, board: dict[str, Any]) -> None:
        """All panels of a dashboard, and its variables."""
        values = dashboards.variables(board) | {"__rate_interval": RATE_INTERVAL}
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                label, text = variable["name"], variable["query"]["query"]
                selector = re.fullmatch(r"label_values\((.*), \w+\)", text)
                assert selector
                found = self._prometheus.values(label, dashboards.filled(selector[1], values))
                if not found and label != "namespace":  # of Kubernetes
                    self.wrong.append(f"{name}: variable {label} has no values")
        for query in dashboards.queries(board):
            self(f"{name}, {query.panel['title']}", dashboards.filled(query.text, values))


def examine(prometheus: Prometheus, start: float, end: float) -> list[str]:
    """Ask everything; what is wrong."""
    asked = Asked(prometheus, start, end)
    for name, board in dashboards.boards().items():
        asked.board(name, board)
    num_of_panels = asked.num
    (group,) = yaml.safe_load(alerts(**FILLED))["groups"]
    for rule in group["rules"]:
        for side in sides(rule["expr"]):
            asked(rule["alert"], side)
    print(f"{num_of_panels} queries of panels, {asked.num - num_of_panels} of alerts")
    firing = asked("all alerts", 'ALERTS{alertstate="firing"}')
    fired = {each.labels["alertname"] for each in firing}
    for rule in group["rules"]:
        how = "fired" if rule["alert"] in fired else "has data without its comparison"
        print(f"  {rule['alert']}: {how}")
    return asked.wrong


def record(root: Path) -> tuple[Prometheus, float, float]:
    """A cluster, its load and its faults, as Prometheus has seen them; from when to when."""
    (root / "serve").mkdir()
    serve = Serve(root / "serve").start(*ARGUMENTS)
    try:
        serve.wait_ready()
        prometheus, start = prometheus_of(root, [serve_graphs()]), time.time()
        try:
            with steady(serve.url):
                disturb(serve)
                end = time.time()
        except BaseException:
            prometheus.end()
            raise
    finally:
        serve.end()
    return prometheus, start, end


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="kvl-mon-", dir="/tmp") as temporary:
        prometheus, start, end = record(Path(temporary))
        try:
            wrong = examine(prometheus, start, end)
        finally:
            prometheus.end()
    print(*wrong, f"{len(wrong)} wrong", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    enter_namespace_of("tests.monitoring.live")
    sys.exit(main())
