"""The report's figures. Latencies in milliseconds, time on a run in seconds.

Colours: one a stage, everywhere the same; results are told apart by blue and orange.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from benchmarks.load.measure import (
    STAGES,
    STAGES_TO_FIRST_TOKEN,
    concurrency,
    parts_s,
    samples,
    was_sent,
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
        if limit is not None:
            mark_objective(figure, limit, column)
    figure.update_xaxes(
        title="percentile",
        tickvals=[-np.log10(1 - tick) for tick in ticks],
        ticktext=[f"{tick * 100:g}" for tick in ticks],
        range=[0, deepest],
    )
    figure.update_yaxes(rangemode="tozero")
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


def mark_objective(figure: go.Figure, limit_s: float, column: int) -> None:
    """A dashed line at an objective."""
    figure.add_hline(
        limit_s * 1e3,
        row=1,
        col=column,
        line={"color": GREY, "dash": "dash", "width": 1},
        annotation={
            "text": f"objective {limit_s * 1e3:g} ms",
            "font": {"color": "#555", "size": 11},
        },
        annotation_position="top left",
    )


def thinned(outcomes: Sequence[Outcome], most: int) -> list[Outcome]:
    """At most `most` of them, evenly over their order."""
    if len(outcomes) <= most:
        return list(outcomes)
    return [outcomes[i] for i in np.linspace(0, len(outcomes) - 1, most).astype(int)]


def over_time(run: Run, name: str, colour: str, objective_s: float | None) -> go.Figure:
    """Every request where it was intended, with its time to first token; what failed is a cross, at
    the time after which it failed."""
    figure = go.Figure()
    served = [o for o in run.outcomes if not o.error and o.chunk_s]
    served = thinned(served, MAX_POINTS)
    failed = [o for o in run.outcomes if o.error]
    figure.add_scatter(
        x=[o.intended_s for o in served],
        y=[(o.chunk_s[0] - o.intended_s) * 1e3 for o in served],
        mode="markers",
        name=name,
        marker={"color": colour, "size": 5, "opacity": 0.55},
        text=[f"session {o.session}, turn {o.turn}, {o.num_prompt_tokens} tokens" for o in served],
        hovertemplate="%{y:.1f} ms at %{x:.2f} s<br>%{text}<extra></extra>",
    )
    if failed:
        figure.add_scatter(
            x=[o.intended_s for o in failed],
            y=[o.e2e_s * 1e3 for o in failed],
            mode="markers",
            name="failed",
            marker={"color": ERROR_COLOUR, "size": 9, "symbol": "x-thin", "line_width": 2},
            marker_line_color=ERROR_COLOUR,
            text=[o.error for o in failed],
            hovertemplate="%{text} after %{y:.1f} ms at %{x:.2f} s<extra></extra>",
        )
    if objective_s is not None:
        figure.add_hline(objective_s * 1e3, line={"color": GREY, "dash": "dash", "width": 1})
    figure.update_xaxes(title="intended send time, s")
    figure.update_yaxes(title="time to first token, ms", type="log", minor_showgrid=False, dtick=1)
    return styled(figure, 320)


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
    figure.update_xaxes(title="time on the run, s", row=3, col=1)
    styled(figure, 620)
    return figure.update_layout(legend_y=1.04)


def bins(run: Run) -> np.ndarray:
    """Edges in seconds: of a second each, or wider, or (in a short run) narrower."""
    begin = min((o.intended_s for o in run.outcomes), default=0.0)
    length = run.wall_s or 1.0
    return begin + np.linspace(0, length, int(np.clip(length, 20, NUM_BINS)) + 1)


def account(outcome: Outcome, to_first_token: bool) -> dict[str, float]:
    """Seconds of each part of a request that told its stages, in order; they add up to its time to
    first token, or to its end-to-end time, unless the server's account exceeds the client's."""
    parts = parts_s(outcome) or {}
    names = STAGES_TO_FIRST_TOKEN if to_first_token else STAGES
    found = {"lag_s": outcome.lag_s, **{name: parts[name] for name in names}}
    whole = outcome.ttft_s if to_first_token else outcome.e2e_s
    return found | {"unaccounted_s": max(0.0, (whole or 0.0) - sum(found.values()))}


def first_token(outcomes: Sequence[Outcome]) -> go.Figure:
    """Mean seconds of each stage before the first token, of the fast half of the requests, of the
    slower ones, and of the slowest."""
    told = [o for o in outcomes if not o.error and o.chunk_s and o.stages is not None]
    told.sort(key=lambda o: o.ttft_s or 0.0)
    rows: list[tuple[str, list[dict[str, float]]]] = []
    for low, high in BUCKETS:
        part = told[int(low * len(told)) : int(np.ceil(high * len(told)))]
        if part and int(low * len(told)) < len(told):
            label = f"{low * 100:g} to {high * 100:g} %<br>{len(part)} requests"
            rows.append((label, [account(o, True) for o in part]))
    figure = go.Figure()
    for stage in ("lag_s", *STAGES_TO_FIRST_TOKEN, "unaccounted_s"):
        figure.add_bar(
            y=[label for label, _ in rows],
            x=[1e3 * float(np.mean([parts[stage] for parts in found])) for _, found in rows],
            orientation="h",
            name=STAGE_NAMES[stage],
            marker_color=STAGE_COLOURS[stage],
            hovertemplate=f"{STAGE_NAMES[stage]}: %{{x:.2f}} ms<extra></extra>",
        )
    figure.update_layout(barmode="stack", bargap=0.35)
    figure.update_xaxes(title="mean of the requests in the bucket, ms")
    figure.update_yaxes(autorange="reversed", title="by time to first token")
    return styled(figure, 330).update_layout(margin_l=120)


def timeline(run: Run) -> go.Figure:
    """The stages of each request, one after the other, on the run's time. All requests of a stretch
    in the middle would hide the whole, so they are sampled evenly."""
    told = [o for o in run.outcomes if not o.error and o.stages is not None and was_sent(o)]
    told = thinned(sorted(told, key=lambda o: o.intended_s), MAX_BARS)
    accounts = [account(outcome, False) for outcome in told]
    figure = go.Figure()
    begin = np.array([outcome.intended_s for outcome in told])
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
    figure.update_xaxes(title="time on the run, s")
    figure.update_yaxes(autorange="reversed", title="requests, by intended time", showgrid=False)
    height = int(np.clip(2.4 * len(told) + 120, 240, 820))
    return styled(figure, height)
