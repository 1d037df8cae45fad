"""One benchmark of two checkouts, by turns on one machine: what a change costs or saves.

    git worktree add /tmp/REV REV
    python -m benchmarks.compare --before /tmp/REV --after . --starts 6 --json out.json -- \\
        benchmarks.engine --model-config benchmarks/models/qwen3-8b.json --batch 1,32,256

Starts of one commit differ by more than the steps within a start. So the unit is a start, a process
of its own in the checkout's folder: its figure is the median of its steps, and the table shows the
median over starts. The order is before, after, after, before, ..., so that a machine that grows
slower counts for both. The interval holds 95 % of the ratios when starts are drawn anew, with
replacement, among each checkout's own. The JSON file is written after each start.

With `--slot S` one start of each runs at the same time, S seconds by turns (SIGSTOP, SIGCONT), so
that a machine whose speed changes within seconds is the same for both; of a GPU nothing is shared.

It takes any benchmark that writes `--json` as `benchmarks.engine` or `router` does.
"""

import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.output import parser, write

SIDES = ("before", "after")
# What tells rows apart, where both checkouts write it.
FIELDS = (
    "batch", "prompt_len", "tokens", "sampling", "width", "accept", "launch", "path", "new",
    "snapshots", "figure",
)  # fmt: skip
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


def take_turns(
    checkouts: Sequence[Path], command: Sequence[str], slot_s: float
) -> list[list[dict[str, Any]]]:
    """Run the benchmark once in all of them, one for `slot_s` after the other; rows of each.

    Raises subprocess.CalledProcessError if one fails; the others are killed.
    """
    with tempfile.TemporaryDirectory(prefix="kvlane-compare-") as place, ExitStack() as ended:
        results = [Path(place) / f"{i}.json" for i in range(len(checkouts))]
        running: list[subprocess.Popen[bytes]] = []
        for checkout, result in zip(checkouts, results, strict=True):
            whole = [sys.executable, "-m", *command, "--json", str(result)]
            run = subprocess.Popen(whole, cwd=checkout, stdout=sys.stderr, process_group=0)
            ended.callback(_kill, run)
            running.append(run)
        for run in itertools.cycle(tuple(running)):
            if not running:
                break
            for other in running:
                os.killpg(other.pid, signal.SIGCONT if other is run else signal.SIGSTOP)
            with suppress(subprocess.TimeoutExpired):
                if run.wait(slot_s) != 0:
                    raise subprocess.CalledProcessError(run.returncode, command)
                running = [other for other in running if other is not run]
        return [rows_of(json.loads(result.read_text())) for result in results]


def _kill(run: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()


def rows_of(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Of `benchmarks.engine` its steps; of `router` figures with units."""
    if "figures" in measured:
        return [{"figure": name, "median_ms": value} for name, value in measured["figures"].items()]
    return measured["steps"]


def compared(started: Sequence[tuple[str, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """A row for each thing measured, with each start's figure and the ratio; of (side, rows)."""
    every = [row for _, steps in started for row in steps]
    fields = [field for field in FIELDS if all(field in row for row in every)]
    by_name: dict[str, dict[str, list[float]]] = {}
    for side, steps in started:
        for row in steps:
            name = ", ".join(f"{field} {row[field]}" for field in fields)
            by_name.setdefault(name, {side: [] for side in SIDES})[side].append(row["median_ms"])
    return [
        {"name": name, **times, "ratio": ratio(**times)._asdict() if all(times.values()) else None}
        for name, times in by_name.items()
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as markdown: medians of starts, their number, least and most."""
    lines = ["| in ms, or as it says | before | after | after / before |", "|---|---|---|---|"]
    for row in rows:
        cells = [
            f"{statistics.median(times):.3f} ({len(times)}: {min(times):.3f} to {max(times):.3f})"
            if (times := row[side])
            else "-"
            for side in SIDES
        ]
        of = row["ratio"]
        cells.append("{value:.3f} ({low:.3f} to {high:.3f})".format(**of) if of else "-")
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Start both by turns; write JSON after each start; print the table of what was measured.

    Returns:
        1 if a start failed, after which none follows.
    """
    made = parser(__doc__)
    add = made.add_argument
    add("--before", type=Path, required=True, help="a checkout")
    add("--after", type=Path, default=Path("."), help="another")
    add("--starts", type=int, default=6, help="of each checkout")
    add("--slot", type=float, default=0.0, metavar="S", help="seconds; 0: one start at a time")
    add("command", nargs="+", help="after --: a module and its options")
    options = made.parse_args()
    checkouts = {side: getattr(options, side).resolve(strict=True) for side in SIDES}
    about = {"checkouts": {side: str(path) for side, path in checkouts.items()}}
    about["command"] = options.command
    started: list[tuple[str, list[dict[str, Any]]]] = []
    failed = ""
    turns = [[side] for side in order(options.starts)]
    if options.slot:
        turns = [list(SIDES) for _ in range(options.starts)]
    for sides in turns:
        side = " and ".join(sides)
        print(f"start {len(started) + 1} of {2 * options.starts}: {side}", file=sys.stderr)
        try:
            places = [checkouts[side] for side in sides]
            found = take_turns(places, options.command, options.slot or 1.0)
            started += zip(sides, found, strict=True)
        except subprocess.CalledProcessError as error:
            failed = f"start {len(started) + 1} ({side}) failed with exit code {error.returncode}"
            break
        finally:
            write(options.json, {**about, "failed": failed, "rows": compared(started)})
    print(table(compared(started)), flush=True)
    if failed:
        print(f"{failed}: the table has the starts before it", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
