"""The load harness's command line, its search for the highest rate, and what it shows meanwhile."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.load.measurement import failure
from benchmarks.load.options import objectives, parse
from benchmarks.load.records import Objectives, Outcome
from benchmarks.load.search import highest_rate
from tests.support.patience import HANG_S

WRONG = [
    ("--concurrency 3 --duration 4", "say how much to send"),
    ("--rate 3 --concurrency 2 --num 4", "say when to send"),
    ("--source mooncake:x --concurrency 2", "say when to send"),
    ("--rate 3 --num 1 --slo speed=3", "'speed'"),
    ("--rate 3 --num 1 --extra {", "--extra"),
    ("--rate 3 --num 1 --header nocolon", "--header"),
    ("--search --num 10", "needs --slo"),
    ("--search --num 10 --slo ttft=1 --concurrency 3", "leave out"),
]


@pytest.mark.parametrize(("line", "message"), WRONG, ids=[line for line, _ in WRONG])
def test_mistakes_are_named(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(line.split())


def test_a_line_becomes_options(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\nother\n")
    line = "--url http://h:1/v1/ --rate 2.5 --duration 30 --slo ttft=200ms,itl=0.05"
    more = ["--header", "X-Who: me", "--api-key-file", str(tmp_path / "keys")]
    found = parse([*line.split(), *more, "--extra", '{"top_p": 0.5}'])
    assert found.urls == ("http://h:1",)
    assert found.rate == "poisson:2.5"
    assert found.objectives == Objectives(ttft_s=0.2, itl_s=0.05)
    assert found.headers == {"X-Who": "me", "Authorization": "Bearer secret"}
    assert found.extra == {"top_p": 0.5}
    assert "secret" not in str(found.shown()), "a result file may be passed around"
    assert parse(["--source", "burstgpt:f.csv"]).rate == ""
    assert objectives("tpot=20ms,e2el=3") == objectives("itl=20ms,e2e=3")
    assert objectives("") == Objectives()


def test_that_nothing_was_served_is_told_with_the_reason_and_red_on_a_terminal() -> None:
    outcomes = [Outcome(0, 0, 0.0, error="http_503", message="no worker"), Outcome(1, 0, 0.0)]
    told = "error: no request was served; the first one: http_503 no worker"
    assert failure(outcomes, is_terminal=False) == told
    assert failure(outcomes, is_terminal=True) == f"\x1b[31m{told}\x1b[0m"
    assert failure([], is_terminal=False).endswith("; none was sent")


@pytest.mark.parametrize("arguments", [["--help"], ["report", "--help"], ["stub", "--help"]])
def test_help_needs_nothing_that_bench_installs(arguments: list[str]) -> None:
    code = (
        "import sys\nsys.modules |= dict.fromkeys(('aiohttp', 'uvloop', 'plotly'))\n"
        "from cluster.clients.commands import bench\nbench(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert "kvlane bench" in done.stdout
    assert arguments[1:] or all(f"  {verb} " in done.stdout for verb in ("run", "report", "stub"))


@pytest.mark.parametrize("capacity", [3.1, 7.3, 100.0])
@pytest.mark.parametrize("start", [1.0, 40.0])
def test_the_search_ends_just_below_what_the_server_holds(capacity: float, start: float) -> None:
    tried: list[float] = []

    def share_at(rate: float) -> float:
        tried.append(rate)
        return 1.0 if rate <= capacity else 0.5

    best, probes = highest_rate(share_at, start=start, share=0.99, precision=0.05)
    assert capacity / 1.05 <= best <= capacity
    assert [probe.rate for probe in probes] == tried
    assert len(tried) == len(set(tried)) <= 20
    assert {probe.rate for probe in probes if probe.held} == {r for r in tried if r <= capacity}
