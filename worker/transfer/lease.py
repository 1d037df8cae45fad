"""The lease of a transfer: its term on either side, and why pulled bytes can be trusted.

Prefill keeps announced pages for its term after it *received* the last renewal. Decode trusts them
for its own term after it *sent* the last renewal that was acknowledged. A renewal is sent before it
is received, and decode's term is shorter, so decode's lease always ends first. That needs neither a
bound on network delay nor synchronised clocks. A pull that ended within decode's lease therefore
read pages that prefill had not given away.
"""

MARGIN_S = 0.25  # a pull counts only if it ended this long before the lease does


class Lease:
    """One side's view of a lease; all times are `time.monotonic()` of that side's host."""

    def __init__(self, term_s: float, began_at: float) -> None:
        self._term_s = term_s
        self._ends_at = began_at + term_s

    def renewed(self, at: float) -> None:
        """Extend it by a renewal that was sent or received at `at`."""
        self._ends_at = max(self._ends_at, at + self._term_s)

    def expired(self, now: float) -> bool:
        """Whether it has ended; prefill may then give the pages away."""
        return now >= self._ends_at

    def covers(self, now: float) -> bool:
        """Whether decode may use announced bytes whose pull ended at `now`."""
        return now + MARGIN_S <= self._ends_at
