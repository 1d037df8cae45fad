"""One plot of results: latency at every percentile, and goodput by offered rate or the load."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from benchmarks.load.measure import concurrency, samples
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
    """A line or dots a result; the percentile axis is stretched to the right for the tail.

    The panels are those that have something to show: latencies, then goodput by rate where more
    than one rate was tried, else how many requests were at the server.
    """
    outcomes = [[each for run in measured.runs for each in run.outcomes] for _, measured in named]
    values = [samples(each) for each in outcomes]
    kinds = [kind for kind in PANELS if any(each[kind].size for each in values)] or [*PANELS][:1]
    goods = [goodput_by_rate(measured) for _, measured in named]
    is_by_rate = len({rate for rates, _ in goods for rate in rates}) > 1
    last = len(kinds) + 1
    title = "good requests, %" if is_by_rate else "requests at the server"
    drawn = make_subplots(1, last, subplot_titles=[*(PANELS[kind] for kind in kinds), title])
    for index, (name, measured) in enumerate(named):
        colour = COLOURS[index % len(COLOURS)]
        for column, kind in enumerate(kinds, 1):
            line = {"name": name, "legendgroup": name, "showlegend": column == 1}
            sample = values[index][kind]
            x = np.linspace(0, np.log10(max(sample.size, 10)), NUM_POINTS)
            y = 1e3 * np.quantile(sample, 1 - 10**-x) if sample.size else x * np.nan
            drawn.add_scatter(x=x, y=y, line_color=colour, row=1, col=column, **line)
        more = {"name": name, "legendgroup": name, "showlegend": False, "row": 1, "col": last}
        if is_by_rate:
            rates, shares = goods[index]
            drawn.add_scatter(x=rates, y=shares, mode="markers", marker_color=colour, **more)
        elif measured.runs:
            times, at_once = concurrency(measured.runs[0].outcomes)
            step = {"color": colour, "shape": "hv"}
            drawn.add_scatter(x=times, y=at_once, line=step, **more)
    for column in range(1, last):
        drawn.update_xaxes(
            title="percentile",
            tickvals=[-np.log10(1 - tick) for tick in TICKS],
            ticktext=[f"{100 * tick:g}" for tick in TICKS],
            col=column,
        )
        drawn.update_yaxes(type="log", col=column)
    along = "offered, requests/s" if is_by_rate else "s"
    drawn.update_xaxes(title=along, rangemode="tozero", col=last)
    drawn.update_yaxes(rangemode="tozero", range=[0, 102] if is_by_rate else None, col=last)
    return drawn.update_layout(template="plotly_white", width=350 * last, height=420)


def goodput_by_rate(measured: Result) -> tuple[list[float], list[float]]:
    """Offered requests per second, and the percentage that was good, of each run or probe."""
    pairs = [(probe["rate"], probe["share"]) for probe in measured.search]
    if not pairs:
        figures = ((each["throughput"], each["goodput"]) for each in measured.summaries)
        pairs = [(rates["offered_per_s"], good["share"]) for rates, good in figures]
    known = sorted((rate, 100 * share) for rate, share in pairs if rate and share is not None)
    return [rate for rate, _ in known], [share for _, share in known]
