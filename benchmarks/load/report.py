"""What results say: one in full, or several side by side, as text; and one plot of them.

python -m benchmarks.load report a.json [b.json ...] [--plot page.html]
"""

import argparse
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.load import result
from benchmarks.load.measure import STAGES
from benchmarks.load.records import Result

Summary = dict[str, Any]  # of `measure.summary`

LATENCIES = {
    "ttft_s": "time to first token",
    "ttft_from_send_s": "  from the send (vLLM's TTFT)",
    "tpot_s": "inter-token, mean of a request (TPOT)",
    "gaps_s": "between pieces, every gap (ITL)",
    "e2e_s": "end to end (E2EL)",
}
SHOWN = ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")
COLUMNS = (
    ("requests/s", ("throughput", "requests_per_s")),
    ("tokens/s", ("throughput", "output_tokens_per_s")),
    ("ttft p50", ("latency", "ttft_s", "p50")),
    ("p99", ("latency", "ttft_s", "p99")),
    ("inter-token p50", ("latency", "tpot_s", "p50")),
    ("p99", ("latency", "tpot_s", "p99")),
    ("gap p50", ("latency", "gaps_s", "p50")),
    ("p99", ("latency", "gaps_s", "p99")),
    ("p99.9", ("latency", "gaps_s", "p99.9")),
    ("good", ("goodput", "share")),
)


def pick(figures: Summary, *path: str) -> float | None:
    """The number at `path` of a summary, None if there is none."""
    value: Any = figures
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return None if value is None else float(value)


def median(summaries: Sequence[Summary], *path: str) -> float | None:
    """The median over the runs of the number at `path`."""
    measured = [value for each in summaries if (value := pick(each, *path)) is not None]
    return statistics.median(measured) if measured else None


def ms(seconds: float | None) -> str:
    """Milliseconds with three digits or more; a dash for None."""
    if seconds is None:
        return "-"
    value = seconds * 1e3
    return f"{value:,.{0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2}f}"


def number(value: float | None, digits: int = 1) -> str:
    """With thousands marked; a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    """Of a share; a dash for None."""
    return "-" if share is None else f"{share * 100:.1f} %"


STYLES = {"latency": ms, "goodput": percent, "throughput": number}  # by part of a summary


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells in columns, all but the first one to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def table(measured: Result) -> str:
    """One result in full. Of several runs it shows the median of each figure, and then a line for
    each run."""
    summaries = measured.summaries
    if not summaries:
        return "no runs\n"
    several = len(summaries) > 1
    named = [*measured.options.get("urls", ()), measured.options.get("model", "")]
    runs = f"median of {len(summaries)} runs" if several else "1 run"
    lines = [measured.named(" · ".join([*named, summaries[0]["begun_at"], runs])), ""]
    lines += [*latencies(summaries), "", *sentences(summaries), *transfers(summaries)]
    for probe in measured.search:
        held = "holds" if probe["held"] else "fails"
        lines.append(f"search      {probe['rate']:.3g}/s: {percent(probe['share'])} good, {held}")
    if (best := measured.workload.get("highest_rate")) is not None:
        lines.append(f"search      the highest rate that holds is {best:.3g}/s")
    if several:
        lines += ["", *side_by_side([(f"run {i + 1}", [s]) for i, s in enumerate(summaries)])]
    else:
        lines.append(summaries[0]["harness_says"])
    return "\n".join(lines) + "\n"


def latencies(summaries: Sequence[Summary]) -> list[str]:
    """Latencies and stages in milliseconds."""
    rows = [("latency", name, label) for name, label in LATENCIES.items()]
    if any(each["stages"] for each in summaries):
        names = (*STAGES, "unaccounted_s")
        rows += [("stages", name, f"  {name[:-2].replace('_', ' ')}") for name in names]
        rows.append(("stages", "pull_s", "  KV pulled, beside these"))
    cells = [
        [label, *(ms(median(summaries, part, name, column)) for column in SHOWN)]
        for part, name, label in rows
    ]
    return aligned([["ms", *SHOWN], *cells])


def sentences(summaries: Sequence[Summary]) -> list[str]:
    """What has no percentiles, a line each."""

    def of(*path: str, digits: int = 1) -> str:
        return number(median(summaries, *path), digits)

    errors: Counter[str] = Counter()
    for each in summaries:
        errors.update(each["requests"]["errors"])
    failed = ", ".join(f"{name} {num}" for name, num in errors.most_common())
    total = {name: sum(s["requests"][name] for s in summaries) for name in ("sent", "served")}
    limits = summaries[0]["goodput"]["objectives"]
    under = ", ".join(f"{name[:-2]} <= {ms(limit)} ms" for name, limit in limits.items())
    return [
        f"requests    {total['served']} of {total['sent']} served"
        + (f"; FAILED: {failed} (not in the latencies)" if failed else ""),
        f"throughput  {of('throughput', 'requests_per_s', digits=2)} requests/s, "
        f"{of('throughput', 'output_tokens_per_s')} output and "
        f"{of('throughput', 'input_tokens_per_s')} input tokens/s in {of('wall_s')} s",
        f"arrivals    {of('throughput', 'offered_per_s', digits=2)}/s offered, "
        f"{of('throughput', 'started_per_s', digits=2)}/s started; at the server "
        f"{of('concurrency', 'mean')} on average, {of('concurrency', 'max', digits=0)} at most",
        f"goodput     {of('goodput', 'good_per_s', digits=2)} requests/s, "
        f"{percent(median(summaries, 'goodput', 'share'))} of all"
        + (f" within {under}" if under else " (no objectives)"),
        f"tokens      {of('tokens', 'prompt', digits=0)} prompt "
        f"({percent(median(summaries, 'tokens', 'cached_share'))} cached), "
        f"{of('tokens', 'output', digits=0)} output, "
        f"{of('tokens', 'per_piece', digits=2)} a piece; {of('tokens', 'mismatched', digits=0)} of "
        f"{of('tokens', 'checked', digits=0)} texts counted differently by our tokenizer, "
        f"{of('tokens', 'without_usage', digits=0)} without usage",
    ]


def transfers(summaries: Sequence[Summary]) -> list[str]:
    """How many prompts were computed elsewhere, and how fast their KV came; a line, or none."""
    found = [each["stages"]["pulled"] for each in summaries if "pulled" in each["stages"]]
    if not found:
        return []
    num, of, num_bytes, seconds = (sum(each[name] for each in found) for name in found[0])
    megabytes = num_bytes / 1e6
    rate = f"; {megabytes:,.1f} MB of KV at {megabytes / seconds:,.0f} MB/s" if seconds else ""
    return [f"disaggregated {num:,} of {of:,} requests{rate}"]


def side_by_side(named: Sequence[tuple[str, Sequence[Summary]]]) -> list[str]:
    """A line for each (name, summaries of its runs), medians; then what is to be doubted."""
    rows = [["ms", *(label for label, _ in COLUMNS)]]
    doubts: list[str] = []
    for name, summaries in named:
        values = ((path[0], median(summaries, *path)) for _, path in COLUMNS)
        rows.append([name, *(STYLES[part](value) for part, value in values)])
        failed = sum(each["requests"]["failed"] for each in summaries)
        doubts += [f"{name}: {failed} requests FAILED"] if failed else []
        doubts += [f"{name}: {s['harness_says']}" for s in summaries if not s["harness_ok"]]
    return aligned(rows) + doubts


def main(argv: Sequence[str]) -> int:
    """Print, and draw if asked; raises ValueError if a file is not a result."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="kvlane bench report", description="Results side by side."
    )
    parser.add_argument("results", nargs="+", metavar="RESULT", help="result file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a plot, HTML")
    parser.add_argument(
        "--sessions", type=Path, metavar="FILE", help="figures by session, and a plot, SVG"
    )
    args = parser.parse_args(argv)
    read = [(Path(path).name.split(".json")[0], result.read(path)) for path in args.results]
    named = [(measured.named(name), measured) for name, measured in read]
    if len(named) == 1:
        print(table(named[0][1]), end="")
    else:
        print("\n".join(side_by_side([(name, measured.summaries) for name, measured in named])))
    if args.sessions:
        from benchmarks.load import sessions

        for name, measured in named:
            print("\n".join([name, *sessions.table(measured)]))
        sessions.draw(named, args.sessions)
    if args.plot:
        from benchmarks.load.plot import draw

        draw(named, args.plot)
    return 0
