"""The load harness's command line, its search for the highest rate, and what it shows meanwhile."""

import io
import re
from pathlib import Path

import pytest

from benchmarks.load import measurement
from benchmarks.load.options import objectives, parse
from benchmarks.load.records import Objectives, Outcome
from benchmarks.load.search import MAX_DOUBLINGS, MAX_HALVINGS, highest_rate

WRONG = [
    ("--num 5", "say when to send"),
    ("--rate 3", "say how much to send"),
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
    assert objectives("") == Objectives()


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
