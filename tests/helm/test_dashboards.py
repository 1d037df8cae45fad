"""The dashboards ask for what the product exports, say what to do, and have their places."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from helm.dashboards import OBJECTIVES
from router.observe.metrics import ITL_BUCKETS, TTFT_BUCKETS
from tests.helm import metrics
from tests.helm.charts import documents
from tests.helm.dashboards import boards, filled, panels, queries, variables

BOARDS = boards()
LABEL = re.compile(r"\{\{(\w+)\}\}")


@pytest.mark.parametrize("name", BOARDS)
def test_every_query_asks_for_what_is_exported(name: str) -> None:
    for query in queries(BOARDS[name]):
        assert list(metrics.breaches(query.text, set(), metrics.exported())) == []
        grouped = {each.strip() for inside in metrics.GROUPED.findall(query.text)
                   for each in inside.split(",")}  # fmt: skip
        assert grouped >= set(LABEL.findall(query.legend)), query
    for variable in BOARDS[name]["templating"]["list"]:
        if variable["type"] == "query":
            text = variable["query"]["query"].removeprefix("label_values(")
            assert list(metrics.breaches(text, set(), metrics.exported())) == []


def test_workers_of_two_releases_are_told_apart() -> None:
    for query in itertools.chain(*map(queries, BOARDS.values())):
        for inside in metrics.GROUPED.findall(query.text):
            names = {each.strip() for each in inside.split(",")}
            assert "worker" not in names or names >= {"namespace", "job"}, query.text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("kvlane_kv_pulls_total", "kvlane_pulls_total"),
        ("kvlane_kv_pages{", "kvlane_pages{"),
        ('role="decode"', 'role="decoder"'),
        ("worker_role=", "role_of_worker="),
        ("by (stage)", "by (phase)"),
    ],
)
def test_a_name_that_is_wrong_is_noticed(old: str, new: str) -> None:
    texts = [each.text for board in BOARDS.values() for each in queries(board)]
    wrong = [text.replace(old, new) for text in texts if old in text]
    assert wrong
    assert all(list(metrics.breaches(text, set(), metrics.exported())) for text in wrong)


@pytest.mark.parametrize("name", BOARDS)
def test_nothing_of_one_installation_is_in_it(name: str) -> None:
    board = BOARDS[name]
    given = variables(board)
    used = set[str]()
    for query in queries(board):
        assert re.search(r'namespace=~"\$namespace",job=~"\$job",model=~"\$model"', query.text)
        assert "$" not in filled(query.text + query.legend, given)
        used |= {one or other for one, other in re.findall(r"\$(?:\{(\w+)\}|(\w+))", query.text)}
    own = {each["name"] for each in board["templating"]["list"]}
    assert own - used == {"datasource"}
    sources = re.findall(r'"type": "prometheus", "uid": "([^"]*)"', json.dumps(board))
    assert set(sources) == {"${datasource}"}


def test_dashboards_are_told_apart_and_link_to_one_another() -> None:
    assert len({board["uid"] for board in BOARDS.values()}) == len(BOARDS) == 3
    for board in BOARDS.values():
        (link,) = board["links"]
        assert set(link["tags"]) <= set(board["tags"])


@pytest.mark.parametrize("name", BOARDS)
def test_panels_say_what_to_do_and_do_not_overlap(name: str) -> None:
    board = BOARDS[name]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels(board):
        assert len(panel["description"]) > 30, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert len(set(legends)) == len(legends)
    for one, other in itertools.combinations(board["panels"], 2):
        assert not overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    """Whether two places share a cell."""
    return all(
        one[at] < other[at] + other[size] and other[at] < one[at] + one[size]
        for at, size in (("x", "w"), ("y", "h"))
    )


@pytest.mark.parametrize(("name", "bounds"), [("ttft", TTFT_BUCKETS), ("itl", ITL_BUCKETS)])
def test_objectives_are_bounds_of_buckets(name: str, bounds: tuple[float, ...]) -> None:
    _, values, chosen = OBJECTIVES[name]
    assert chosen in values.split(",")
    assert {each for each in values.split(",")} <= {str(float(bound)) for bound in bounds}


def test_the_chart_has_all_of_them() -> None:
    found: list[Any] = [
        each for each in documents("monitoring")
        if "grafana_dashboard" in each["metadata"].get("labels", {})
    ]  # fmt: skip
    (config_map,) = found
    shown = {name: json.loads(text) for name, text in config_map["data"].items()}
    # Ours in a folder that other charts' files share.
    assert shown == {f"kvlane-{name}.json": board for name, board in BOARDS.items()}
