"""Conditional disaggregation: whether decode prefills by itself.

A local prefill costs its compute time once for the request and once for every decode row that it
stalls. A remote one costs the candidate's queue, its compute time and the pull.
(The idea of disaggregating only what pays is DistServe's and Dynamo's; the estimate is our own.)
"""

from dataclasses import dataclass

from worker.api import Candidate
from worker.config import DisaggregationConfig


@dataclass(slots=True, frozen=True)
class PlacementInputs:
    """Numbers of the request and of this worker from which both costs are estimated."""

    num_uncached_tokens: int  # tokens to prefill
    num_running: int  # decode rows that a local prefill would stall
    s_per_token: float  # of local prefill; 0 = not measured yet
    kv_bytes_per_token: int
    pull_bytes_per_s: float


def prefills_locally(
    inputs: PlacementInputs, candidates: list[Candidate], config: DisaggregationConfig
) -> bool:
    """Whether decode should prefill by itself; always True without a candidate."""
    if not candidates or config.mode == "never":
        return True
    # An unmeasured rate is borrowed: our own from the fastest candidate, a candidate's from us.
    measured = filter(None, (candidate.prefill_s_per_token for candidate in candidates))
    s_per_token = inputs.s_per_token or min(measured, default=0.0)
    if config.mode == "always" or s_per_token == 0:
        return False
    num_bytes = inputs.num_uncached_tokens * inputs.kv_bytes_per_token

    def remote_s(candidate: Candidate) -> float:
        num_uncached = max(0, inputs.num_uncached_tokens - candidate.num_cached_tokens)
        rate = candidate.prefill_s_per_token or s_per_token
        compute_s = (candidate.num_queued_tokens + num_uncached) * rate
        return config.pull_overhead_s + compute_s + num_bytes / inputs.pull_bytes_per_s

    local_s = inputs.num_uncached_tokens * s_per_token * (1 + inputs.num_running)
    return local_s <= min(map(remote_s, candidates))
