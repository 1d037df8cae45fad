"""Every worker in turn, whatever its load."""

from collections.abc import Sequence

from router.dispatch.members import Known
from router.dispatch.policy.base import Asked, Choice, Policy, candidates, eligible


class RoundRobin(Policy):
    """Decode and prefill workers have turns of their own, so that pairs vary."""

    def __init__(self) -> None:
        self._decode_turn = 0
        self._prefill_turn = 0

    def choose(self, asked: Asked, decode: Sequence[Known], prefill: Sequence[Known]) -> Choice:
        in_order = sorted(decode, key=lambda known: known.peer)
        chosen = in_order[self._decode_turn % len(in_order)]
        self._decode_turn += 1
        pool = sorted(eligible(chosen, prefill), key=lambda known: known.peer)
        if pool:
            first = self._prefill_turn % len(pool)
            self._prefill_turn += 1
            pool = pool[first:] + pool[:first]
        return Choice(chosen.peer, candidates(pool))
