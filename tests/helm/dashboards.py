"""The dashboards as Grafana reads them."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).resolve().parents[2] / "helm" / "kvlane" / "files" / "dashboards"
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
CHOSEN = {"namespace": ".*", "job": ".*", "model": ".*", "worker": ".*"}  # all of everything
INTERVALS = {"__rate_interval": "1m", "__interval": "15s", "__range": "30m"}


@dataclass(frozen=True)
class Query:
    panel: dict[str, Any]
    legend: str
    text: str


def boards() -> dict[str, dict[str, Any]]:
    """Name of the file, without kvlane- -> dashboard."""
    paths = sorted(DIRECTORY.glob("*.json"))
    return {path.stem.removeprefix("kvlane-"): json.loads(path.read_text()) for path in paths}


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (panel for panel in board["panels"] if panel["type"] != "row")


def queries(board: dict[str, Any]) -> Iterator[Query]:
    for panel in panels(board):
        for target in panel["targets"]:
            yield Query(panel, target["legendFormat"], target["expr"])


def variables(board: dict[str, Any]) -> dict[str, str]:
    """What Grafana would fill in at first, as text for PromQL."""
    listed = board["templating"]["list"]
    own = {each["name"]: each.get("current", {}).get("value", "") for each in listed}
    return own | INTERVALS | {name: value for name, value in CHOSEN.items() if name in own}


def filled(text: str, values: dict[str, str]) -> str:
    """A query or legend without variables; KeyError if it has one that the dashboard has not."""
    return VARIABLE.sub(lambda match: values[match[1] or match[2]], text)
