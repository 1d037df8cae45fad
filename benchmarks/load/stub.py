"""A server whose delays are known: the measure of the measure. `python -m benchmarks.load stub`.

It speaks as much of OpenAI's API as a load client needs. A request's delays come from (seed, its
last prompt) alone, so two clients that send the same requests meet the same server. Every piece
leaves at its due time, counted from the arrival of the request's last byte; its bytes are made
before.
"""

import argparse
import asyncio
import gc
import itertools
import random
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, NamedTuple

import msgspec

from benchmarks.load.pacer import Pacer, now

WORD = " word"
END = b"\n\ndata: [DONE]\n\n"
JSON, STREAM = "application/json", "text/event-stream"


class StubOptions(msgspec.Struct, frozen=True):
    """How it behaves; times in seconds."""

    ttft_s: float = 0.05  # mean; each request's own is uniform in mean * (1 +- spread)
    itl_s: float = 0.01  # the same, per request
    spread: float = 0.0
    num_tokens: int = 16  # where the request sets no max_tokens
    stall_after: int = 0  # when it has read so many requests, it stands still ...
    stall_s: float = 0.0  # ... for so long: what is due meanwhile leaves at the end
    fail_every: int = 0  # every n-th request gets a 503; 0 = none
    break_every: int = 0  # every n-th stream ends in an error event
    seed: int = 0


class Delays(NamedTuple):
    """Of one request."""

    ttft_s: float
    itl_s: float


def delays(options: StubOptions, prompt: str) -> Delays:
    """What a request meets whose last message, or prompt, is `prompt`."""
    rng = random.Random(f"{options.seed}/{prompt}")
    low, high = 1 - options.spread, 1 + options.spread
    return Delays(options.ttft_s * rng.uniform(low, high), options.itl_s * rng.uniform(low, high))


_Count = Annotated[int, msgspec.Meta(ge=1)]


class _Body(msgspec.Struct):
    """What matters of a request, of either endpoint."""

    messages: list[dict[str, Any]] = []
    prompt: Any = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    stream: bool | None = None

    @property
    def last_prompt(self) -> str:
        """What the delays follow from."""
        return str(self.messages[-1].get("content") if self.messages else self.prompt)


class Answer(NamedTuple):
    """Status, content type, and when each piece of the body leaves, by the monotonic clock."""

    status: int
    kind: str
    pieces: Sequence[tuple[float, bytes]]


class Stub:
    """What is answered; one for all connections."""

    def __init__(self, options: StubOptions) -> None:
        self._options = options
        self._indices = itertools.count()
        self._stall = (0.0, 0.0)  # begin and end, monotonic

    def answer(self, chat: bool, raw: bytes, arrived: float) -> Answer:
        """To a request whose last byte arrived at `arrived`."""
        try:
            body = msgspec.json.decode(raw, type=_Body)
        except msgspec.DecodeError as error:
            return Answer(400, JSON, [(arrived, _error(str(error), "bad_request"))])
        options, index = self._options, next(self._indices)
        if options.stall_s and index == options.stall_after:
            self._stall = arrived, arrived + options.stall_s
        if _is_nth(index, options.fail_every):
            return Answer(503, JSON, [(arrived, _error("as asked", "busy"))])
        num_tokens = body.max_completion_tokens or body.max_tokens or options.num_tokens
        each = delays(options, body.last_prompt)
        due = [arrived + each.ttft_s + i * each.itl_s for i in range(num_tokens)]
        if not body.stream:
            return Answer(200, JSON, [(due[-1], _whole(chat, num_tokens))])
        piece, last = _stream(chat, num_tokens)
        if _is_nth(index, options.break_every):
            last = b"data: " + _error("as asked", "worker_lost") + END
        pieces = [*[piece] * (num_tokens - 1), last]
        return Answer(200, STREAM, list(zip(due, pieces, strict=True)))

    def leaves(self, due: float) -> float:
        """When what is due at `due` leaves: at the end of the stall if it falls into one."""
        begin, end = self._stall
        return end if begin <= due < end else due


def _is_nth(index: int, every: int) -> bool:
    return every > 0 and index % every == every - 1


def _error(message: str, code: str) -> bytes:
    error = {"message": message, "type": "error", "param": None, "code": code}
    return msgspec.json.encode({"error": error})


@cache
def _whole(chat: bool, num_tokens: int) -> bytes:
    said = {"message": {"role": "assistant", "content": WORD * num_tokens, "refusal": None}}
    choice = said if chat else {"text": WORD * num_tokens}
    kind = "chat.completion" if chat else "text_completion"
    return msgspec.json.encode(_object(kind, [choice], "length") | _usage(num_tokens))


@cache
def _stream(chat: bool, num_tokens: int) -> tuple[bytes, bytes]:
    """Any piece but the last, and the last one with the end."""
    kind = "chat.completion.chunk" if chat else "text_completion"
    choice: dict[str, Any] = {"delta": {"content": WORD}} if chat else {"text": WORD}
    last = _object(kind, [choice], "length"), _object(kind, []) | _usage(num_tokens)
    return _event(_object(kind, [choice])), b"".join(map(_event, last)) + END[2:]


def _object(kind: str, choices: list[dict[str, Any]], reason: str | None = None) -> dict[str, Any]:
    common = {"index": 0, "finish_reason": reason, "logprobs": None}
    whole = [common | choice for choice in choices]
    return {"id": "stub", "object": kind, "created": 0, "model": "stub", "choices": whole}


def _usage(num_tokens: int) -> dict[str, Any]:
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {"usage": dict(zip(names, (1, num_tokens, num_tokens + 1), strict=True))}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def serve(options: StubOptions, host: str, port: int) -> None:
    """Serve until cancelled; says its address on standard output once it listens."""
    from aiohttp import web  # help does without

    stub = Stub(options)

    async def listed(_: web.Request) -> web.Response:
        row = {"id": "stub", "object": "model", "created": 0, "owned_by": "stub"}
        return web.json_response({"object": "list", "data": [row]})

    async def answered(request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        answer = stub.answer("chat" in request.path, raw, now())
        response = web.StreamResponse(status=answer.status, headers={"content-type": answer.kind})
        for due, part in answer.pieces:
            while (leaves := stub.leaves(due)) > now():  # a stall may begin meanwhile
                await pacer.until(leaves)
            if not response.prepared:
                await response.prepare(request)
            await response.write(part)
        return response

    app = web.Application(client_max_size=1 << 30)
    for path in ("/v1/models", "/health"):
        app.router.add_get(path, listed)
    for path in ("/v1/chat/completions", "/v1/completions"):
        app.router.add_post(path, answered)
    gc.freeze()  # a collection would be a delay
    with Pacer() as pacer:
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, host, port, backlog=1024).start()
        print(f"http://{host}:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()


def main(argv: Sequence[str]) -> int:
    """A server with known delays."""
    parser = argparse.ArgumentParser(
        prog="kvlane bench stub", description=main.__doc__, allow_abbrev=False
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one, which is printed")
    for field in msgspec.structs.fields(StubOptions):
        flag = "--" + field.name.removesuffix("_s").replace("_", "-")
        kind = float if field.type is not int else int
        parser.add_argument(flag, dest=field.name, type=kind, default=field.default)
    args: dict[str, Any] = vars(parser.parse_args(argv))
    from benchmarks.load.fleet import run_loop  # aiohttp: help does without

    host, port = args.pop("host"), args.pop("port")
    run_loop(lambda: serve(StubOptions(**args), host, port))
    return 0
