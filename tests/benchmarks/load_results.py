"""Made-up results of the load harness: what a small cluster of prefill and decode workers does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.load.measure import summary
from benchmarks.load.records import Lag, Objectives, Outcome, Result, Run
from benchmarks.load.result import KIND

OBJECTIVES = Objectives(ttft_s=0.4, itl_s=0.03)


def made_up_run(
    seed: int = 0,
    *,
    num: int = 600,
    rate: float = 20.0,
    prefill_s_per_token: float = 6e-5,
    step_s: float = 0.012,
    share_failing: float = 0.01,
    with_stages: bool = True,
    stall: tuple[float, float] = (12.0, 1.5),
) -> Run:
    """One prefill worker with a queue; steps slow down with the batch; one stall (at, for how long)
    in seconds; some requests fail."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum(rng.exponential(1 / rate, num))
    free_at, outcomes = 0.0, []
    for index, start in enumerate(starts.tolist()):
        num_prompt = int(rng.lognormal(5.8, 0.8)) + 20
        num_output = int(rng.gamma(2, 30)) + 2
        cached = int(num_prompt * 0.4) if rng.random() < 0.5 else 0
        sent = start + float(rng.exponential(0.0002))
        begin = max(sent + 0.002, free_at)
        if stall[0] < begin < sum(stall):
            begin = sum(stall)
        prefill = (num_prompt - cached) * prefill_s_per_token + 0.004
        free_at = begin + prefill
        transfer = 0.001 + num_prompt * 4e-6
        queue = float(rng.exponential(0.003))
        first_step = step_s * float(rng.uniform(1, 1.6))
        first = free_at + transfer + queue + first_step + 0.003
        if rng.random() < share_failing:
            outcomes.append(failure(index, start, sent, rng))
            continue
        gaps = (
            step_s * rng.lognormal(0, 0.12, num_output - 1)
            + (rng.random(num_output - 1) < 0.01) * 0.04
        )
        chunks = np.round(first + np.concatenate([[0], np.cumsum(gaps)]), 6).tolist()
        outcome = Outcome(index, 0, start, sent, first - 0.001, chunks, chunks[-1] + 0.001)
        outcome.num_prompt_tokens, outcome.num_cached_tokens = num_prompt, cached
        outcome.num_output_tokens, outcome.num_text_tokens = num_output, num_output - 1
        outcome.counted = True
        outcome.finish_reason = "stop"
        if with_stages:
            outcome.stages = {
                "router_queue_s": 0.0005,
                "prefill_queue_s": begin - sent - 0.001,
                "prefill_s": prefill,
                "transfer_s": transfer,
                "decode_queue_s": queue,
                "first_step_s": first_step,
                "decode_s": chunks[-1] - first,
                "prefilled_by": "prefill-0/i0",
                "decoded_by": "decode-0/i0",
                "first_token_s": first - sent - 0.002,
            }
        outcomes.append(outcome)
    lag = Lag(0, rng.exponential(0.0002, 400).tolist(), 0.4 * float(starts[-1]), float(starts[-1]))
    end = max(outcome.end_s for outcome in outcomes)
    begun_at = "2026-11-21T10:00:00+00:00"
    return Run(outcomes, [lag], begun_at, end - float(starts[0]), starts.tolist())


def failure(index: int, start: float, sent: float, rng: np.random.Generator) -> Outcome:
    """A request that came to nothing: refused at once, or timed out after 2 s."""
    if rng.random() < 0.5:
        outcome = Outcome(index, 0, start, sent, end_s=sent + 0.004, error="http_429")
        outcome.message = '{"error": {"message": "too many requests <queued>"}}'
        return outcome
    return Outcome(index, 0, start, sent, end_s=sent + 2.0, error="timeout")


def made_up_result(
    runs: Sequence[Run], objectives: Objectives = OBJECTIVES, **options: Any
) -> Result:
    """`runs` with their summaries, as the harness would write them."""
    machine = {"cpu": "Some CPU", "cores": 2, "memory_gib": 23.5, "gpus": [], "commit": "abc123"}
    argv = ["--url", "http://127.0.0.1:8000", "--rate", "20"]
    return Result(
        KIND,
        {"argv": argv, "urls": ["http://127.0.0.1:8000"], "model": "tiny", **options},
        machine,
        {"source": "synthetic", "seed": 0, "num_requests": len(runs[0].outcomes) if runs else 0},
        [summary(run, objectives) for run in runs],
        list(runs),
    )
