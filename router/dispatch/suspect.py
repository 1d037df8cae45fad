"""The poison guard: a request that was present at two deaths of workers may have caused them.

It is not sent again. It cannot have caused the first if it drew so many tokens elsewhere: more than
steps in flight draw. Nor if it had no row there; but a worker may die before it has said so, and
that is forgiven a few times. As often so is a death at a moment at which others died without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from worker.api import PeerId

INNOCENT_TOKENS = 32
MAX_ABSENT = 3
MOMENT_S = 2.0  # within which workers that end have ended together


@dataclass(slots=True)
class Suspect:
    """What speaks against one request. `num_tokens` are its output tokens so far."""

    has_row: bool = False  # its present worker has said so, or sent tokens
    _num_absent: int = 0  # deaths of workers at which it had no row, or that were not its own
    _died_at: int | None = None  # output tokens it had where a worker died last
    _struck_s: float = 0.0  # when that was
    _elsewhere_s: float = float("-inf")  # when other workers last died, without it
    # Workers whose connection was lost with it: its output tokens then, and `has_row`.
    _lost: dict[PeerId, tuple[int, bool]] = field(default_factory=dict[PeerId, tuple[int, bool]])

    def lost(self, peer: PeerId, num_tokens: int) -> None:
        """It was at a worker whose connection is lost: whether that has died is not known yet."""
        self._lost[peer] = num_tokens, self.has_row

    def died(self, peers: Sequence[PeerId], now_s: float) -> bool:
        """Processes of decode workers have ended. Whether this was present at two such ends."""
        there = [self._lost.pop(peer) for peer in peers if peer in self._lost]
        rows = [num_tokens for num_tokens, had_row in there if had_row]
        is_absent = len(rows) < len(there)
        if len(rows) < len(peers):  # others have ended, or one that it had not reached yet
            self._elsewhere_s = now_s
            is_one = now_s - self._struck_s <= MOMENT_S and self._num_absent < MAX_ABSENT
            if self._died_at is not None and is_one:
                self._died_at, is_absent = None, True
        if rows and now_s - self._elsewhere_s > MOMENT_S:
            self._struck_s = now_s
            return any([self.erred(num_tokens) for num_tokens in rows])
        self._num_absent += is_absent or bool(rows)
        return bool(there) and self._num_absent > MAX_ABSENT

    def erred(self, num_tokens: int) -> bool:
        """The worker where it has a row made a mistake, which may repeat itself: as a death."""
        before, self._died_at = self._died_at, num_tokens
        return before is not None and num_tokens - before < INNOCENT_TOKENS
