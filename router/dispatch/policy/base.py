"""What a routing policy is asked, and what it answers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.dispatch.members import Known
from worker.api import Candidate, PeerId

MAX_CANDIDATES = 3


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, as far as routing is concerned."""

    req_id: str
    tokens: Sequence[int]  # of the prompt


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes: its decode worker, and prefill workers in order of preference."""

    decode: PeerId
    candidates: tuple[Candidate, ...]


class Policy(Protocol):
    """Chooses workers. One per router, used on its loop only; it must be quick and never block."""

    def choose(self, asked: Asked, decode: Sequence[Known], prefill: Sequence[Known]) -> Choice:
        """Place a request at one of `decode`, which may take it and are at least one.

        `prefill` are alive; those that cannot serve the chosen decode worker (another KV layout or
        transport) must not become candidates.
        """
        ...

    def settled(self, asked: Asked, choice: Choice, num_cached_tokens: int | None) -> None:
        """The request has left `choice.decode`; num_cached_tokens None: refused or lost there.

        By default nothing: `router.dispatch.members` counts loads.
        """


def eligible(decode: Known, prefill: Iterable[Known]) -> list[Known]:
    """Those prefill workers whose KV this decode worker can pull."""
    mine = decode.member
    return [
        known
        for known in prefill
        if known.member.layout_hash == mine.layout_hash and known.member.transport == mine.transport
    ]


def candidates(prefill: Sequence[Known]) -> tuple[Candidate, ...]:
    """The first few as `Generate` carries them."""
    return tuple(
        Candidate(known.peer, known.num_queued_tokens, known.stats.prefill_s_per_token)
        for known in prefill[:MAX_CANDIDATES]
    )
