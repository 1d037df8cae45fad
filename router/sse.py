"""Answers: one HTTP request from its dispatch to the last byte, streamed or whole.

Nothing is sent before the first delta, so that a request which fails before its first token gets an
HTTP status of its own. A stream then ends in exactly one of two ways: with finish chunks for all
choices, or with one error event; `[DONE]` follows both. A stream is never just cut.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from fastapi import Response
from starlette.types import Receive, Scope, Send

from router.dispatch import Dispatcher
from router.errors import ApiError, error_response, of_grammar
from router.logprobs import mean
from router.mailbox import Delta, Mailbox
from router.metrics import by_stage
from router.prepared import Prepared
from router.reply import Choice, Completion, StageTimes, Usage, to_json
from router.waiting import Req
from worker.api import FinishReason

log = logging.getLogger("kvlane.router")

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
THREAD_SCORED = 256  # beyond so many tokens with logprobs a thread writes; 4000 took 1.5 s
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class _Gone(Exception):
    """The client has closed the connection, or reads nothing."""


class Answer(Response):
    """Runs a prepared request; aborts what is left of it when the client goes.

    Args:
        prepared: the request.
        dispatcher: runs its choices.
        ping_s: a stream that is silent for so long gets a comment line.
        patience_s: a client that reads nothing for so long counts as gone.
        closed: called once, when nothing of the request is left.
    """

    def __init__(
        self,
        prepared: Prepared,
        dispatcher: Dispatcher,
        ping_s: float,
        patience_s: float,
        closed: Callable[[], None],
    ) -> None:
        self.background = None
        self.status_code = 200
        self._prepared = prepared
        self._dispatcher = dispatcher
        self._ping_s = ping_s
        self._patience_s = patience_s
        self._closed = closed
        self._mailbox = Mailbox(streamed=prepared.streamed)
        self._reqs: list[Req] = []
        self._num_open = len(prepared.choices)
        self._error: ApiError | None = None
        self._started = False
        self._id = f"{prepared.writer.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request from submission to the last byte, as an ASGI application."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            for index, choice in enumerate(self._prepared.choices):
                leader = None if choice.leader is None else self._reqs[choice.leader]
                self._reqs.append(
                    self._dispatcher.submit(
                        index,
                        choice.prompt,
                        choice.sampling,
                        choice.output,
                        self._mailbox,
                        leader,
                    )
                )
            await (self._stream(send) if self._prepared.streamed else self._whole(send))
        except _Gone:
            log.info("%s: the client is gone, or does not read", self._id)
        except ApiError as error:
            await self._fail(error, scope, receive, send)
        except Exception:
            await self._fail(ApiError.of("internal_error", "internal error"), scope, receive, send)
            raise
        finally:
            watcher.cancel()
            for req in self._reqs:
                self._dispatcher.give_up(req)
            self._closed()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        for req in self._reqs:
            self._dispatcher.give_up(req)

    async def _deltas(self) -> list[Delta]:
        """The next deltas. An error among them ends the list, and the next call raises it.

        Raises:
            ApiError: a choice has failed, and with it the request.
            _Gone: the client has closed the connection.
        """
        if self._error is not None:
            raise self._error
        deltas = await self._mailbox.get()
        for i, delta in enumerate(deltas):
            if delta.error is not None:
                self._error = of_grammar(delta.error, self._prepared.grammar_param)
                return deltas[:i] or await self._deltas()
            if delta.finish_reason is FinishReason.ABORT:
                raise _Gone
            self._num_open -= delta.finish_reason is not None
        return deltas

    async def _whole(self, send: Send) -> None:
        found: list[Delta] = []
        while self._num_open:
            found += await self._deltas()
        writer, answers = self._prepared.writer, self._kept(_merged(found))

        def write() -> bytes:
            choices = [writer.whole(i, answer) for i, answer in enumerate(answers)]
            for choice, answer in zip(choices, answers, strict=True):
                self._account(choice, answer)
            return to_json(self._completion(writer.whole_object, choices, self._usage()))

        body = await _written(answers, write)
        length = str(len(body)).encode()
        await self._start(
            send, [(b"content-type", b"application/json"), (b"content-length", length)]
        )
        await send({"type": "http.response.body", "body": body})

    def _kept(self, answers: Sequence[Delta]) -> list[Delta]:
        """The answers to return: the best samples of each prompt, best first."""
        ordered = sorted(answers, key=lambda answer: answer.index)
        size, kept = self._prepared.num_samples, self._prepared.num_kept
        if kept == size:
            return ordered
        found: list[Delta] = []
        for start in range(0, len(ordered), size):
            samples = ordered[start : start + size]
            found += sorted(samples, key=lambda answer: -mean(answer.scored))[:kept]
        return found

    async def _stream(self, send: Send) -> None:
        opened = set[int]()
        loop = asyncio.get_running_loop()
        ping_at = loop.time() + self._ping_s
        while self._num_open:
            pinger = loop.call_at(ping_at, self._mailbox.nudge)
            try:
                deltas = await self._deltas()
            finally:
                pinger.cancel()
            if not self._started:
                await self._start(send, SSE_HEADERS)
            events = await _written(deltas, partial(self._events, deltas, opened))
            if not events and loop.time() >= ping_at:  # deltas may hold nothing certain yet
                events = PING
            if events:
                await self._write(send, events)
                ping_at = loop.time() + self._ping_s
        last = self._chunk([], self._usage()) if self._prepared.include_usage else b""
        await self._write(send, last + DONE, more=False)

    def _events(self, deltas: Sequence[Delta], opened: set[int]) -> bytes:
        """The chunks of `deltas`; choices that get their first chunk are added to `opened`."""
        writer, events = self._prepared.writer, list[bytes]()
        for delta in _merged(deltas):
            opening = None if delta.index in opened else writer.opening(delta.index)
            opened.add(delta.index)
            if opening is not None:
                events.append(self._chunk([opening]))
            chunk = writer.chunk(delta)
            if chunk is not None:
                self._account(chunk, delta)
                events.append(self._chunk([chunk]))
        return b"".join(events)

    async def _start(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the error: an event if the stream has begun, else a status of its own."""
        if self._started:
            event = b"data: %s\n\n" % json.dumps(error.body).encode()
            with suppress(_Gone):
                await self._write(send, event + DONE, more=False)
        else:
            await error_response(error)(scope, receive, send)

    async def _write(self, send: Send, body: bytes, *, more: bool = True) -> None:
        """Part of a stream.

        Raises:
            _Gone: the client has read too little of what came before for too long.
        """
        try:
            async with asyncio.timeout(self._patience_s):
                await send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            raise _Gone from None

    def _chunk(self, choices: Sequence[Choice], usage: Usage | None = None) -> bytes:
        if usage is None and self._prepared.continuous_usage:
            usage = self._usage()
        completion = self._completion(self._prepared.writer.chunk_object, choices, usage)
        return b"data: %s\n\n" % to_json(completion)

    def _completion(self, kind: str, choices: Sequence[Choice], usage: Usage | None) -> Completion:
        completion = Completion(
            id=self._id,
            object=kind,
            created=self._created,
            model=self._prepared.model,
            choices=choices,
        )
        if usage is not None or self._prepared.include_usage:
            completion.usage = usage
        return completion

    def _account(self, choice: Choice, delta: Delta) -> None:
        """Add the time of each stage, if that was asked for and is known."""
        if not self._prepared.return_stages or delta.spent is None:
            return
        spent = delta.spent
        choice.stages = StageTimes(
            **{f"{stage}_s": seconds for stage, seconds in by_stage(spent).items()},
            first_token_s=spent.first_token_s,
            prefilled_by=spent.stages.prefilled_by.partition("/")[0] or None,
            decoded_by=spent.decoded_by.partition("/")[0],
        )

    def _usage(self) -> Usage:
        reqs = self._reqs
        return Usage.of(
            sum(len(req.prompt) for req in reqs if req.leader is None),
            sum(len(req.tokens) for req in reqs),
            sum(req.num_cached_tokens for req in reqs if req.leader is None),
        )


async def _written(deltas: Sequence[Delta], write: Callable[[], bytes]) -> bytes:
    """What `write` makes of `deltas`, from a thread if they hold many logprobs."""
    num_scored = sum(len(delta.scored) for delta in deltas)
    return await asyncio.to_thread(write) if num_scored > THREAD_SCORED else write()


def _merged(deltas: Sequence[Delta]) -> list[Delta]:
    """One delta for each choice: the sum of its deltas."""
    piled: dict[int, list[Delta]] = {}
    for delta in deltas:
        piled.setdefault(delta.index, []).append(delta)
    return [_sum(found) if len(found) > 1 else found[0] for found in piled.values()]


def _sum(deltas: Sequence[Delta]) -> Delta:
    text = "".join(delta.text for delta in deltas)
    scored = tuple(each for delta in deltas for each in delta.scored)
    last = deltas[-1]
    return Delta(last.index, text, last.finish_reason, None, scored, last.spent)
