"""What `engine.step_log` says of served steps, by number of rows, beside the engine's own steps.

    python -m benchmarks.steps logs/decode-0.jsonl
    python -m benchmarks.steps logs/decode-0.jsonl --serving load-nvlink.json --engine decode.json

With `--serving`, a result of `benchmarks.serving`, there is a table for each of its loads. Decode
steps that follow another step without a pause; medians. `period`: from one settling to the next.
Served steps of a bucket (as many rows as one graph serves) stand beside the step that
`benchmarks.engine` took for the most rows of that bucket. If any step verified windows, steps of a
bucket are told apart by width, and `kept` is what a window yielded, tokens a row. `idle`: the
device's share of all such steps' time in which it computed nothing, at least and at most: where a
launch was late, it may have waited for as long as the launch took.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.load import result
from benchmarks.load.report import aligned
from worker.observe.step_log import StepLine
from worker.run.full import decode_buckets

MIN_STEPS = 20  # of a bucket, for a row of the table


class Served(NamedTuple):
    """A decode step that followed another step at once."""

    line: StepLine
    period_us: float


def read(path: Path, from_s: float, to_s: float) -> list[Served]:
    """The decode steps of a log that settled within from_s..to_s (Unix time)."""
    decoder = msgspec.json.Decoder(StepLine)
    whole = [text for text in path.read_bytes().splitlines() if text.endswith(b"}")]
    lines = [decoder.decode(text) for text in whole]
    return [
        Served(line, 1e6 * (line.at - before.at))
        for before, line in pairwise(lines)
        if line.rows and line.joined and from_s <= line.at <= to_s
    ]


def loads(path: Path | None) -> list[tuple[str, float, float]]:
    """(name, begin, end) of each load of a result, Unix time; without one, all there is."""
    if path is None:
        return [("all", 0.0, float("inf"))]
    found = result.read(path)
    if "loads" not in found.workload:
        raise ValueError(f"{path} is not a result of benchmarks.serving")
    begins = [datetime.fromisoformat(each["begun_at"]).timestamp() for each in found.summaries]
    names: list[str] = found.workload["loads"]
    return [
        (name, began, began + each["wall_s"])
        for name, began, each in zip(names, begins, found.summaries, strict=True)
    ]


def engine_ms(path: Path | None) -> dict[tuple[int, int], float]:
    """(rows, width) -> milliseconds of a greedy step, of `benchmarks.engine --phase decode`."""
    steps = json.loads(path.read_text())["steps"] if path is not None else []
    greedy = [each for each in steps if each["sampling"] == "greedy"]
    found = {(each["batch"], each.get("width", 1)): each["median_ms"] for each in greedy}
    if len(found) < len(greedy):
        raise ValueError(f"{path} has one number of rows at several lengths of prompts")
    return found


def table(
    steps: Sequence[Served], engine: dict[tuple[int, int], float], max_rows: int
) -> list[str]:
    """A line for each bucket and width with MIN_STEPS steps, and the share of idle time."""
    found: dict[tuple[int, int], list[Served]] = defaultdict(list)
    buckets = decode_buckets(max([max_rows, *(each.line.rows for each in steps)]))
    for each in steps:
        bucket = next(size for size in buckets if size >= each.line.rows)
        found[bucket, each.line.width].append(each)
    wide = any(width > 1 for _, width in found)
    titles = ["steps", "keys", "period", "gpu", "idle", "launch", "wait", "host", "engine"]
    rows = [["rows", *(["width", "kept"] if wide else []), *titles]]
    for (bucket, width), served in sorted(found.items()):
        if len(served) < MIN_STEPS:
            continue
        lines = [each.line for each in served]
        kept = sum(each.kept or each.rows for each in lines) / sum(each.rows for each in lines)
        columns = (
            [each.period_us for each in served], [each.gpu_us for each in lines],
            [each.idle_us for each in lines], [each.launch_us for each in lines],
            [each.wait_us for each in lines], [each.host_us for each in lines],
        )  # fmt: skip
        known = f"{engine[bucket, width]:.2f}" if (bucket, width) in engine else "-"
        keys = statistics.median(each.num_keys / each.rows for each in lines)
        medians = [f"{statistics.median(column) / 1e3:.2f}" for column in columns]
        windows = [str(width), f"{kept:.2f}"] if wide else []
        rows.append([f"<= {bucket}", *windows, str(len(served)), f"{keys:.0f}", *medians, known])
    idle = sum(max(each.line.idle_us, 0.0) for each in steps)
    most = idle + sum(each.line.launch_us for each in steps if each.line.late)
    whole = idle + sum(each.line.gpu_us for each in steps)
    share = (
        f"{100 * idle / whole:.2f} to {100 * most / whole:.2f} %" if idle else "not known: no GPU"
    )
    return [*aligned(rows), f"all {len(steps)} steps: the device was idle {share} of their time"]


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 for a user's mistake."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("log", type=Path, nargs="+", help="of a decode worker")
    add("--serving", type=Path, metavar="FILE", help="of benchmarks.serving --json")
    add("--max-rows", type=int, default=256, help="engine.max_num_reqs (%(default)s)")
    add("--engine", type=Path, metavar="FILE", help="of benchmarks.engine --phase decode --json")
    given = parser.parse_args(argv)
    try:
        for path in given.log:
            for load, from_s, to_s in loads(given.serving):
                print(f"{path.name}, {load}: milliseconds")
                found = read(path, from_s, to_s)
                print("\n".join(table(found, engine_ms(given.engine), given.max_rows)))
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
