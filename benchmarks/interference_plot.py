"""The plot of `benchmarks.interference`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from benchmarks.interference_figures import LOADS, gaps_over_time, layouts_in, parts
from benchmarks.load.measure import samples
from benchmarks.load.plots import (
    RESULT_COLOURS,
    WIDTH,
    log_axis,
    outcomes_of,
    percentile_line,
    styled,
)
from benchmarks.load.records import Result, Run

COLOURS: tuple[str, ...] = (*RESULT_COLOURS, "#3a9a75", "#7b5ea7")  # one a layout
SHADE = "rgba(217, 130, 43, 0.15)"
BIN_S = 0.05
TICKS = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TOP_PIXELS, ROW_PIXELS, SPACE_PIXELS = 380, 200, 75
LEAST = -np.log10(1 - 0.1)  # the percentile from which on the axis holds all

Parts = dict[str, dict[str, dict[str, Result]]]  # layout -> load -> class -> result


def draw(out: Path) -> Path:
    """Write the plot of `out`, as HTML and, if there is a browser, as PNG; the newest file."""
    found: Parts = {
        layout: {load: parts(out, layout, load) for load in LOADS} for layout in layouts_in(out)
    }
    drawn = figure(found)
    page = out / "interference.html"
    drawn.write_html(page, include_plotlyjs=True, config={"displayModeBar": False})
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        return page
    height = height_of(found) + 20
    subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         "--virtual-time-budget=10000", f"--window-size={WIDTH + 20},{height}",
         f"--screenshot={page.with_suffix('.png')}", page.as_uri()],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    return page.with_suffix(".png")


def height_of(found: Parts) -> int:
    """Of the figure, in pixels."""
    return TOP_PIXELS + ROW_PIXELS * len(found)


def figure(found: Parts) -> go.Figure:
    """Above, every percentile of the chats' gaps and of both classes' first tokens; below, a run of
    each layout over time, shaded where a prompt waits for its first token."""
    names = list(found)
    titles = [f"{name}: longest gap of any chat in each {BIN_S * 1e3:g} ms" for name in names]
    height = height_of(found)
    drawn = make_subplots(
        1 + len(names),
        2,
        specs=[[{}, {}], *([{"colspan": 2}, None] for _ in names)],
        subplot_titles=[
            "chats: inter-token, every gap",
            "time to first token, mixed load",
            *titles,
        ],
        vertical_spacing=SPACE_PIXELS / height,
        row_heights=[1.6, *[1.0] * len(names)],
    )
    colours = dict(zip(names, COLOURS, strict=False))
    percentiles(drawn, found, colours)
    longest = []
    for row, name in enumerate(names, 2):
        chats, prompts = (found[name]["mixed"][kind].runs[0] for kind in ("chat", "prompt"))
        longest += over_time(drawn, chats, prompts, row, colours[name])
    for row in range(2, 2 + len(names)):
        drawn.update_yaxes(title="ms", row=row, col=1, **log_axis(longest))
    drawn.update_xaxes(title="time on the run, s", row=1 + len(names), col=1)
    for column in (1, 2):
        lines = list(drawn.select_traces(row=1, col=column))
        drawn.update_xaxes(
            title="percentile",
            row=1,
            col=column,
            range=[0, max(line.x[-1] for line in lines)],
            tickvals=[-np.log10(1 - tick) for tick in TICKS],
            ticktext=[f"{tick * 100:g}" for tick in TICKS],
        )
        values = np.concatenate([line.y[line.x >= LEAST] for line in lines])
        drawn.update_yaxes(title="ms", row=1, col=column, **log_axis(values))
    styled(drawn, height)
    return drawn.update_layout(width=WIDTH, legend_y=1.04, margin_t=90)


def percentiles(drawn: go.Figure, found: Parts, colours: dict[str, str]) -> None:
    """The first row, against -log10(1 - quantile)."""
    for name, loads in found.items():
        lines = (
            ("alone", "chat", "gaps_s", 1, "dot", f"{name}, chats alone"),
            ("mixed", "chat", "gaps_s", 1, "solid", f"{name}, with prompts"),
            ("mixed", "chat", "ttft_s", 2, "solid", f"{name}, with prompts"),
            ("mixed", "prompt", "ttft_s", 2, "dash", f"{name}, the prompts"),
        )
        for load, kind, latency, column, dash, label in lines:
            values = samples(outcomes_of(loads[load][kind].runs))[latency]
            depth = min(4.0, float(np.log10(max(values.size, 2))))
            style = {"color": colours[name], "width": 2, "dash": dash}
            trace = percentile_line(values, depth, label, style)
            shown = column == 1 or kind == "prompt"
            trace.update(legendgroup=label, showlegend=shown)
            drawn.add_trace(trace, 1, column)


def over_time(drawn: go.Figure, run: Run, prompts: Run, row: int, colour: str) -> list[float]:
    """One layout's row; its values in milliseconds."""
    times, longest = gaps_over_time(run, BIN_S)
    drawn.add_scatter(
        x=times,
        y=[None if gap is None else 1e3 * gap for gap in longest],
        mode="lines+markers",  # a bin alone among empty ones has no line
        line={"color": colour, "width": 1.2},
        marker_size=3,
        showlegend=False,
        row=row,
        col=1,
    )
    for each in prompts.outcomes:
        if each.chunk_s:
            ends = each.sent_s, each.chunk_s[0]
            drawn.add_vrect(*ends, row=row, col=1, fillcolor=SHADE, line_width=0, layer="below")
    return [1e3 * gap for gap in longest if gap]
