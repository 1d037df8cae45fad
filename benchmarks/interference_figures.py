"""The figures of `benchmarks.interference`: by layout, load and class of request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.load import result
from benchmarks.load.compare import compare
from benchmarks.load.measure import median, ms, number, pick, summary
from benchmarks.load.records import Objectives, Result, Run

SPLIT = "split"
LOADS = ("alone", "mixed")
CLASSES = ("chat", "prompt")
COMPARED = ("gaps_p50", "gaps_p99", "tpot_p99", "ttft_p50", "ttft_p99", "output_tokens_per_s")
GAPS = ("p50", "p99", "p99.9", "max")


def in_order(layouts: Iterable[str]) -> list[str]:
    """`split` first, then by chunk."""
    return sorted(layouts, key=lambda name: (name != SPLIT, len(name), name))


def layouts_in(out: Path) -> list[str]:
    """Those that were measured to the end and whose results are in `out`, in order."""
    found = [path.name.removesuffix("-mixed.json.gz") for path in out.glob("*-mixed.json.gz")]
    return in_order(name for name in found if (out / f"{name}.json").exists())


def read_load(out: Path, layout: str, load: str) -> tuple[Result, list[str]]:
    """The result, and the class of each session of it.

    Raises:
        ValueError: the load's file is not the one that was sent.
    """
    found = result.read(out / f"{layout}-{load}.json.gz")
    lines = (out / f"{load}.jsonl").read_bytes().splitlines()
    classes = [msgspec.json.decode(line)["type"] for line in lines]
    # The harness numbers sessions in the order of their starts, which is that of the lines.
    asked = sum(msgspec.json.decode(line)["input_length"] for line in lines)
    if (
        found.workload["prompt_tokens"]["sum"] != asked
        or len(classes) != found.workload["num_sessions"]
    ):
        raise ValueError(f"{out / load}.jsonl is not what {layout} was asked")
    return found, classes


def of_class(found: Result, classes: Sequence[str], wanted: str) -> Result:
    """The part of every run that is of the class `wanted`, with figures of its own.

    Rates are over the time of the whole run, and the harness's lag is that of the whole.
    """
    runs = [
        msgspec.structs.replace(
            run, outcomes=[each for each in run.outcomes if classes[each.session] == wanted],
            schedule=[],
        )
        for run in found.runs
    ]  # fmt: skip
    same = {"digest": found.workload["digest"], "class": wanted}
    summaries = [summary(run, Objectives()) for run in runs]
    return msgspec.structs.replace(found, runs=runs, summaries=summaries, workload=same)


def parts(out: Path, layout: str, load: str) -> dict[str, Result]:
    """Class of request -> its part of the result, of the classes that the load has."""
    found, classes = read_load(out, layout, load)
    return {each: of_class(found, classes, each) for each in CLASSES if each in classes}


def figures(out: Path) -> dict[str, Any]:
    """All figures of `out`: of the results there and, of layouts whose results have been left out
    since, what its `interference.json` has. With any results, that file is written anew.

    "layouts": layout -> load -> class -> summaries of the runs (`benchmarks.load.measure`, s), with
    what ran where beside them. "compared": layout -> the chats of the mixed load against those of
    `split`: the ratio of medians and its 95 % interval. Where the results of one of the two are not
    in `out`, it stays what it was.
    """
    path = out / "interference.json"
    told: dict[str, Any] = {"layouts": {}, "compared": {}}
    if path.exists():
        told = json.loads(path.read_text())
    measured = layouts_in(out)
    if not measured:
        return told
    chats: dict[str, Result] = {}
    for layout in measured:
        loads = {load: parts(out, layout, load) for load in LOADS}
        chats[layout] = loads["mixed"]["chat"]
        summaries = {
            load: {each: part.summaries for each, part in classes.items()}
            for load, classes in loads.items()
        }
        told["layouts"][layout] = json.loads((out / f"{layout}.json").read_text()) | summaries
    for layout in [each for each in chats if each != SPLIT and SPLIT in chats]:
        rows = compare(chats[SPLIT], chats[layout], metrics=COMPARED)
        told["compared"][layout] = {
            row.metric: {"ratio": row.ratio, "interval": list(row.interval)}
            for row in rows
            if row.interval is not None
        }
    told = {part: {name: rows[name] for name in in_order(rows)} for part, rows in told.items()}
    path.write_text(json.dumps(told, indent=1) + "\n")
    return told


COLUMNS = (
    "layout", "load", "chats: gap p50", "p99", "of runs", "p99.9", "max", "ttft p50", "p99",
    "prompts: ttft p50", "p99", "requests/s", "tokens/s",
)  # fmt: skip


def table(told: dict[str, Any]) -> str:
    """The text for the terminal: medians over the runs, times in ms; and what is to be doubted."""
    shown = Table(box=SIMPLE, pad_edge=False)
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column in COLUMNS[:2] else "right")
    lines: list[str] = []
    for layout, rows in told["compared"].items():
        if row := rows.get("gaps_p99"):
            between = "{:.2f} to {:.2f}".format(*row["interval"])
            ratio = f"{row['ratio']:.2f} ({between})"
            lines.append(f"inter-token p99 of the chats, {layout} / {SPLIT}: {ratio}")
    for layout, loads in told["layouts"].items():
        for load in LOADS:
            shown.add_row(layout, load, *cells(loads[load]))
            lines += [f"{layout}, {load}: {line}" for line in doubts(loads[load])]
    console = Console(width=150, highlight=False)
    with console.capture() as text:
        console.print(shown)
        for line in lines:
            console.print(line, markup=False)
    return text.get()


def cells(classes: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A row of the table after its names."""
    chats, prompts = classes["chat"], classes.get("prompt", [])
    gaps = [ms(median(chats, "latency", "gaps_s", column)) for column in GAPS]
    p99s = [value for each in chats if (value := pick(each, "latency", "gaps_s", "p99"))]
    between = f"{ms(min(p99s))}..{ms(max(p99s))}" if len(p99s) > 1 else ""
    firsts = [
        ms(median(part, "latency", "ttft_s", column))
        for part in (chats, prompts)
        for column in ("p50", "p99")
    ]
    rates = [
        sum(median(part, "throughput", name) or 0.0 for part in (chats, prompts))
        for name in ("requests_per_s", "output_tokens_per_s")
    ]
    return [*gaps[:2], between, *gaps[2:], *firsts, number(rates[0], 2), number(rates[1])]


def doubts(classes: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Failures, and runs in which the harness was late."""
    found = [each["harness_says"] for each in classes["chat"] if not each["harness_ok"]]
    failed = sum(each["requests"]["failed"] for part in classes.values() for each in part)
    return found + ([f"{failed} requests FAILED"] if failed else [])


def gaps_over_time(run: Run, bin_s: float) -> tuple[list[float], list[float | None]]:
    """(time, longest gap that ended in it, None for none) of every bin, both in seconds."""
    longest: dict[int, float] = {}
    for outcome in run.outcomes:
        for at_s, gap_s in zip(outcome.chunk_s[1:], outcome.gaps_s, strict=True):
            place = int(at_s / bin_s)
            longest[place] = max(longest.get(place, 0.0), gap_s)
    places = range(max(longest, default=-1) + 1)
    return [(place + 0.5) * bin_s for place in places], [longest.get(place) for place in places]
