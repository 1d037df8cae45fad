"""Draws a dashboard about as Grafana would; runs in .tools/monitoring/venv.

Reads JSON: "title", "path", "rows" as Grafana has them, and "panels", each with Grafana's "panel"
and its "series", which have "legend", "labels" and "points".
"""

import io
import itertools
import json
import math
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter
from PIL import Image

CELL_W, CELL_H = 0.62, 0.33  # inches of a cell of Grafana's grid
STEPS = [(1e-6, "µs"), (1e-3, "ms"), (1, "s"), (60, "min")]
LARGE = [(1, ""), (1e3, "k"), (1e6, "M"), (1e9, "G")]
SUFFIX = {"reqps": " req/s", "ops": " ops/s", "tok/s": " tok/s", "Bps": "B/s", "short": ""}


def shown(value, unit):
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    if value == 0:
        return f"0{SUFFIX.get(unit, ' ' + unit)}"
    steps = STEPS if unit == "s" else LARGE
    scale, name = max((step for step in steps if abs(value) >= step[0]), default=steps[0])
    suffix = "" if unit == "s" else SUFFIX.get(unit, f" {unit}")
    return f"{value / scale:.3g} {name}".rstrip() + suffix


def with_gaps(points):
    step = min((b[0] - a[0] for a, b in itertools.pairwise(points)), default=0)
    found = []
    for at, value in points:
        if found and at - found[-1][0] > 1.5 * step:
            found.append((at, math.nan))
        found.append((at, value))
    return found


def lines(axes, panel, series, start):
    defaults = panel["fieldConfig"]["defaults"]
    custom = defaults["custom"]
    if custom["stacking"]["mode"] == "normal":
        times = sorted({at for each in series for at, _ in each["points"]})
        rows = [[dict(map(tuple, each["points"])).get(at, 0) for at in times] for each in series]
        axes.stackplot([at - start for at in times], rows, labels=[e["legend"] for e in series],
                       alpha=0.6)  # fmt: skip
    else:
        for each in series:
            points = with_gaps(each["points"])
            axes.plot([at - start for at, _ in points], [v for _, v in points],
                      label=each["legend"], linewidth=1)  # fmt: skip
    if custom["scaleDistribution"]["type"] == "log":
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0, top=defaults.get("max"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: shown(v, defaults["unit"])))
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=6)
    if any(each["legend"] for each in series):
        axes.legend(fontsize=5.5, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.1),
                    frameon=False, columnspacing=1, handlelength=1)  # fmt: skip


def heatmap(axes, panel, series, start):
    """A panel of buckets, which are cumulative as they come."""
    bounds = sorted(
        (float(each["labels"]["le"]), dict(map(tuple, each["points"]))) for each in series
    )
    times = sorted({at for _, points in bounds for at in points})
    grid, below = [], dict.fromkeys(times, 0.0)
    for _, points in bounds:
        now = {at: points.get(at, 0.0) for at in times}
        grid.append([max(now[at] - below[at], 0) or math.nan for at in times])
        below = now
    axes.pcolormesh([at - start for at in times], range(len(bounds)), grid, cmap="Oranges",
                    shading="nearest")  # fmt: skip
    every = max(1, len(bounds) // 8)
    axes.set_yticks(range(0, len(bounds), every))
    unit = panel["options"]["yAxis"]["unit"]
    axes.set_yticklabels(
        [shown(b, unit) if math.isfinite(b) else "+Inf" for b, _ in bounds][::every]
    )
    axes.tick_params(labelsize=6)


def stat(axes, panel, series, start):
    axes.axis("off")
    defaults = panel["fieldConfig"]["defaults"]
    for number, each in enumerate(series):
        value = each["points"][-1][1]
        steps = defaults["thresholds"]["steps"]
        colour = [s["color"] for s in steps if s["value"] is None or value >= s["value"]][-1]
        text = f"{each['legend']} {shown(value, defaults['unit'])}".strip()
        axes.text(0.5, (number + 0.5) / len(series), text, ha="center", va="center",
                  fontsize=13, color=colour)  # fmt: skip


def table(axes, panel, series, start):
    axes.axis("off")
    unit = panel["fieldConfig"]["defaults"]["unit"]
    names = sorted(series[0]["labels"])
    rows = [[*(each["labels"][name] for name in names), shown(each["points"][-1][1], unit)]
            for each in series][:10]  # fmt: skip
    drawn = axes.table(rows, colLabels=[*names, "step time"], loc="upper center", fontsize=6)
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(6)


def main():
    given = json.load(sys.stdin)
    places = [each["panel"]["gridPos"] for each in given["panels"]]
    height = max(at["y"] + at["h"] for at in places)
    figure = pyplot.figure(figsize=(24 * CELL_W, height * CELL_H + 0.4))
    figure.suptitle(given["title"], fontsize=10, y=0.998)
    points = [at for each in given["panels"] for s in each["series"] for at, _ in s["points"]]
    start = min(points)
    for each, at in zip(given["panels"], places, strict=True):
        panel, series = each["panel"], [s for s in each["series"] if s["points"]]
        axes = figure.add_axes(
            ((at["x"] + 1.3) / 24, 1 - (at["y"] + at["h"] - 1.6) / (height + 1),
             (at["w"] - 1.8) / 24, (at["h"] - 2.8) / (height + 1))
        )  # fmt: skip
        axes.set_title(panel["title"], fontsize=7, loc="left", pad=3)
        if not series:
            none = panel["fieldConfig"]["defaults"].get("noValue", "No data")
            axes.text(0.5, 0.5, none, ha="center", transform=axes.transAxes)
            continue
        {"timeseries": lines, "heatmap": heatmap, "stat": stat, "table": table}[panel["type"]](
            axes, panel, series, start
        )
    for row in given["rows"]:
        place = 1 - (row["gridPos"]["y"] + 1.2) / (height + 1)
        figure.text(0.01, place, row["title"], fontsize=9, weight="bold")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100)
    Image.open(drawn).convert("RGB").quantize(255).save(given["path"], optimize=True)


main()
