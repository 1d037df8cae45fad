"""Whose turn it is: fairly between clients, and by priority among the requests of one.

A client is an API key; without keys all are one. The client that was served least is next. What it
was served is counted in tokens: those of a prompt when it is sent, those of an output as they come,
at twice the weight (virtual token counters: Sheng et al., arXiv:2401.00588, section 4.1). Who was
away is lifted to the least of those who wait: nobody saves up turns.
"""

import heapq
from collections import Counter, OrderedDict
from typing import Generic, Protocol, TypeVar

OUTPUT_WEIGHT = 2  # of a token, against one of a prompt
SLACK = 64  # entries of requests that have left, which a heap may hold


class Waiter(Protocol):
    """What is read of a request."""

    req_id: str
    client: str
    priority: int  # the least is first


W = TypeVar("W", bound=Waiter)


class Turns(Generic[W]):
    """Requests that wait."""

    def __init__(self) -> None:
        self._again: OrderedDict[str, W] = OrderedDict()  # come back from a worker: before all
        self._live: dict[str, tuple[int, W]] = {}  # by req_id; the number is its heap entry's
        self._heaps: dict[str, list[tuple[int, int, str]]] = {}  # of clients that wait
        self._num_of: Counter[str] = Counter()  # live requests of each client
        self._served: dict[str, float] = {}  # tokens, weighted, by client
        self._last_served = 0.0  # of whoever had the last turn
        self._number = 0

    def __len__(self) -> int:
        return len(self._again) + len(self._live)

    def add(self, waiter: W, *, first: bool = False) -> None:
        """first: before all others; the last of these before the ones before."""
        if first:
            self._again[waiter.req_id] = waiter
            self._again.move_to_end(waiter.req_id, last=False)
            return
        client, self._number = waiter.client, self._number + 1
        if client not in self._heaps:
            others = [self._served[each] for each in self._heaps]
            least = min(others, default=self._last_served)
            self._served[client] = max(self._served.get(client, 0.0), least)
            self._heaps[client] = []
        heapq.heappush(self._heaps[client], (waiter.priority, self._number, waiter.req_id))
        self._live[waiter.req_id] = self._number, waiter
        self._num_of[client] += 1

    def pop(self) -> W:
        """The next one; KeyError if there is none."""
        if self._again:
            return self._again.popitem(last=False)[1]
        if not self._heaps:
            raise KeyError("nobody waits")
        client = min(self._heaps, key=lambda each: self._served[each])
        self._last_served = self._served[client]
        while True:  # entries of those that have left are passed over
            _, number, req_id = heapq.heappop(self._heaps[client])
            if (found := self._live.get(req_id)) is not None and found[0] == number:
                self.remove(found[1])
                return found[1]

    def remove(self, waiter: W) -> None:
        """It does not wait any more, if it did."""
        self._again.pop(waiter.req_id, None)
        if self._live.pop(waiter.req_id, None) is None:
            return
        client = waiter.client
        self._num_of[client] -= 1
        if not self._num_of[client]:
            del self._num_of[client], self._heaps[client]
        elif len(self._heaps[client]) > 2 * self._num_of[client] + SLACK:
            kept = [entry for entry in self._heaps[client] if entry[2] in self._live]
            heapq.heapify(kept)
            self._heaps[client] = kept

    def charge(self, client: str, tokens: float) -> None:
        """Count what a client was served."""
        self._served[client] = self._served.get(client, 0.0) + tokens

    def num_waiting(self, client: str) -> int:
        """Requests of one client, those that have come back left out."""
        return self._num_of[client]
