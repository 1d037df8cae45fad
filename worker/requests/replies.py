"""Replies: frames of token chunks to routers; final chunks again until they are acknowledged."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from worker.api import (
    AnyMessage,
    Chunks,
    Error,
    FinishReason,
    PeerId,
    TokenChunk,
    TokenLogprob,
    Window,
)
from worker.requests.kept import keep
from worker.schedule.req import Req

Key = tuple[PeerId, str, int]  # router, req_id, dispatch


class Last(NamedTuple):
    """What a step, or a prefill worker, has added to a request."""

    num: int = 1  # of tokens
    reason: FinishReason | None = None  # why the request ends with them
    error: Error | None = None
    logprobs: tuple[TokenLogprob, ...] = ()  # of `num` tokens and more
    window: Window | None = None  # for `return_trace`


class Replies:
    """Outgoing chunks of one decode worker."""

    def __init__(self, send: Callable[[PeerId, AnyMessage], None], resend_s: float) -> None:
        self._send = send
        self._resend_s = resend_s
        self._queued: dict[PeerId, list[TokenChunk]] = {}
        self._finals: dict[Key, tuple[TokenChunk, float]] = {}  # sent when; inf: still queued

    @property
    def num_unacknowledged(self) -> int:
        """Final chunks that a router has not confirmed."""
        return len(self._finals)

    def tokens(self, req: Req, now: float, last: Last) -> None:
        """Queue the tokens that were just added to `req`; the first ones bring its stages."""
        num, reason, error, logprobs, window = last
        most = req.sampling.logprobs
        if logprobs and most < 0:  # others of the batch asked for them
            logprobs = ()
        elif logprobs:
            logprobs = limited(logprobs[:num], most)
        stages = None
        if req.timeline.stage != "decode":
            stages = req.timeline.token(now, in_row=req.row != 0)
        position, tokens = len(req.tokens) - num, tuple(req.tokens[-num:])
        chunk = TokenChunk(
            req.req_id, req.dispatch, position, tokens, reason, error, req.num_cached_tokens,
            logprobs, stages, window,
        )  # fmt: skip
        self._reply(req, chunk)

    def scores(self, req: Req, found: Sequence[TokenLogprob]) -> None:
        """Queue logprobs of the prompt's next tokens."""
        chunk = TokenChunk(*req.key, len(req.tokens))
        cut = limited(found, req.sampling.prompt_logprobs)
        self._reply(req, msgspec.structs.replace(chunk, prompt_logprobs=cut))

    def begins(self, req: Req) -> None:
        """Send the news that `req` gets a row, unless its first token has told so.

        At once: the step that is launched next may be this process's end.
        """
        if req.router and not req.timeline.first_token_at:
            self._send(req.router, Chunks((TokenChunk(*req.key, len(req.tokens)),)))

    def error(self, req: Req, error: Error) -> None:
        """Queue the end of `req` without a token."""
        position, cached, reason = len(req.tokens), req.num_cached_tokens, FinishReason.ERROR
        self._reply(req, TokenChunk(*req.key, position, (), reason, error, cached))

    def again(self, router: PeerId, key: tuple[str, int], chunks: Sequence[TokenChunk]) -> None:
        """Queue what was sent before for another router, which has given it another id."""
        req_id, dispatch = key
        for chunk in chunks:
            renamed = msgspec.structs.replace(chunk, req_id=req_id, dispatch=dispatch)
            self.add(router, renamed)

    def _reply(self, req: Req, chunk: TokenChunk) -> None:
        if req.sent is not None:
            keep(req.sent, chunk)
        if req.router:
            self.add(req.router, chunk)

    def add(self, router: PeerId, chunk: TokenChunk) -> None:
        """Queue a chunk for the next frame."""
        self._queued.setdefault(router, []).append(chunk)
        if chunk.finish_reason is not None:
            self._finals[router, chunk.req_id, chunk.dispatch] = chunk, math.inf

    def acknowledged(self, router: PeerId, req_id: str, dispatch: int) -> None:
        """Forget a final chunk: the router has it."""
        self._finals.pop((router, req_id, dispatch), None)

    def lost(self, router: PeerId) -> None:
        """Drop everything that is queued or unacknowledged for `router`."""
        self._queued.pop(router, None)
        self._finals = {key: final for key, final in self._finals.items() if key[0] != router}

    def flush(self, now: float, read_at: float) -> None:
        """Send what is queued, and unacknowledged final chunks again after resend_s.

        read_at: when this turn read its inbox. Acknowledgements are known up to then only, so a
        long turn alone does not cause a resend.
        """
        for key, (chunk, sent_at) in self._finals.items():
            if read_at - sent_at >= self._resend_s:
                self._queued.setdefault(key[0], []).append(chunk)
            elif sent_at < math.inf:
                continue
            self._finals[key] = chunk, now
        for router, chunks in self._queued.items():
            self._send(router, Chunks(tuple(chunks)))
        self._queued.clear()


def limited(logprobs: Sequence[TokenLogprob], most: int) -> tuple[TokenLogprob, ...]:
    """With at most `most` alternatives; others of the batch may have asked for more."""
    return tuple(msgspec.structs.replace(token, top=token.top[:most]) for token in logprobs)
