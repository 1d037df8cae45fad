"""The load harness's command line, its search for the highest rate, and what it shows meanwhile."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.load import measurement
from benchmarks.load.options import objectives, parse
from benchmarks.load.records import Objectives, Outcome
from benchmarks.load.search import MAX_DOUBLINGS, MAX_HALVINGS, highest_rate
from tests.support.patience import HANG_S

WRONG = [
    ("--concurrency 3 --duration 4", "say how much to send"),
    ("--rate 3 --concurrency 2 --num 4", "say when to send"),
    ("--source mooncake:x --concurrency 2", "say when to send"),
    ("--rate 3 --num -1", "--num"),
    ("--rate 3 --num 1 --repeat 0", "--repeat"),
    ("--rate 3 --num 1 --slo ttft", "--slo"),
    ("--rate 3 --num 1 --slo speed=3", "'speed'"),
    ("--rate 3 --num 1 --slo ttft=-3", "above zero"),
    ("--rate 3 --num 1 --extra [1]", "--extra"),
    ("--rate 3 --num 1 --extra {", "--extra"),
    ("--rate 3 --num 1 --header nocolon", "--header"),
    ("--rate 3 --num 1 --api-key-file /nowhere", "--api-key-file"),
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


DEFAULTS = [
    ("", (8, 64, 0)), ("--num 5", (8, 5, 0)), ("--concurrency 3", (3, 24, 0)),
    ("--rate 3", (0, 0, 30)), ("--rate 3 --duration 4", (0, 0, 4)), ("--rate 3 --num 4", (0, 4, 0)),
    ("--search --slo ttft=1", (0, 0, 30)), ("--source mooncake:x", (0, 0, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), DEFAULTS, ids=[line for line, _ in DEFAULTS])
def test_what_is_not_said_has_a_useful_default(line: str, expected: tuple[int, int, float]) -> None:
    found = parse(line.split())
    assert (found.concurrency, found.num, found.duration_s) == expected


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


def test_a_server_that_holds_nothing_or_everything_ends_the_search() -> None:
    best, probes = highest_rate(lambda rate: 0.0, start=1, share=0.9, precision=0.1)
    assert best == 0.0
    assert not any(probe.held for probe in probes)
    assert len(probes) == 1 + MAX_HALVINGS
    best, probes = highest_rate(lambda rate: 1.0, start=1, share=0.9, precision=0.1)
    assert [probe.rate for probe in probes] == [2.0**n for n in range(MAX_DOUBLINGS)]
    assert best == probes[-1].rate


def test_progress_counts_and_names_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    out, clock = io.StringIO(), [0.0]
    monkeypatch.setattr(measurement, "now", lambda: clock[0])
    watch = measurement.progress(10, "x ", out)
    watch([Outcome(0, 0, 0.0), Outcome(1, 0, 0.0, error="http_429")], 3)
    assert out.getvalue() == "", "not at once"
    clock[0] = measurement.PROGRESS_S
    watch([], 1)
    assert out.getvalue() == "x 2/10 done, 1 running, http_429 1\n"


def test_on_a_terminal_the_progress_is_a_bar_with_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    out, clock = io.StringIO(), [0.0]
    monkeypatch.setattr(measurement, "now", lambda: clock[0])
    monkeypatch.setattr(out, "isatty", lambda: True)
    watch = measurement.progress(2, "", out)
    for at in (1.0, 2.0):
        clock[0] = at
        watch([Outcome(0, 0, 0.0, chunk_s=[0.5], num_output_tokens=10)], 1)
    first, last = out.getvalue().split("\r\x1b[K")[1:]
    assert first == "█" * 12 + "░" * 12 + " 1/2 done, 1 running, 10 tokens/s, first token 500.0 ms"
    assert last == "█" * 24 + " 2/2 done, 1 running, 10 tokens/s, first token 500.0 ms\n"
