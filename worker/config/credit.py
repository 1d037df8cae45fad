"""How much members may say to one another: one count, the same at who sends and at who reads.

The reader grants units, in pings and in their answers. The sender keeps within, and holds the rest:
no clock and no pause on the way makes an honest member one that sends too much.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from worker.api import PeerId

# What a peer may send: so many units a second, and so many at once. A message is one, and one more
# for every so many bytes, as what is read of it takes ten times as much; a link is LINK_UNITS. Half
# of it is a router that asks one worker 2,500 times a second, or 256 rows' steps of four tokens
# with all logprobs at 200 a second. Those to whom we have connected answer, at greater length.
# Both sides count: who reads grants units in pings and their answers, and who sends keeps within.
UNITS_PER_S, MAX_UNITS, LINK_UNITS = 20_000, 20_000, 200
ASKED_UNIT_BYTES, ANSWER_UNIT_BYTES = 2048, 8192
PING_UNITS = 100  # which only pings and their answers use, as they bring the next ones
# A longer message leaves a part of MAX_UNITS to others, and waits until its sender's I/O thread has
# less than a few to send.
LONG_BYTES, SHORT_PART, FEW_WAITING = 1 << 15, 0.25, 4
UNLIMITED = 1 << 60
MAX_BUDGETS = 1024  # peers


def units_of(num_bytes: int, *, answers: bool) -> float:
    """What a message takes of a grant. answers: of the side that was connected to."""
    units = 1 + num_bytes / (ANSWER_UNIT_BYTES if answers else ASKED_UNIT_BYTES)
    return min(units, MAX_UNITS - PING_UNITS)


@dataclass(slots=True)
class Outgoing:
    """What we send on one link: as much as the peer has granted; other frames are held, in order.

    So a member that does what it is asked to is never told that it sends too much.
    """

    answers: bool  # the peer has connected to us
    granted: float = LINK_UNITS  # since the link began
    num_units: float = 0.0  # sent
    held: deque[bytes] = field(default_factory=deque[bytes])

    def takes(self, frame: bytes, *, is_ping: bool = False) -> bool:
        """Whether to send a frame now; else it is held, but a ping, of which more will come."""
        fits = not (self.held and not is_ping) and self._fits(frame, is_ping=is_ping)
        if not (fits or is_ping):
            self.held.append(frame)
        return fits

    def has_room(self, num_bytes: int) -> bool:
        """Whether nothing is held, and a long message leaves a part of the grant to short ones."""
        left, units = self.granted - self.num_units, units_of(num_bytes, answers=self.answers)
        leaves = num_bytes <= LONG_BYTES or left - units >= SHORT_PART * MAX_UNITS
        return not self.held and (leaves or left >= (1 - SHORT_PART) * MAX_UNITS)

    def released(self, granted: int) -> Iterator[bytes]:
        """The frames that may leave now that so much was granted."""
        self.granted = max(self.granted, granted)
        while self.held and self._fits(self.held[0], is_ping=False):
            yield self.held.popleft()

    def _fits(self, frame: bytes, *, is_ping: bool) -> bool:
        units = units_of(len(frame), answers=self.answers)
        fits = self.num_units + units <= self.granted - PING_UNITS * (not is_ping)
        self.num_units += units * fits
        return fits


@dataclass(slots=True)
class Budget:
    """What one peer may send to us."""

    noted_at: float
    left: float  # may be granted: grows with time, outlives links; below 0: it has sent too much
    granted: float  # on the present link, and not used
    told: float  # on the present link, in all

    def takes(self, num_bytes: int, *, begins: bool, answers: bool) -> bool:
        """Whether a message is within what was granted; who goes on stays unheard, also over new
        links. begins: it is the first of a link, and nothing is to come of the one before.
        """
        if begins:
            self.left = min(MAX_UNITS, self.left + max(0.0, self.granted)) - LINK_UNITS
            self.granted = self.told = LINK_UNITS if self.left >= 0 else 0.0
        units = units_of(num_bytes, answers=answers)
        self.granted -= units
        if self.granted < 0:
            self.left = max(min(self.left, 0.0) - units, -UNITS_PER_S)
        return self.granted >= 0

    def grant(self) -> int:
        """How much it may send on its link, in all."""
        more = max(0.0, min(self.left, MAX_UNITS - self.granted))
        self.left, self.granted, self.told = self.left - more, self.granted + more, self.told + more
        return int(self.told)

    @property
    def is_low(self) -> bool:
        """Whether half of what was granted is used, and there is enough to grant."""
        return self.granted < MAX_UNITS / 2 and self.left >= MAX_UNITS / 4


class Budgets(dict[PeerId, Budget]):
    """Those of all peers."""

    def of(self, peer: PeerId) -> Budget:
        """As of now."""
        now = time.monotonic()
        if (budget := self.get(peer)) is None:
            if len(self) >= MAX_BUDGETS:  # not one of a link: it is heard every second
                del self[min(self, key=lambda name: self[name].noted_at)]
            budget = self[peer] = Budget(now, MAX_UNITS, LINK_UNITS, LINK_UNITS)
        budget.left = min(MAX_UNITS, budget.left + (now - budget.noted_at) * UNITS_PER_S)
        budget.noted_at = now
        return budget
