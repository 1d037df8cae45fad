"""The alerts fire, are quiet and resolve when they should; each has its section of the runbook."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import leaves
from helm import dashboards
from helm.generate import alerts
from router.errors import NO_FAULT
from router.observe.metrics import RouterMetrics
from tests.helm.alert_cases import CASES, SILENT
from tests.helm.charts import (
    CHART,
    NAMESPACE,
    RELEASE,
    described,
    documents,
    parsed,
    template,
    tool,
)
from tests.helm.dashboards import boards

Rules = dict[str, dict[str, Any]]  # name -> rule

NAMES = list(dict.fromkeys(case.alert for case in CASES))
NAMES_OF_COMPOSE = [name for name in NAMES if name != "KvlaneOtherTransport"]  # it asks for none
RUNBOOK = "https://docs.example/runbook"
FILLED = {"PREFILL": 1, "TRANSPORT": "mooncake/rdma", "RUNBOOK": RUNBOOK}
MONITORING = (
    "monitoring: {serviceMonitor: &on {enabled: true}, podMonitor: *on, prometheusRule: *on}"
)


def by_name(spec: dict[str, Any]) -> Rules:
    (group,) = spec["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def rules_of_chart(objects: list[dict[str, Any]]) -> Rules:
    (ours,) = (each for each in objects if each["kind"] == "PrometheusRule")
    return by_name(ours["spec"])


RULES = by_name(yaml.safe_load(alerts(**FILLED)))  # of a cluster that is to use RDMA


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
    known |= set(described())
    text = (CHART / "RUNBOOK.md").read_text() + json.dumps(boards())
    sections = "|".join({name.partition(".")[0] for name in known})
    named = set(re.findall(rf"(?<![\w./])(?:{sections})(?:\.[a-zA-Z_]+)+(?!\w|\.\*)", text))
    assert len(named) > 10
    parts = {name.rpartition(".")[0] for name in known}
    assert named <= known | parts


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
    rules = list(rules_of_chart(documents("monitoring")).values())
    chart = {"groups": [{"name": "chart", "rules": rules}]}
    files = ("chart", yaml.safe_dump(chart), NAMES), ("compose", alerts(), NAMES_OF_COMPOSE)
    for name, text, names in files:
        assert re.findall(r"alert: (\w+)", text) == names
        assert not re.search(r"\$[A-Z]", text)
        (tmp_path / name).write_text(text)
        done = tool("promtool", "check", "rules", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        assert f"{len(names)} rules found" in done.stdout


def test_alerts_link_to_a_runbook_only_where_its_address_is_given() -> None:
    for name, rule in rules_of_chart(documents("monitoring")).items():
        assert rule["annotations"]["runbook_url"] == f"{RUNBOOK}#{name.lower()}"
    assert "runbook_url" not in alerts()
    without = rules_of_chart(parsed(template(values=MONITORING).stdout))
    assert list(without) == NAMES
    for rule in without.values():
        assert rule["annotations"].keys() == {"summary", "description"}


@pytest.mark.parametrize(
    ("transport", "asked"),
    [
        ("{kind: tcp}", "sockets/tcp"), ("{name: mooncake, kind: tcp}", "mooncake/tcp"),
        ("{kind: rdma}", "mooncake/rdma"), ("{name: mixed}", ".*"), ("{}", ".*"),
    ],
)  # fmt: skip
def test_the_transport_that_is_asked_for_is_the_one_that_is_chosen(transport, asked) -> None:
    done = template(values=f"{MONITORING}\nconfig: {{transport: {transport}}}")
    rule = rules_of_chart(parsed(done.stdout))["KvlaneOtherTransport"]
    assert f'transport!~"{asked}"' in rule["expr"]


def test_alerts_of_two_releases_are_told_apart() -> None:
    for rule in RULES.values():
        assert rule["labels"].keys() == {"severity", "release"}
    for rule in rules_of_chart(documents("monitoring")).values():
        own = {"namespace": NAMESPACE, "release": f"{RELEASE}-kvlane"}
        assert rule["labels"] == {"severity": rule["labels"]["severity"]} | own


def promtool_test(
    alert: str, series: dict[str, str], expected: dict[int, list[Any]]
) -> dict[str, Any]:
    """One test of promtool: minute -> alerts of this name."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"alertname": alert, "eval_time": f"{minute}m", "exp_alerts": firing}
            for minute, firing in expected.items()
        ],
    }


def test_alerts_fire_and_resolve(tmp_path: Path) -> None:
    tests = [promtool_test(name, series, {59: []}) for name, series in SILENT.items()]
    for case in CASES:
        rule = RULES[case.alert]
        notes = rule["annotations"] | {"summary": f"kvlane: {case.summary}"}
        fires = {"exp_labels": rule["labels"] | case.labels, "exp_annotations": notes}
        expected = dict(zip(case.minutes, ([], [fires], []), strict=True))
        tests.append(promtool_test(case.alert, case.series, expected))
    asked = {"rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "alerts.yaml").write_text(alerts(**FILLED))
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(asked, width=1000))
    done = tool("promtool", "test", "rules", str(tmp_path / "tests.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
