"""The life of one request between the HTTP front and the decode workers.

    submit -> [waiting] -> sent -> tokens -> _end
                 ^          |  refused, or lost before its first token
                 '----------'

All state belongs to the router's loop. Every request leaves through `_end`, once.
A worker that refuses is left alone for a while (`Members.refused`), so requests wait in order of
arrival and are tried again when a worker shows room, a request of ours leaves it, a new worker
comes, or that while is over.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.config import RouterConfig
from router.errors import ApiError
from router.mailbox import Delta, Mailbox
from router.members import Members
from router.metrics import RouterMetrics
from router.output import OutputText
from router.policy.base import Asked, Choice, Policy
from worker.api import (
    Abort,
    Ack,
    Chunks,
    Error,
    FinishReason,
    Generate,
    Lost,
    Member,
    PeerId,
    Pong,
    Refused,
    Sampling,
    Stop,
    TokenChunk,
)
from worker.wire import Event, Wire

log = logging.getLogger("kvlane.router")

MAX_LOSSES = 2  # a request that was present at so many losses of a worker is not sent a third time
MAX_JITTER = 0.5  # of retry_after_s
RECONNECT_S = 1.0
NOT_RETRIED = frozenset({"invalid_value", "unsupported"})


@dataclass(slots=True, eq=False)
class Req:
    """One choice of an HTTP request, with all that a re-dispatch needs."""

    index: int
    prompt: tuple[int, ...]
    sampling: Sampling
    output: OutputText
    mailbox: Mailbox
    arrived_at: float
    deadline: float
    req_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    tokens: list[int] = field(default_factory=list[int])  # emitted so far
    dispatch: int = 0
    choice: Choice | None = None  # where it is; None while it waits
    num_losses: int = 0
    num_cached_tokens: int = 0
    waiting_since: float | None = None  # kept while refused, so that the queue timeout is one
    queued_s: float = 0.0
    first_token_at: float | None = None
    last_token_at: float = 0.0
    timers: list[asyncio.TimerHandle] = field(default_factory=list[asyncio.TimerHandle])
    outcome: str = ""  # set by `_end`

    @property
    def position(self) -> int:
        """Where the next token belongs, in prompt + output."""
        return len(self.prompt) + len(self.tokens)

    @property
    def asked(self) -> Asked:
        """What routing sees of it."""
        return Asked(self.req_id, self.prompt)


class Dispatcher:
    """Sends requests to decode workers and turns what comes back into deltas.

    Args:
        config: limits.
        wire: started; hands its events to `deliver`.
        members: who is there.
        policy: chooses among them.
        metrics: told of every end.
    """

    def __init__(
        self,
        config: RouterConfig,
        wire: Wire,
        members: Members,
        policy: Policy,
        metrics: RouterMetrics,
    ) -> None:
        self._config = config
        self._wire = wire
        self._members = members
        self._policy = policy
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._reqs: dict[str, Req] = {}
        # Invariant: a live Req is in _waiting iff its choice is None.
        self._waiting: OrderedDict[str, Req] = OrderedDict()
        self._closed = False
        metrics.watch(
            lambda: len(self._reqs) - len(self._waiting),
            lambda: len(self._waiting),
            lambda role: len(members.live("decode" if role == "decode" else "prefill")),
        )

    def check_room(self, num_choices: int) -> None:
        """Refuse at once what would exceed max_inflight.

        Raises:
            ApiError: 429.
        """
        if len(self._reqs) + num_choices > self._config.max_inflight:
            raise ApiError.of("busy", "this router is at its limit of requests", retry_after_s=1)

    def submit(
        self,
        index: int,
        prompt: tuple[int, ...],
        sampling: Sampling,
        output: OutputText,
        mailbox: Mailbox,
    ) -> Req:
        """Take a request; its deltas, the last with a finish reason, go to `mailbox`."""
        now, timeout_s = time.monotonic(), self._config.request_timeout_s
        req = Req(index, prompt, sampling, output, mailbox, now, now + timeout_s)
        self._reqs[req.req_id] = req
        if self._closed:
            self._end(req, FinishReason.ERROR, error=_stopping())
            return req
        late = ApiError.of("timeout", f"not finished within {timeout_s:g} s")
        req.timers.append(self._loop.call_later(timeout_s, self._give_up, req, late))
        self._wait(req)
        return req

    def abort(self, req: Req) -> None:
        """The client is gone. Does nothing to a request that has ended."""
        if not req.outcome:
            self._tell_abort(req)
            self._end(req, FinishReason.ABORT)

    def deliver(self, events: Sequence[Event]) -> None:
        """What arrived on the wire, in order."""
        for peer, message in events:
            match message:
                case Chunks():
                    for chunk in message.chunks:
                        self._on_chunk(peer, chunk)
                case Pong():
                    if self._members.pong(peer, message.stats):
                        self._place_waiting()
                case Refused():
                    self._on_refused(peer, message)
                case Lost():
                    self._on_lost(peer, message.reason)
                case _:
                    log.warning("%s sent a %s to a router", peer, type(message).__name__)

    def update_members(self, members: Sequence[Member]) -> None:
        """The controller's whole list; workers that are no longer on it are lost."""
        added, removed = self._members.update(members)
        for member in removed:
            self._wire.disconnect(member.peer)
            self._on_lost(member.peer, "no longer a member")
        for member in added:
            self._wire.connect(member.peer, member.address)

    def close(self) -> None:
        """End every request with an error; later ones end at once."""
        self._closed = True
        for req in list(self._reqs.values()):
            self._give_up(req, _stopping())

    # Waiting and placing.

    def _wait(self, req: Req, *, first: bool = False) -> None:
        """Queue `req`, at the end or, for one that was out already, in front; then try."""
        self._waiting[req.req_id] = req
        if first:
            self._waiting.move_to_end(req.req_id, last=False)
        req.choice = None
        now = time.monotonic()
        if req.waiting_since is None:
            req.waiting_since = now
            delay_s = self._config.queue_timeout_s
            req.timers.append(self._loop.call_later(delay_s, self._waited, req, now))
        self._place_waiting()
        if self._config.queue_timeout_s == 0:
            self._waited(req, req.waiting_since)

    def _waited(self, req: Req, since: float) -> None:
        """The queue timeout of the wait that began at `since`."""
        if req.outcome or req.choice is not None or req.waiting_since != since:
            return
        if self._members.live("decode"):
            message, code = "no decode worker had room in time", "busy"
        else:
            message, code = "no decode worker is alive", "no_worker"
        self._give_up(req, ApiError.of(code, message, retry_after_s=1))

    def _place_waiting(self) -> None:
        """Send as many as workers may take, in order."""
        while self._waiting:
            decode = self._members.open_decode(time.monotonic())
            if not decode:
                return
            _, req = self._waiting.popitem(last=False)
            self._send(req, self._policy.choose(req.asked, decode, self._members.open_prefill()))

    def _send(self, req: Req, choice: Choice) -> None:
        now = time.monotonic()
        req.dispatch += 1
        req.choice = choice
        first = choice.candidates[0].peer if choice.candidates else None
        self._members.sent(choice.decode, first, len(req.prompt), now)
        generate = Generate(
            req_id=req.req_id,
            dispatch=req.dispatch,
            tokens=(*req.prompt, *req.tokens),
            num_prompt_tokens=len(req.prompt),
            sampling=req.sampling,
            timeout_s=max(0.001, req.deadline - now),
            candidates=choice.candidates,
        )
        self._wire.send(choice.decode, generate)

    # What workers say.

    def _on_chunk(self, peer: PeerId, chunk: TokenChunk) -> None:
        if chunk.finish_reason is not None:
            self._wire.send(peer, Ack(chunk.req_id, chunk.dispatch))
        req = self._reqs.get(chunk.req_id)
        if req is None or req.dispatch != chunk.dispatch or req.choice is None:
            self._metrics.stale_chunks.inc()
            return
        failed = chunk.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
        if chunk.position > req.position and not (failed and not chunk.tokens):
            log.error("req_id=%s: %s left out tokens", req.req_id, peer)
            self._tell_abort(req)
            self._lose(req, "gap")
            return
        req.num_cached_tokens = max(req.num_cached_tokens, chunk.num_cached_tokens)
        tokens = chunk.tokens[max(0, req.position - chunk.position) :]
        if tokens and self._emit(req, tokens):
            return
        if failed:
            self._end(req, FinishReason.ERROR, error=_failure(chunk.error))
        elif chunk.finish_reason is not None:
            self._end(req, chunk.finish_reason, req.output.finish())

    def _emit(self, req: Req, tokens: tuple[int, ...]) -> bool:
        """Pass tokens on; True when a stop string has ended the request."""
        now = time.monotonic()
        if req.first_token_at is None:
            req.first_token_at = now
            self._metrics.ttft.observe(now - req.arrived_at)
        else:
            self._metrics.itl.observe(now - req.last_token_at)
        req.last_token_at = now
        piece = req.output.feed(tokens)
        req.tokens.extend(tokens[: piece.num_tokens])
        if piece.stopped:
            assert req.choice is not None
            self._wire.send(req.choice.decode, Stop(req.req_id, req.dispatch, req.position))
            self._end(req, FinishReason.STOP, piece.text)
        elif piece.text:
            req.mailbox.put(Delta(req.index, piece.text))
        return piece.stopped

    def _on_refused(self, peer: PeerId, refused: Refused) -> None:
        req = self._reqs.get(refused.req_id)
        if req is None or req.dispatch != refused.dispatch or req.choice is None:
            return
        error = refused.error
        if error.code in NOT_RETRIED:
            self._end(req, FinishReason.ERROR, error=_failure(error))
            return
        pause_s = refused.retry_after_s * (1 + MAX_JITTER * random.random())
        self._leave(req, served=False)
        self._members.refused(peer, time.monotonic() + pause_s)
        self._loop.call_later(pause_s, self._place_waiting)
        self._metrics.retried("refused")
        self._wait(req, first=True)

    def _on_lost(self, peer: PeerId, reason: str) -> None:
        known = self._members.get(peer)
        self._members.lost(peer)
        there = [r for r in self._reqs.values() if r.choice and r.choice.decode == peer]
        log.warning("%s is lost (%s) with %d requests", peer, reason, len(there))
        for req in there:
            self._lose(req, "worker_lost")
        if known is not None and not self._closed:  # the controller still lists it: ask again
            self._loop.call_later(RECONNECT_S, self._connect_again, known.member)

    def _connect_again(self, member: Member) -> None:
        if self._members.get(member.peer) is not None and not self._closed:
            self._wire.connect(member.peer, member.address)

    def _lose(self, req: Req, cause: str) -> None:
        """The worker that had `req` is lost, for all or for this request."""
        req.num_losses += 1
        if req.num_losses >= MAX_LOSSES:
            message = "the request was present when two workers were lost; it is not tried again"
            error = ApiError(500, "internal_error", message, retry=False)
            self._end(req, FinishReason.ERROR, error=error)
        elif req.tokens:
            error = ApiError.of("worker_lost", "the worker that had the request is lost")
            self._end(req, FinishReason.ERROR, error=error)
        else:
            self._leave(req, served=False)
            self._metrics.retried(cause)
            self._wait(req, first=True)

    # Leaving.

    def _tell_abort(self, req: Req) -> None:
        if req.choice is not None:
            self._wire.send(req.choice.decode, Abort(req.req_id, req.dispatch))

    def _give_up(self, req: Req, error: ApiError) -> None:
        if not req.outcome:
            self._tell_abort(req)
            self._end(req, FinishReason.ERROR, error=error)

    def _leave(self, req: Req, *, served: bool) -> None:
        """`req` is no longer where it was, be that a worker or the queue."""
        if req.choice is None:
            return
        self._members.left(req.choice.decode, gives_room=served)
        self._policy.settled(req.asked, req.choice, req.num_cached_tokens if served else None)
        req.choice = None

    def _end(
        self,
        req: Req,
        reason: FinishReason,
        text: str = "",
        error: ApiError | None = None,
    ) -> None:
        """The only exit: frees what `req` holds, counts it and tells the client's task."""
        assert not req.outcome, "a request ends once"
        req.outcome = error.code if error is not None else str(reason)
        del self._reqs[req.req_id]
        self._waiting.pop(req.req_id, None)
        for timer in req.timers:
            timer.cancel()
        self._leave(req, served=True)
        req.mailbox.put(Delta(req.index, text, reason, error))
        metrics, now = self._metrics, time.monotonic()
        metrics.ended(req.outcome)
        metrics.e2e.observe(now - req.arrived_at)
        metrics.queue_time.observe(req.queued_s)
        metrics.prompt_tokens.inc(len(req.prompt))
        metrics.generation_tokens.inc(len(req.tokens))
        metrics.cached_tokens.inc(req.num_cached_tokens)
        log.info("req_id=%s ended: %s, %d tokens", req.req_id, req.outcome, len(req.tokens))
        self._place_waiting()


def _failure(error: Error | None) -> ApiError:
    """What a worker's typed error means to the client."""
    if error is None:
        return ApiError.of("world_error", "the worker gave the request up")
    retry_after_s = 1.0 if error.code in ("busy", "out_of_pages") else None
    return ApiError.of(error.code, error.message, retry_after_s=retry_after_s)


def _stopping() -> ApiError:
    return ApiError.of("draining", "the router is stopping", retry_after_s=1)
