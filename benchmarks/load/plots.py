"""The report's figures. Latencies in milliseconds, time on a run in seconds.

Colours: one a stage, everywhere the same; results are told apart by blue and orange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from benchmarks.load.measure import (
    STAGES,
    STAGES_TO_FIRST_TOKEN,
    concurrency,
    parts_s,
    samples,
)
from benchmarks.load.records import Objectives, Outcome, Run

WIDTH = 1140  # pixels
RESULT_COLOURS = ("#1f5a92", "#d9822b")
ERROR_COLOUR = "#c0392b"
GREY = "#8a8f98"
STAGE_COLOURS = {
    "lag_s": "#2f3640",
    "router_queue_s": "#b0b7c3",
    "prefill_queue_s": "#f2c879",
    "prefill_s": "#d9822b",
    "transfer_s": "#7b5ea7",
    "decode_queue_s": "#a9d3c0",
    "first_step_s": "#3a9a75",
    "decode_s": "#5b8fc9",
    "unaccounted_s": "#e1e4e9",
}
STAGE_NAMES = {
    "lag_s": "harness lag",
    "router_queue_s": "router queue",
    "prefill_queue_s": "prefill queue",
    "prefill_s": "prefill",
    "transfer_s": "KV transfer",
    "decode_queue_s": "decode queue",
    "first_step_s": "first step",
    "decode_s": "decode",
    "unaccounted_s": "network, HTTP, rest",
}
BUCKETS = ((0.0, 0.5), (0.5, 0.9), (0.9, 0.99), (0.99, 1.0))  # of the time to first token
MAX_POINTS = 4000
MAX_SLOWEST = 1000  # of these points, the slowest are all shown
LONG = 60  # a run of this many median requests would show its timeline as a mere diagonal
MAX_BARS = 300
NUM_BINS = 100


def styled(figure: go.Figure, height: int, legend: bool = True) -> go.Figure:
    """`figure` in the report's style."""
    figure.update_layout(
        template="plotly_white",
        width=WIDTH,
        height=height,
        font={"family": "system-ui, Segoe UI, Helvetica, Arial, sans-serif", "size": 13},
        font_color="#222",
        margin={"l": 70, "r": 20, "t": 40, "b": 50},
        showlegend=legend,
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        hoverlabel={"font_size": 12},
    )
    axis = {"gridcolor": "#e9ebee", "linecolor": "#9aa0a8", "zeroline": False, "showline": True}
    figure.update_xaxes(ticks="outside", tickcolor="#9aa0a8", title_font_size=13, **axis)
    figure.update_yaxes(title_font_size=13, **axis)
    figure.update_annotations(font_size=13)
    return figure


def log_axis(values_ms: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """A logarithmic axis that holds `values_ms`, with round numbers as ticks."""
    above = [value for value in values_ms if value > 0] or [1.0]
    low, high = min(above) / 1.25, max(above) * 1.25
    steps = (
        (1, 1.5, 2, 3, 4, 5, 6, 8) if high / low < 10 else (1, 2, 5) if high / low < 1e4 else (1,)
    )
    ticks = [step * 10.0**power for power in range(-6, 9) for step in steps]
    shown = [tick for tick in ticks if low <= tick <= high]
    return {
        "type": "log",
        "range": [float(np.log10(low)), float(np.log10(high))],
        "tickvals": shown,
        "ticktext": [f"{tick:,g}" for tick in shown],
    }


def outcomes_of(runs: Sequence[Run]) -> list[Outcome]:
    """Of all runs."""
    return [outcome for run in runs for outcome in run.outcomes]


def percentiles(results: Sequence[tuple[str, Sequence[Run]]], objectives: Objectives) -> go.Figure:
    """Latency at every percentile; the axis is stretched to the right, so that the tail shows."""
    kinds = (
        ("ttft_s", "time to first token", objectives.ttft_s),
        ("tpot_s", "inter-token, mean of a request", objectives.itl_s),
        ("gaps_s", "inter-token, every gap", objectives.stall_s),
    )
    figure = make_subplots(1, 3, subplot_titles=[title for _, title, _ in kinds])
    ticks = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999)
    deepest = 2.0
    for (name, runs), colour in zip(results, RESULT_COLOURS, strict=False):
        found = samples(outcomes_of(runs))
        for column, (kind, _, _) in enumerate(kinds, 1):
            depth = min(4.0, np.log10(max(found[kind].size, 2)))
            deepest = max(deepest, depth)
            lines = [(kind, name, {"color": colour, "width": 2})]
            if kind == "ttft_s":
                dotted = {"color": colour, "width": 1.2, "dash": "dot"}
                lines.append(("ttft_from_send_s", f"{name}, from the send", dotted))
            for each, label, line in lines:
                trace = percentile_line(found[each], depth, label, line)
                trace.update(legendgroup=label, showlegend=column == 1)
                figure.add_trace(trace, 1, column)
    for column, (_, _, limit) in enumerate(kinds, 1):
        drawn = [trace.y for trace in figure.select_traces(row=1, col=column)]
        values = np.concatenate([*drawn, [1e3 * limit] if limit is not None else []])
        figure.update_yaxes(row=1, col=column, **log_axis(values))
        if limit is not None:
            mark_objective(figure, limit, deepest, column)
    figure.update_xaxes(
        title="percentile",
        tickvals=[-np.log10(1 - tick) for tick in ticks],
        ticktext=[f"{tick * 100:g}" for tick in ticks],
        range=[0, deepest],
    )
    figure.update_yaxes(title="ms", col=1)
    styled(figure, 380)
    return figure.update_layout(legend={"y": -0.2, "yanchor": "top"}, margin_b=90)


def percentile_line(values: np.ndarray, depth: float, name: str, line: dict) -> go.Scatter:
    """`values` in seconds against -log10(1 - quantile), up to 1 - 10**-depth."""
    x = np.linspace(0, depth, 300)
    y = np.quantile(values, 1 - 10**-x) * 1e3 if values.size else np.full(300, np.nan)
    told = "%{y:.2f} ms at the %{customdata:.2f}th percentile"
    return go.Scatter(
        x=x, y=y, name=name, line=line, customdata=100 * (1 - 10**-x), hovertemplate=told
    )


def mark_objective(figure: go.Figure, limit_s: float, right: float, column: int) -> None:
    """A dashed line at an objective, named at its right end."""
    limit_ms = limit_s * 1e3
    dashed = {"color": GREY, "dash": "dash", "width": 1}
    figure.add_hline(limit_ms, row=1, col=column, line=dashed)
    figure.add_annotation(
        x=right,
        y=np.log10(limit_ms),  # as annotations on such an axis want it
        text=f"objective {limit_ms:g} ms",
        showarrow=False,
        xanchor="right",
        yanchor="bottom",
        font_color="#555",
        row=1,
        col=column,
    )


def thinned(outcomes: Sequence[Outcome], most: int) -> list[Outcome]:
    """At most `most` of them, evenly over their order."""
    if len(outcomes) <= most:
        return list(outcomes)
    return [outcomes[i] for i in np.linspace(0, len(outcomes) - 1, most).astype(int)]


def over_time(results: Sequence[tuple[str, Run]], objective_s: float | None) -> go.Figure:
    """Every request where it was intended, with its time to first token; what failed is a cross, at
    the time after which it failed."""
    figure = make_subplots(len(results), 1, shared_xaxes=True, vertical_spacing=0.08)
    for row, (name, run) in enumerate(results, 1):
        served = [o for o in run.outcomes if not o.error and o.chunk_s]
        served.sort(key=lambda o: o.ttft_s or 0.0)
        slow = max(0, len(served) - MAX_SLOWEST)
        served = thinned(served[:slow], MAX_POINTS - MAX_SLOWEST) + served[slow:]
        figure.add_scatter(
            x=[o.intended_s for o in served],
            y=[(o.chunk_s[0] - o.intended_s) * 1e3 for o in served],
            mode="markers",
            name=name,
            marker={"color": RESULT_COLOURS[row - 1], "size": 5, "opacity": 0.55},
            text=[f"session {o.session}, turn {o.turn}, {o.num_prompt_tokens} in" for o in served],
            hovertemplate="%{y:.1f} ms at %{x:.2f} s<br>%{text}<extra></extra>",
            row=row,
            col=1,
        )
        failed = thinned([o for o in run.outcomes if o.error], MAX_POINTS)
        figure.add_scatter(
            x=[o.intended_s for o in failed],
            y=[o.e2e_s * 1e3 for o in failed],
            mode="markers",
            name="failed",
            showlegend=row == 1,
            marker={"color": ERROR_COLOUR, "size": 9, "symbol": "x-thin"},
            marker_line={"color": ERROR_COLOUR, "width": 2},
            text=[o.error for o in failed],
            hovertemplate="%{text} after %{y:.1f} ms at %{x:.2f} s<extra></extra>",
            row=row,
            col=1,
        )
    values = [value for trace in figure.data for value in trace.y]
    if objective_s is not None:
        values.append(objective_s * 1e3)
        figure.add_hline(objective_s * 1e3, line={"color": GREY, "dash": "dash", "width": 1})
    figure.update_xaxes(range=common_ends(results))
    figure.update_xaxes(title="intended send time, s", row=len(results), col=1)
    figure.update_yaxes(title="time to first token, ms", **log_axis(values))
    return styled(figure, 100 + 240 * len(results))


def load_over_time(results: Sequence[tuple[str, Run]]) -> go.Figure:
    """Requests at the server, output tokens per second, and requests offered and served."""
    titles = ("requests at the server", "output tokens/s", "requests/s: offered and served")
    figure = make_subplots(3, 1, shared_xaxes=True, subplot_titles=titles, vertical_spacing=0.09)
    for (name, run), colour in zip(results, RESULT_COLOURS, strict=False):
        line = {"color": colour, "width": 1.5}
        group = {"legendgroup": name}
        times, at_once = concurrency(run.outcomes)
        keep = (
            np.unique(np.linspace(0, len(times) - 1, MAX_POINTS).astype(int)) if len(times) else []
        )
        step = line | {"shape": "hv"}
        figure.add_scatter(
            x=times[keep], y=at_once[keep], line=step, name=name, row=1, col=1, **group
        )
        edges = bins(run)
        seconds = edges[1] - edges[0]
        served = [o for o in run.outcomes if not o.error]
        pieces = np.concatenate([np.array(o.chunk_s, float) for o in served] or [np.zeros(0)])
        share = [
            np.full(len(o.chunk_s), o.num_output_tokens / max(1, len(o.chunk_s))) for o in served
        ]
        weights = np.concatenate(share or [np.zeros(0)])
        curves = (
            (2, "output tokens/s", pieces, weights, line),
            (3, "served", [o.end_s for o in served], None, line),
            (3, "offered", [o.intended_s for o in run.outcomes], None, line | {"dash": "dot"}),
        )
        for row, label, at, weight, style in curves:
            y = np.histogram(at, edges, weights=weight)[0] / seconds
            shown = f"{name}, offered" if label == "offered" else name
            figure.add_scatter(
                x=(edges[:-1] + edges[1:]) / 2,
                y=y,
                line=style,
                name=shown,
                showlegend=label == "offered",
                row=row,
                col=1,
                **group,
            )
    figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(range=common_ends(results))
    figure.update_xaxes(title="time on the run, s", row=3, col=1)
    styled(figure, 620)
    return figure.update_layout(legend_y=1.04)


def ends(run: Run) -> tuple[float, float]:
    """From the first intended time to the last end, seconds."""
    begin = min((o.intended_s for o in run.outcomes), default=0.0)
    return begin, begin + (run.wall_s or 1.0)


def common_ends(results: Sequence[tuple[str, Run]]) -> tuple[float, float]:
    """From the first begin to the last end of the runs, seconds."""
    both = [ends(run) for _, run in results]
    return min(begin for begin, _ in both), max(end for _, end in both)


def bins(run: Run) -> np.ndarray:
    """Edges in seconds: of a second each, or wider, or (in a short run) narrower."""
    begin, end = ends(run)
    return np.linspace(begin, end, int(np.clip(end - begin, 20, NUM_BINS)) + 1)


def account(outcome: Outcome, to_first_token: bool) -> dict[str, float]:
    """Seconds of each part of a request that told its stages, in order; they add up to its time to
    first token, or to its end-to-end time, unless the server's account exceeds the client's."""
    parts = parts_s(outcome) or {}
    names = STAGES_TO_FIRST_TOKEN if to_first_token else STAGES
    found = {"lag_s": outcome.lag_s, **{name: parts[name] for name in names}}
    whole = outcome.ttft_s if to_first_token else outcome.e2e_s
    return found | {"unaccounted_s": max(0.0, (whole or 0.0) - sum(found.values()))}


def buckets(outcomes: Sequence[Outcome]) -> list[tuple[str, list[dict[str, float]]]]:
    """(label, accounts of its requests) of each bucket that has any."""
    told = [o for o in outcomes if not o.error and o.chunk_s and o.stages is not None]
    told.sort(key=lambda o: o.ttft_s or 0.0)
    found = []
    edges = [round(BUCKETS[0][0] * len(told)), *(round(high * len(told)) for _, high in BUCKETS)]
    for (low, high), first, end in zip(BUCKETS, edges, edges[1:], strict=False):
        if part := told[first:end]:
            label = f"{low * 100:g} to {high * 100:g} %<br>{len(part)} requests"
            found.append((label, [account(outcome, True) for outcome in part]))
    return found


def first_token(results: Sequence[tuple[str, Sequence[Run]]]) -> go.Figure:
    """Mean seconds of each stage before the first token, of the fast half of the requests, of the
    slower ones, and of the slowest."""
    several = len(results) > 1
    names = [name for name, _ in results] if several else None
    figure = make_subplots(len(results), 1, subplot_titles=names, vertical_spacing=0.16)
    for row, (_, runs) in enumerate(results, 1):
        found = buckets(outcomes_of(runs))
        for stage in ("lag_s", *STAGES_TO_FIRST_TOKEN, "unaccounted_s"):
            figure.add_bar(
                y=[label for label, _ in found],
                x=[1e3 * float(np.mean([parts[stage] for parts in each])) for _, each in found],
                orientation="h",
                name=STAGE_NAMES[stage],
                legendgroup=stage,
                showlegend=row == 1,
                marker_color=STAGE_COLOURS[stage],
                hovertemplate=f"{STAGE_NAMES[stage]}: %{{x:.2f}} ms<extra></extra>",
                row=row,
                col=1,
            )
    figure.update_layout(barmode="stack", bargap=0.35)
    figure.update_xaxes(matches="x")
    figure.update_xaxes(title="mean of the requests in the bucket, ms", row=len(results), col=1)
    figure.update_yaxes(autorange="reversed", title="by time to first token")
    styled(figure, 110 + 230 * len(results))
    return figure.update_layout(margin_l=120, legend_y=1.06 if several else 1.0)


def tells(run: Run) -> bool:
    """Whether any served request of it has stages."""
    return any(o.stages is not None and not o.error for o in run.outcomes)


def timeline(run: Run) -> go.Figure:
    """The stages of each of some requests, taken evenly: on the run's time, or, if the run is so
    long that a request would be a dot, from the request's own intended time."""
    told = [o for o in run.outcomes if not o.error and o.stages is not None]
    told = thinned(sorted(told, key=lambda o: o.intended_s), MAX_BARS)
    accounts = [account(outcome, False) for outcome in told]
    figure = go.Figure()
    intended = np.array([outcome.intended_s for outcome in told])
    is_long = run.wall_s > LONG * float(np.median([o.e2e_s for o in told]))
    begin = np.zeros(len(told)) if is_long else intended
    order = ("lag_s", *STAGES_TO_FIRST_TOKEN, "decode_s", "unaccounted_s")
    for stage in order:
        lengths = np.array([parts[stage] for parts in accounts])
        figure.add_bar(
            y=np.arange(len(told)),
            x=lengths,
            base=begin,
            orientation="h",
            name=STAGE_NAMES[stage],
            marker={"color": STAGE_COLOURS[stage], "line_width": 0},
            customdata=lengths * 1e3,
            text=[f"session {o.session}, turn {o.turn}" for o in told],
            textposition="none",
            hovertemplate=f"%{{text}}<br>{STAGE_NAMES[stage]}: %{{customdata:.2f}} ms"
            "<extra></extra>",
        )
        begin = begin + lengths
    figure.update_layout(barmode="overlay", bargap=0)
    if is_long:
        figure.update_xaxes(
            title="time from the request's intended send time, s", rangemode="tozero"
        )
    else:
        figure.update_xaxes(title="time on the run, s", range=ends(run))
    marked = np.unique(np.linspace(0, len(told) - 1, 9).astype(int))
    figure.update_yaxes(
        autorange="reversed",
        title="intended send time",
        showgrid=False,
        tickvals=marked,
        ticktext=[f"{intended[index]:.1f} s" for index in marked],
    )
    height = int(np.clip(2.4 * len(told) + 120, 240, 820))
    return styled(figure, height).update_layout(legend_font_size=11.5)
