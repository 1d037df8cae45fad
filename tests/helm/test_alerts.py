"""The alerts fire, are quiet and resolve when they should; each has its section of the runbook."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import leaves
from helm import dashboards
from helm.generate import COMPOSE, alerts, rows
from router.errors import NO_FAULT
from router.observe.metrics import RouterMetrics
from tests.helm import metrics
from tests.helm.alert_cases import CASES, SILENT, Case
from tests.helm.charts import (
    CHART,
    HERE,
    NAMESPACE,
    RELEASE,
    REPOSITORY,
    TOOLS,
    documents,
    template,
)
from tests.helm.dashboards import boards
from tests.support.patience import HANG_S

NAMES = list(dict.fromkeys(each.alert for each in CASES))
NAMES_OF_COMPOSE = [name for name in NAMES if name != "KvlaneOtherTransport"]  # it asks for none
RUNBOOK = "https://docs.example/runbook"
FILLED = {"PREFILL": 1, "TRANSPORT": "mooncake/rdma", "RUNBOOK": RUNBOOK}


def rules() -> dict[str, dict[str, Any]]:
    """Name -> rule of such a file as Compose's, for a cluster that is to use RDMA."""
    (group,) = yaml.safe_load(alerts(**FILLED))["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


RULES = rules()


def rules_of_chart() -> dict[str, dict[str, Any]]:
    """Name -> rule of the chart's PrometheusRule."""
    return rules_among(documents("monitoring"))


def rules_among(objects: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Name -> rule of the PrometheusRule."""
    (ours,) = (each for each in objects if each["kind"] == "PrometheusRule")
    return {rule["alert"]: rule for rule in ours["spec"]["groups"][0]["rules"]}


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The one that tests/helm/install fetches; it takes seconds, so only where that has run."""
    if not (TOOLS / "promtool").exists():
        pytest.skip("no promtool in .tools/helm; run tests/helm/install")
    return subprocess.run(
        [str(TOOLS / "promtool"), *arguments],
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip


def test_every_alert_has_cases_and_a_section_of_the_runbook() -> None:
    assert list(RULES) == NAMES
    text = (CHART / "RUNBOOK.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert list(sections) == NAMES
    for name, rule in RULES.items():
        notes = rule["annotations"]
        assert notes["runbook_url"] == f"{RUNBOOK}#{name.lower()}"
        assert notes.keys() == {"summary", "description", "runbook_url"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        for part in ("**Means.**", "**Look at.**", "**Do.**"):
            assert sections[name].count(part) == 1, (name, part)


def test_settings_that_runbook_and_dashboards_name_exist() -> None:
    known = {*leaves(), *(name.removeprefix("decode.") for name in leaves())}
    known |= {name for name, _, _ in rows()}
    text = (CHART / "RUNBOOK.md").read_text() + json.dumps(boards())
    sections = "|".join({name.partition(".")[0] for name in known})
    named = set(re.findall(rf"(?<![\w./])(?:{sections})(?:\.[a-zA-Z_]+)+(?!\w|\.\*)", text))
    assert len(named) > 10
    parts = {name.rpartition(".")[0] for name in known}
    assert named <= known | parts


@pytest.mark.parametrize("name", NAMES)
def test_queries_ask_for_what_is_exported(name: str) -> None:
    found = list(metrics.breaches(RULES[name]["expr"], {"kvlane"}, metrics.exported()))
    assert found == []


def test_errors_are_the_same_here_and_on_the_dashboard_of_the_router() -> None:
    assert frozenset(dashboards.fine().split("|")) == NO_FAULT


def test_what_rises_once_is_there_before() -> None:
    page = RouterMetrics("tiny", "router-0").render().decode()
    for label, value in re.findall(
        r'(cause|outcome)=~?"([^"]+)"', RULES["KvlaneWorkerLost"]["expr"]
    ):
        for each in value.split("|"):
            assert re.search(rf'^kvlane_\w+{{.*{label}="{each}".* 0\.0$', page, re.MULTILINE)


def test_rules_of_chart_and_compose_are_rules(tmp_path: Path) -> None:
    chart = {"groups": [{"name": "chart", "rules": list(rules_of_chart().values())}]}
    files = ("chart", yaml.safe_dump(chart), NAMES), ("compose", alerts(), NAMES_OF_COMPOSE)
    for name, text, names in files:
        assert re.findall(r"alert: (\w+)", text) == names
        assert not re.search(r"\$[A-Z]", text)
        (tmp_path / name).write_text(text)
        done = promtool("check", "rules", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        assert f"{len(names)} rules found" in done.stdout


def test_alerts_link_to_a_runbook_only_where_its_address_is_given() -> None:
    for name, rule in rules_of_chart().items():
        assert rule["annotations"]["runbook_url"] == f"{RUNBOOK}#{name.lower()}"
    assert "runbook_url" not in alerts()
    values = HERE / "values" / "monitoring.yaml"
    done = template(4, values, "--set", "monitoring.prometheusRule.runbookURL=")
    without = rules_among(each for each in yaml.safe_load_all(done.stdout) if each)
    assert list(without) == NAMES
    for rule in without.values():
        assert rule["annotations"].keys() == {"summary", "description"}


def test_readmes_say_how_many_there_are() -> None:
    for path in (REPOSITORY / "README.md", CHART / "README.md"):
        assert f" {len(NAMES)} alerts" in path.read_text()
    assert f" {len(NAMES_OF_COMPOSE)} of its alerts" in (COMPOSE.parent / "README.md").read_text()


def test_alerts_of_two_releases_are_told_apart() -> None:
    for rule in RULES.values():
        assert rule["labels"].keys() == {"severity", "release"}
    for rule in rules_of_chart().values():
        own = {"namespace": NAMESPACE, "release": f"{RELEASE}-kvlane"}
        assert rule["labels"] == {"severity": rule["labels"]["severity"]} | own


def case_of(case: Case) -> dict[str, Any]:
    """One test of promtool."""
    rule = RULES[case.alert]
    notes = rule["annotations"] | {"summary": case.summary}
    fires = {"exp_labels": rule["labels"] | case.labels, "exp_annotations": notes}
    return promtool_test(
        case.alert, case.series, {case.quiet: [], case.fires: [fires], case.resolved: []}
    )


def promtool_test(
    alert: str, series: dict[str, str], expected: dict[int, list[Any]]
) -> dict[str, Any]:
    """One test of promtool: minute -> alerts of this name."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"alertname": alert, "eval_time": f"{minute}m", "exp_alerts": found}
            for minute, found in expected.items()
        ],
    }


def test_alerts_fire_and_resolve(tmp_path: Path) -> None:
    (tmp_path / "alerts.yaml").write_text(alerts(**FILLED))
    silent = [promtool_test(name, series, {59: []}) for name, series in SILENT.items()]
    tests = {
        "rule_files": ["alerts.yaml"],
        "evaluation_interval": "1m",
        "tests": [*map(case_of, CASES), *silent],
    }
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests, width=1000))
    done = promtool("test", "rules", str(tmp_path / "tests.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
