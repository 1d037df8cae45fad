"""One plot of results: latency at every percentile, and goodput by offered rate."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from benchmarks.load.measure import samples
from benchmarks.load.records import Result

COLOURS = ("#1f5a92", "#d9822b", "#3a9a75", "#7b5ea7", "#c0392b", "#8a8f98")
PANELS = {
    "ttft_s": "time to first token, ms",
    "tpot_s": "inter-token, mean of a request, ms",
    "gaps_s": "between pieces, every gap, ms",
}
TICKS = (0.0, 0.5, 0.9, 0.99, 0.999)
NUM_POINTS = 200


def draw(named: Sequence[tuple[str, Result]], path: Path) -> None:
    """Write the plot of results, by their names, as one page that fetches nothing."""
    figure(named).write_html(path, include_plotlyjs=True, config={"displayModeBar": False})


def figure(named: Sequence[tuple[str, Result]]) -> go.Figure:
    """A line or dots a result; the percentile axis is stretched to the right for the tail."""
    drawn = make_subplots(1, 4, subplot_titles=[*PANELS.values(), "good requests, %"])
    for index, (name, measured) in enumerate(named):
        colour = COLOURS[index % len(COLOURS)]
        outcomes = [outcome for run in measured.runs for outcome in run.outcomes]
        values = samples(outcomes)
        for column, kind in enumerate(PANELS, 1):
            line = {"name": name, "legendgroup": name, "showlegend": column == 1}
            x = np.linspace(0, np.log10(max(values[kind].size, 10)), NUM_POINTS)
            y = 1e3 * np.quantile(values[kind], 1 - 10**-x) if values[kind].size else x * np.nan
            drawn.add_scatter(x=x, y=y, line_color=colour, row=1, col=column, **line)
        rates, shares = goodput_by_rate(measured)
        dots = {"name": name, "legendgroup": name, "showlegend": False, "mode": "markers"}
        drawn.add_scatter(x=rates, y=shares, marker_color=colour, row=1, col=4, **dots)
    for column in range(1, 4):
        drawn.update_xaxes(
            title="percentile",
            tickvals=[-np.log10(1 - tick) for tick in TICKS],
            ticktext=[f"{100 * tick:g}" for tick in TICKS],
            col=column,
        )
        drawn.update_yaxes(type="log", col=column)
    drawn.update_xaxes(title="offered, requests/s", rangemode="tozero", col=4)
    drawn.update_yaxes(range=[0, 102], col=4)
    return drawn.update_layout(template="plotly_white", width=1400, height=420)


def goodput_by_rate(measured: Result) -> tuple[list[float], list[float]]:
    """Offered requests per second, and the percentage that was good, of each run or probe."""
    pairs = [(probe["rate"], probe["share"]) for probe in measured.search]
    if not pairs:
        figures = ((each["throughput"], each["goodput"]) for each in measured.summaries)
        pairs = [(rates["offered_per_s"], good["share"]) for rates, good in figures]
    known = sorted((rate, 100 * share) for rate, share in pairs if rate and share is not None)
    return [rate for rate, _ in known], [share for _, share in known]
