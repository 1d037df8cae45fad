"""The load harness's figures, its result file, its report and its plot."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load import plot, report, result
from benchmarks.load.measure import STAGES, concurrency, summary
from benchmarks.load.records import Lag, Objectives, Outcome, Result, Run
from benchmarks.load.report import side_by_side, table

BEGUN = "2026-11-21T10:00:00+00:00"


def served(intended: float, *chunks: float, sent: float | None = None) -> Outcome:
    """A served request: it ends with its last piece, and tells its stages."""
    outcome = Outcome(0, 0, intended, intended if sent is None else sent, end_s=chunks[-1])
    outcome.chunk_s, outcome.num_output_tokens = list(chunks), len(chunks)
    outcome.num_prompt_tokens, outcome.counted = 10, True
    outcome.stages = {"decode_s": chunks[-1] - chunks[0], "pulled_bytes": 5_000_000, "pull_s": 0.02}
    return outcome


def failed(intended: float, end: float, error: str) -> Outcome:
    return Outcome(0, 0, intended, intended, end_s=end, error=error)


def run_of(*outcomes: Outcome, wall_s: float = 10.0, lags: list[Lag] | None = None) -> Run:
    starts = [outcome.intended_s for outcome in outcomes]
    return Run(list(outcomes), lags or [], BEGUN, wall_s, starts)


def made_up_run(seed: int = 0, num: int = 60) -> Run:
    rng = np.random.default_rng(seed)
    begins = np.cumsum(rng.exponential(1 / 20, num)).tolist()
    gaps = rng.lognormal(-4, 0.3, (num, 6)).cumsum(axis=1).round(6).tolist()
    outcomes = [served(at, *(at + gap for gap in of)) for at, of in zip(begins, gaps, strict=True)]
    return run_of(*outcomes, failed(begins[-1], begins[-1] + 2, "timeout"), wall_s=begins[-1] + 2)


def result_of(*runs: Run) -> Result:
    options = {"argv": ["--rate", "20"], "urls": ["http://127.0.0.1:8000"], "model": "tiny"}
    summaries = [summary(run, Objectives(ttft_s=0.02)) for run in runs]
    return Result(result.KIND, options, {"cpu": "Some CPU"}, {"seed": 0}, summaries, list(runs))


def test_figures_of_three_requests_are_those_worked_out_by_hand() -> None:
    first, second = served(1.0, 1.5, 1.6, 1.8, sent=1.25), served(2.0, 2.1, 2.2)
    first.num_text_tokens, second.num_text_tokens = 2, 0
    figures = summary(run_of(first, second, failed(3.0, 8.0, "timeout")), Objectives(ttft_s=0.2))
    counts = {"sent": 3, "served": 2, "failed": 1, "errors": {"timeout": 1}, "without_output": 0}
    assert figures["requests"] == counts
    latency = figures["latency"]
    assert latency["ttft_s"]["mean"] == latency["ttft_s"]["p50"] == pytest.approx(0.3)
    assert latency["ttft_s"]["p90"] == pytest.approx(0.46)
    assert latency["ttft_from_send_s"]["max"] == pytest.approx(0.25), "hides the late start"
    assert latency["gaps_s"]["count"] == 3
    assert latency["gaps_s"]["max"] == pytest.approx(0.2)
    assert latency["tpot_s"]["max"] == pytest.approx(0.15)
    assert latency["e2e_s"]["max"] == pytest.approx(0.8), "a failed request has no latency"
    through = figures["throughput"]
    names = ("requests_per_s", "output_tokens_per_s", "input_tokens_per_s", "offered_per_s")
    assert [through[name] for name in names] == pytest.approx([0.2, 0.5, 2.0, 1.0])
    assert through["started_per_s"] == pytest.approx(2 / 1.75)
    assert figures["goodput"]["good"] == 1
    assert figures["goodput"]["share"] == pytest.approx(1 / 3), "a time-out is never good"
    # 0.55 s, 0.2 s and 5 s of requests between 1.25 s and 8 s; the last two never overlap
    assert figures["concurrency"] == {"mean": pytest.approx(5.75 / 6.75), "max": 1}
    tokens = figures["tokens"]
    assert (tokens["checked"], tokens["mismatched"]) == (2, 1), "one is the end token"
    parts = sum(figures["stages"][name]["mean"] for name in (*STAGES, "unaccounted_s"))
    lag_s = (first.lag_s + second.lag_s) / 2
    assert parts + lag_s == pytest.approx(latency["e2e_s"]["mean"])


times = st.floats(0, 100, allow_nan=False)


@given(st.lists(st.tuples(times, times), max_size=30))
def test_concurrency_is_the_number_of_requests_open_at_each_time(spans) -> None:
    outcomes = [served(begin, begin + length) for begin, length in spans]
    at, numbers = concurrency(outcomes)
    for time in set(at.tolist()):
        assert numbers[at == time][-1] == sum(o.sent_s <= time < o.end_s for o in outcomes)


@pytest.mark.parametrize(
    ("name", "limit"), [("ttft_s", 0.5), ("itl_s", 0.15), ("stall_s", 0.2), ("e2e_s", 0.8)]
)
def test_an_objective_holds_up_to_its_very_limit(name: str, limit: float) -> None:
    outcome = served(1.0, 1.5, 1.6, 1.8)
    assert Objectives(**{name: limit + 1e-9}).met_by(outcome)
    assert not Objectives(**{name: limit - 1e-3}).met_by(outcome)
    assert Objectives(itl_s=1e-6, stall_s=1e-6).met_by(served(1.0, 1.1)), "no time between tokens"


KEPT, HELD_UP, BUSY = "the harness kept up", "to within 3.0 ms", "THE HARNESS DID NOT KEEP UP"
LATE = [(1e-3, 1e-3, 5, KEPT), (3e-3, 1e-3, 5, HELD_UP), (1e-3, 3e-3, 5, HELD_UP)]
LATE += [(1e-3, 1e-3, 9, BUSY), (1e-3, 13e-3, 5, "THIS MACHINE CANNOT TELL")]


@pytest.mark.parametrize(("late_s", "loop_s", "cpu_s", "says"), LATE)
def test_a_late_or_busy_harness_says_so(late_s, loop_s, cpu_s, says) -> None:
    """A late one that had CPU time to spare was held up: that makes times coarse, not wrong."""
    lags = [Lag(0, [loop_s] * 9, cpu_s, 10.0)]
    made = result_of(run_of(served(1.0, 1.05, sent=1 + late_s), lags=lags))
    assert made.summaries[0]["harness_ok"] is (says in (KEPT, HELD_UP))
    assert says in table(made)
    assert (says in "".join(side_by_side([("a", made.summaries)]))) is (says not in (KEPT, HELD_UP))


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_result_comes_back_as_it_was_written(tmp_path: Path, name: str) -> None:
    made = result_of(made_up_run(), made_up_run(1))
    made.machine = result.machine()
    result.write(tmp_path / name, made)
    read = msgspec.to_builtins(result.read(tmp_path / name))
    for run in made.runs:
        run.outcomes = [result.rounded(outcome) for outcome in run.outcomes]
    assert read == msgspec.to_builtins(made)
    for wrong in ("", "{}", '{"kind": "other"}'):
        (tmp_path / name).write_text(wrong)
        with pytest.raises(ValueError, match=f"{name} is not a result"):
            result.read(tmp_path / name)


ODD = {
    "nothing sent": [run_of(wall_s=0.0)],
    "none served": [run_of(failed(0.0, 1.0, "connection"), failed(1.0, 3.0, "timeout"))],
    "one token": [run_of(served(0.0, 0.1), wall_s=0.1)],
    "three runs": [made_up_run(seed) for seed in range(3)],
}


@pytest.mark.parametrize("runs", ODD.values(), ids=ODD)
def test_the_report_survives(runs: Sequence[Run]) -> None:
    made, other = result_of(*runs), result_of(made_up_run())
    text = table(made)
    assert ("FAILED" in text) == any(each.error for run in made.runs for each in run.outcomes)
    assert (f"median of {len(runs)} runs" in text) == (len(runs) > 1)
    lines = side_by_side([("odd", made.summaries), ("even", other.summaries)])
    assert [line.split()[0] for line in lines[:3]] == ["ms", "odd", "even"]
    assert plot.figure([("odd", made), ("even", other)]).data


def test_the_command_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = result_of(made_up_run())
    made.search = [{"rate": 8.0, "share": 0.5, "held": False}]
    paths = [str(tmp_path / name) for name in ("old.json", "new.json.gz")]
    for path in paths:
        result.write(path, made)
    page = tmp_path / "page.html"
    assert report.main([paths[0]]) == 0
    said = capsys.readouterr().out
    assert "8/s: 50.0 % good, fails" in said
    assert "disaggregated 60 of 60 requests; 300.0 MB of KV at 250 MB/s" in said
    assert report.main([*paths, "--plot", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["ms", "old", "new"]
    assert "<script src=" not in page.read_text(), "nothing is fetched"
