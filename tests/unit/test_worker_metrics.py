"""What a worker counts of its steps, and that what it will count is there from the start."""

from __future__ import annotations

import pytest

from worker.api import FinishReason
from worker.engine.meter import StepMeter
from worker.metrics import OUTCOMES, WorkerMetrics
from worker.plan import Chunk, Plan

BOUND = {"model": "tiny", "role": "decode", "worker": "decode-0"}


@pytest.fixture
def metrics() -> WorkerMetrics:
    return WorkerMetrics(**BOUND)


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
