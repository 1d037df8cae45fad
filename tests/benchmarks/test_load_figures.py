"""The load harness's figures, its result file, comparison and report."""

from __future__ import annotations

import json
import statistics
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.load import compare, result
from benchmarks.load.measure import STAGES, concurrency, spread, summary, table
from benchmarks.load.records import Lag, Objectives, Outcome, Run
from benchmarks.load.report import page, write_report
from tests.benchmarks.load_results import OBJECTIVES, made_up_result, made_up_run

BEGUN = "2026-11-21T10:00:00+00:00"
SECTIONS = (
    "Figures",
    "Latency at every percentile",
    "Time to first token over time",
    "Load over time",
    "Where the time to first token goes",
    "Timeline",
    "Failures",
    "The harness itself",
)


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
    assert figures["requests"] == {
        "sent": 3,
        "served": 2,
        "failed": 1,
        "errors": {"timeout": 1},
        "without_output": 0,
    }
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
@settings(deadline=None)
def test_concurrency_is_the_number_of_requests_open_at_each_time(
    spans: list[tuple[float, float]],
) -> None:
    outcomes = [served(begin, begin + length) for begin, length in spans]
    at, numbers = concurrency(outcomes)
    for time in {float(t) for t in at}:
        last = np.flatnonzero(at == time)[-1]
        assert numbers[last] == sum(o.sent_s <= time < o.end_s for o in outcomes)


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({}, True),
        ({"ttft_s": 0.5}, True),
        ({"ttft_s": 0.499}, False),
        ({"itl_s": 0.15}, True),
        ({"itl_s": 0.149}, False),
        ({"stall_s": 0.2}, True),
        ({"stall_s": 0.199}, False),
        ({"e2e_s": 0.8}, True),
        ({"ttft_s": 0.5, "e2e_s": 0.7}, False),
    ],
)
def test_an_objective_holds_up_to_its_very_limit(limits: dict[str, float], good: bool) -> None:
    nudged = {name: limit + 1e-9 for name, limit in limits.items()}
    run = run_of(served(1.0, 1.5, 1.6, 1.8))
    assert summary(run, Objectives(**nudged))["goodput"]["good"] == good


def test_a_single_token_has_no_time_between_tokens_to_be_judged_by() -> None:
    figures = summary(run_of(served(1.0, 1.1)), Objectives(itl_s=1e-6, stall_s=1e-6))
    assert figures["goodput"]["good"] == 1
    assert figures["latency"]["tpot_s"]["count"] == 0
    assert figures["latency"]["tpot_s"]["p50"] is None


def test_tokens_are_checked_but_for_the_end_token() -> None:
    outcomes = [served(0.0, 1.0, num_tokens=10) for _ in range(4)]
    for outcome, num in zip(outcomes, (10, 9, 8, None), strict=True):
        outcome.num_text_tokens = num
    outcomes[3].counted = False
    found = summary(run_of(*outcomes), Objectives())["tokens"]
    assert (found["checked"], found["mismatched"], found["worst_mismatch"]) == (3, 1, 2)
    assert found["without_usage"] == 1


@pytest.mark.parametrize(
    ("late_s", "loop_s", "cpu_s", "ok"),
    [
        (0.001, 0.001, 5.0, True),
        (0.003, 0.001, 5.0, False),
        (0.001, 0.003, 5.0, False),
        (0.001, 0.001, 9.0, False),
    ],
)
def test_a_late_or_busy_harness_says_so(
    late_s: float, loop_s: float, cpu_s: float, ok: bool
) -> None:
    run = run_of(served(1.0, 1.05, sent=1 + late_s), lags=[Lag(0, [loop_s] * 9, cpu_s, 10.0)])
    made = made_up_result([run])
    assert made.summaries[0]["harness_ok"] is ok
    loud = "THE HARNESS DID NOT KEEP UP"
    assert (loud in table(made.summaries, made)) is not ok
    assert (loud in page([made])) is not ok


def test_a_slow_server_forgives_a_small_lag() -> None:
    run = run_of(served(1.0, 2.0, sent=1.01), lags=[Lag(0, [0.001], 1.0, 10.0)])
    assert summary(run, Objectives())["harness_ok"], "10 ms are less than 2 % of a second"


def test_stages_and_the_rest_add_up_to_what_the_client_saw() -> None:
    run = made_up_run(share_failing=0.0)
    found = summary(run, OBJECTIVES)
    parts = sum(found["stages"][name]["mean"] for name in (*STAGES, "unaccounted_s"))
    whole = found["latency"]["e2e_s"]["mean"]
    assert parts + found["harness"]["lag_s"]["mean"] == pytest.approx(whole)
    assert summary(made_up_run(with_stages=False), OBJECTIVES)["stages"] == {}


@pytest.mark.parametrize("num_runs", [1, 3])
def test_the_table_shows_failures_and_figures(num_runs: int) -> None:
    made = made_up_result(
        [made_up_run(seed, num=100, share_failing=0.2) for seed in range(num_runs)]
    )
    text = table(made.summaries, made)
    assert "FAILED" in text
    assert "time to first token" in text
    assert (f"median of {num_runs} runs" in text) == (num_runs > 1)


# The result file.


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_result_comes_back_as_it_was_written(tmp_path: Path, name: str) -> None:
    made = made_up_result([made_up_run(num=50), made_up_run(1, num=50, with_stages=False)])
    result.write(tmp_path / name, made)
    assert msgspec.to_builtins(result.read(tmp_path / name)) == msgspec.to_builtins(made)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"kind": "other"}', '{"kind": "kvlane.load/1"}'])
def test_what_is_no_result_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    for name in ("x.json", "x.json.gz"):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=f"{name} is not a result"):
            result.read(tmp_path / name)
    with pytest.raises(ValueError, match="missing"):
        result.read(tmp_path / "missing.json")


def test_the_machine_is_told_as_json() -> None:
    found = result.machine()
    assert found["cores"] >= 1
    assert found["versions"]["numpy"] == np.__version__
    assert json.loads(json.dumps(found)) == found


# Comparison.


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coarser intervals, in a fifth of the time."""
    monkeypatch.setattr(compare, "NUM_DRAWS", compare.MIN_DRAWS)


def test_weighted_percentiles_are_those_of_the_values_repeated() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        values = np.sort(rng.normal(size=rng.integers(1, 20)))
        weights = rng.integers(0, 4, values.size)
        repeated = np.repeat(values, weights)
        for quantile in (0.0, 0.5, 0.99, 1.0):
            found = compare.weighted(values, weights, quantile)
            assert (found is None) == (repeated.size == 0)
            if found is not None:
                assert found == pytest.approx(np.quantile(repeated, quantile))
        if repeated.size:
            assert compare.weighted(values, weights, None) == pytest.approx(repeated.mean())


def scaled(run: Run, factor: float) -> Run:
    """`run` with every time between pieces multiplied; first pieces stay where they are."""
    outcomes = []
    for outcome in run.outcomes:
        changed = msgspec.structs.replace(outcome)
        if outcome.chunk_s:
            first = outcome.chunk_s[0]
            changed.chunk_s = [first + factor * (t - first) for t in outcome.chunk_s]
            changed.end_s = changed.chunk_s[-1] + 0.001
        outcomes.append(changed)
    return Run(outcomes, run.lags, run.begun_at, run.wall_s, run.schedule)


def test_a_known_factor_is_found_and_nothing_else() -> None:
    run = made_up_run(num=300)
    a, b = made_up_result([run]), made_up_result([scaled(run, 1.2)])
    rows = {row.metric: row for row in compare.compare(a, b)}
    for metric in ("tpot_mean", "tpot_p50", "gaps_p50", "gaps_mean"):
        row = rows[metric]
        assert row.interval is not None
        assert row.interval[0] - 1e-6 <= 1.2 <= row.interval[1] + 1e-6
        assert row.significant
        assert not row.better
    assert not rows["ttft_p50"].significant
    assert rows["ttft_p50"].ratio == 1
    assert not rows["requests_per_s"].significant
    back = {row.metric: row for row in compare.compare(b, a)}
    assert back["tpot_p50"].better


def test_two_samples_of_one_server_seldom_differ_significantly() -> None:
    """Pairs of runs with other arrivals: 5 % of the intervals should miss 1."""
    quiet = {"num": 200, "stall": (0.0, 0.0), "rate": 10.0}
    missed, num = 0, 0
    for seed in range(0, 16, 2):
        a, b = (made_up_result([made_up_run(seed + i, **quiet)], seed=seed + i) for i in range(2))
        b.workload = {"seed": "another"}
        rows = [
            r for r in compare.compare(a, b) if r.metric in ("ttft_p50", "tpot_mean", "e2e_p50")
        ]
        missed += sum(row.significant for row in rows)
        num += len(rows)
    assert missed <= 0.2 * num


def test_a_rate_is_the_mean_of_its_slices() -> None:
    run = made_up_run()
    figures = summary(run, OBJECTIVES)
    for name in ("requests_per_s", "output_tokens_per_s"):
        mean = compare.per_slice(run, name, OBJECTIVES).mean()
        assert mean == pytest.approx(figures["throughput"][name])
    good = compare.per_slice(run, "good_per_s", OBJECTIVES).mean()
    assert good == pytest.approx(figures["goodput"]["good_per_s"])


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    run = made_up_run(num=200)
    result.write(tmp_path / "a.json", made_up_result([run]))
    result.write(tmp_path / "b.json", made_up_result([scaled(run, 1.2)]))
    return str(tmp_path / "a.json"), str(tmp_path / "b.json")


@pytest.mark.parametrize(
    ("limits", "status"),
    [
        (["tpot_p50=25"], 0),
        (["tpot_p50=10"], 1),
        (["ttft_p99=0", "requests_per_s=0"], 0),
        (["ttft_p99=0", "gaps_p50=5"], 1),
    ],
)
def test_the_gate_closes_on_a_sure_regression(
    files: tuple[str, str], limits: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word for each in limits for word in ("--max-regression", each)]
    assert compare.main([*files, *given]) == status
    assert ("REGRESSION" in capsys.readouterr().out) == (status == 1)
    assert compare.main([files[1], files[0], *given]) == 0, "b is the better one"


def test_the_gate_closes_if_nothing_was_served(tmp_path: Path, files: tuple[str, str]) -> None:
    dead = made_up_result([run_of(failed(0.0, 1.0, "connection"))])
    result.write(tmp_path / "dead.json", dead)
    gone = str(tmp_path / "dead.json")
    for metric in ("ttft_p50", "requests_per_s"):
        assert compare.main([files[0], gone, "--max-regression", f"{metric}=50"]) == 1
    assert compare.main([gone, gone, "--max-regression", "ttft_p50=50"]) == 1
    assert compare.main([gone, gone]) == 0


@pytest.mark.parametrize("wrong", ["nonsense=5", "ttft_p50", "ttft_p50=x", "ttft_p50=-1"])
def test_a_wrong_limit_is_refused(files: tuple[str, str], wrong: str) -> None:
    with pytest.raises(SystemExit) as error:
        compare.main([*files, "--max-regression", wrong])
    assert error.value.code == 2


def test_the_comparison_as_json(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    compare.main([*files, "--json"])
    found = json.loads(capsys.readouterr().out)
    row = next(row for row in found["metrics"] if row["metric"] == "tpot_p50")
    assert row["ratio"] == pytest.approx(1.2, abs=1e-3)
    assert row["significant"]
    assert any("single run" in warning for warning in found["warnings"])


def test_other_machines_and_workloads_are_warned_of() -> None:
    a, b = made_up_result([made_up_run(num=20)]), made_up_result([made_up_run(num=20)])
    assert not any(warning.startswith("the ") for warning in compare.warnings(a, b))
    b.machine["cpu"] = "Another"
    b.workload["seed"] = 1
    text = " ".join(compare.warnings(a, b))
    assert "cpu: Some CPU / Another" in text
    assert "seed: 0 / 1" in text


# The report.


class Elements(HTMLParser):
    """What a browser would fetch, and the headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.titles: list[str] = []
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self.inside == "h2" and data.strip():
            self.titles.append(data)
            self.inside = ""


def odd_runs() -> dict[str, list[Run]]:
    """Runs with little to show."""
    return {
        "none": [],
        "nothing sent": [run_of(wall_s=0.0)],
        "none served": [run_of(failed(0.0, 1.0, "connection"), failed(1.0, 3.0, "timeout"))],
        "one request": [run_of(served(0.0, 0.1, 0.2), wall_s=0.2)],
        "one token": [run_of(served(0.0, 0.1), wall_s=0.1)],
        "no stages": [made_up_run(num=30, with_stages=False)],
        "stages at times": [made_up_run(num=30, with_stages=i > 0) for i in range(2)],
        "three runs": [made_up_run(seed, num=30) for seed in range(3)],
    }


@pytest.mark.parametrize("name", odd_runs())
def test_the_report_survives(name: str) -> None:
    made = made_up_result(odd_runs()[name])
    assert table(made.summaries, made)
    for results in ([made], [made, made_up_result([made_up_run(num=30)])]):
        found = Elements(page(results))
        assert found.links == [], "nothing is fetched"
        assert "Figures" in found.titles


def test_the_report_has_every_section_and_escapes_what_others_wrote(tmp_path: Path) -> None:
    made = made_up_result([made_up_run(share_failing=0.1)], model="<b>x</b>")
    made.search = [{"rate": 4.0, "share": 0.99, "held": True, "summary": made.summaries[0]}]
    path = tmp_path / "report.html"
    write_report(path, [made])
    text = path.read_text()
    titles = Elements(text).titles
    assert [title for title in titles if title in SECTIONS] == list(SECTIONS)
    assert any(title.startswith("Search") for title in titles)
    assert "&lt;queued&gt;" in text
    assert "<queued>" not in text
    assert "<b>x</b>" not in text


def test_a_report_of_two_tells_their_ratio() -> None:
    run = made_up_run(num=100)
    text = page([made_up_result([run]), made_up_result([scaled(run, 1.2)])], ["old", "new"])
    assert "Is it more than chance?" in Elements(text).titles
    assert "old" in text
    assert "<td>1.20</td>" in text
