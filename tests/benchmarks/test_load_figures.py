"""The load harness's figures, its result file, its report and its plot."""

import re
import statistics
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load import plot, report, result
from benchmarks.load.measure import STAGES, concurrency, spread, summary
from benchmarks.load.records import Lag, Objectives, Outcome, Run
from benchmarks.load.report import side_by_side, table
from tests.benchmarks.load_results import BEGUN, OBJECTIVES, made_up_result, made_up_run


def served(
    intended: float, *chunks: float, sent: float | None = None, num_tokens: int | None = None
) -> Outcome:
    """A served request: it ends with its last piece."""
    outcome = Outcome(0, 0, intended, intended if sent is None else sent, end_s=chunks[-1])
    outcome.chunk_s = list(chunks)
    outcome.num_output_tokens = len(chunks) if num_tokens is None else num_tokens
    outcome.num_prompt_tokens = 10
    outcome.counted = True
    return outcome


def failed(intended: float, end: float, error: str) -> Outcome:
    return Outcome(0, 0, intended, intended, end_s=end, error=error)


def run_of(*outcomes: Outcome, wall_s: float = 10.0, lags: list[Lag] | None = None) -> Run:
    return Run(list(outcomes), lags or [], BEGUN, wall_s)


def test_figures_of_three_requests_are_those_worked_out_by_hand() -> None:
    figures = summary(
        run_of(
            served(1.0, 1.5, 1.6, 1.8, sent=1.25),
            served(2.0, 2.1, 2.2),
            failed(3.0, 8.0, "timeout"),
        ),
        Objectives(ttft_s=0.2),
    )
    counts = {"sent": 3, "served": 2, "failed": 1, "errors": {"timeout": 1}, "without_output": 0}
    assert figures["requests"] == counts
    latency = figures["latency"]
    assert latency["ttft_s"]["mean"] == pytest.approx(0.3)
    assert latency["ttft_s"]["p50"] == pytest.approx(0.3)
    assert latency["ttft_s"]["p90"] == pytest.approx(0.46)
    assert latency["ttft_from_send_s"]["max"] == pytest.approx(0.25), "hides the late start"
    assert latency["gaps_s"]["count"] == 3
    assert latency["gaps_s"]["max"] == pytest.approx(0.2)
    assert latency["tpot_s"]["max"] == pytest.approx(0.15)
    assert latency["e2e_s"]["max"] == pytest.approx(0.8), "a failed request has no latency"
    assert figures["throughput"]["requests_per_s"] == pytest.approx(0.2)
    assert figures["throughput"]["output_tokens_per_s"] == pytest.approx(0.5)
    assert figures["throughput"]["input_tokens_per_s"] == pytest.approx(2.0)
    assert figures["goodput"]["good"] == 1
    assert figures["goodput"]["share"] == pytest.approx(1 / 3), "a time-out is never good"
    # 0.55 s, 0.2 s and 5 s of requests between 1.25 s and 8 s; the last two never overlap
    assert figures["concurrency"]["mean"] == pytest.approx(5.75 / 6.75)
    assert figures["concurrency"]["max"] == 1


def test_offered_and_started_rates_are_those_of_the_first_turns() -> None:
    run = run_of(*(served(t, t + 1, sent=1.1 * t) for t in range(11)))
    run.schedule = [float(t) for t in range(11)]
    figures = summary(run, Objectives())["throughput"]
    assert figures["offered_per_s"] == pytest.approx(1.0)
    assert figures["started_per_s"] == pytest.approx(1 / 1.1)
    run.schedule = []
    assert summary(run, Objectives())["throughput"]["offered_per_s"] is None


times = st.floats(0, 100, allow_nan=False)


@given(st.lists(times, min_size=2, max_size=60))
def test_spread_agrees_with_the_standard_library(values: list[float]) -> None:
    found = spread(values)
    cuts = statistics.quantiles(values, n=1000, method="inclusive")
    for name, index in {"p1": 10, "p50": 500, "p90": 900, "p99": 990, "p99.9": 999}.items():
        assert found[name] == pytest.approx(cuts[index - 1], abs=1e-9)
    assert found["mean"] == pytest.approx(statistics.fmean(values), abs=1e-9)
    assert found["std"] == pytest.approx(statistics.pstdev(values), abs=1e-6)
    assert (found["min"], found["max"]) == (min(values), max(values))


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
    run = run_of(served(1.0, 1.5, 1.6, 1.8))
    for slack, good in ((1e-9, True), (-1e-3, False)):
        assert summary(run, Objectives(**{name: limit + slack}))["goodput"]["good"] == good
    one = run_of(served(1.0, 1.1))  # no time between tokens to be judged by
    assert summary(one, Objectives(itl_s=1e-6, stall_s=1e-6))["goodput"]["good"] == 1
    assert summary(one, Objectives())["latency"]["tpot_s"]["count"] == 0


def test_tokens_are_checked_but_for_the_end_token() -> None:
    outcomes = [served(0.0, 1.0, num_tokens=10) for _ in range(4)]
    for outcome, num in zip(outcomes, (10, 9, 8, None), strict=True):
        outcome.num_text_tokens = num
    outcomes[3].counted = False
    found = summary(run_of(*outcomes), Objectives())["tokens"]
    assert (found["checked"], found["mismatched"], found["worst_mismatch"]) == (3, 1, 2)
    assert found["without_usage"] == 1
    assert found["per_piece"] == 10


KEPT, HELD_UP, BUSY = "the harness kept up", "to within 3.0 ms", "THE HARNESS DID NOT KEEP UP"
LATE = [(1e-3, 1e-3, 5, KEPT), (3e-3, 1e-3, 5, HELD_UP), (1e-3, 3e-3, 5, HELD_UP)]
LATE += [(1e-3, 1e-3, 9, BUSY), (1e-3, 13e-3, 5, "THIS MACHINE CANNOT TELL")]


@pytest.mark.parametrize(("late_s", "loop_s", "cpu_s", "says"), LATE)
def test_a_late_or_busy_harness_says_so(late_s, loop_s, cpu_s, says) -> None:
    """A late one that had CPU time to spare was held up: that makes times coarse, not wrong."""
    run = run_of(served(1.0, 1.05, sent=1 + late_s), lags=[Lag(0, [loop_s] * 9, cpu_s, 10.0)])
    made = made_up_result([run])
    assert made.summaries[0]["harness_ok"] is (says in (KEPT, HELD_UP))
    assert says in table(made)
    assert (says in "".join(side_by_side([("a", made.summaries)]))) is (says not in (KEPT, HELD_UP))
    slow = run_of(served(1.0, 2.0, sent=1.01), lags=[Lag(0, [0.001], 1.0, 10.0)])
    assert summary(slow, Objectives())["harness_ok"], "10 ms are less than 2 % of a second"


def test_stages_and_the_rest_add_up_to_what_the_client_saw() -> None:
    run = made_up_run(share_failing=0.0)
    found = summary(run, OBJECTIVES)
    parts = sum(found["stages"][name]["mean"] for name in (*STAGES, "unaccounted_s"))
    whole = found["latency"]["e2e_s"]["mean"]
    assert parts + found["harness"]["lag_s"]["mean"] == pytest.approx(whole)
    assert summary(made_up_run(with_stages=False), OBJECTIVES)["stages"] == {}


def test_the_table_says_how_many_were_disaggregated_and_how_fast() -> None:
    text = table(made_up_result([made_up_run(num=30, share_failing=0.0)]))
    assert "disaggregated 30 of 30 requests; 150.0 MB of KV at 250 MB/s" in text
    assert re.search(r"KV pulled, beside these +20\.00 ", text)
    local = made_up_run(num=30)
    for outcome in local.outcomes:
        outcome.stages = outcome.stages and outcome.stages | {"pull_s": 0.0, "pulled_bytes": 0}
    assert re.search(r"disaggregated 0 of \d+ requests\n", table(made_up_result([local])))


# The result file.


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_result_comes_back_as_it_was_written(tmp_path: Path, name: str) -> None:
    made = made_up_result([made_up_run(num=50), made_up_run(1, num=50, with_stages=False)])
    made.machine = result.machine()
    assert made.machine["versions"]["numpy"] == np.__version__
    result.write(tmp_path / name, made)
    assert msgspec.to_builtins(result.read(tmp_path / name)) == msgspec.to_builtins(made)


@pytest.mark.parametrize("text", ["", "{}", '{"kind": "other"}', '{"kind": "kvlane.load/1"}'])
def test_what_is_no_result_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    for name in ("x.json", "x.json.gz"):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=f"{name} is not a result"):
            result.read(tmp_path / name)
    with pytest.raises(ValueError, match="missing"):
        result.read(tmp_path / "missing.json")


# The report.


def odd_runs() -> dict[str, list[Run]]:
    return {
        "nothing sent": [run_of(wall_s=0.0)],
        "none served": [run_of(failed(0.0, 1.0, "connection"), failed(1.0, 3.0, "timeout"))],
        "one token": [run_of(served(0.0, 0.1), wall_s=0.1)],
        "stages at times": [made_up_run(num=30, with_stages=i > 0) for i in range(2)],
        "three runs": [made_up_run(seed, num=30) for seed in range(3)],
    }


@pytest.mark.parametrize("name", odd_runs())
def test_the_report_survives(name: str) -> None:
    made, other = made_up_result(odd_runs()[name]), made_up_result([made_up_run(num=30)])
    text = table(made)
    assert ("FAILED" in text) == any(each.error for run in made.runs for each in run.outcomes)
    assert (f"median of {len(made.runs)} runs" in text) == (len(made.runs) > 1)
    lines = side_by_side([("odd", made.summaries), ("even", other.summaries)])
    assert [line.split()[0] for line in lines[:3]] == ["ms", "odd", "even"]
    assert len({len(line) for line in lines[1:3] if "-" not in line}) <= 1, "columns are aligned"
    assert plot.figure([("odd", made), ("even", other)]).data


def test_results_stand_side_by_side_with_the_medians_of_their_runs() -> None:
    fast = made_up_result([made_up_run(seed, num=60, step_s=0.01) for seed in range(3)])
    dead = made_up_result([made_up_run(share_failing=1.0, num=20)])
    header, first, second, *doubts = side_by_side([("a", fast.summaries), ("b", dead.summaries)])
    good = sorted(each["goodput"]["share"] for each in fast.summaries)[1]
    assert first.split()[-2:] == [f"{100 * good:.1f}", "%"]
    assert first.index("%") + 1 == len(header), "the last column ends below its name"
    assert second.split()[3] == "-", "nothing served, no latency"
    assert "b: 20 requests FAILED" in doubts


def test_the_command_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = made_up_result([made_up_run(num=60)])
    made.search = [
        {"rate": 4.0, "share": 0.99, "held": True}, {"rate": 8.0, "share": 0.5, "held": False},
    ]  # fmt: skip
    paths = [str(tmp_path / name) for name in ("old.json", "new.json.gz")]
    for path in paths:
        result.write(path, made)
    page = tmp_path / "page.html"
    assert report.main([paths[0]]) == 0
    said = capsys.readouterr().out
    assert "between pieces, every gap (ITL)" in said
    assert "8/s: 50.0 % good, fails" in said
    assert report.main([*paths, "--plot", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ms", "old", "new"]
    assert "<script src=" not in page.read_text(), "nothing is fetched"


def test_the_plot_shows_percentiles_and_goodput_by_rate() -> None:
    made = made_up_result([made_up_run(seed, num=300) for seed in range(2)])
    drawn = plot.figure([("a", made)])
    (line,) = drawn.select_traces(row=1, col=1)
    at = int(np.abs(line.x - 2).argmin())  # the 99th percentile
    both = [outcome for run in made.runs for outcome in run.outcomes]
    wanted = np.quantile([o.ttft_s for o in both if o.ttft_s is not None], 1 - 10 ** -line.x[at])
    assert line.y[at] == pytest.approx(1e3 * wanted)
    (dots,) = drawn.select_traces(row=1, col=4)
    pairs = {(e["throughput"]["offered_per_s"], e["goodput"]["share"]) for e in made.summaries}
    assert set(zip(dots.x, dots.y, strict=True)) == {(x, 100 * y) for x, y in pairs}
    made.search = [{"rate": 8.0, "share": 0.5}, {"rate": 4.0, "share": 1.0}]
    assert plot.goodput_by_rate(made) == ([4.0, 8.0], [100.0, 50.0])


def test_the_plot_of_one_rate_shows_the_load_and_no_empty_panel() -> None:
    whole = made_up_run(num=40)
    for outcome in whole.outcomes:
        outcome.chunk_s = outcome.chunk_s[:1]  # as without a stream
    drawn = plot.figure([("a", made_up_result([whole]))])
    titles = [each.text for each in drawn.layout.annotations]
    assert titles == ["time to first token, ms", "requests at the server"]
    assert all(np.isfinite(trace.y.astype(float)).any() for trace in drawn.data)
