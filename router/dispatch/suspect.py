"""The poison guard: a request that was present at two deaths of workers may have caused them.

It is not sent again. It cannot have caused the first if it drew so many tokens elsewhere: more than
steps in flight draw. Nor if it had no row there; but a worker may die before it has said so, and
that is forgiven a few times.
"""

from dataclasses import dataclass, field

from worker.api import PeerId

INNOCENT_TOKENS = 32
MAX_ABSENT = 3


@dataclass(slots=True)
class Suspect:
    """What speaks against one request. `num_tokens` are its output tokens so far."""

    has_row: bool = False  # its present worker has said so, or sent tokens
    _num_absent: int = 0  # deaths of workers at which it had no row
    _died_at: int | None = None  # output tokens it had where a worker died last
    # Workers whose connection was lost with it: its output tokens then, and `has_row`.
    _lost: dict[PeerId, tuple[int, bool]] = field(default_factory=dict[PeerId, tuple[int, bool]])

    def lost(self, peer: PeerId, num_tokens: int) -> None:
        """It was at a worker whose connection is lost: whether that has died is not known yet."""
        self._lost[peer] = num_tokens, self.has_row

    def died(self, peer: PeerId, num_tokens: int, *, is_there: bool) -> bool:
        """A worker's process has ended. Whether this was present at two such ends.

        is_there: the request is at that worker now.
        """
        there = num_tokens, self.has_row
        was = self._lost.pop(peer, None)
        present = there if is_there else was
        if present is None:
            return False
        had_tokens, had_row = present
        if had_row:
            return self.erred(had_tokens)
        self._num_absent += 1
        return self._num_absent > MAX_ABSENT

    def erred(self, num_tokens: int) -> bool:
        """The worker where it has a row made a mistake, which may repeat itself: as a death."""
        before, self._died_at = self._died_at, num_tokens
        return before is not None and num_tokens - before < INNOCENT_TOKENS
