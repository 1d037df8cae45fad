"""Grafana dashboards, each made of the YAML file beside this one.

A file has `uid`, `title`, `description`, `variables` and `rows` of panels. Three panels of eight
columns stand side by side. A panel has a `title`, `about` (what it shows, and what to do when it
looks bad) and `queries`, legend -> PromQL, or `percentiles` of a histogram; a `kind` other than
timeseries; where they differ, `unit`, `width`, `stacked`, `log` (scale), `max`, `none` (what is
said where there is no data), `red_below`, `red_above`, `exemplars`, `quantile` (queries' $P).

In queries $SCOPE and $CHOSEN stand for label matchers by Grafana's variables, the latter with the
worker's, $FINE for the outcomes that are nobody's fault, or the client's.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Any

import yaml

HERE = Path(__file__).parent
FILES = HERE.parent / "kvlane" / "files"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SCOPE = 'namespace=~"$namespace",job=~"$job",model=~"$model"'
CHOSEN = f'{SCOPE},worker=~"$worker"'
ALL = {"text": "All", "value": "$__all"}
# Objectives to choose from, in seconds: bounds of the histograms' buckets, as they are exported.
OBJECTIVES = {
    "ttft": ("First token within", "0.1,0.2,0.3,0.5,1.0,2.5,5.0,10.0", "1.0"),
    "itl": ("Next token within", "0.01,0.02,0.03,0.04,0.06,0.1,0.2,0.4", "0.1"),
}
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
COLUMNS, WIDTH = 24, 8


def written() -> dict[Path, str]:
    """File -> what it has to hold. Grafana's sidecar has the files of all charts in one folder."""
    return {
        FILES / "dashboards" / f"kvlane-{path.stem}.json": json.dumps(dashboard(path), indent=1)
        + "\n"
        for path in sorted(HERE.glob("*.yaml"))
    }


def dashboard(path: Path) -> dict[str, Any]:
    """Grafana's JSON of one file."""
    given = yaml.safe_load(path.read_text())
    return {
        "uid": given["uid"],
        "title": given["title"],
        "description": given["description"],
        "tags": ["kvlane"],
        "schemaVersion": 41,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one crosshair on all panels
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "",
        "fiscalYearStartMonth": 0,
        "annotations": {"list": []},
        "links": [others()],
        "templating": {"list": list(variables(given["variables"]))},
        "panels": list(panels(given["rows"])),
    }


def others() -> dict[str, Any]:
    """The menu of our dashboards, which keeps time and variables."""
    return {
        "type": "dashboards", "title": "kvlane", "tags": ["kvlane"], "asDropdown": True,
        "includeVars": True, "keepTime": True, "targetBlank": False, "icon": "external link",
        "tooltip": "", "url": "",
    }  # fmt: skip


def variables(names: list[str]) -> Iterator[dict[str, Any]]:
    """The datasource, what every dashboard chooses by, and what this one does."""
    yield {
        "name": "datasource", "type": "datasource", "label": "Prometheus", "query": "prometheus",
        "hide": 0, "refresh": 1, "regex": "", "includeAll": False, "multi": False, "options": [],
    }  # fmt: skip
    matchers: list[str] = []
    for name in ("namespace", "job", "model"):
        yield label(name, matchers)
        matchers.append(f'{name}=~"${name}"')
    for name in names:
        yield objective(name) if name in OBJECTIVES else label(name, [*matchers, 'role!="router"'])


def label(name: str, matchers: list[str]) -> dict[str, Any]:
    """A variable with the values of a label, all of them at first."""
    query = f"label_values(kvlane_requests_running{{{','.join(matchers)}}}, {name})"
    return {
        "name": name, "type": "query", "label": name.capitalize(), "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # whenever the time range changes
        "sort": 1, "regex": "", "hide": 0, "multi": True, "includeAll": True,
        "allValue": ".*",  # series without the label as well: no Kubernetes, no namespace
        "current": ALL, "options": [],
    }  # fmt: skip


def objective(name: str) -> dict[str, Any]:
    """A variable with a few bounds of a histogram."""
    title, values, chosen = OBJECTIVES[name]
    options = [
        {"text": f"{float(each):g} s", "value": each, "selected": each == chosen}
        for each in values.split(",")
    ]
    return {
        "name": name, "type": "custom", "label": title, "hide": 0, "multi": False,
        "includeAll": False, "options": options,
        "query": ",".join(f"{option['text']} : {option['value']}" for option in options),
        "current": {"text": f"{float(chosen):g} s", "value": chosen},
    }  # fmt: skip


def panels(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows' titles and panels, with ids and places."""
    number, y = 0, 0
    for row in rows:
        number, x = number + 1, 0
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        yield {
            "id": number, "type": "row", "title": row["title"], "collapsed": False,
            "gridPos": place, "panels": [],
        }  # fmt: skip
        y += 1
        for given in row["panels"]:
            number, width = number + 1, given.get("width", WIDTH)
            if x + width > COLUMNS:
                x, y = 0, y + row["height"]
            place = {"x": x, "y": y, "w": width, "h": row["height"]}
            yield {"id": number, "gridPos": place, **panel(given)}
            x += width
        y += row["height"]


def panel(given: dict[str, Any]) -> dict[str, Any]:
    """One panel, without its id and place."""
    kind = given.get("kind", "timeseries")
    made = {
        "type": kind,
        "title": given["title"],
        "description": given["about"],
        "datasource": SOURCE,
        "targets": list(targets(given, kind)),
        "fieldConfig": {"defaults": defaults(given, kind), "overrides": []},
        "options": OPTIONS[kind](given.get("unit", "short")),
    }
    if kind == "table":
        hidden = {"excludeByName": {"Time": True}, "renameByName": {"Value": "step time"}}
        made["transformations"] = [{"id": "organize", "options": hidden}]
    return made


def targets(given: dict[str, Any], kind: str) -> Iterator[dict[str, Any]]:
    """The queries of a panel."""
    queries = given.get("queries") or {
        name: f"histogram_quantile({share}, sum by (le) "
        f"(rate({given['percentiles']}_bucket{{$SCOPE}}[$__rate_interval])))"
        for name, share in PERCENTILES.items()
    }
    for number, (legend, query) in enumerate(queries.items()):
        fixed = {"SCOPE": SCOPE, "CHOSEN": CHOSEN, "FINE": fine(), "P": given.get("quantile", "")}
        found: dict[str, Any] = {
            "refId": chr(ord("A") + number),
            "expr": Template(query).safe_substitute(fixed),
            "legendFormat": "{{le}}" if kind == "heatmap" else legend,
            "range": kind != "table",
            "instant": kind == "table",
            "exemplar": given.get("exemplars", False),
        }
        if kind in ("heatmap", "table"):
            found["format"] = kind
        yield found


def fine() -> str:
    """Outcomes that are no errors, or the client's; the alerts say which."""
    found = re.search(r'outcome!~"([^"]+)"', (FILES / "alerts.yaml").read_text())
    assert found
    return found[1]


def defaults(given: dict[str, Any], kind: str) -> dict[str, Any]:
    """Unit, scale, colours and the look of lines."""
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if "red_below" in given:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": given["red_below"]}]
    if "red_above" in given:
        steps.append({"color": "red", "value": given["red_above"] + 1e-9})
    found: dict[str, Any] = {
        "unit": given.get("unit", "short"),
        "color": {"mode": "thresholds" if kind in ("stat", "table") else "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if kind == "timeseries":
        stacked, log = given.get("stacked", False), given.get("log", False)
        found["custom"] = {
            "drawStyle": "line", "lineWidth": 1, "fillOpacity": 30 if stacked else 5,
            "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
            "scaleDistribution": {"type": "log", "log": 10} if log else {"type": "linear"},
            "showPoints": "auto", "spanNulls": False,
        }  # fmt: skip
        if not log:
            found["min"] = 0
    if "max" in given:
        found["max"] = given["max"]
    if "none" in given:
        found["noValue"] = given["none"]
    return found


OPTIONS = {
    "timeseries": lambda unit: {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": lambda unit: {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value", "graphMode": "area", "justifyMode": "auto", "orientation": "auto",
        "textMode": "auto", "wideLayout": True,
    },
    "heatmap": lambda unit: {
        "calculate": False,  # Prometheus has the buckets
        "yAxis": {"axisPlacement": "left", "unit": unit},
        "rowsFrame": {"layout": "auto"},
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5,
                  "scale": "exponential", "fill": "dark-orange", "reverse": False},
        "cellGap": 1,
        "filterValues": {"le": 1e-9},  # buckets without requests stay empty
        "legend": {"show": True},
        "tooltip": {"mode": "single", "yHistogram": False, "showColorScale": False},
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
    },
    "table": lambda unit: {"showHeader": True, "cellHeight": "sm"},
}  # fmt: skip
