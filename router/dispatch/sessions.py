"""Sessions: where the KV of a conversation is, and for how long it pauses between its turns.

A turn goes where the last one went, unless that worker is hot or gone, or others' prompts wait
there while another worker is idle. A new session goes to the worker that has fewest; of equals to
the first in an order of its own (rendezvous hashing by names).

All routers agree as far as workers tell them: every Pong names the turns that have come last to a
worker, whoever has sent them. So a turn finds its session through any router, once a Pong has come
since the turn before; two that come to two routers before that go to the same worker if both count
alike.
"""

import time
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from router.dispatch.members import Known
from worker.api import PeerId

Where = Literal["home", "moved", "new"]  # went a turn, by where its session was

CAPACITY = 1 << 16  # sessions: some 30 MB
FORGOTTEN_S = 900.0  # after its last turn a session is a new one
LATER = 0.5  # of a turn's tokens: where more wait at home, computing all of them may be sooner
HOTTER = 0.5  # of a worker's rows, above the mean: a new session passes it over
MAX_OWNERS, NUM_PAUSES, MIN_PAUSES = 1024, 128, 8
QUANTILE = 0.9  # of pauses, for which pages are kept
LEAST_S, UNKNOWN_S, MOST_S = 5.0, 60.0, 600.0  # for which they are, where a request does not say


@dataclass(slots=True)
class _Session:
    used_at: float
    home: PeerId = ""
    num_open: int = 0  # turns that have not ended
    ended_at: float = 0.0  # of the last turn here; 0: another router had one since


class Sessions:
    """What one router knows of them, by `Req.session`. Its loop's alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[str, _Session] = OrderedDict()  # used last is last
        self._num_at = Counter[PeerId]()  # of `_known`: to count them all would take milliseconds
        # By owner: of the last pauses, as they came and in order.
        self._pauses: OrderedDict[str, tuple[list[float], list[float]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def begin(self, name: str) -> None:
        """A turn has come."""
        session = self._used(name)
        if session.ended_at and not session.num_open:
            owner, pause_s = name.partition("/")[0], self._clock() - session.ended_at
            came, ranked = self._pauses.setdefault(owner, ([], []))
            if len(came) == NUM_PAUSES:
                del ranked[bisect_left(ranked, came.pop(0))]
            came.append(pause_s)
            insort(ranked, pause_s)
            self._pauses.move_to_end(owner)
            if len(self._pauses) > MAX_OWNERS:
                self._pauses.popitem(last=False)
        session.num_open += 1

    def end(self, name: str) -> None:
        """A turn that had begun is over."""
        session = self._used(name)
        session.num_open, session.ended_at = max(0, session.num_open - 1), self._clock()

    def heard(self, known: Known, turns: Sequence[tuple[int, str]]) -> None:
        """A worker has told of the turns that came last, with ascending numbers."""
        for number, name in turns:
            if number > known.last_turn:
                known.last_turn = number
                session = self._used(name)
                if not session.num_open:  # else what we have sent is what counts
                    session.ended_at = session.ended_at if session.home == known.peer else 0.0
                    self._moves(session, known.peer)

    def pause_s(self, name: str) -> float:
        """How long all but the longest pauses of its owner's sessions are, within bounds."""
        _, ranked = self._pauses.get(name.partition("/")[0], ((), ()))
        if len(ranked) < MIN_PAUSES:
            return UNKNOWN_S
        return min(MOST_S, max(LEAST_S, ranked[int(QUANTILE * len(ranked))]))

    def choose(self, name: str, decode: Sequence[Known], num_tokens: int) -> Known | None:
        """The worker for a turn of this session, of a prompt of num_tokens; None: all are hot."""
        session = self._known.get(name)
        home = session.home if session is not None else ""
        at_home = next((one for one in decode if one.peer == home and one.load < 1), None)
        waits = at_home is not None and at_home.num_queued_tokens > LATER * num_tokens
        if at_home is not None and not waits:
            return at_home
        hot = min(1.0, HOTTER + sum(known.load for known in decode) / len(decode))
        cool = [known for known in decode if known.load < hot and not (waits and known.load)]

        def order(known: Known) -> tuple[int, bytes]:
            rank = blake2b(f"{name}/{known.member.name}".encode(), digest_size=8).digest()
            return self._num_at[known.peer], rank

        return min(cool, key=order, default=at_home)

    def sent(self, name: str, peer: PeerId) -> Where:
        """A turn goes to this worker, where its session is from then on."""
        before = self._moves(self._used(name), peer)
        return "home" if before == peer else "moved" if before else "new"

    def _moves(self, session: _Session, peer: PeerId) -> PeerId:
        """Where it was."""
        before, session.home = session.home, peer
        if before != peer:
            self._num_at -= Counter([before])
            self._num_at[peer] += 1
        return before

    def _used(self, name: str) -> _Session:
        """A session, which is one from now on."""
        now = self._clock()
        session = self._known.setdefault(name, _Session(now))
        session.used_at = now
        self._known.move_to_end(name)
        while True:
            oldest, other = next(iter(self._known.items()))
            if len(self._known) <= CAPACITY and now - other.used_at < FORGOTTEN_S:
                return session
            self._num_at -= Counter([other.home])
            del self._known[oldest]
