"""Makes what is held twice: values.schema.json, the dashboards, and the alerts of Compose.

    python -m helm.generate           # after a change of the configuration or of their sources

The schema is schema.yaml, each object closed, with the project's own at `config`; dashboards are
those of dashboards/; the alerts are the chart's. A test compares all with what this would write.
"""

import json
import re
from pathlib import Path
from string import Template
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

import cluster.config
import worker.config
from cluster.config import Config
from helm import dashboards

HERE = Path(__file__).parent
CHART = HERE / "kvlane"
COMPOSE = HERE.parent / "deploy" / "compose"
ALERTS_OF_COMPOSE = """\
# The chart's alerts (helm/kvlane/files/alerts.yaml) for a Prometheus that scrapes one cluster as
# the job kvlane, written by `python -m helm.generate`. Change limits in a copy of yours: those of
# KvlaneWorkersMissing are the numbers of decode and prefill workers that you ask for.
# helm/kvlane/RUNBOOK.md has a section for each.
"""
ALL = ".*"  # every transport is the one that was asked for


def schema() -> dict[str, Any]:
    """The JSON schema of the chart's values."""
    own = yaml.safe_load((HERE / "schema.yaml").read_text())
    theirs = Config.model_json_schema()
    named = theirs.pop("$defs") | {"Config": theirs}
    for name, section in named.items():
        if takes_a_name(name):
            named[name] = {"anyOf": [{"type": "string"}, section]}
    own["properties"]["config"] = {"$ref": "#/$defs/Config"}
    closed = {name: close(each, own["$defs"]) for name, each in own["$defs"].items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **close({"properties": own["properties"]}, own["$defs"]),
        "$defs": closed | without(named, {"title", "default"}),
    }


def takes_a_name(section: str) -> bool:
    """Whether one word stands for all leaves of a section, which its JSON schema does not say."""
    kind = getattr(cluster.config, section, None) or getattr(worker.config, section, None)
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return False
    try:
        kind.model_validate("auto")
    except ValidationError:
        return False
    return True


def close(node: Any, bases: dict[str, Any]) -> Any:
    """Every object with properties refuses others; `extends` adds those of a definition."""
    if isinstance(node, list):
        return [close(item, bases) for item in node]
    if not isinstance(node, dict):
        return node
    closed = dict(node)
    if base := closed.pop("extends", None):
        inherited = close(bases[base], bases)["properties"]
        closed["properties"] = inherited | closed["properties"]
    closed = {
        key: {name: close(item, bases) for name, item in value.items()}
        if key == "properties"
        else close(value, bases)
        for key, value in closed.items()
    }
    if "properties" in closed:
        closed |= {"type": "object", "additionalProperties": False}
    return closed


def without(node: Any, keys: set[str], *, names: bool = False) -> Any:
    """Without keywords that say nothing here. `names`: the keys of `node` are not keywords."""
    if isinstance(node, list):
        return [without(item, keys) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: without(value, keys, names=key in ("properties", "$defs") and not names)
        for key, value in node.items()
        if names or key not in keys
    }


def alerts(**filled: object) -> str:
    """The chart's alerts as a file of Prometheus, which scrapes one cluster as the job kvlane.

    Args:
        filled: what takes the place of $NAME and the like, where it is not Compose's.
    """
    rule = yaml.safe_load((CHART / "values.yaml").read_text())["monitoring"]["prometheusRule"]
    usual = {
        "NAME": "kvlane",
        "RELEASE": "release: kvlane",
        "ROUTERS": 'job="kvlane",role="router"',
        "WORKERS": 'job="kvlane",role=~"prefill|decode"',
        "DECODE": 1,
        "PREFILL": 0,  # which is allowed
        "ERROR_RATIO": rule["errorRatio"],
        "TTFT": rule["timeToFirstTokenSeconds"],
        "ITL": rule["interTokenSeconds"],
        "TRANSPORT": ALL,
        "RUNBOOK": rule["runbookURL"],
    }
    text = (CHART / "files" / "alerts.yaml").read_text()
    given = usual | filled
    rules = "".join(
        line for line in text.splitlines(True)
        if not line.startswith("#") and (given["RUNBOOK"] or "$RUNBOOK" not in line)
    )  # fmt: skip
    found = Template(rules).safe_substitute(given)
    each = re.split(r"^(?=      - alert: )", found, flags=re.MULTILINE)
    return "".join(rule for rule in each if f'transport!~"{ALL}"' not in rule)  # none ever fires


def written() -> dict[Path, str]:
    """File -> what it has to hold."""
    return {
        CHART / "values.schema.json": json.dumps(schema(), indent=1) + "\n",
        COMPOSE / "alerts.yaml": ALERTS_OF_COMPOSE + alerts(),
        **dashboards.written(),
    }


if __name__ == "__main__":
    for file, content in written().items():
        file.write_text(content)
        print(file)
