"""What a router has done in the last minutes: its counts, sampled every few seconds.

Nothing is observed for it: it takes the differences of what the metrics count anyway.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from router.observe.board import History, Part, Rates, Spread, together
from router.observe.metrics import PREFILLS, WHERE, RouterMetrics
from router.observe.tally import total

STEP_S = 2.0
NUM_STEPS = 150  # five minutes
HOUR_STEP_S = 30.0
NUM_HOUR_STEPS = 120
RATE_S = 10.0  # throughput is that of the last ten seconds


@dataclass(frozen=True, slots=True)
class Reading:
    """All counts at one moment, since the start."""

    running: int
    waiting: int
    outcomes: Mapping[str, float]
    prompt_tokens: float
    cached_tokens: float
    output_tokens: float  # those of choices that have not ended included
    prefills: Mapping[str, int]
    pulled_bytes: float
    latencies: Mapping[str, Spread]
    at: float = field(default_factory=time.monotonic)
    sessions: int = 0
    turns: Mapping[str, float] = field(default_factory=dict[str, float])  # see `Part.turns`


def read(metrics: RouterMetrics) -> Reading:
    """What the metrics count now."""
    tallies = {
        "time_to_first_token": metrics.first_tokens,
        "inter_token": (metrics.itl,),
        "end_to_end": (metrics.e2e,),
        "kv_pull": (metrics.pulls,),
    }
    families = metrics.collectors["requests"].collect()
    at_home = {"tokens": metrics.turn_tokens("home"), "cached": metrics.turn_cached("home")}
    counters = {where: metrics.turns(where) for where in WHERE} | at_home
    ended = {s.labels["outcome"]: s.value for family in families for s in family.samples}
    return Reading(
        running=metrics.live.running(),
        waiting=metrics.live.waiting(),
        outcomes=ended,
        prompt_tokens=total(metrics.prompt_tokens),
        cached_tokens=total(metrics.cached_tokens),
        output_tokens=total(metrics.generation_tokens) + sum(metrics.live.outputs()),
        prefills={
            where: tally.spread().total
            for where, tally in zip(PREFILLS, metrics.first_tokens, strict=True)
        },
        pulled_bytes=total(metrics.pulled_bytes),
        latencies={
            name: together([tally.spread() for tally in parts]) for name, parts in tallies.items()
        },
        sessions=metrics.live.sessions(),
        turns={name: total(counter) for name, counter in counters.items()},
    )


class Period:
    """The readings of the last minutes, and fewer of the last hour, which `read` makes."""

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read
        self._readings: deque[Reading] = deque(maxlen=NUM_STEPS + 1)
        self._of_hour: deque[Reading] = deque(maxlen=NUM_HOUR_STEPS + 1)

    def keep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take a reading, and from now on one every STEP_S while the loop runs."""
        self.sample()
        loop.call_later(STEP_S, self.keep, loop)

    def sample(self) -> None:
        """Take a reading now."""
        now = self._read()
        self._readings.append(now)
        if not self._of_hour or now.at - self._of_hour[-1].at >= HOUR_STEP_S - STEP_S / 2:
            self._of_hour.append(now)

    def part(self, name: str, *, draining: bool) -> Part:
        """What has happened from the oldest reading until now."""
        now = self._read()
        first = self._readings[0] if self._readings else now
        older = [reading for reading in self._readings if now.at - reading.at >= RATE_S]
        then = older[-1] if older else first
        seconds = max(now.at - then.at, STEP_S)  # of a router that has just started
        rates = Rates(
            requests=sum(_difference(now.outcomes, then.outcomes).values()) / seconds,
            prompt_tokens=(now.prompt_tokens - then.prompt_tokens) / seconds,
            output_tokens=(now.output_tokens - then.output_tokens) / seconds,
        )
        return Part(
            name=name,
            draining=draining,
            running=now.running,
            waiting=now.waiting,
            window_s=now.at - first.at,
            outcomes=_difference(now.outcomes, first.outcomes),
            prompt_tokens=int(now.prompt_tokens - first.prompt_tokens),
            cached_tokens=int(now.cached_tokens - first.cached_tokens),
            prefills=_difference(now.prefills, first.prefills),
            pulled_bytes=int(now.pulled_bytes - first.pulled_bytes),
            rates=rates,
            latencies={
                name: spread.since(first.latencies[name]) for name, spread in now.latencies.items()
            },
            history=_history(self._readings),
            hour=_history(self._of_hour),
            sessions=now.sessions,
            turns=_difference(now.turns, first.turns),
        )


def _history(readings: Iterable[Reading]) -> History:
    steps = list(pairwise(readings))
    return History(
        tuple((b.output_tokens - a.output_tokens) / (b.at - a.at) for a, b in steps),
        tuple(float(reading.running) for _, reading in steps),
        tuple(float(reading.waiting) for _, reading in steps),
    )


def _difference(now: Mapping[str, float], then: Mapping[str, float]) -> dict[str, int]:
    """Only what has grown."""
    grown = {name: int(count - then.get(name, 0.0)) for name, count in now.items()}
    return {name: count for name, count in grown.items() if count}
