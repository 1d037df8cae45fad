"""What a worker counts of its steps, and that what it will count is there from the start."""

from __future__ import annotations

import pytest

from worker.api import FinishReason
from worker.observe.meter import StepMeter
from worker.observe.metrics import OUTCOMES, WorkerMetrics
from worker.plan import Chunk, Plan

BOUND = {"model": "tiny", "role": "decode", "worker": "decode-0"}


@pytest.fixture
def metrics() -> WorkerMetrics:
    metrics = WorkerMetrics(**BOUND)
    metrics.verifies(4)
    return metrics


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"kvlane_{name}", BOUND | labels)


@pytest.mark.parametrize(
    ("said", "path", "reason"),
    [
        ("graph", "graph", None),
        ("piecewise", "piecewise", None),
        ("eager", "eager", "configured"),
        ("eager_too_long", "eager", "too_long"),
        ("eager_padding", "eager", "padding"),
    ],
)
def test_a_step_counts_under_its_path_and_an_eager_one_under_its_reason(
    metrics: WorkerMetrics, said: str, path: str, reason: str | None
) -> None:
    meter, plan = StepMeter(metrics), Plan(1, chunks=(Chunk(1, 0, (5, 6, 7)),))
    meter.launched(plan)
    meter.settled(plan, said)
    assert value(metrics, "engine_steps_total", kind="prefill", path=path) == 1
    for each in ("configured", "too_long", "padding"):
        found = value(metrics, "engine_eager_steps_total", kind="prefill", reason=each)
        assert found == (1 if each == reason else None)
    assert value(metrics, "engine_step_seconds_count", kind="prefill") == 1
    assert value(metrics, "prompt_tokens_computed_total") == 3


def test_outcomes_places_and_causes_count_from_zero_on_the_worker_that_counts_them(
    metrics: WorkerMetrics,
) -> None:
    assert set(OUTCOMES) == {each.value for each in FinishReason}
    for outcome in OUTCOMES:
        assert value(metrics, "requests_total", outcome=outcome) == 0
    assert value(metrics, "prefill_placed_total", where="remote") == 0
    assert value(metrics, "kv_fetch_retries_total", cause="worker_lost") == 0
    other = WorkerMetrics(**BOUND | {"role": "prefill"})
    (retries,) = (each for each in other.registry.collect() if "retries" in each.name)
    assert not retries.samples


def test_windows_count_rows_and_what_they_accepted(metrics: WorkerMetrics) -> None:
    metrics.windows(4, [1, 3, 4], [(-1, -1, -1), (5, 6, -1), (5, 6, 7)])
    metrics.windows(2, [2, 1], [(5,), (6,)])
    metrics.windows(1, [1, 1, 1], [(), (), ()])
    metrics.windows(4, [], [])  # all of its requests had ended
    assert value(metrics, "spec_steps_total") == 5
    assert value(metrics, "spec_accepted_tokens_total") == 6
    by_place = [value(metrics, "spec_accepted_at_position_total", position=p) for p in "123"]
    assert by_place == [3, 2, 1]
    assert metrics.accepted == by_place
    by_place = [value(metrics, "spec_drafted_at_position_total", position=p) for p in "123"]
    assert by_place == [4, 2, 1]
    assert (metrics.drafted, metrics.num_windows) == (by_place, 5)
    assert value(metrics, "spec_undrafted_steps_total") == 1
    assert value(metrics, "spec_first_acceptance") == 0
    assert value(metrics, "spec_width_sum") == 7
    assert value(metrics, "spec_width_count") == 3
    assert value(metrics, "spec_simulated") == 0
    for _ in range(250):
        metrics.windows(2, [2, 2, 2, 1], [(5,), (6,), (7,), (8,)])
    assert 0.74 < value(metrics, "spec_first_acceptance") < 0.76
    first = value(metrics, "spec_first_acceptance")
    metrics.windows(2, [1, 1, 1, 1], [(5,), (6,), (7,), (8,)])
    assert value(metrics, "spec_first_acceptance") == first


def test_places_that_simulated_acceptance_counts_for_are_drafts(metrics: WorkerMetrics) -> None:
    metrics.simulate()
    metrics.windows(4, [1, 3], [(-1, -1, -1), (-1, -1, -1)])
    by_place = [value(metrics, "spec_drafted_at_position_total", position=p) for p in "123"]
    assert by_place == [2, 2, 2]
    assert value(metrics, "spec_simulated") == 1
    assert value(metrics, "spec_undrafted_steps_total") == 0


def test_what_windows_will_count_is_there_before_the_first(metrics: WorkerMetrics) -> None:
    for name in ("accepted", "drafted"):
        found = [value(metrics, f"spec_{name}_at_position_total", position=p) for p in "1234"]
        assert found == [0, 0, 0, None]


def test_tokens_of_a_row_follow_what_steps_yield(metrics: WorkerMetrics) -> None:
    assert metrics.tokens_per_row == 0
    for _ in range(100):
        metrics.windows(4, [4, 1], [(5, 6, 7), (-1, -1, -1)])
    assert metrics.tokens_per_row == pytest.approx(2.5, abs=0.01)
    for _ in range(100):  # narrowed: nothing is gained any more
        metrics.windows(1, [1, 1], [(), ()])
    assert metrics.tokens_per_row == pytest.approx(1, abs=0.01)


def test_prompt_lookup_has_no_first_acceptance(metrics: WorkerMetrics) -> None:
    metrics.acceptance_follows_text()
    for _ in range(250):
        metrics.windows(2, [2, 2, 2, 1], [(5,), (6,), (7,), (8,)])
    assert value(metrics, "spec_first_acceptance") == 0
    assert value(metrics, "spec_steps_total") == 1000
