"""Two checkouts by turns: who is started when, and what the table says of it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import ratio, take_turns

# A benchmark whose figure is the number of the start, plus what its own checkout takes.
BENCHMARK = """
import json, sys
from pathlib import Path
count = Path(sys.argv[1])
number = int(count.read_text())
count.write_text(str(number + 1))
if number == FAILS:
    sys.exit(3)
row = {"batch": 1, "median_ms": TAKES + number, FIELD}
Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps({"steps": [row]}))
print("read bandwidth 1 GB/s")
"""


def ran(place: Path, fails: int = -1) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Two starts of each checkout, of which the one of that number fails; and what is written."""
    fields = {"before": '"sampling": "greedy"', "after": '"sampling": "greedy", "width": 1'}
    for (side, field), takes in zip(fields.items(), (100, 200), strict=True):
        (place / side / "bench").mkdir(parents=True)
        source = BENCHMARK.replace("TAKES", str(takes)).replace("FIELD", field)
        (place / side / "bench" / "steps.py").write_text(source.replace("FAILS", str(fails)))
    (place / "count").write_text("0")
    done = subprocess.run(
        [
            sys.executable, "-m", "benchmarks.compare", "--before", place / "before", "--after",
            place / "after", "--starts", "2", "--json", place / "out.json", "--", "bench.steps",
            place / "count",
        ],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    return done, json.loads((place / "out.json").read_text())


def test_a_start_that_fails_ends_it_and_leaves_what_was_measured(tmp_path: Path) -> None:
    done, written = ran(tmp_path, fails=2)
    assert done.returncode == 1
    assert written["failed"] == "start 3 (after) failed with exit code 3"
    assert [(row["before"], row["after"]) for row in written["rows"]] == [([100], [201])]
    assert "100.000" in done.stdout


def test_each_checkout_is_started_by_turns_and_the_rows_that_both_have_are_compared(tmp_path):
    """A machine that grows slower counts for both: the numbers of their starts have one sum."""
    done, written = ran(tmp_path)
    assert done.returncode == 0
    assert written["checkouts"] == {side: str(tmp_path / side) for side in ("before", "after")}
    (row,) = written["rows"]
    assert (row["before"], row["after"]) == ([100, 103], [201, 202])
    assert row["name"] == "batch 1, sampling greedy"
    assert row["ratio"]["value"] == pytest.approx(201.5 / 101.5)
    assert "101.500 (2: 100.000 to 103.000)" in done.stdout
    assert "read bandwidth" in done.stderr  # what a start prints is no part of the table


def test_an_interval_holds_one_where_starts_differ_by_more_than_checkouts() -> None:
    noisy = ratio([7.17, 7.16, 7.23, 7.13, 7.22, 7.69], [7.26, 7.42, 7.22, 7.69, 7.27, 7.23])
    assert noisy.low < 1.0 < noisy.value < noisy.high
    clear = ratio([7.00, 7.01, 7.02, 7.01], [7.28, 7.30, 7.29, 7.29])
    assert 1.03 < clear.low <= clear.value <= clear.high < 1.05


# A benchmark that counts until its wall time has passed: of its own CPU, if it runs alone.
COUNTING = """
import json, sys, time
from pathlib import Path
began, counted = time.monotonic(), 0
while time.monotonic() - began < 1.5:
    counted += 1
figures = {"cpu": time.process_time(), "wall": time.monotonic() - began}
Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps({"figures": figures}))
"""


def test_in_slots_one_start_of_both_runs_while_the_other_stands(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(COUNTING)
    both = take_turns([tmp_path, tmp_path], ["counting"], 0.05)
    cpu, wall = (sum(rows[i]["median_ms"] for rows in both) for i in (0, 1))
    assert cpu < 0.8 * wall  # together at once they would have taken all of their time
    assert len(both) == 2


def test_in_slots_a_start_that_fails_ends_the_other(tmp_path: Path) -> None:
    for name, source in (("fails", "raise SystemExit(3)"), ("stays", "while True: pass")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "counting.py").write_text(source)
    with pytest.raises(subprocess.CalledProcessError):
        take_turns([tmp_path / "stays", tmp_path / "fails"], ["counting"], 0.05)
