"""The dashboards ask for what the product exports, say what to do, and have their places."""

import itertools
import json
import re
from collections import Counter

import pytest

from helm.dashboards import OBJECTIVES
from router.observe.metrics import ITL_BUCKETS, TTFT_BUCKETS
from tests.helm import metrics
from tests.helm.charts import documents
from tests.helm.dashboards import VARIABLE, boards, filled, panels, queries, variables

BOARDS = boards()
QUERIES = [query for board in BOARDS.values() for query in queries(board)]
LABEL = re.compile(r"\{\{(\w+)\}\}")


def test_legends_and_workers_of_two_releases_are_told_apart() -> None:
    for query in QUERIES:
        labels = set(metrics.grouped(query.text))
        assert labels >= set(LABEL.findall(query.legend)), query
        assert "worker" not in labels or labels >= {"namespace", "job"}, query.text


@pytest.mark.parametrize("name", BOARDS)
def test_nothing_of_one_installation_is_in_it(name: str) -> None:
    board = BOARDS[name]
    given = variables(board)
    used = set[str]()
    for query in queries(board):
        assert re.search(r'namespace=~"\$namespace",job=~"\$job",model=~"\$model"', query.text)
        assert "$" not in filled(query.text + query.legend, given)
        used |= {one or other for one, other in VARIABLE.findall(query.text)}
    own = {variable["name"] for variable in board["templating"]["list"]}
    assert own - used == {"datasource"}
    sources = re.findall(r'"type": "prometheus", "uid": "([^"]*)"', json.dumps(board))
    assert set(sources) == {"${datasource}"}
    (link,) = board["links"]
    assert set(link["tags"]) <= set(board["tags"])


@pytest.mark.parametrize("name", BOARDS)
def test_panels_say_what_to_do_and_do_not_overlap(name: str) -> None:
    board = BOARDS[name]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in panels(board):
        assert len(panel["description"]) > 30, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert len(set(legends)) == len(legends)
    cells = Counter[tuple[int, int]]()
    for at in (panel["gridPos"] for panel in board["panels"]):
        columns, rows = range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])
        cells.update(itertools.product(columns, rows))
    assert max(cells.values()) == 1, cells.most_common(1)


@pytest.mark.parametrize(("name", "bounds"), [("ttft", TTFT_BUCKETS), ("itl", ITL_BUCKETS)])
def test_objectives_are_bounds_of_buckets(name: str, bounds: tuple[float, ...]) -> None:
    _, values, chosen = OBJECTIVES[name]
    assert chosen in values.split(",")
    assert set(values.split(",")) <= {str(float(bound)) for bound in bounds}


def test_the_chart_has_all_of_them() -> None:
    assert len({board["uid"] for board in BOARDS.values()}) == len(BOARDS) == 3
    (config_map,) = (
        document for document in documents("monitoring")
        if "grafana_dashboard" in document["metadata"].get("labels", {})
    )  # fmt: skip
    shown = {name: json.loads(text) for name, text in config_map["data"].items()}
    # Ours in a folder that other charts' files share.
    assert shown == {f"kvlane-{name}.json": board for name, board in BOARDS.items()}
