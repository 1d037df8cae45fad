"""The plot of `benchmarks.interference`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from benchmarks.interference_figures import gaps_over_time, layouts_in, parts
from benchmarks.load.measure import median
from benchmarks.load.plots import (
    RESULT_COLOURS,
    WIDTH,
    log_axis,
    styled,
)
from benchmarks.load.records import Run

COLOURS: tuple[str, ...] = (*RESULT_COLOURS, "#3a9a75", "#7b5ea7")  # one a layout
SHADE = "rgba(217, 130, 43, 0.15)"
BIN_S = 0.05
QUANTILES = {"p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
TICKS = (0.5, 0.9, 0.99, 0.999)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TOP_PIXELS, ROW_PIXELS, SPACE_PIXELS = 380, 200, 75
Mixed = dict[str, tuple[Run, Run]]  # layout -> the chats and the prompts of a run of that load


def draw(out: Path, told: dict[str, Any]) -> Path:
    """Write the plot of `told`, see `figures`, into `out`, as HTML and, if there is a browser, as
    PNG; the newest file. What a layout did over time is drawn where all results are in `out`."""
    found: Mixed = {}
    if set(layouts_in(out)) >= set(told["layouts"]):
        for layout in told["layouts"]:
            classes = parts(out, layout, "mixed")
            found[layout] = classes["chat"].runs[0], classes["prompt"].runs[0]
    drawn = figure(told, found)
    page = out / "interference.html"
    drawn.write_html(page, include_plotlyjs=True, config={"displayModeBar": False})
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        return page
    height = height_of(found) + 20
    subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         "--virtual-time-budget=10000", f"--window-size={WIDTH + 20},{height}",
         f"--screenshot={page.resolve().with_suffix('.png')}", page.resolve().as_uri()],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    return page.with_suffix(".png")


def height_of(found: Mixed) -> int:
    """Of the figure, in pixels."""
    return TOP_PIXELS + ROW_PIXELS * len(found)


def figure(told: dict[str, Any], found: Mixed) -> go.Figure:
    """Above, percentiles of the chats' gaps and of both classes' first tokens, medians over the
    runs; below, a run of each layout over time, shaded where a prompt waits for its first token."""
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
    colours = dict(zip(told["layouts"], COLOURS, strict=False))
    percentiles(drawn, told, colours)
    longest = []
    for row, name in enumerate(names, 2):
        longest += over_time(drawn, *found[name], row, colours[name])
    for row in range(2, 2 + len(names)):
        drawn.update_yaxes(title="ms", row=row, col=1, **log_axis(longest))
    if names:
        drawn.update_xaxes(title="time on the run, s", row=1 + len(names), col=1)
    for column in (1, 2):
        lines = list(drawn.select_traces(row=1, col=column))
        drawn.update_xaxes(
            title="percentile",
            row=1,
            col=column,
            tickvals=[-np.log10(1 - tick) for tick in TICKS],
            ticktext=[f"{tick * 100:g}" for tick in TICKS],
        )
        values = np.concatenate([line.y for line in lines])
        drawn.update_yaxes(title="ms", row=1, col=column, **log_axis(values))
    styled(drawn, height)
    return drawn.update_layout(width=WIDTH, legend_y=1.04, margin_t=90)


def percentiles(drawn: go.Figure, told: dict[str, Any], colours: dict[str, str]) -> None:
    """The first row, against -log10(1 - quantile)."""
    x = -np.log10(1 - np.array(list(QUANTILES.values())))
    for name, loads in told["layouts"].items():
        lines = (
            ("alone", "chat", "gaps_s", 1, "dot", f"{name}, chats alone"),
            ("mixed", "chat", "gaps_s", 1, "solid", f"{name}, with prompts"),
            ("mixed", "chat", "ttft_s", 2, "solid", f"{name}, with prompts"),
            ("mixed", "prompt", "ttft_s", 2, "dash", f"{name}, the prompts"),
        )
        for load, kind, latency, column, dash, label in lines:
            values = [median(loads[load][kind], "latency", latency, each) for each in QUANTILES]
            drawn.add_scatter(
                x=x,
                y=np.array([np.nan if each is None else 1e3 * each for each in values]),
                mode="lines+markers",
                line={"color": colours[name], "width": 2, "dash": dash},
                name=label,
                legendgroup=label,
                showlegend=column == 1 or kind == "prompt",
                row=1,
                col=column,
            )


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
