"""Made-up results of the load harness: what a small cluster of prefill and decode workers does."""

from collections.abc import Sequence

import numpy as np

from benchmarks.load.measure import summary
from benchmarks.load.records import Lag, Objectives, Outcome, Result, Run
from benchmarks.load.result import KIND

OBJECTIVES = Objectives(ttft_s=0.4, itl_s=0.03)
BEGUN = "2026-11-21T10:00:00+00:00"


def made_up_run(
    seed: int = 0,
    *,
    num: int = 600,
    step_s: float = 0.012,
    share_failing: float = 0.01,
    with_stages: bool = True,
) -> Run:
    """20 requests/s at one prefill worker with a queue, then steps; some requests time out."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum(rng.exponential(1 / 20, num)).tolist()
    free_at, outcomes = 0.0, []
    for index, start in enumerate(starts):
        outcome = Outcome(index, 0, start, sent_s=start + float(rng.exponential(0.0002)))
        outcomes.append(outcome)
        if rng.random() < share_failing:
            outcome.end_s, outcome.error = outcome.sent_s + 2.0, "timeout"
            continue
        begin, prefill = max(outcome.sent_s + 0.002, free_at), float(rng.lognormal(-4, 0.8))
        free_at = begin + prefill
        first, num_output = free_at + 0.005 + step_s, int(rng.gamma(2, 30)) + 2
        gaps = step_s * rng.lognormal(0, 0.12, num_output - 1)
        outcome.chunk_s = np.round(first + np.concatenate([[0], np.cumsum(gaps)]), 6).tolist()
        outcome.end_s = outcome.chunk_s[-1] + 0.001
        outcome.num_prompt_tokens, outcome.counted = 400, True
        outcome.num_output_tokens, outcome.num_text_tokens = num_output, num_output - 1
        if with_stages:
            outcome.stages = {
                "prefill_queue_s": begin - outcome.sent_s - 0.001,
                "prefill_s": prefill,
                "first_step_s": step_s,
                "decode_s": outcome.chunk_s[-1] - first,
                "first_token_s": first - outcome.sent_s - 0.002,
                "pull_s": 0.02,
                "pulled_bytes": 5_000_000,
            }
    lag = Lag(0, rng.exponential(0.0002, 400).tolist(), 0.4 * starts[-1], starts[-1])
    end = max(outcome.end_s for outcome in outcomes)
    return Run(outcomes, [lag], BEGUN, end - starts[0], starts)


def made_up_result(runs: Sequence[Run]) -> Result:
    options = {"argv": ["--rate", "20"], "urls": ["http://127.0.0.1:8000"], "model": "tiny"}
    summaries = [summary(run, OBJECTIVES) for run in runs]
    return Result(KIND, options, {"cpu": "Some CPU"}, {"seed": 0}, summaries, list(runs))
