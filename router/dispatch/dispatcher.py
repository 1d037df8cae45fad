"""The life of one request between the HTTP front and the decode workers.

    submit -> queued -> at a worker -> tokens -> _end
                 ^           |  refused, or its worker is lost
                 '-----------'

A request that is sent again takes its output so far along. A draw depends on text, seed and
position alone, so the text goes on as it would have at the worker that is lost.

All state belongs to the router's loop. Every request leaves through `_end`, once.
"""

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from router.config import RouterConfig
from router.dispatch.claims import Claims
from router.dispatch.mailbox import Delta, Mailbox
from router.dispatch.members import NONE_EXPECTED, Known, drafting
from router.dispatch.policy import Fleet
from router.dispatch.queue import Queue, Req
from router.errors import ApiError
from router.observe.metrics import RouterMetrics
from router.observe.vllm import Live
from worker.api import (
    Abort,
    Ack,
    Chunks,
    Claimed,
    Error,
    FinishReason,
    Lost,
    Member,
    PeerId,
    Pong,
    Refused,
    Stop,
    TokenChunk,
    TokenLogprob,
)
from worker.errors import LibraryError, contained
from worker.wire import Event

if TYPE_CHECKING:
    from worker.observe.spans import Trace

log = logging.getLogger("kvlane.router")

RECONNECT_S = 0.2
NONE_EXPECTED_S = 10.0  # after which a client may ask again
NOT_RETRIED = frozenset({"invalid_value", "unsupported", "internal_error", "taken_over"})
DETOKENIZER = contained("the detokenizer")
FAILED = frozenset({FinishReason.ERROR, FinishReason.ABORT})


class Dispatcher:
    """Sends requests to decode workers and turns what comes back into deltas.

    The events of the wire are handed to `deliver`.
    """

    def __init__(self, config: RouterConfig, fleet: Fleet, metrics: RouterMetrics) -> None:
        self._config, self._metrics = config, metrics
        self._wire, self._members = fleet.wire, fleet.members
        self._loop = asyncio.get_running_loop()
        self._reqs: dict[str, Req] = {}  # every request that has not ended
        self._queue = Queue(fleet, config.queue_timeout_s, self._waited)
        self.forget_prefixes, self.num_of = self._queue.forget_prefixes, self._queue.num_of
        self._claims = Claims(fleet, self._queue.add, self._queue.claimed)
        self._touched: list[Mailbox] = []  # have got text since the last flush
        # The times of the tokens before those that streams have just got. Streams of one
        # worker get tokens at the same time, so most of these times are equal.
        self._lasts: list[float] = []
        self._closed = False
        live = Live(
            running=lambda: len(self._reqs) - len(self._queue),
            waiting=lambda: len(self._queue),
            outputs=lambda: [len(req.tokens) for req in self._reqs.values() if req.tokens],
            alive=lambda role: len(fleet.members.live(role)),
            decodes=lambda: [known.stats for known in fleet.members.live("decode")],
            drafting=partial(drafting, fleet.members),
            sessions=lambda: len(self._queue.sessions),
        )
        metrics.watch(live)

    @property
    def num_choices(self) -> int:
        """Choices that have not ended."""
        return len(self._reqs)

    def submit(self, req: Req, server: "Trace | None" = None) -> None:
        """Take a request; its deltas go to its mailbox, the last of them with a finish reason.

        The stages of its trace are below the present one of `server`.
        """
        now, timeout_s = time.monotonic(), self._config.request_timeout_s
        req.arrived_at, req.deadline = now, now + timeout_s
        if server is not None:
            req.trace = server.below(now, {"kvlane.choice": req.index})
        self._reqs[req.req_id] = req
        if req.session:
            self._queue.sessions.begin(req.session)
        if self._closed:
            self._end(req, _failed(req, _stopping()))
            return
        late = ApiError("timeout", f"not finished within {timeout_s:g} s")
        req.timers.append(self._loop.call_later(timeout_s, self.give_up, req, late))
        if req.key:
            self._claims.ask(req, timeout_s)
        else:
            self._queue.add(req)

    def give_up(self, req: Req, error: ApiError | None = None) -> None:
        """End a request that has not ended, with an error or because its client is gone."""
        if not req.outcome:
            # Its client may come back, to another router if this one stops.
            keep = bool(req.key) and (error is None or error.code == "draining")
            self._queue.abort(req, keep=keep)
            self._end(req, _failed(req, error))

    def deliver(self, events: Sequence[Event]) -> None:
        """What arrived on the wire, in order; streams that got text are flushed once."""
        now = time.monotonic()
        for peer, message in events:
            try:
                match message:
                    case Chunks():
                        for chunk in message.chunks:
                            self._on_chunk(peer, chunk, now)
                    case Pong():
                        self._members.pong(peer, message.stats)
                        known = self._members.get(peer)
                        if known is not None and message.stats is not None:
                            self._queue.sessions.heard(known, message.stats.turns)
                        self._queue.place()
                    case Refused():
                        self._on_refused(peer, message)
                    case Claimed():
                        self._claims.answered(peer, message)
                    case Lost():
                        self._on_lost(peer, message.reason)
                    case _:
                        self._wire.refusals.unexpected(peer, message)
            except Exception:  # a bug of ours: the other messages are other requests'
                log.exception("a %s of %s", type(message).__name__, peer)
        if self._touched:  # behind the tasks that were woken: first chunks leave first
            self._loop.call_soon(_flush, self._touched)
            self._touched = []
        if self._lasts:
            self._metrics.itl.observe_since(now, self._lasts)
            self._lasts = []

    def update_members(self, members: Sequence[Member]) -> None:
        """The controller's whole list; workers that are no longer on it are lost."""
        added, removed = self._members.update(members)
        # Who leaves hands over what it has; else its process has ended.
        died = [k.peer for k in removed if k.member.role == "decode" and not k.stats.draining]
        for req in list(self._reqs.values()) if died else ():
            if req.route is not None and req.route.decode in died:
                req.suspect.lost(req.route.decode, len(req.tokens))
            if req.suspect.died(died, time.monotonic()):
                self.give_up(req, _suspected())
        for known in removed:
            self._wire.disconnect(known.peer)
            self._on_lost(known.peer, "no longer a member")
        for member in added:
            self._wire.connect(member.peer, member.address, member.wire_key)
        self._queue.place()

    def close(self) -> None:
        """End every request with an error; later ones end at once."""
        self._closed = True
        for req in list(self._reqs.values()):
            self.give_up(req, _stopping())

    def _on_chunk(self, peer: PeerId, chunk: TokenChunk, now: float) -> None:
        if chunk.finish_reason is not None:
            self._wire.send(peer, Ack(chunk.req_id, chunk.dispatch))
        req = self._reqs.get(chunk.req_id)
        if (
            req is None
            or req.dispatch != chunk.dispatch
            or req.route is None
            or req.route.decode != peer  # two may have had what was claimed
        ):
            self._metrics.stale_chunks.inc()
            if chunk.finish_reason is None:  # the worker still computes it
                # Its client may be gone, and come back; a dispatch that was overtaken is nobody's.
                self._wire.send(peer, Abort(chunk.req_id, chunk.dispatch, keep=req is None))
            return
        req.begun()
        failed = chunk.finish_reason in FAILED
        first = req.position - chunk.position  # of its tokens, the first that is new
        if first < 0 and not (failed and not chunk.tokens):
            log.error("req_id=%s: %s left out tokens", req.req_id, peer)
            self._queue.abort(req)
            if req.suspect.erred(len(req.tokens)):
                self.give_up(req, _suspected())
            else:
                self._lose(req, "gap")
            return
        if not req.tokens:  # of the first token; a worker that resumes has found and spent more
            req.num_cached_tokens = max(req.num_cached_tokens, chunk.num_cached_tokens)
            if chunk.tokens:
                self._queue.found(req, chunk.num_cached_tokens, chunk.stages)
            if chunk.stages is not None:
                req.stages, req.decoded_by = chunk.stages, peer
        elif chunk.stages is not None and chunk.stages.late and req.decoded_by == peer:
            req.stages = chunk.stages
        req.scored.extend(chunk.prompt_logprobs)
        tokens, logprobs = chunk.tokens, chunk.logprobs
        if first > 0:
            tokens, logprobs = tokens[first:], logprobs[first:]
        elif chunk.window is not None:
            req.windows.append(chunk.window)
        try:
            if tokens and self._emit(req, tokens, logprobs, now):
                return
            if failed:
                self._end(req, _failed(req, _failure(chunk.error)))
            elif chunk.finish_reason is not None:
                with DETOKENIZER:
                    rest = req.output.finish()
                self._end(req, Delta(req.index, rest, chunk.finish_reason))
        except LibraryError as error:
            error.log(req.req_id)
            self.give_up(req, ApiError(error.code, str(error)))

    def _emit(
        self, req: Req, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...], now: float
    ) -> bool:
        """Pass tokens on; True when a stop string has ended the request."""
        before, is_first = req.last_token_at, not req.tokens
        req.last_token_at = now
        if is_first:
            req.first_token_at, req.queued_first_s = now, req.queued_s
            where = _prefilled(req, self._members.get(req.decoded_by))
            self._metrics.ttft(where).observe(now - req.arrived_at, req.trace_id)
            self._metrics.prompt(len(req.prompt), req.num_cached_tokens, req.went)
        with DETOKENIZER:
            piece = req.output.feed(tokens)
        num = piece.num_tokens
        tokens = tokens[:num]
        if not is_first and (num > 1 or req.trace_id):  # tokens of one step share its time
            self._metrics.itl.observe((now - before) / num, req.trace_id, num)
        elif not is_first:
            self._lasts.append(before)
        req.tokens.extend(tokens)
        self._queue.drew(req, num)
        scored = tuple(zip(tokens, logprobs, strict=False)) if logprobs else ()
        starts = piece.starts if scored else ()
        if piece.stopped:
            assert req.route is not None
            self._wire.send(req.route.decode, Stop(req.req_id, req.dispatch, req.position))
            reason = FinishReason.STOP if num else FinishReason.LENGTH  # it wanted none
            self._end(req, Delta(req.index, piece.text, reason, scored=scored, starts=starts))
        elif piece.text or scored:
            prompt = req.take_scored() if req.scored else ()
            delta = Delta(req.index, piece.text, scored=scored, starts=starts, prompt=prompt)
            req.mailbox.put(delta)
            self._touched.append(req.mailbox)
        return piece.stopped

    def _on_refused(self, peer: PeerId, refused: Refused) -> None:
        req = self._reqs.get(refused.req_id)
        if req is None or req.dispatch != refused.dispatch or req.route is None:
            return
        if req.route.decode != peer:
            self._wire.refusals.foreign(peer, refused)
            return
        if refused.error.code in NOT_RETRIED:
            self._end(req, _failed(req, _failure(refused.error)))
            return
        if req.trace is not None:
            req.trace.leave(time.monotonic(), {}, refused.error.code, refused.error.message)
        self._queue.leave(req, served=False)
        self._queue.pause(peer, refused.retry_after_s)
        self._metrics.retries("refused").inc()
        self._queue.add(req, first=True)

    def _on_lost(self, peer: PeerId, reason: str) -> None:
        known = self._members.get(peer)
        self._members.lost(peer)
        self._claims.lost(peer)
        there = [req for req in self._reqs.values() if req.is_at(peer)]
        level = logging.WARNING if there else logging.DEBUG  # a drained worker has none
        log.log(level, "%s is lost (%s) with %d requests", peer, reason, len(there))
        for req in there:
            req.suspect.lost(peer, len(req.tokens))
            self._lose(req, "worker_lost")
        if known is not None and not self._closed:  # the controller still lists it: ask again
            self._loop.call_later(RECONNECT_S, self._connect_again, known.member)

    def _connect_again(self, member: Member) -> None:
        if self._members.get(member.peer) is not None and not self._closed:
            self._wire.connect(member.peer, member.address, member.wire_key)

    def _lose(self, req: Req, cause: str) -> None:
        """Send it again, to another worker if there is one; the client sees a pause."""
        assert req.route is not None
        if req.trace is not None:
            req.trace.leave(time.monotonic(), error=cause)
        req.avoid, req.waiting_since = req.route.decode, None
        self._queue.leave(req, served=False)
        self._metrics.retries(cause).inc()
        if req.tokens:
            self._metrics.resumed.inc()
            if req.mailbox.has_begun:
                req.mailbox.put(Delta(req.index, resumed=True))
                req.mailbox.nudge()
        self._queue.add(req, first=True)

    def _waited(self, req: Req, late_s: float) -> None:
        """The queue timeout has passed, or will: no decode worker has room, or there is none."""
        when = "will have" if late_s else "had"
        code, message = "busy", f"no decode worker {when} room in time"
        if not self._members.expects_decode:
            code, message, late_s = "no_worker", NONE_EXPECTED, NONE_EXPECTED_S
        elif not self._members.live("decode"):
            code, message = "no_worker", "no decode worker is alive"
        elif req.tokens:
            code, message = "worker_lost", "every decode worker has another model by now"
        self.give_up(req, ApiError(code, message, retry_after_s=max(1, math.ceil(late_s))))

    def _end(self, req: Req, last: Delta) -> None:
        """The only exit: frees what `req` holds, counts it and tells the client's task.

        last: the end of its text, and why; all else that its client gets at the end is added.
        """
        assert not req.outcome, "a request ends once"
        error = last.error
        req.outcome = error.code if error is not None else str(last.finish_reason)
        del self._reqs[req.req_id]
        for timer in req.timers:
            timer.cancel()
        self._claims.forget(req)
        self._queue.leave(req, served=True)
        spent = last.spent = req.spent
        last.windows = req.windows if req.sampling.return_trace else None
        last.prompt = req.take_scored() if req.scored else ()
        last.stopped_by = req.output.stopped_by
        req.mailbox.put(last)
        metrics, now = self._metrics, time.monotonic()
        if req.trace is not None:
            cut_off = req.outcome if last.finish_reason in FAILED else ""
            why = str(error) if error is not None else None
            req.trace.leave(now, {"kvlane.output_tokens": len(req.tokens)}, cut_off, why)
        if spent is not None:
            metrics.spent(spent, len(req.tokens), req.trace_id)
        metrics.ended(req.outcome)
        metrics.e2e.observe(now - req.arrived_at, req.trace_id)
        metrics.queue_time.observe(req.queued_s, req.trace_id)
        metrics.generation_tokens.inc(len(req.tokens))
        metrics.output_length.observe(len(req.tokens))
        log.debug("req_id=%s ended: %s, %d tokens", req.req_id, req.outcome, len(req.tokens))
        if not self._closed:
            self._queue.place()


def _failed(req: Req, error: ApiError | None) -> Delta:
    """The end of one that has failed; None: its client is gone."""
    reason = FinishReason.ABORT if error is None else FinishReason.ERROR
    return Delta(req.index, finish_reason=reason, error=error)


def _prefilled(req: Req, decode: Known | None) -> str:
    """Where its KV was computed, one of PREFILLS; `decode`: the worker that it is at."""
    if req.stages is not None and req.stages.prefilled_by not in ("", req.decoded_by):
        return "pulled"
    page_size = decode.stats.page_size if decode is not None else 0
    cached = len(req.prompt) - req.num_cached_tokens <= page_size
    return "cached" if cached else "local"


def _flush(mailboxes: Sequence[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.flush()


def _failure(error: Error | None) -> ApiError:
    """What a worker's typed error means to the client."""
    if error is None:
        return ApiError("world_error", "the worker gave the request up")
    return ApiError(error.code, error.message, param=error.param)


def _suspected() -> ApiError:
    message = "the request was present when two workers died; it is not tried again"
    error = ApiError("internal_error", message)
    error.retry = False
    return error


def _stopping() -> ApiError:
    return ApiError("draining", "the router is stopping")
