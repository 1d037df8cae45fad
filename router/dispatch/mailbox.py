"""Carries what happens to the choices of one HTTP request to the task that answers it."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from router.errors import ApiError
from router.observe.stages import StageTimes
from worker.api import FinishReason, TokenLogprob, Window

Scored = tuple[tuple[int, TokenLogprob], ...]  # tokens with their logprobs


class Delta(msgspec.Struct, gc=False):
    """What is new of one choice. The last has a finish reason; if that is ERROR, also the error.

    There is one a chunk: a Struct is made in a quarter of a dataclass's time, and wakes no
    garbage collection.
    """

    index: int
    text: str = ""
    finish_reason: FinishReason | None = None
    error: ApiError | None = None
    scored: Scored = ()  # tokens, if their logprobs are wanted
    starts: Sequence[int] = ()  # of these: where they begin in all of the text, its end uncut
    spent: StageTimes | None = None  # with a finish reason
    windows: Sequence[Window] | None = None  # the accept trace if asked for, with a finish reason
    prompt: Scored = ()  # the prompt's tokens but its first, if theirs are, before any text
    stopped_by: str = ""  # the stop string before which the text has ended
    resumed: bool = False  # the choice goes on at another worker; there is no text


class Mailbox:
    """Deltas of all choices of a request, in order. Loop thread only.

    Text of a stream that has begun is handed to `write_now`, if it takes it without waiting, once
    all of a frame is here. The task that answers is woken for all else: the first text, the end of
    a choice, and text that could not be written. Then deltas pile up until it takes all at once, so
    a slow client slows nobody else. `write_now` is None where the answer is not streamed.
    """

    def __init__(self, write_now: Callable[[list[Delta]], bool] | None) -> None:
        self._write_now = write_now
        self.has_begun = write_now is None  # else the first text wakes the task
        self._deltas: list[Delta] = []
        self._ready = asyncio.Event()
        self._is_awaited = False  # the task has nothing in hand that would have to go out first

    def put(self, delta: Delta) -> None:
        """Add a delta; `flush` follows unless it is the last one of a choice."""
        self._deltas.append(delta)
        if delta.finish_reason is not None or not self.has_begun:
            self._ready.set()

    def flush(self) -> None:
        """Everything that has arrived was put: let the text go out."""
        if self._write_now is None or not self._deltas or self._ready.is_set():
            return
        if self._is_awaited and self._write_now(self._deltas):
            self._deltas.clear()
        else:
            self._ready.set()

    def close(self) -> None:
        """Write nothing from now on. Its writer holds it: both are freed without a collection."""
        self._write_now = None

    def nudge(self) -> None:
        """Wake the reader, even if there is no delta."""
        self._ready.set()

    async def get(self) -> list[Delta]:
        """Wait for deltas and take all of them; there may be none after a nudge."""
        self._is_awaited = True
        try:
            await self._ready.wait()
        finally:
            self._is_awaited = False
        self._ready.clear()
        deltas, self._deltas = self._deltas, []
        return deltas
