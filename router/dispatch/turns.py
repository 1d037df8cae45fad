"""Whose turn it is: fairly between clients, and by priority among the requests of one.

A client is an API key or an address (`http/source.py`). Who was served least lately is next. What
it was served is counted in tokens: those of a prompt when it is sent, those of an output as
they come, at twice the weight (virtual token counters: Sheng et al., arXiv:2401.00588, section
4.1). Older tokens count for less: so who asks for less than its share has credit, and a burst of
its requests goes before others'. The credit is bounded: who was away is lifted near to the least of
those who wait.

A turn alone helps little, as rows end in bunches: who asks for less than its share finds some free.
So rows stay free for clients that do not wait: for one of them as many as it has lately had at a
time and one more, for all of them together at most a quarter of the rows. And who has less than a
quarter of its equal part goes before who has more, however much credit that one came with.
"""

import heapq
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

OUTPUT_WEIGHT = 2  # of a token, against one of a prompt
SLACK = 64  # entries of requests that have left, which a heap may hold
NUM_TIMED, MIN_TIMED = 64, 16  # turns of a client, by which its waits are predicted
LATELY_S = 10.0  # in which what a client was served, and has had at a time, counts for e times less
LIFT = 0.8  # of the least of those who wait: a client that was away has the rest as credit
MAX_CLIENTS = 256  # that are known, unless more of them ask
KEPT = 0.25  # of the rows, at most, stay free


class Waiter(Protocol):
    """What is read of a request."""

    req_id: str
    client: str
    priority: int  # the least is first


W = TypeVar("W", bound=Waiter)


@dataclass(slots=True)
class _Client:
    """One client, also while none of its requests wait."""

    noted_at: float  # when `note` was called last
    num: int = 0  # its requests that wait, those that have come back left out
    heap: list[tuple[int, int, str]] = field(default_factory=list[tuple[int, int, str]])
    turn_at: float = 0.0  # monotonic, of its last turn if more of its requests waited then, else 0
    between_s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TIMED))  # turns
    running: int = 0  # its requests at workers
    most: float = 0.0  # of these, lately
    served: float = 0.0  # tokens, weighted, lately

    def note(self, now: float, change: int = 0) -> None:
        """So many more are at a worker now; what was before counts for less."""
        left = math.exp((self.noted_at - now) / LATELY_S)
        self.running += change
        self.most, self.served = max(self.running, self.most * left), self.served * left
        self.noted_at = now


class Turns(Generic[W]):
    """Requests that wait."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._again: OrderedDict[str, W] = OrderedDict()  # come back from a worker: before all
        self._live: dict[str, tuple[int, W]] = {}  # by req_id; the number is its heap entry's
        self._clients: dict[str, _Client] = {}
        self._waiting: dict[str, _Client] = {}  # those with requests that wait
        self._last = _Client(clock())  # who had the last turn
        self._number = 0

    def __len__(self) -> int:
        return len(self._again) + len(self._live)

    def add(self, waiter: W, *, first: bool = False) -> None:
        """first: before all others; the last of these before the ones before."""
        if first:
            self._again[waiter.req_id] = waiter
            self._again.move_to_end(waiter.req_id, last=False)
            return
        client, self._number = self._client(waiter.client), self._number + 1
        if not client.num:
            now, others = self._clock(), list(self._waiting.values()) or [self._last]
            for other in (client, *others):
                other.note(now)
            client.served = max(client.served, LIFT * min(other.served for other in others))
            self._waiting[waiter.client] = client
        heapq.heappush(client.heap, (waiter.priority, self._number, waiter.req_id))
        self._live[waiter.req_id] = self._number, waiter
        client.num += 1

    def pop(self, num_rows: int, fits: Callable[[W], bool] = lambda _: True) -> W | None:
        """The next one that `fits`, where workers have so many rows; None: nobody who may have
        one waits.
        """
        again = next((waiter for waiter in self._again.values() if fits(waiter)), None)
        if again is not None:
            return self._again.pop(again.req_id)
        now = self._clock()
        for client in self._in_order(num_rows, now) if self._waiting else ():
            waiter = self._first(client)
            if not fits(waiter):
                continue
            self._last = client
            self.remove(waiter)
            if client.turn_at:
                client.between_s.append(now - client.turn_at)
            client.turn_at = now if client.num else 0.0
            return waiter
        return None

    def all(self) -> list[W]:
        """Who waits, in no order."""
        return [*self._again.values(), *(waiter for _, waiter in self._live.values())]

    def remove(self, waiter: W) -> None:
        """It does not wait any more, if it did."""
        self._again.pop(waiter.req_id, None)
        if self._live.pop(waiter.req_id, None) is None:
            return
        client = self._clients[waiter.client]
        client.num -= 1
        if not client.num:
            client.heap.clear()
            del self._waiting[waiter.client]
        elif len(client.heap) > 2 * client.num + SLACK:
            client.heap = [entry for entry in client.heap if entry[2] in self._live]
            heapq.heapify(client.heap)

    def charge(self, client: str, tokens: float) -> None:
        """Count what a client was served, as of the last turn: quick, as a chunk calls it."""
        self._client(client).served += tokens

    def runs(self, client: str, change: int) -> None:
        """One more of its requests is at a worker, or one less."""
        self._client(client).note(self._clock(), change)

    def num_of(self, client: str) -> int:
        """A client's requests that wait or are at workers."""
        known = self._clients.get(client)
        return 0 if known is None else known.num + known.running

    def wait_s(self, client: str) -> float:
        """How long a request of this client would wait that comes now; 0: not known."""
        known = self._client(client)
        times = known.between_s
        if len(times) < MIN_TIMED or not known.turn_at:
            return 0.0
        # Turns come in bunches. The longest time does not count: a worker was lost, say.
        return known.num * (sum(times) - max(times)) / (len(times) - 1)

    def _in_order(self, num_rows: int, now: float) -> Iterator[_Client]:
        """Those who wait, in order, but for whom the free rows are kept for others."""
        for known in self._clients.values():
            known.note(now)
        active = [known for known in self._clients.values() if known.num or known.most > 1 / math.e]
        if len(active) == 1:  # who waits
            yield active[0]
            return
        few = KEPT * num_rows / len(active)
        free = num_rows - sum(known.running for known in active)
        away = [known for known in active if not known.num]
        kept = sum(max(0.0, known.most + 1 - known.running) for known in away)
        is_open = free > min(kept, KEPT * num_rows)
        for client in sorted(
            self._waiting.values(), key=lambda one: (one.running >= few, one.served)
        ):
            if is_open or not client.running:
                yield client

    def _first(self, client: _Client) -> W:
        """Its next one; entries of those that have left are dropped."""
        while True:
            _, number, req_id = client.heap[0]
            newest, live = self._live.get(req_id, (0, None))
            if live is not None and newest == number:
                return live
            heapq.heappop(client.heap)

    def _client(self, name: str) -> _Client:
        client = self._clients.get(name)
        if client is None:
            if len(self._clients) >= MAX_CLIENTS:
                self._forget_some()
            client = self._clients[name] = _Client(self._clock())
        return client

    def _forget_some(self) -> None:
        """Of those that ask nothing the half that was served least lately."""
        idle = [name for name, known in self._clients.items() if not (known.num or known.running)]
        idle.sort(key=lambda name: self._clients[name].served)
        for name in idle[: len(idle) // 2 + 1]:
            del self._clients[name]
