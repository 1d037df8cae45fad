"""Requests that outlive their router, or its client, until somebody claims them.

A client may send an idempotency key. When its connection breaks it asks again, perhaps another
router, which asks all decode workers for the request of that key. What was sent of it is kept here,
while it runs and for a while after its end, so whoever claims it gets the same chunks.
"""

import ctypes
from collections import OrderedDict
from collections.abc import Sequence
from sys import getsizeof

from worker.api import Chunks, FinishReason, TokenChunk, decode, encode
from worker.schedule.req import Req

KEPT_S = 60.0  # after its end, or while nobody wants it
# Of all answers, as they are held. The oldest that have ended are forgotten first, then the oldest
# that run: who comes back for them has them computed anew.
MAX_BYTES = 64 << 20
LENGTH_BYTES = 4  # before a packed chunk, its length
TRIM_BYTES = 16 << 20  # let go of since glibc has given memory back
COMPLETE = frozenset({FinishReason.STOP, FinishReason.LENGTH})
_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)  # glibc has it


class KeptAnswers:
    """All requests of one decode worker that can be claimed."""

    def __init__(self) -> None:
        self._running: dict[str, Req] = {}
        self._ended: OrderedDict[str, tuple[bytearray, float]] = OrderedDict()  # until when
        self._num_ended_bytes = self._num_freed = 0

    def begin(self, req: Req) -> None:
        """Note a request that was admitted; what had its key before is not found any more."""
        self._drop(req.claim_key)
        output = tuple(req.tokens[req.num_prompt_tokens :])
        if output and req.sampling.logprobs >= 0:
            return  # these have no logprobs here
        self._running[req.claim_key] = req
        req.sent = bytearray()
        if output:
            keep(req.sent, TokenChunk(*req.key, req.num_prompt_tokens, output))

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
            self._ended[key] = req.sent, now + KEPT_S
            self._num_ended_bytes += getsizeof(req.sent)
        elif req.sent is not None:
            self._num_freed += getsizeof(req.sent)
        req.sent = None

    def sweep(self, now: float) -> None:
        """Forget answers that nobody has claimed in time, and what is too much."""
        while self._ended and next(iter(self._ended.values()))[1] < now:
            self._drop(next(iter(self._ended)))
        while self._num_running_bytes + self._num_ended_bytes > MAX_BYTES:
            if self._ended:
                self._drop(next(iter(self._ended)))
            else:
                req = self._running.pop(next(iter(self._running)))
                self._num_freed += getsizeof(req.sent)
                req.sent = None
        if self._num_freed > TRIM_BYTES:
            self._num_freed = 0
            _trim(0)

    @property
    def _num_running_bytes(self) -> int:
        return sum(getsizeof(req.sent) for req in self._running.values())

    def find(self, key: str) -> tuple[Req | None, Sequence[TokenChunk]] | None:
        """The request of this key, None in its place if it has ended, and what was sent of it."""
        if (req := self._running.get(key)) is not None:
            assert req.sent is not None
            return req, chunks_of(req.sent)
        return (None, chunks_of(self._ended[key][0])) if key in self._ended else None

    def _drop(self, key: str) -> None:
        if key in self._ended:
            sent, _ = self._ended.pop(key)
            self._num_ended_bytes -= getsizeof(sent)
            self._num_freed += getsizeof(sent)


def keep(sent: bytearray, chunk: TokenChunk) -> None:
    """Add a chunk, packed: with logprobs it takes a tenth so. All are one block of memory, which is
    given back as one.
    """
    packed = encode(Chunks((chunk,)))
    sent += len(packed).to_bytes(LENGTH_BYTES, "big") + packed


def chunks_of(sent: bytearray) -> list[TokenChunk]:
    """The chunks that were kept."""
    found, at = list[TokenChunk](), 0
    while at < len(sent):
        begin = at + LENGTH_BYTES
        at = begin + int.from_bytes(sent[at:begin], "big")
        frame = decode(sent[begin:at])
        assert isinstance(frame, Chunks)
        found += frame.chunks
    return found
