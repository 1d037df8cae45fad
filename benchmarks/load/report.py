"""One self-contained HTML page from a result file, or from two, side by side.

python -m benchmarks.load report a.json [b.json] --out report.html
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from benchmarks.load import compare, plots, result
from benchmarks.load.compare import objectives_of
from benchmarks.load.measure import (
    LATENCIES,
    SHOWN,
    STAGES_TO_FIRST_TOKEN,
    median,
    ms,
    number,
    percent,
    pick,
)
from benchmarks.load.records import Result

STAGE_ROWS = ("first_token_s", *STAGES_TO_FIRST_TOKEN, "decode_s", "unaccounted_s")
STYLE = """
body { font: 14px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; color: #1c1f23;
  background: #fff; max-width: 1140px; margin: 28px auto; padding: 0 20px; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 34px 0 4px; }
p { margin: 4px 0 8px; } .note { color: #555b63; max-width: 900px; }
table { border-collapse: collapse; margin: 8px 0; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 14px 3px 0; text-align: right; border-bottom: 1px solid #e9ebee; }
th { color: #555b63; font-weight: 600; border-bottom-color: #b9bec6; }
th:first-child, td:first-child, td.text { text-align: left; }
tr.first td { border-top: 1px solid #b9bec6; }
.heads { display: grid; grid-auto-flow: column; grid-auto-columns: 1fr; gap: 40px; }
.head { display: grid; grid-template-columns: 80px 1fr; gap: 0 12px; margin: 10px 0; }
.head div:nth-child(odd) { color: #555b63; } code { font-size: 12.5px; word-break: break-word; }
.ok, .bad { padding: 7px 12px; margin: 8px 0; border-left: 4px solid #3a9a75; background: #f1f8f5; }
.bad { border-color: #c0392b; background: #c0392b; color: #fff; font-weight: 600; }
.beside { display: flex; gap: 70px; align-items: flex-start; }
.range { color: #7a8088; font-size: 12px; } .key { display: inline-block; width: 11px;
  height: 11px; border-radius: 2px; margin-right: 6px; }
summary { cursor: pointer; color: #555b63; }
"""


def write_report(
    path: str | Path, results: Sequence[Result], names: Sequence[str] = (), title: str = ""
) -> None:
    """Writes the page of one or two results; `names` tell two apart ("a" and "b" without)."""
    Path(path).write_text(page(results, names, title), encoding="utf-8")


def page(results: Sequence[Result], names: Sequence[str] = (), title: str = "") -> str:
    """The page, as text; nothing in it is fetched from anywhere.

    Raises ValueError for no results or more than two.
    """
    if not 1 <= len(results) <= 2:
        raise ValueError(f"a report shows one result or two, not {len(results)}")
    given = list(names) or (["a", "b"] if len(results) > 1 else ["this run"])
    named = list(zip(given, results, strict=True))
    title = title or "Load test" + (f": {' and '.join(given)}" if len(results) > 1 else "")
    body = "".join(
        [
            f"<h1>{escape(title)}</h1>",
            '<div class="heads">',
            *(head(name, each, len(results) > 1) for name, each in named),
            "</div>",
            comparison(named),
            figures(named),
            *latencies(named),
            *timelines(named),
            *searches(named),
            *details(named),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head>\n<body>{body}</body></html>\n"
    )


def drawing(figure: go.Figure) -> str:
    """A figure as HTML, without the library."""
    return figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        include_mathjax=False,
        config={"displayModeBar": False},  # dragging zooms, a double click goes back
    )


def section(title: str, note: str = "") -> str:
    """A heading and a line on how to read what follows."""
    return f"<h2>{escape(title)}</h2>" + (f'<p class="note">{escape(note)}</p>' if note else "")


def rows_table(columns: Sequence[str], rows: Sequence[Sequence[str]], first: int = 0) -> str:
    """A table of ready HTML cells; each group of `first` rows is set apart (0: none)."""
    top = "".join(f"<th>{column}</th>" for column in columns)
    lines = []
    for index, row in enumerate(rows):
        mark = ' class="first"' if first and index % first == 0 else ""
        lines.append(f"<tr{mark}>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>")
    return f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def head(name: str, found: Result, several: bool) -> str:
    """What ran, when, where, and whether the harness kept up."""
    machine, options = found.machine, found.options
    hardware = [f"{machine.get('cpu', '?')}, {machine.get('cores', '?')} cores"]
    hardware.append(f"{machine.get('memory_gib', '?')} GiB")
    hardware += [str(gpu) for gpu in machine.get("gpus") or []]
    commit = str(machine.get("commit") or "unknown")[:12] + (
        " (changed)" * bool(machine.get("dirty"))
    )
    command = "python -m benchmarks.load " + shlex.join(map(str, options.get("argv", [])))
    begun = found.summaries[0]["begun_at"] if found.summaries else machine.get("date", "?")
    server = " · ".join(str(options[key]) for key in ("url", "model") if options.get(key))
    rows = {
        "server": escape(server),
        "begun": escape(f"{begun} · {len(found.runs)} run" + "s" * (len(found.runs) != 1)),
        "client on": escape(", ".join(hardware) + f" · kvlane commit {commit}"),
        "workload": escape(", ".join(f"{k} {v}" for k, v in found.workload.items())),
        "command": f"<code>{escape(command)}</code>",
    }
    cells = "".join(f"<div>{label}</div><div>{cell}</div>" for label, cell in rows.items() if cell)
    verdicts = "".join(verdict_boxes(found))
    label = f"<h2>{escape(name)}</h2>" if several else ""
    return f'<div>{label}<div class="head">{cells}</div>{verdicts}</div>'


def verdict_boxes(found: Result) -> list[str]:
    """Whether the harness kept up; each run in which it did not has a box of its own."""
    told = [each["harness_says"] for each in found.summaries if each["harness_ok"]]
    bad = [
        f'<div class="bad">Run {index + 1}: {escape(each["harness_says"])}</div>'
        for index, each in enumerate(found.summaries)
        if not each["harness_ok"]
    ]
    if bad or not told:
        return bad
    text = told[0] if len(told) == 1 else f"the harness kept up in all {len(told)} runs"
    return [f'<div class="ok">{escape(text)}</div>']


def key(index: int, name: str) -> str:
    """A name with its result's colour."""
    colour = plots.RESULT_COLOURS[index]
    return f'<span class="key" style="background:{colour}"></span>{escape(name)}'


def value_of(found: Result, shown: Any, *path: str) -> str:
    """The median over the runs, and under it their extremes if there are several."""
    text = shown(median(found.summaries, *path))
    values = [v for each in found.summaries if (v := pick(each, *path)) is not None]
    low, high = (shown(end(values)) for end in (min, max)) if values else (text, text)
    return text if low == high else f'{text}<br><span class="range">{low} to {high}</span>'


def figures(named: Sequence[tuple[str, Result]]) -> str:
    """Tables: rates and counts with a column each result, then the latencies."""

    def whole(value: float | None) -> str:
        return number(value, 0)

    lines: list[tuple[str, Any, tuple[str, ...]]] = [
        ("requests sent", whole, ("requests", "sent")),
        ("requests failed", whole, ("requests", "failed")),
        ("requests/s served", number, ("throughput", "requests_per_s")),
        ("output tokens/s", number, ("throughput", "output_tokens_per_s")),
        ("input tokens/s", number, ("throughput", "input_tokens_per_s")),
        ("first turns/s offered", number, ("throughput", "offered_per_s")),
        ("first turns/s started", number, ("throughput", "started_per_s")),
        ("goodput, requests/s", number, ("goodput", "good_per_s")),
        ("goodput, share of all", percent, ("goodput", "share")),
        ("requests at the server, mean", number, ("concurrency", "mean")),
        ("requests at the server, most", whole, ("concurrency", "max")),
        ("prompt tokens", whole, ("tokens", "prompt")),
        ("prompt tokens cached", percent, ("tokens", "cached_share")),
        ("output tokens", whole, ("tokens", "output")),
        ("texts our tokenizer counts differently", whole, ("tokens", "mismatched")),
        ("requests without usage", whole, ("tokens", "without_usage")),
        ("wall time, s", number, ("wall_s",)),
    ]
    rows = [
        [label, *(value_of(found, shown, *path) for _, found in named)]
        for label, shown, path in lines
    ]
    goals = msgspec.structs.asdict(objectives_of(named[0][1]))
    wanted = [f"{name[:-2]} at most {s * 1e3:g} ms" for name, s in goals.items() if s is not None]
    note = f"Goodput: within {', '.join(wanted)}." if wanted else "No objectives were set."
    if any(len(found.runs) > 1 for _, found in named):
        note += " Medians over the runs; lowest and highest below."
    several = len(named) > 1
    names = ["", *(key(i, name) if several else "" for i, (name, _) in enumerate(named))]
    half = -(-len(rows) // 2)
    beside = rows_table(names, rows[:half]) + rows_table(names, rows[half:])
    return section("Figures", note) + f'<div class="beside">{beside}</div>' + latency_rows(named)


def latency_rows(named: Sequence[tuple[str, Result]]) -> str:
    """Latencies and stages, a row for each result and, for two, their ratio."""
    lines = [("latency", name, label) for name, label in LATENCIES.items()]
    labels = plots.STAGE_NAMES | {"first_token_s": "router: arrival to first token"}
    if any(each["stages"] for _, found in named for each in found.summaries):
        lines += [("stages", stage, labels[stage]) for stage in STAGE_ROWS]
    rows = []
    for part, name, label in lines:
        colour = plots.STAGE_COLOURS.get(name) if part == "stages" else None
        mark = f'<span class="key" style="background:{colour}"></span>' if colour else ""
        for index, (who, found) in enumerate(named):
            paths = [(part, name, column) for column in SHOWN]
            if part == "latency":
                cells = [value_of(found, ms, *path) for path in paths]
            else:
                cells = [ms(median(found.summaries, *path)) for path in paths]
            start = mark + escape(label) if index == 0 else ""
            rows.append([start, *([key(index, who)] if len(named) > 1 else []), *cells])
        if len(named) > 1:
            rows.append(["", "b / a", *(ratio(named, part, name, column) for column in SHOWN)])
    columns = ["ms", *([""] if len(named) > 1 else []), *SHOWN]
    return rows_table(columns, rows, len(named) + 1 if len(named) > 1 else 0)


def ratio(named: Sequence[tuple[str, Result]], *path: str) -> str:
    """Of the second result's median to the first's."""
    a, b = (median(found.summaries, *path) for _, found in named)
    return f"{b / a:.2f}" if a and b is not None else "-"


def comparison(named: Sequence[tuple[str, Result]]) -> str:
    """Ratios of two results, with their intervals, as `compare` finds them."""
    if len(named) < 2 or not all(found.runs for _, found in named):
        return ""
    (_, a), (_, b) = named
    rows = []
    for row in compare.compare(a, b):
        shown = ms if compare.METRICS[row.metric].is_latency else number
        between = "{:.3f} to {:.3f}".format(*row.interval) if row.interval else "-"
        told = ("better" if row.better else "worse") if row.significant else "no sure difference"
        over = f"{row.ratio:.3f}" if row.ratio is not None else "-"
        rows.append([row.metric, shown(row.a), shown(row.b), over, between, told])
    columns = ["", *(key(i, name) for i, (name, _) in enumerate(named))]
    note = "Latencies in ms. The interval holds 95 % of the ratios that redrawn requests give."
    doubts = "".join(f"<p>{escape(doubt)}.</p>" for doubt in compare.warnings(a, b))
    table = rows_table((*columns, "b / a", "interval", ""), rows)
    return section("Is it more than chance?", note) + table + doubts


def latencies(named: Sequence[tuple[str, Result]]) -> list[str]:
    """Distributions, and latency and load over time."""
    runs = [(name, found.runs) for name, found in named]
    firsts = [(name, found.runs[0]) for name, found in named if found.runs]
    if not firsts:
        return []
    goals = objectives_of(named[0][1])
    several = any(len(found.runs) > 1 for _, found in named)
    only = " Of the first run." if several else ""
    parts = [
        section(
            "Latency at every percentile",
            "Read the tail at the right. Dotted: counted from the send, as other tools report; "
            "where it lies below the full line, requests were late to leave. Failed requests are "
            "left out.",
        ),
        drawing(plots.percentiles(runs, goals)),
        section(
            "Time to first token over time",
            "Each request where it was due; crosses failed, after that time." + only,
        ),
    ]
    parts.append(drawing(plots.over_time(firsts, goals.ttft_s)))
    parts.append(section("Load over time", "Served is counted where requests ended." + only))
    return [*parts, drawing(plots.load_over_time(firsts))]


def timelines(named: Sequence[tuple[str, Result]]) -> list[str]:
    """Where the time went, if the server told."""
    told = [(name, found) for name, found in named if any(map(plots.tells, found.runs))]
    if not told:
        note = "The server told no stages (kvlane does, when asked)."
        return [section("Where the time to first token goes", note), section("Timeline", note)]
    parts = [
        section(
            "Where the time to first token goes",
            "Requests by their time to first token: the fast half, slower ones, the slowest 1 %.",
        )
    ]
    parts.append(drawing(plots.first_token([(name, found.runs) for name, found in told])))
    note = (
        f"A line for each request, at most {plots.MAX_BARS}, taken evenly from the first run. "
        "What the stages do not explain stands at the end; in a long run all begin at zero."
    )
    parts.append(section("Timeline", note))
    for name, found in told:
        parts.append(f"<p><b>{escape(name)}</b></p>" if len(named) > 1 else "")
        first = next(run for run in found.runs if plots.tells(run))
        parts.append(drawing(plots.timeline(first)))
    return parts


def searches(named: Sequence[tuple[str, Result]]) -> list[str]:
    """The rates that a search for the highest one tried."""
    parts = []
    for name, found in named:
        if found.search:
            rows = [
                [
                    number(pick(probe, "rate"), 2),
                    percent(pick(probe, "share")),
                    "held" if probe.get("held") else "failed",
                    *(ms(pick(probe, "summary", "latency", *path)) for path in PROBED),
                ]
                for probe in found.search
            ]
            columns = ("requests/s", "good", "", "ttft p50, ms", "ttft p99", "gap p50", "gap p99")
            parts.append(section(f"Search for the highest rate: {name}"))
            parts.append(rows_table(columns, rows))
    return parts


PROBED = (("ttft_s", "p50"), ("ttft_s", "p99"), ("gaps_s", "p50"), ("gaps_s", "p99"))


def details(named: Sequence[tuple[str, Result]]) -> list[str]:
    """Errors with an example each, the harness's lag, options and machine."""
    parts = [section("Failures")]
    for name, found in named:
        examples: dict[str, tuple[int, str]] = {}
        for outcome in plots.outcomes_of(found.runs):
            if outcome.error:
                count, text = examples.get(outcome.error, (0, ""))
                examples[outcome.error] = (count + 1, text or outcome.message)
        rows = [[escape(k), str(n), escape(text)] for k, (n, text) in examples.items()]
        parts.append(f"<p><b>{escape(name)}</b></p>" if len(named) > 1 else "")
        parts.append(
            rows_table(("class", "count", "for example"), rows) if rows else "<p>None.</p>"
        )
    parts.append(section("The harness itself", "Lateness of its sends and of its loop, in ms."))
    for name, found in named:
        rows = []
        for index, each in enumerate(found.summaries):
            own = each["harness"]
            lags = [ms(own[lag][column]) for lag in ("lag_s", "loop_s") for column in LAG_COLUMNS]
            shares = ", ".join(f"{share:.2f}" for share in own["cpu_share"].values())
            rows.append([f"{escape(name)}, run {index + 1}", *lags, shares])
        columns = [f"{lag} {column}" for lag in ("send", "loop") for column in LAG_COLUMNS]
        parts.append(rows_table(("", *columns, "share of a core, each process"), rows))
    for name, found in named:
        text = json.dumps(
            {"options": found.options, "machine": found.machine}, indent=2, default=str
        )
        label = f"All options and the machine: {escape(name)}"
        parts.append(f"<details><summary>{label}</summary><pre>{escape(text)}</pre></details>")
    return parts


LAG_COLUMNS = ("p50", "p99", "max")


def main(argv: Sequence[str]) -> int:
    """Writes a page from result files.

    Raises ValueError if a file is not a result.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load report",
        description="One HTML page from one or two results.",
    )
    parser.add_argument("results", nargs="+", metavar="RESULT", help="result file; at most two")
    parser.add_argument("--out", default="report.html", help="the page to write")
    parser.add_argument("--title", default="", help="stands above it")
    parser.add_argument("--name", action="append", default=[], help="of a result, in their order")
    args = parser.parse_args(argv)
    names = args.name or [Path(path).name.split(".")[0] for path in args.results]
    if len(names) != len(args.results):
        parser.error("give --name once for each result")
    write_report(args.out, [result.read(path) for path in args.results], names, args.title)
    return 0
