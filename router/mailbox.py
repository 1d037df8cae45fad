"""Carries what happens to the choices of one HTTP request to the task that answers it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from router.errors import ApiError
from worker.api import FinishReason, PeerId, Stages, TokenLogprob

Scored = tuple[tuple[int, TokenLogprob], ...]  # tokens with their logprobs


@dataclass(frozen=True, slots=True)
class Spent:
    """Where the time of one choice went; durations in seconds."""

    router_queue_s: float  # in the router's queue
    stages: Stages  # at the workers, until the first token
    decode_s: float  # from the first token to the last
    first_token_s: float  # from arrival to the first token, by the router's clock
    decoded_by: PeerId


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one choice. The last has a finish reason; if that is ERROR, also the error."""

    index: int
    text: str = ""
    finish_reason: FinishReason | None = None
    error: ApiError | None = None
    scored: Scored = ()  # tokens, if their logprobs are wanted
    spent: Spent | None = None  # with a finish reason


class Mailbox:
    """Deltas of all choices of a request, in order. Loop thread only.

    A slow client never slows anyone else: deltas pile up here and are taken all at once.

    Args:
        streamed: wake the reader for every delta, not only when a choice ends.
    """

    def __init__(self, *, streamed: bool) -> None:
        self._streamed = streamed
        self._deltas: list[Delta] = []
        self._ready = asyncio.Event()

    def put(self, delta: Delta) -> None:
        """Add a delta."""
        self._deltas.append(delta)
        if self._streamed or delta.finish_reason is not None:
            self._ready.set()

    def nudge(self) -> None:
        """Wake the reader, even if there is no delta."""
        self._ready.set()

    async def get(self) -> list[Delta]:
        """Wait for deltas and take all of them; there may be none after a nudge."""
        await self._ready.wait()
        self._ready.clear()
        deltas, self._deltas = self._deltas, []
        return deltas
