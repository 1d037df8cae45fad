"""Routing policies: which workers a request goes to."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean
from typing import Protocol

from router.dispatch.members import Known, Members
from router.dispatch.prefixes import Prefixes, blocks_of
from worker.api import Candidate, PeerId
from worker.registry import resolve
from worker.wire import Wire

MAX_CANDIDATES = 3
UNKNOWN_S_PER_TOKEN = 1e-4
# A long prompt that is there weighs as much as all rows of a worker, a short one less.
LONG_TOKENS = 256
HOTTER = 0.3  # of its rows, above the mean: it has no advantage, or all would crowd there
TURN_TOKENS = 2048  # that a conversation more, at a worker above the mean, is thought to cost later
POLICIES = {
    "least_loaded": "router.dispatch.policy:LeastLoaded",
    "prefix_aware": "router.dispatch.policy:PrefixAware",
    "round_robin": "router.dispatch.policy:RoundRobin",
}


Prompt = Sequence[int]
Pool = Sequence[Known]


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes: its decode worker, and prefill workers in order of preference."""

    decode: PeerId
    candidates: tuple[Candidate, ...]
    num_expected: float = 0.0  # tokens that the decode worker is thought to have; 0: not known
    fresh: Sequence[int] = ()  # `Prefixes` of the prompt that the first candidate does not have yet


class Policy(Protocol):
    """Chooses workers. One per router, used on its loop only; it must be quick and never block."""

    follows_sessions: bool = False  # whether `Sessions` is asked first

    def choose(self, prompt: Prompt, decode: Pool, prefill: Pool, salt: str = "") -> Route:
        """Place a request at one of `decode`, which may take it and are at least one.

        `prefill` are alive; those that cannot serve the chosen decode worker (another KV layout or
        transport) must not become candidates. Prompts of another `salt` must not count: who asks
        can measure where it is sent.
        """
        ...

    def found(self, route: Route, num_cached: int, prefilled_by: PeerId = "") -> None:
        """Of a prompt so many tokens were found; prefilled_by: who computed the rest, if known."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers of a router: how it speaks to them, knows them and chooses among them."""

    wire: Wire  # started
    members: Members
    policy: Policy


class LeastLoaded(Policy):
    """The decode worker with the smallest share of its rows taken; prefill by expected wait.

    Ties are broken at random, so that routers that know the same do not all choose the same.
    """

    def choose(self, prompt: Prompt, decode: Pool, prefill: Pool, salt: str = "") -> Route:
        best = min(decode, key=lambda known: (known.load, random.random()))
        pool = _eligible(best, prefill)
        pool.sort(key=lambda known: (_prefill_wait_s(known, len(prompt)), random.random()))
        return Route(best.peer, _candidates(pool, len(prompt)))


class PrefixAware(Policy):
    """Where most of the prompt is, unless that worker is so much busier; else as LeastLoaded.

    A worker beyond its rows, or much busier than the mean, has no advantage: prompts would wait.
    Nor has any by what conversations have in common, if those that hold it have so many more of
    them than the mean that a copy elsewhere costs less: all would crowd there.
    """

    follows_sessions = True

    def __init__(self) -> None:
        self._prefixes = Prefixes()

    def choose(self, prompt: Prompt, decode: Pool, prefill: Pool, salt: str = "") -> Route:
        blocks, prefixes = blocks_of(prompt, salt), self._prefixes
        weight, had = 1 / max(LONG_TOKENS, len(prompt)), dict[PeerId, float]()
        hot = min(1.0, HOTTER + sum(known.load for known in decode) / len(decode))

        def held(known: Known) -> float:
            if (peer := known.peer) not in had:
                had[peer] = prefixes.held(blocks, peer, known.stats.snapshot_grid)
            return had[peer]

        crowded = False
        if prefixes.is_common(blocks):
            most = max(map(held, decode))
            there = [prefixes.num_at[known.peer] for known in decode if held(known) >= most / 2]
            more = fmean(there) - fmean(prefixes.num_at[known.peer] for known in decode)
            crowded = more * TURN_TOKENS > most

        def cost(known: Known) -> tuple[float, int, float]:
            has = held(known) * weight if known.load < hot and not crowded else 0.0
            return known.load - has, prefixes.num_at[known.peer], random.random()

        def wait_s(known: Known) -> tuple[float, float]:
            per_token = known.stats.prefill_s_per_token or UNKNOWN_S_PER_TOKEN
            left = len(prompt) - int(held(known))
            return _prefill_wait_s(known, left) - held(known) * per_token, random.random()

        best = min(decode, key=cost)
        pool = sorted(_eligible(best, prefill), key=wait_s)[:MAX_CANDIDATES]
        fresh = prefixes.fresh(blocks, pool[0].peer) if pool else ()
        cached = [int(held(known)) for known in pool]
        route = Route(best.peer, _candidates(pool, len(prompt), cached), held(best), fresh)
        prefixes.turned(blocks, best.peer)
        for known in (best, *pool[:1]):
            prefixes.sent(blocks, known.peer, known.stats.snapshot_grid)
        return route

    def found(self, route: Route, num_cached: int, prefilled_by: PeerId = "") -> None:
        self._prefixes.found(route.decode, route.num_expected, num_cached)
        for first in route.candidates[:1]:
            if prefilled_by == first.peer:
                self._prefixes.found(first.peer, first.num_cached_tokens, num_cached)
            elif prefilled_by:
                self._prefixes.unsent(route.fresh, first.peer)


class RoundRobin(Policy):
    """Every worker in turn. Decode and prefill have turns of their own, so that pairs vary."""

    def __init__(self) -> None:
        self._decode_turn = 0
        self._prefill_turn = 0

    def choose(self, prompt: Prompt, decode: Pool, prefill: Pool, salt: str = "") -> Route:
        in_order = sorted(decode, key=lambda known: known.peer)
        chosen = in_order[self._decode_turn % len(in_order)]
        self._decode_turn += 1
        pool = sorted(_eligible(chosen, prefill), key=lambda known: known.peer)
        if pool:
            first = self._prefill_turn % len(pool)
            self._prefill_turn += 1
            pool = pool[first:] + pool[:first]
        return Route(chosen.peer, _candidates(pool, len(prompt)))


def policy(name: str) -> Policy:
    """A fresh policy; raises a UserError that lists the names if there is none of this name."""
    return resolve("routing policy", name, POLICIES)()


def _prefill_wait_s(known: Known, num_tokens: int) -> float:
    """How long a prompt of so many tokens would wait there before its first chunk is computed."""
    per_token = known.stats.prefill_s_per_token or UNKNOWN_S_PER_TOKEN
    return known.num_before(num_tokens) * per_token


def _eligible(decode: Known, prefill: Iterable[Known]) -> list[Known]:
    """Those prefill workers whose KV this decode worker can pull."""
    form = attrgetter("member.layout_hash", "member.transport")
    return [known for known in prefill if form(known) == form(decode)]


def _candidates(
    prefill: Sequence[Known], num_tokens: int, num_cached: Sequence[int] = (0,) * MAX_CANDIDATES
) -> tuple[Candidate, ...]:
    """The first of them; num_tokens, num_cached: of the prompt, and how many of those are there."""
    return tuple(
        Candidate(
            known.peer, known.num_before(num_tokens - num), known.stats.prefill_s_per_token, num
        )
        for known, num in zip(prefill, num_cached, strict=False)
    )
