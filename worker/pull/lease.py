"""Lease windows of a transfer, and why a pull may be trusted without asking again.

Prefill keeps announced pages until `prefill_window_s` after it *received* the last renewal. Decode
trusts them until `decode_window_s` after it *sent* that renewal, and only once it was acknowledged.
Sending precedes receiving and decode's window is the shorter one, so it always ends first, whatever
the network delays and without comparing clocks of two hosts. A pull that ended inside decode's
window therefore read pages that prefill had not given away.

All times are `time.monotonic()` of the host that keeps the record.
"""

from __future__ import annotations

from dataclasses import dataclass

MARGIN_S = 0.25  # a pull counts only if it ended this long before the window does


@dataclass(slots=True)
class PullWindow:
    """Decode's side of one lease.

    Invariant: ends_at = decode_window_s + the sending time of the last acknowledged renewal.
    """

    length_s: float
    ends_at: float = float("-inf")

    def acknowledged(self, sent_at: float) -> None:
        """The peer answered something that it got after we sent it at `sent_at`."""
        self.ends_at = max(self.ends_at, sent_at + self.length_s)

    def covers(self, now: float) -> bool:
        """Whether bytes whose pull ended at `now` may be used."""
        return now + MARGIN_S <= self.ends_at


@dataclass(slots=True)
class PinLease:
    """Prefill's side of one lease."""

    length_s: float
    ends_at: float

    def renewed(self, now: float) -> None:
        """A renewal was received at `now`."""
        self.ends_at = max(self.ends_at, now + self.length_s)

    def expired(self, now: float) -> bool:
        """Whether the pages may be given away."""
        return now >= self.ends_at
