"""A slower card than the machine has: a double around a transport's peer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from worker.transfer.base import Peer, Pull, PullState, Run


class Throttle:
    """What pulls come through, one after the other, at `bytes_per_s`; 0: as they come.

    It can only slow down: the transport itself has to be faster. `num_bytes` is of all pulls.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.bytes_per_s = 0.0
        self.num_bytes = 0
        self._free_at = 0.0

    def over(self, peer: Peer) -> ThrottledPeer:
        """`peer`, pulled from through this throttle."""
        return ThrottledPeer(peer, self)

    def issued(self, num_bytes: int) -> float:
        """A pull begins behind those before it; the earliest time at which it may be over."""
        self.num_bytes += num_bytes
        if not self.bytes_per_s:
            return 0.0
        self._free_at = max(self._free_at, self.clock()) + num_bytes / self.bytes_per_s
        return self._free_at


class ThrottledPeer:
    """A peer behind a throttle."""

    def __init__(self, peer: Peer, throttle: Throttle) -> None:
        self._peer, self._throttle = peer, throttle

    def pull(self, runs: Sequence[Run]) -> ThrottledPull:
        """See Peer.pull."""
        pull = self._peer.pull(runs)
        return ThrottledPull(pull, self._throttle.clock, self._throttle.issued(pull.num_bytes))

    def close(self) -> None:
        """See Peer.close."""
        self._peer.close()


class ThrottledPull:
    """A pull that is not OK before `ends_at`."""

    def __init__(self, pull: Pull, clock: Callable[[], float], ends_at: float) -> None:
        self.num_bytes = pull.num_bytes
        self._pull, self._clock, self._ends_at = pull, clock, ends_at

    @property
    def error(self) -> str | None:
        """See Pull.error."""
        return self._pull.error

    def poll(self) -> PullState:
        """See Pull.poll."""
        state = self._pull.poll()
        early = state is PullState.OK and self._clock() < self._ends_at
        return PullState.RUNNING if early else state

    def cancel(self) -> None:
        """See Pull.cancel."""
        self._pull.cancel()
