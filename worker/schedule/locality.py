"""Conditional disaggregation: whether decode prefills by itself. Pure.

The cost of a local prefill is its own time, paid once by the request and once by every row that
stands still meanwhile. The cost of a remote one is the candidate's queue, its compute and the pull.
(The idea of disaggregating only what pays is DistServe's and Dynamo's; the estimate is our own.)
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.api import Candidate
from worker.config import DisaggregationConfig


@dataclass(slots=True, frozen=True)
class LocalCost:
    """What decode knows of itself and of the request at hand."""

    num_uncached_tokens: int  # tokens it would have to prefill
    num_running: int  # rows that would stand still
    s_per_token: float  # of its own prefill; 0 = not measured yet
    kv_bytes_per_token: int
    pull_bytes_per_s: float


def prefills_locally(
    cost: LocalCost, candidates: list[Candidate], config: DisaggregationConfig
) -> bool:
    """Whether decode should prefill by itself; always so when there is no candidate."""
    if not candidates or config.mode == "never":
        return True
    # Rates that nobody has measured yet are taken to be those of the others.
    measured = [each.prefill_s_per_token for each in candidates if each.prefill_s_per_token]
    s_per_token = cost.s_per_token or min(measured, default=0.0)
    if config.mode == "always" or s_per_token == 0:
        return False
    local_s = cost.num_uncached_tokens * s_per_token * (1 + cost.num_running)
    return local_s <= min(_remote_s(cost, each, s_per_token, config) for each in candidates)


def _remote_s(
    cost: LocalCost, candidate: Candidate, local_s_per_token: float, config: DisaggregationConfig
) -> float:
    s_per_token = candidate.prefill_s_per_token or local_s_per_token
    num_uncached = max(0, cost.num_uncached_tokens - candidate.num_cached_tokens)
    num_bytes = cost.num_uncached_tokens * cost.kv_bytes_per_token
    return (
        config.pull_overhead_s
        + (candidate.num_queued_tokens + num_uncached) * s_per_token
        + num_bytes / cost.pull_bytes_per_s
    )
