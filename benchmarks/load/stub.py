"""A server whose delays are known: the measure of the measure. `python -m benchmarks.load stub`.

It speaks as much of OpenAI's API as a load client needs. A request's delays come from (seed, its
last prompt) alone, so two clients that send the same requests meet the same server. Every piece
leaves at its due time, counted from the arrival of the request's last byte.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from benchmarks.load.pacer import Pacer, now

WORD = " word"
STREAM_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache"}


class StubOptions(msgspec.Struct, frozen=True):
    """How it behaves; times in seconds."""

    ttft_s: float = 0.05  # mean; each request's own is uniform in mean * (1 +- spread)
    itl_s: float = 0.01  # the same, per request
    spread: float = 0.0
    num_tokens: int = 16  # where the request sets no max_tokens
    stall_after: int = 0  # when it has read so many requests, it stands still ...
    stall_s: float = 0.0  # ... for so long: what is due meanwhile leaves at the end
    fail_every: int = 0  # every n-th request gets a 503; 0 = none
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Delays:
    """Of one request."""

    ttft_s: float
    itl_s: float


def delays(options: StubOptions, prompt: str) -> Delays:
    """What a request meets whose last message, or prompt, is `prompt`."""
    rng = random.Random(f"{options.seed}/{prompt}")
    low, high = 1 - options.spread, 1 + options.spread
    return Delays(options.ttft_s * rng.uniform(low, high), options.itl_s * rng.uniform(low, high))


class Stub:
    """The routes. Everything happens in one loop; due times are kept by `pacer`."""

    def __init__(self, options: StubOptions, pacer: Pacer) -> None:
        self._options = options
        self._pacer = pacer
        self._indices = itertools.count()
        self._stall = (0.0, 0.0)  # begin and end, monotonic

    def application(self) -> web.Application:
        """What to serve."""
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        for path in ("/v1/chat/completions", "/v1/completions"):
            app.router.add_post(path, self._answer)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        row = {"id": "stub", "object": "model", "created": 0, "owned_by": "stub"}
        return web.json_response({"object": "list", "data": [row]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        arrived, index = now(), next(self._indices)
        options = self._options
        if options.stall_s and index == options.stall_after:
            self._stall = arrived, arrived + options.stall_s
        if options.fail_every and index % options.fail_every == options.fail_every - 1:
            error = {"message": "as asked", "type": "server_error", "param": None, "code": "busy"}
            return web.json_response({"error": error}, status=503)
        num_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
        num_tokens = int(num_tokens or options.num_tokens)
        each = delays(options, _prompt_of(body))
        due = [arrived + each.ttft_s + i * each.itl_s for i in range(num_tokens)]
        chat = "chat" in request.path
        if body.get("stream"):
            return await self._stream(request, due, chat)
        await self._until(due[-1])
        said = {"message": {"role": "assistant", "content": WORD * num_tokens, "refusal": None}}
        choice = said if chat else {"text": WORD * num_tokens}
        answer = _object("chat.completion" if chat else "text_completion", choice, "length")
        return web.json_response(answer | {"usage": _usage(num_tokens)})

    async def _until(self, due: float) -> None:
        """Return at `due`, or at the end of the stall if it falls into it."""
        await self._pacer.until(due)
        begin, end = self._stall
        if begin <= due < end:
            await self._pacer.until(end)

    async def _stream(
        self, request: web.Request, due: list[float], chat: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=STREAM_HEADERS)
        kind = "chat.completion.chunk" if chat else "text_completion"
        choice: dict[str, Any] = {"delta": {"content": WORD}} if chat else {"text": WORD}
        piece = _event(_object(kind, choice, None))
        end = {"id": "stub", "object": kind, "created": 0, "model": "stub", "choices": []}
        usage = _event(end | {"usage": _usage(len(due))})
        last = _event(_object(kind, choice, "length")) + usage + b"data: [DONE]\n\n"
        for i, moment in enumerate(due):
            await self._until(moment)
            if i == 0:  # headers leave with the first piece, as from a real server
                await response.prepare(request)
            await response.write(last if i + 1 == len(due) else piece)
        await response.write_eof()
        return response


def _prompt_of(body: dict[str, Any]) -> str:
    messages = body.get("messages")
    return str(messages[-1].get("content") if messages else body.get("prompt"))


def _object(kind: str, choice: dict[str, Any], reason: str | None) -> dict[str, Any]:
    whole = {"index": 0, "finish_reason": reason, "logprobs": None} | choice
    return {"id": "stub", "object": kind, "created": 0, "model": "stub", "choices": [whole]}


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": num_tokens + 1}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def serve(options: StubOptions, host: str, port: int) -> None:
    """Serve until cancelled; says its address on standard output once it listens."""
    with Pacer() as pacer:
        runner = web.AppRunner(Stub(options, pacer).application(), access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        await site.start()
        bound = runner.addresses[0][1]
        print(f"http://{host}:{bound}", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()
