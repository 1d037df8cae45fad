"""What `/dashboard/data` says: the cluster at a glance, put together from the routers' `Part`s.

Routers know all workers, and their own requests. Times are durations: hosts share no clock.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Literal

import msgspec

from worker.api import Card, Role

NONE_LEFT = "all decode workers were drained (kvlane scale decode=1 starts one)"
NUM_NAMED = 4  # in the sentence that says the worst


class Change(msgspec.Struct, frozen=True):
    """What has happened to a process, for people. The controller tells routers."""

    name: str
    role: Role
    incarnation: str
    state: str  # of its name from then on: ready, lost, draining, drained, restarting, turning
    text: str  # how long it took, or why
    ago_s: float


class Start(msgspec.Struct, frozen=True):
    """A process that is not ready yet; it comes as a `Change` does."""

    name: str
    role: Role
    incarnation: str
    stage: str  # load or capture
    part: float  # done of the stage, of 1
    since_s: float

    @property
    def text(self) -> str:
        """What it does, how far it is, and since when."""
        verb = "capturing graphs" if self.stage == "capture" else "loading"
        return f"{verb} {self.part:.0%} after {self.since_s:.0f} s"


class Spread(msgspec.Struct, frozen=True):
    """How long something took, by bucket, as Prometheus has it."""

    bounds: tuple[float, ...]  # upper, in seconds, ascending
    counts: tuple[
        int, ...
    ]  # of the buckets by themselves; one more than bounds, for what is beyond
    seconds: float = 0.0  # all together

    @property
    def total(self) -> int:
        """How many."""
        return sum(self.counts)

    def since(self, then: "Spread") -> "Spread":
        """What has come since `then`."""
        counts = zip(self.counts, then.counts, strict=True)
        grown = tuple(now - before for now, before in counts)
        return Spread(self.bounds, grown, self.seconds - then.seconds)

    def quantile(self, q: float) -> float | None:
        """As histogram_quantile: linear within a bucket, the last bound for what is beyond it."""
        rank, below, lower = q * self.total, 0, 0.0
        for upper, count in zip(self.bounds, self.counts, strict=False):
            if count and below + count >= rank:
                return lower + (upper - lower) * (rank - below) / count
            below, lower = below + count, upper
        return lower if self.total else None


class Rates(msgspec.Struct, frozen=True):
    """Throughput, a second."""

    requests: float = 0.0  # choices that have ended, however
    prompt_tokens: float = 0.0  # of choices that got their first token
    output_tokens: float = 0.0  # as they came


class History(msgspec.Struct, frozen=True):
    """The window step by step, the last one last; young routers have fewer steps."""

    output_tokens: tuple[float, ...] = ()  # a second
    running: tuple[float, ...] = ()
    waiting: tuple[float, ...] = ()


class Part(msgspec.Struct, frozen=True):
    """What one router knows of its own requests."""

    name: str
    draining: bool
    running: int
    waiting: int  # for a decode worker
    window_s: float  # that the counts are of
    outcomes: dict[str, int]
    prompt_tokens: int
    cached_tokens: int  # of them
    prefills: dict[str, int]  # prompts by where they were computed: local, pulled, cached
    pulled_bytes: int  # of KV, from prefill to decode workers
    rates: Rates
    latencies: "dict[str, Spread]"
    history: History
    hour: History
    sessions: int = 0  # known, with a turn in the last minutes
    # Of sessions' turns: home, moved, new; and prompt tokens of those that went home, and cached.
    turns: dict[str, int] = {}


class Latency(msgspec.Struct, frozen=True):
    """Seconds; None: there was nothing to measure."""

    p50: float | None
    p90: float | None
    p99: float | None
    count: int


class RouterRow(msgspec.Struct, frozen=True):
    """One router; `silent`: it did not answer in time, so that its requests are not counted."""

    name: str
    state: Literal["ready", "draining", "silent", "lost"]
    node: str = ""
    running: int = 0
    waiting: int = 0
    reason: str = ""  # why it is lost


class WorkerRow(msgspec.Struct, frozen=True):
    """One worker, as it last said itself; the figures are 0 unless it is ready or draining."""

    name: str
    role: Role
    state: Literal["ready", "draining", "starting", "silent", "lost"]
    node: str = ""
    incarnation: str = ""
    pid: int = 0
    transport: str = ""
    heard_s: float | None = None  # since it last answered
    running: int = 0
    waiting: int = 0
    max_running: int = 0
    free_pages: int = 0
    pages: int = 0
    page_size: int = 0  # tokens
    max_len: int = 0  # tokens of one request
    queued_tokens: int = 0  # of prompts, to be computed
    ranks: int = 1  # processes
    drafter: str = ""  # what proposes drafts; "": nothing
    tokens_per_row: float = 0.0  # that a request got of a decode step, lately; 0: of none yet
    reason: str = ""  # why it is lost
    progress: str = ""  # of its start: what it does, how far it is, since when
    part: float = 0.0  # done of that, of 1
    card: Card | None = None


class Board(msgspec.Struct, frozen=True):
    """The whole cluster."""

    state: Literal["good", "wait", "warn", "bad"]  # wait: it starts
    summary: str  # the worst that is known, in a sentence
    model: str
    version: str
    told_by: str  # the router that has put it together
    window_s: float  # that outcomes, tokens and latencies are of
    step_s: float  # of the history
    running: int
    waiting: int
    outcomes: dict[str, int]
    errors: dict[str, int]  # of them, those that are not the client's
    prompt_tokens: int
    cached_tokens: int
    prefills: dict[str, int]  # prompts by where they were computed: local, pulled, cached
    pulled_bytes: int  # of KV, from prefill to decode workers
    pull_s: float  # in which they came, of all choices together
    rates: Rates
    latencies: dict[str, Latency]
    history: History
    hour: History
    hour_step_s: float
    routers: list[RouterRow]
    workers: list[WorkerRow]
    changes: list[Change]  # the last one first
    sessions: int  # all routers know the same ones, or nearly
    turns: dict[str, int]  # see `Part.turns`


def verdict(
    workers: Sequence[WorkerRow], routers: Sequence[RouterRow], *, expected: bool = True
) -> tuple[Literal["good", "wait", "warn", "bad"], str]:
    """The state of the cluster, and why in a sentence. expected: a decode worker is, sometime."""
    rows = [*workers, *routers]
    odd = [f"{row.name} is {row.state}" for row in rows if row.state != "ready"]
    named = ", ".join(odd[:NUM_NAMED])
    if len(odd) > NUM_NAMED:
        named += f", and {len(odd) - NUM_NAMED} more"
    decoding = {row.state for row in workers if row.role == "decode"}
    loading = [row.name for row in workers if row.role == "decode" and row.progress]
    if loading and not decoding & {"ready", "draining"}:
        return "wait", f"Starting: requests wait until {' or '.join(loading[:NUM_NAMED])} is ready"
    why = ""
    if not expected:
        return "bad", f"Requests get 503: {NONE_LEFT}"
    if not workers:
        return "wait", "Starting: no worker is known yet"
    if not decoding & {"ready", "draining"}:
        why = "No decode worker answers: requests wait, then fail"
    elif "ready" not in decoding:
        why = "No decode worker takes requests: new ones wait, then fail"
    elif not any(row.state == "ready" for row in routers):
        why = "No router takes requests"
    if why:
        return "bad", f"{why} ({named})" if named else why
    if any(row.state in ("silent", "lost") for row in rows):
        return "bad", named
    if named:
        return "warn", named
    return "good", f"All {len(workers)} workers answer" if workers[1:] else "The worker answers"


def together(spreads: "Sequence[Spread]") -> "Spread":
    """The sum of some with the same bounds."""
    counts = [spread.counts for spread in spreads]
    seconds = sum(spread.seconds for spread in spreads)
    return Spread(spreads[0].bounds, tuple(map(sum, zip(*counts, strict=True))), seconds)


def spreads(parts: Sequence[Part]) -> dict[str, Spread]:
    """Of all routers together, but for those with other buckets (another version)."""
    whole: dict[str, Spread] = {}
    for name, first in parts[0].latencies.items():
        found = [part.latencies[name] for part in parts if name in part.latencies]
        whole[name] = together([spread for spread in found if spread.bounds == first.bounds])
    return whole


def latencies(whole: Mapping[str, Spread]) -> dict[str, Latency]:
    """Their quantiles."""
    return {
        name: Latency(
            spread.quantile(0.5), spread.quantile(0.9), spread.quantile(0.99), spread.total
        )
        for name, spread in whole.items()
    }


def counted(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """How often which, in all of them; the most frequent first."""
    return dict(sum(map(Counter[str], counts), Counter[str]()).most_common())


def rates(parts: Sequence[Part]) -> Rates:
    """Of all routers together."""
    digits = {"requests": 3, "prompt_tokens": 1, "output_tokens": 1}
    sums = {name: sum(getattr(part.rates, name) for part in parts) for name in digits}
    return Rates(**{name: round(sums[name], places) for name, places in digits.items()})


def history(parts: Sequence[History]) -> History:
    """Of all routers together. They end at the same time, give or take a step."""

    def summed(name: str) -> tuple[float, ...]:
        rows = [getattr(part, name)[::-1] for part in parts]
        backwards = zip_longest(*rows, fillvalue=0.0)
        return tuple(round(sum(column), 1) for column in backwards)[::-1]

    return History(*map(summed, History.__struct_fields__))
