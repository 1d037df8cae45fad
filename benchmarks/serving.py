"""What clients of a server see by load: one table for any servers that are given the same traces.

    python -m benchmarks.serving --name kvlane --traces DIR --json kvlane.json.gz --tokenizer MODEL
    python -m benchmarks.serving --name two --traces DIR --json two.json.gz --tokenizer MODEL \\
        --url http://127.0.0.1:8001,http://127.0.0.1:8002
    python -m benchmarks.serving report kvlane.json.gz two.json.gz --plot page.html

A load is a rate (Poisson arrivals for --duration) or `full` (--full requests at any time). The
traces of the rates are drawn where DIR lacks them, so that all later runs send the same. Several
addresses are replicas behind a good balancer: a client process sends each request where the fewest
of its own run. All other flags are those of `kvlane bench`; stages come from kvlane alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.load import arrivals, measurement, options, result
from benchmarks.load.lengths import pair
from benchmarks.load.measure import STAGES
from benchmarks.load.records import Result
from benchmarks.load.report import aligned, ms, number, percent, pick

RATES = "16,32,48,full"  # requests per second
LENGTHS = "64+lognormal(446,0.5),32+lognormal(270,0.4)"  # tokens in and out
FULL_LENGTHS = "512,256"
OBJECTIVES = "ttft=300ms,itl=8ms"
GOOD_SHARE = 0.9  # of requests: what the highest rate is asked to hold
COLUMNS = (
    ("TTFT p50", ("latency", "ttft_s", "p50")),
    ("p99", ("latency", "ttft_s", "p99")),
    ("inter-token p50", ("latency", "tpot_s", "p50")),
    ("p99", ("latency", "tpot_s", "p99")),
    ("gap p99", ("latency", "gaps_s", "p99")),
    ("p99.9", ("latency", "gaps_s", "p99.9")),
    ("tokens/s", ("throughput", "output_tokens_per_s")),
    ("good", ("goodput", "share")),
)
STYLES = {"latency": ms, "goodput": percent, "throughput": number}


def parser() -> argparse.ArgumentParser:
    """Our own flags."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = made.add_argument
    add("--name", default="server", help="in the table")
    add("--traces", type=Path, required=True, metavar="DIR")
    add("--rates", default=RATES, help="loads (%(default)s)")
    add("--duration", type=float, default=10.0, help="of a rate, s (%(default)g)")
    add("--lengths", default=LENGTHS, help="of a rate's requests: IN,OUT (%(default)s)")
    add("--full", type=int, default=256, help="requests of `full` at a time (%(default)s)")
    add("--full-lengths", default=FULL_LENGTHS, help="IN,OUT (%(default)s)")
    add("--slo", default=OBJECTIVES, help="a good request's (%(default)s)")
    add("--json", type=Path, required=True, metavar="FILE", help="what was measured")
    return made


def record(path: Path, rate: str, duration_s: float, lengths: str, seed: int) -> None:
    """Draw a trace: start, tokens in and tokens out of each request, as Mooncake writes them."""
    rng = np.random.default_rng(seed)
    draw = pair(lengths, "--lengths")
    unfinished = path.with_suffix(".part")  # not to be taken for a trace if we are interrupted
    with unfinished.open("w") as file:
        for at_s in arrivals.starts(f"poisson:{rate}", rng, None, duration_s):
            num_in, num_out = draw(rng)
            row = {"timestamp": 1e3 * at_s, "input_length": num_in, "output_length": num_out}
            file.write(msgspec.json.encode(row).decode() + "\n")
    unfinished.rename(path)


def measure(argv: Sequence[str]) -> Result:
    """All loads, one run each, as one result.

    Raises:
        ValueError, ConnectionError: see `measurement.measured`.
    """
    given, rest = parser().parse_known_args(argv)
    common = [*rest, "--slo", given.slo]
    given.traces.mkdir(parents=True, exist_ok=True)
    found: list[Result] = []
    loads: list[str] = given.rates.split(",")
    for load in loads:
        if load == "full":
            num = str(given.full)
            how = ["--source", f"synthetic:{given.full_lengths}", "--concurrency", num]
            how += ["--num", str(4 * given.full)]
        else:
            path: Path = given.traces / f"{load}.jsonl"
            if not path.exists():
                record(path, load, given.duration, given.lengths, seed=len(found))
            how = ["--source", f"mooncake:{path}"]
        print(f"{given.name}: {load}", file=sys.stderr)
        found.append(measurement.measured(options.parse([*common, *how])))
    about = {"name": given.name, "loads": loads, "each": [each.workload for each in found]}
    summaries = [each.summaries[0] for each in found]
    runs = [each.runs[0] for each in found]
    shown = {**found[0].options, "argv": list(argv)}
    made = Result(result.KIND, shown, result.machine(), about, summaries, runs)
    about["name"] = made.named(given.name)
    result.write(given.json, made)
    return made


def report(results: Sequence[Result]) -> list[str]:
    """The table of all loads, the stages at each load, and the highest rate of each server."""
    rows, stages, ends = [["ms", "", *(label for label, _ in COLUMNS)]], [], list[str]()
    names = (*STAGES, "unaccounted_s")
    loads = list(dict.fromkeys(load for each in results for load in each.workload["loads"]))
    for load, found, figures in (
        (load, found, dict(zip(found.workload["loads"], found.summaries, strict=True)).get(load))
        for load in loads
        for found in results
    ):
        if figures is None:
            continue
        head = [load if load == "full" else f"{load}/s", str(found.workload["name"])]
        rows.append([*head, *(STYLES[path[0]](pick(figures, *path)) for _, path in COLUMNS)])
        if figures["stages"]:
            stages.append([*head, *(ms(pick(figures, "stages", name, "p50")) for name in names)])
        if failed := figures["requests"]["failed"]:
            ends.append(f"{' '.join(head)}: {failed} requests FAILED")
        if not figures["harness_ok"]:
            ends.append(f"{' '.join(head)}: {figures['harness_says']}")
    for found in results:
        held = [rate for rate, share in goodput(found) if share >= GOOD_SHARE]
        best = f"{max(held):g}/s" if held else "none"
        name = found.workload["name"]
        ends.append(f"{name}: highest rate with {percent(GOOD_SHARE)} good: {best}")
    titles = [f"{name[:-2].replace('_', ' ')} p50" for name in names]
    told = ["", *aligned([["ms", "", *titles], *stages])] if stages else []
    return [*aligned(rows), *told, "", *ends]


def goodput(found: Result) -> list[tuple[float, float]]:
    """(requests per second, share of them that was good) of each rate."""
    named = zip(found.workload["loads"], found.summaries, strict=True)
    shares = [(load, figures["goodput"]["share"]) for load, figures in named]
    return [(float(load), share or 0.0) for load, share in shares if load != "full"]


def draw(results: Sequence[Result], path: Path) -> None:
    """Write the plot: good requests, time to first token and time between tokens by rate."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    panels = {
        "good requests, %": [("good", ("goodput", "share"), 100.0)],
        "time to first token, ms": [(p, ("latency", "ttft_s", p), 1e3) for p in ("p50", "p99")],
        "inter-token, mean of a request, ms": [
            (p, ("latency", "tpot_s", p), 1e3) for p in ("p50", "p99")
        ],
    }
    drawn: Any = make_subplots(1, len(panels), subplot_titles=list(panels))
    for found in results:
        rates = [rate for rate, _ in goodput(found)]
        named = zip(found.workload["loads"], found.summaries, strict=True)
        figures = [each for load, each in named if load != "full"]
        for column, lines in enumerate(panels.values(), 1):
            for label, where, scale in lines:
                values = [scale * (pick(each, *where) or 0.0) for each in figures]
                name = f"{found.workload['name']} {label}"
                drawn.add_trace(go.Scatter(x=rates, y=values, name=name), row=1, col=column)
    drawn.update_xaxes(title="offered, requests/s", rangemode="tozero")
    drawn.update_yaxes(rangemode="tozero")
    drawn.update_layout(template="plotly_white", width=1400, height=420)
    drawn.write_html(path, include_plotlyjs=True, config={"displayModeBar": False})


def main(argv: Sequence[str]) -> int:
    """0, or 2 for a user's mistake; with `report`, of results that exist."""
    try:
        if argv[:1] == ["report"]:
            asked = argparse.ArgumentParser(prog="python -m benchmarks.serving report")
            asked.add_argument("results", nargs="+", type=Path)
            asked.add_argument("--plot", type=Path, metavar="FILE", help="HTML")
            given = asked.parse_args(argv[1:])
            found = [result.read(path) for path in given.results]
            if given.plot:
                draw(found, given.plot)
        else:
            found = [measure(argv)]
    except (ValueError, ConnectionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(report(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
