"""Requests that outlive their router, or its client, until somebody claims them.

A client may send an idempotency key. When its connection breaks it asks again, perhaps another
router, which asks all decode workers for the request of that key. What was sent of it is kept here,
while it runs and for a while after its end, so whoever claims it gets the same chunks.
"""

from collections import OrderedDict
from collections.abc import Sequence

from worker.api import Chunks, FinishReason, TokenChunk, decode, encode
from worker.schedule.req import Req

KEPT_S = 60.0  # after its end, or while nobody wants it
MAX_BYTES = 64 << 20  # of answers that have ended; the oldest are forgotten first
COMPLETE = frozenset({FinishReason.STOP, FinishReason.LENGTH})


class KeptAnswers:
    """All requests of one decode worker that can be claimed."""

    def __init__(self) -> None:
        self._running: dict[str, Req] = {}
        self._ended: OrderedDict[str, tuple[bytes, float]] = OrderedDict()  # `Chunks`; until when
        self._num_bytes = 0

    def begin(self, req: Req) -> None:
        """Note a request that was admitted; what had its key before is not found any more."""
        self._drop(req.claim_key)
        output = tuple(req.tokens[req.num_prompt_tokens :])
        if output and req.sampling.logprobs >= 0:
            return  # these have no logprobs here
        self._running[req.claim_key] = req
        req.sent = [TokenChunk(*req.key, req.num_prompt_tokens, output)] if output else []

    def orphan(self, req: Req, now: float) -> bool:
        """Let `req` run on although nobody wants it now; False: nobody can claim it."""
        if self._running.get(req.claim_key) is not req:
            return False
        req.router, req.deadline_at = "", min(req.deadline_at, now + KEPT_S)
        return True

    def end(self, req: Req, reason: FinishReason, now: float) -> None:
        """`req` has ended, or will once its pulls have; its answer is kept if it is complete."""
        key = req.claim_key
        if self._running.get(key) is not req:
            return
        del self._running[key]
        if reason in COMPLETE and req.sent is not None:
            packed = encode(Chunks(tuple(req.sent)))
            self._ended[key] = packed, now + KEPT_S
            self._num_bytes += len(packed)
        while self._num_bytes > MAX_BYTES:
            self._drop(next(iter(self._ended)))

    def sweep(self, now: float) -> None:
        """Forget answers that nobody has claimed in time."""
        while self._ended and next(iter(self._ended.values()))[1] < now:
            self._drop(next(iter(self._ended)))

    def find(self, key: str) -> tuple[Req | None, Sequence[TokenChunk]] | None:
        """The request of this key, None in its place if it has ended, and what was sent of it."""
        if (req := self._running.get(key)) is not None:
            assert req.sent is not None
            return req, req.sent
        if key not in self._ended:
            return None
        chunks = decode(self._ended[key][0])
        assert isinstance(chunks, Chunks)
        return None, chunks.chunks

    def _drop(self, key: str) -> None:
        if key in self._ended:
            packed, _ = self._ended.pop(key)
            self._num_bytes -= len(packed)
