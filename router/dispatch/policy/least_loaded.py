"""The decode worker with the smallest share of its rows taken; prefill by expected wait."""

import random
from collections.abc import Sequence

from router.dispatch.members import Known
from router.dispatch.policy.base import Asked, Choice, Policy, candidates, eligible

UNKNOWN_S_PER_TOKEN = 1e-4


def decode_load(known: Known) -> float:
    """Requests per row; above 1 means that some wait."""
    return known.num_requests / max(1, known.stats.max_num_reqs)


def prefill_wait_s(known: Known) -> float:
    """How long a prompt would wait there before its first chunk is computed."""
    return known.num_queued_tokens * (known.stats.prefill_s_per_token or UNKNOWN_S_PER_TOKEN)


class LeastLoaded(Policy):
    """Ties are broken at random, so that routers that know the same do not all choose the same."""

    def choose(self, asked: Asked, decode: Sequence[Known], prefill: Sequence[Known]) -> Choice:
        best = min(decode, key=lambda known: (decode_load(known), random.random()))
        pool = eligible(best, prefill)
        pool.sort(key=lambda known: (prefill_wait_s(known), random.random()))
        return Choice(best.peer, candidates(pool))
