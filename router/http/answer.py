"""Answers: one HTTP request from its dispatch to the last byte, streamed or whole.

Nothing is sent before the first delta, so that a request which fails before its first token gets an
HTTP status of its own. A stream then ends in exactly one of two ways: with finish chunks for all
choices, or with one error event; `[DONE]` follows both. A stream is never just cut.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from fastapi import Response
from starlette.types import Receive, Scope, Send

from router.dispatch.mailbox import Delta, Mailbox
from router.errors import ApiError, of_grammar
from router.http.connection import Outlet
from router.http.exchange import Exchange
from router.openai.body import AnswerForm, Body, Prepared, merged, num_scored
from router.openai.logprobs import mean
from router.show.front import Front
from worker.api import FinishReason

PING = b": ping\n\n"
PART_BYTES = 64 << 10  # of an answer, which leaves at once: others wait while it is copied
THREAD_SCORED = 512  # beyond so many logprobs a thread writes: many answers may end in one step
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class _Gone(Exception):
    """The client has closed the connection, or reads nothing."""


class Answer(Response):
    """Runs a prepared request; aborts what is left of it when the client goes.

    The choices are added to `exchange`. When nothing of the request is left, `closed` is called.
    """

    def __init__(
        self, prepared: Prepared, front: Front, exchange: Exchange, closed: Callable[[], None]
    ) -> None:
        self.background = None
        self.status_code = 200
        self._prepared = prepared
        self._front = front
        self._exchange, self._closed = exchange, closed
        self._ping_s = front.served.config.sse_ping_s
        self._mailbox = Mailbox(self._write_now if prepared.streamed else None)
        self._reqs, exchange.n = exchange.reqs, prepared.num_kept
        self._num_open = len(prepared.reqs)
        self._error: Exception | None = None
        self._started = False
        self._wrote_at = 0.0  # the last part of a stream
        self._pinger: asyncio.TimerHandle | None = None
        written = prepared.form or Body
        self.form: AnswerForm = written(prepared, exchange.unique_id, exchange.reqs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._outlet: Outlet = scope["outlet"]
        self._outlet.watch(self.leave)
        try:
            self._submit()
            if self._outlet.is_gone:  # it has left before it was watched
                self.leave()
            await (self._stream(send) if self._prepared.streamed else self._whole(send))
        except _Gone:
            self._exchange.failure = "client_gone"
        except ApiError as error:
            await self._fail(error, scope, receive, send)
        except Exception:
            await self._fail(ApiError("internal_error", "internal error"), scope, receive, send)
            raise
        finally:
            self._outlet.watch(None)
            self._mailbox.close()
            self.leave()
            self.form.close()
            self._closed()

    def _submit(self) -> None:
        exchange = self._exchange
        for req in self._prepared.reqs:
            req.req_id = f"{exchange.unique_id}-{req.index}"
            req.mailbox, req.trace_id = self._mailbox, exchange.trace_id
            req.client, req.priority = exchange.source, self._prepared.priority
            self._front.dispatcher.submit(req, exchange.trace)
            self._reqs.append(req)

    def leave(self) -> None:
        """End what is left of it; nobody waits any longer."""
        for req in self._reqs:
            self._front.dispatcher.give_up(req)

    async def _deltas(self) -> list[Delta]:
        """The next deltas. An error among them ends the list, and the next call raises it.

        Raises an ApiError if a choice has failed, _Gone if the client has closed the connection.
        """
        deltas = await self._mailbox.get() if self._error is None else []
        if self._error is not None:  # of the deltas before, or of `_write_now`
            raise self._error
        for i, delta in enumerate(deltas):
            if delta.error is not None:
                self._error = of_grammar(delta.error, self._prepared.grammar_param)
                return deltas[:i] or await self._deltas()
            if delta.finish_reason is FinishReason.ABORT:
                raise _Gone
            self._num_open -= delta.finish_reason is not None
        return deltas

    async def _whole(self, send: Send) -> None:
        deltas: list[Delta] = []
        while self._num_open:
            deltas += await self._deltas()
        body = await self._written(deltas, lambda all_: self.form.whole(self._kept(merged(all_))))
        length = str(len(body)).encode()
        await self._start(
            send, [(b"content-type", b"application/json"), (b"content-length", length)]
        )
        for at in range(0, len(body), PART_BYTES):
            more = at + PART_BYTES < len(body)
            await self._write(send, body[at : at + PART_BYTES], more=more)
            if more:  # the kernel may take all at once
                await asyncio.sleep(0)

    async def _written(self, deltas: list[Delta], write: Callable[[list[Delta]], bytes]) -> bytes:
        """What `write` makes of `deltas`, in a thread if they hold many logprobs."""
        if num_scored(deltas) > THREAD_SCORED:
            return await self._front.pool.run(self._exchange.source, partial(write, deltas))
        return write(deltas)

    def _kept(self, answers: Sequence[Delta]) -> list[Delta]:
        """The answers to return: the best samples of a prompt, best first."""
        ordered = sorted(answers, key=lambda answer: answer.index)
        size, kept = self._prepared.num_samples, self._prepared.num_kept
        for answer in ordered:  # a prompt is scored once
            answer.prompt = answer.prompt or ordered[answer.index // size * size].prompt
        if kept == size:
            return ordered
        best: list[Delta] = []
        for start in range(0, len(ordered), size):
            samples = ordered[start : start + size]
            best += sorted(samples, key=lambda answer: -mean(answer.scored))[:kept]
        return best

    async def _stream(self, send: Send) -> None:
        self._wrote_at = time.monotonic()
        self._ping()
        try:
            while self._num_open:
                deltas = await self._deltas()
                if not self._started:
                    await self._start(send, SSE_HEADERS)
                events = await self._written(deltas, self.form.events)
                if not events and self._silent_s >= self._ping_s:  # nothing certain yet
                    events = PING
                if not self._num_open:
                    await self._write(send, events + self.form.end(), more=False)
                elif events:
                    await self._write(send, events)
        finally:
            if self._pinger is not None:
                self._pinger.cancel()

    def _write_now(self, deltas: list[Delta]) -> bool:
        """Write text without the task, if all before it has left and the client keeps up."""
        outlet = self._outlet
        if not outlet.is_open or (deltas[0].scored and num_scored(deltas) > THREAD_SCORED):
            return False
        try:
            events = self.form.events(deltas)
        except Exception as error:  # the task raises it: other requests have no part in it
            self._error = error
            return False
        if events:
            outlet.write_now(events)
            self._wrote_at = time.monotonic()
        return True

    def _ping(self) -> None:
        """Wake the task when the stream has been silent for too long; one timer for all chunks."""
        left_s = self._ping_s - self._silent_s
        if left_s <= 0:
            self._mailbox.nudge()
            left_s = self._ping_s
        self._pinger = asyncio.get_running_loop().call_later(left_s, self._ping)

    @property
    def _silent_s(self) -> float:
        return time.monotonic() - self._wrote_at

    async def _start(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = self._mailbox.has_begun = True
        self._outlet.hold()
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        self._exchange.failure = error.code
        last = self.form.failed(error)
        if self._started:
            with suppress(_Gone):
                await self._write(send, last, more=False)
        else:
            await error.response_to(scope["path"])(scope, receive, send)

    async def _write(self, send: Send, body: bytes, *, more: bool = True) -> None:
        """Send a part of a stream; raises _Gone if the client has read too little for too long."""
        message = {"type": "http.response.body", "body": body, "more_body": more}
        if self._outlet.is_full:
            try:
                async with asyncio.timeout(self._front.served.config.keep_alive_s):
                    await send(message)
            except TimeoutError:
                raise _Gone from None
        else:
            await send(message)
        self._wrote_at = time.monotonic()
