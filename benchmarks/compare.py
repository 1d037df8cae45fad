"""One benchmark of two checkouts, by turns on one machine: what a change costs or saves.

    git worktree add /tmp/REV REV
    python -m benchmarks.compare --before /tmp/REV --after . --starts 6 --json out.json -- \\
        benchmarks.engine --model-config benchmarks/models/qwen3-8b.json --phase prefill \\
        --batch 1 --tokens 256 --graph piecewise --repeat 12

Starts of one commit differ by more than the steps within a start. So the unit is a start: its
figure is the median of its steps, and the table shows the median over starts. The order is
before, after, after, before, ..., so that a machine that grows slower counts for both. The interval
holds 95 % of the ratios when starts are drawn anew, with replacement, among each checkout's own.

Each start is a process of its own
in the checkout's folder; what it prints goes to standard error. Any benchmark serves that writes
`--json` as `benchmarks.engine` does.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.load.result import machine, version_of

SIDES = ("before", "after")
# What tells rows apart, where both checkouts write it.
FIELDS = ("batch", "prompt_len", "tokens", "sampling", "width", "launch", "path")
PACKAGES = ("torch", "triton", "flashinfer-python")
RESAMPLES = 10_000


class Ratio(NamedTuple):
    """Of the medians of two sets of starts, after / before, with the ends of its interval."""

    value: float
    low: float
    high: float


def order(starts: int) -> list[str]:
    """Which checkout each start is of: `starts` of each."""
    return [side for turn in range(starts) for side in (SIDES if turn % 2 == 0 else SIDES[::-1])]


def ratio(before: Sequence[float], after: Sequence[float]) -> Ratio:
    """Compare two sets of starts by a percentile bootstrap (Efron, 1979)."""
    draw = random.Random(0)
    ratios = sorted(
        statistics.median(draw.choices(after, k=len(after)))
        / statistics.median(draw.choices(before, k=len(before)))
        for _ in range(RESAMPLES)
    )
    low, high = ratios[RESAMPLES // 40], ratios[-RESAMPLES // 40]
    return Ratio(statistics.median(after) / statistics.median(before), low, high)


def start(checkout: Path, command: Sequence[str]) -> list[dict[str, Any]]:
    """Run the benchmark once; its rows, of which each has `median_ms`.

    Raises:
        subprocess.CalledProcessError: the benchmark failed.
    """
    with tempfile.TemporaryDirectory(prefix="kvlane-compare-") as place:
        result = Path(place) / "result.json"
        whole = [sys.executable, "-m", *command, "--json", str(result)]
        subprocess.run(whole, cwd=checkout, check=True, stdout=sys.stderr)
        steps = json.loads(result.read_text())["steps"]
    return [row for step in steps for row in launches(step)]


def launches(step: dict[str, Any]) -> list[dict[str, Any]]:
    """A row as it is, or, where it holds several ways to launch a step, a row for each of them."""
    if "graphs" not in step:
        return [step]
    return [{**step, "launch": name, **found} for name, found in step["graphs"].items()]


def compared(started: Sequence[tuple[str, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """A row for each thing measured, with the figure of each start and the ratio.

    Args:
        started: which checkout, and the rows of one start of it.
    """
    every = [row for _, steps in started for row in steps]
    fields = [field for field in FIELDS if all(field in row for row in every)]
    found: dict[str, dict[str, list[float]]] = {}
    for side, steps in started:
        for row in steps:
            name = ", ".join(f"{field} {row[field]}" for field in fields)
            found.setdefault(name, {side: [] for side in SIDES})[side].append(row["median_ms"])
    return [
        {"name": name, **times, "ratio": ratio(**times)._asdict() if all(times.values()) else None}
        for name, times in found.items()
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as markdown: medians of starts, their number, least and most."""
    lines = ["| | before, ms | after, ms | after / before |", "|---|---|---|---|"]
    for row in rows:
        cells = [
            f"{statistics.median(times):.3f} ({len(times)}: {min(times):.3f} to {max(times):.3f})"
            if (times := row[side])
            else "-"
            for side in SIDES
        ]
        found = row["ratio"]
        cells.append("{value:.3f} ({low:.3f} to {high:.3f})".format(**found) if found else "-")
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Start both by turns; print the table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="a checkout")
    parser.add_argument("--after", type=Path, default=Path("."), help="another")
    parser.add_argument("--starts", type=int, default=6, help="of each checkout")
    parser.add_argument("--json", type=Path)
    parser.add_argument("command", nargs="+", help="after --: a module and its options")
    options = parser.parse_args()
    checkouts = {side: getattr(options, side).resolve(strict=True) for side in SIDES}
    started: list[tuple[str, list[dict[str, Any]]]] = []
    for side in order(options.starts):
        print(f"start {len(started) + 1} of {2 * options.starts}: {side}", file=sys.stderr)
        started.append((side, start(checkouts[side], options.command)))
    rows = compared(started)
    print(table(rows), flush=True)
    if options.json:
        about = {
            "machine": machine(), "versions": {name: version_of(name) for name in PACKAGES},
            "checkouts": {side: str(path) for side, path in checkouts.items()},
            "command": options.command, "rows": rows,
        }  # fmt: skip
        options.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
