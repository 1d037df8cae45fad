"""Sessions: where the KV of a conversation is, and for how long it pauses between its turns.

A turn goes where the last one went, unless that worker is hot or gone. A new session goes to the
first worker in an order of its own (rendezvous hashing over workers' names: all routers have the
same one) that has about as many sessions as the others, and about their load. So routers that have
not seen a session agree about it, as far as none of them had to pass over a worker.
"""

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from router.dispatch.members import Known
from worker.api import PeerId

Where = Literal["home", "moved", "new"]  # went a turn, by where its session was

CAPACITY = 1 << 16  # sessions: some 30 MB
FORGOTTEN_S = 900.0  # after its last turn a session is a new one
BOUND = 1.25  # times the mean of workers: sessions that one has at most (bounded loads)
HOTTER = 0.5  # of a worker's rows, above the mean: a new session passes it over
MAX_OWNERS, NUM_PAUSES, MIN_PAUSES = 1024, 128, 8
QUANTILE = 0.9  # of pauses, for which pages are kept
LEAST_S, UNKNOWN_S, MOST_S = 5.0, 60.0, 600.0  # for which they are, where a request does not say


@dataclass(slots=True)
class _Session:
    used_at: float
    home: PeerId = ""
    num_open: int = 0  # turns that have not ended


class Sessions:
    """What one router has seen of them. Its loop's alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[str, _Session] = OrderedDict()  # used last is last
        self._num_at = Counter[PeerId]()
        self._pauses: OrderedDict[str, deque[float]] = OrderedDict()  # by owner

    def __len__(self) -> int:
        return len(self._known)

    def begin(self, name: str, owner: str) -> None:
        """A turn has come."""
        now = self._clock()
        while self._known:
            oldest, session = next(iter(self._known.items()))
            if len(self._known) < CAPACITY and now - session.used_at < FORGOTTEN_S:
                break
            self._num_at -= Counter([session.home])
            del self._known[oldest]
        session = self._known.get(name)
        if session is None:
            session = self._known[name] = _Session(now)
        elif not session.num_open:
            pauses = self._pauses.setdefault(owner, deque(maxlen=NUM_PAUSES))
            pauses.append(now - session.used_at)
            self._pauses.move_to_end(owner)
            if len(self._pauses) > MAX_OWNERS:
                self._pauses.popitem(last=False)
        session.num_open += 1
        self._use(name, now)

    def end(self, name: str) -> None:
        """A turn that had begun is over."""
        if (session := self._known.get(name)) is not None:
            session.num_open = max(0, session.num_open - 1)
            self._use(name, self._clock())

    def pause_s(self, owner: str) -> float:
        """How long all but the longest pauses of an owner's sessions are, within bounds."""
        pauses = sorted(self._pauses.get(owner, ()))
        if len(pauses) < MIN_PAUSES:
            return UNKNOWN_S
        return min(MOST_S, max(LEAST_S, pauses[int(QUANTILE * len(pauses))]))

    def choose(self, name: str, decode: Sequence[Known]) -> Known | None:
        """The worker for a turn of this session; None: no worker is better than others for it."""
        session = self._known.get(name)
        home = session.home if session is not None else ""
        at_home = next((each for each in decode if each.peer == home and each.load < 1), None)
        if at_home is not None:
            return at_home
        hot = min(1.0, HOTTER + sum(known.load for known in decode) / len(decode))
        cool = [known for known in decode if known.load < hot]
        most = BOUND * (1 + sum(self._num_at[known.peer] for known in cool))
        fit = (known for known in cool if self._num_at[known.peer] * len(cool) < most)
        return max(fit, key=lambda known: _rank(name, known.member.name), default=None)

    def sent(self, name: str, peer: PeerId) -> Where:
        """A turn goes to this worker, where its session is from then on."""
        session = self._known.get(name)
        if session is None:  # it waited for so long that it was forgotten
            return "new"
        before, session.home = session.home, peer
        if before != peer:
            self._num_at -= Counter([before])
            self._num_at[peer] += 1
        return "home" if before == peer else "moved" if before else "new"

    def _use(self, name: str, now: float) -> None:
        self._known[name].used_at = now
        self._known.move_to_end(name)


def _rank(session: str, worker: str) -> bytes:
    return blake2b(f"{session}/{worker}".encode(), digest_size=8).digest()
