"""How long a client waits for its turns beside one that asks for too much, on a clock of its own.

The router's `Turns` (router/dispatch/turns.py) before one simulated decode worker, whose steps and
prompts take as long as on the two-core machine of benchmarks/results/chaos.md. So the figures are
the same on every machine, however busy.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from router.dispatch.members import MIN_AHEAD
from router.dispatch.queue import SURE
from router.dispatch.turns import OUTPUT_WEIGHT, Turns

ROWS, TOKENS = 8, 64
STEP_S, ROW_S = 0.0034, 0.00024  # of a step, of each row in it
PROMPT_S, WAY_S = 0.012, 0.002  # of a prompt; from router to worker
CAPACITY = 23.4  # requests/s
QUEUE_S = 5.0
MUCH = 3.0  # of the capacity
WARM_S = 8.0


Event = tuple[float, int, Callable[[], None]]


@dataclass(slots=True, eq=False)
class One:
    """A request, and when what happened to it."""

    req_id: str
    client: str
    at: float
    priority: int = 0
    sent_at: float = 0.0
    end_at: float = 0.0
    told_at: float = 0.0  # that it is refused
    left: int = TOKENS


class Simulated:
    """One router and one decode worker; `ended` are all requests, in the end."""

    def __init__(self, seed: int, rates: dict[str, tuple[float, float, float]]) -> None:
        """rates: by client requests/s, from when, until when."""
        self.ended: list[One] = []
        self._now = 0.0
        self._turns = Turns[One](lambda: self._now)
        self._numbers, self._events = itertools.count(), list[Event]()
        self._ready, self._running, self._steps = deque[One](), list[One](), False
        self._prompts_until, self._num_sent = 0.0, 0
        rng = random.Random(seed)
        for client, (rate, at, until) in rates.items():
            while (at := at + rng.expovariate(rate)) < until:
                one = One(str(next(self._numbers)), client, at)
                self._later(at, lambda one=one: self._arrive(one))
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()

    def _later(self, at: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), event))

    def _arrive(self, one: One) -> None:
        if self._turns.wait_s(one.client) > SURE * QUEUE_S:
            self._refuse(one)
            return
        self._turns.add(one)
        self._place()
        if not one.sent_at:
            self._later(self._now + QUEUE_S, lambda: self._late(one))

    def _late(self, one: One) -> None:
        if not one.sent_at:
            self._turns.remove(one)
            self._refuse(one)

    def _refuse(self, one: One) -> None:
        one.told_at = self._now
        self.ended.append(one)

    def _place(self) -> None:
        while self._num_sent < ROWS + MIN_AHEAD and (one := self._turns.pop(ROWS)) is not None:
            one.sent_at = self._now
            self._num_sent += 1
            self._turns.charge(one.client, TOKENS)
            self._turns.runs(one.client, +1)
            self._prompts_until = max(self._prompts_until, self._now + WAY_S) + PROMPT_S
            self._later(self._prompts_until, lambda one=one: self._prefilled(one))

    def _prefilled(self, one: One) -> None:
        self._ready.append(one)
        if not self._steps:
            self._step()

    def _step(self) -> None:
        while self._ready and len(self._running) < ROWS:
            self._running.append(self._ready.popleft())
        if self._running:
            self._steps = True
            self._later(self._now + STEP_S + ROW_S * len(self._running), self._settle)

    def _settle(self) -> None:
        for one in self._running:
            one.left -= 1
            self._turns.charge(one.client, OUTPUT_WEIGHT)
            if not one.left:
                self._later(self._now + WAY_S, lambda one=one: self._end(one))
        self._running = [one for one in self._running if one.left]
        self._steps = False
        self._step()

    def _end(self, one: One) -> None:
        one.end_at = self._now
        self.ended.append(one)
        self._num_sent -= 1
        self._turns.runs(one.client, -1)
        self._place()


def figures(share: float, seconds: float, num_seeds: int) -> dict[str, float]:
    """Of a client that asks for `share` of the capacity: alone, and beside one that asks MUCH."""
    until, alone, beside = seconds + WARM_S, list[One](), list[One]()
    little = share * CAPACITY, WARM_S, until
    for seed in range(num_seeds):
        alone += Simulated(seed, {"little": little}).ended
        much = MUCH * CAPACITY, 0.0, until + WARM_S
        beside += Simulated(seed, {"little": little, "much": much}).ended
    mine = [one for one in beside if one.client == "little" and not one.told_at]
    others = [one for one in beside if one.client == "much"]
    alone_p99, p99 = (
        np.quantile([one.end_at - one.at for one in ones], 0.99) for ones in (alone, mine)
    )
    return {
        "ratio": p99 / alone_p99,
        "queue_p99_ms": 1e3 * np.quantile([one.sent_at - one.at for one in mine], 0.99),
        "refused": sum(one.client == "little" and one.told_at > 0 for one in beside),
        "others_per_s": sum(not one.told_at for one in others) / num_seeds / (until + WARM_S),
        "others_told_late": sum(one.told_at > one.at for one in others) / num_seeds,
    }
