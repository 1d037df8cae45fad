"""A server whose delays are known: the measure of the measure. `python -m benchmarks.load stub`.

It speaks as much of OpenAI's API as a load client needs. A request's delays come from (seed, its
last prompt) alone, so two clients that send the same requests meet the same server. Every piece
leaves at its due time, counted from the arrival of the request's last byte (of a pipelined request:
from the end of the answer before).

It reads HTTP/1.1 with `Content-Length` off asyncio's streams and makes an answer's bytes before
they are due: every further layer would be a delay that nobody asked for.
"""

import argparse
import asyncio
import gc
import itertools
import random
from collections.abc import Sequence
from functools import cache
from http import HTTPStatus
from typing import Annotated, Any, NamedTuple

import msgspec

from benchmarks.load.pacer import Pacer, now

WORD = " word"
HEAD_END = b"\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


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


Pieces = list[tuple[float, bytes]]  # when each leaves, by the monotonic clock, and its bytes


class Stub:
    """What is answered; one for all connections."""

    def __init__(self, options: StubOptions) -> None:
        self._options = options
        self._indices = itertools.count()
        self._stall = (0.0, 0.0)  # begin and end, monotonic

    def answer(self, method: str, path: str, raw: bytes, arrived: float) -> Pieces:
        """To a request whose last byte arrived at `arrived`."""
        if (method, path) == ("GET", "/v1/models"):
            row = {"id": "stub", "object": "model", "created": 0, "owned_by": "stub"}
            listed = msgspec.json.encode({"object": "list", "data": [row]})
            return [(arrived, _response(200, listed))]
        if method != "POST" or path not in ("/v1/chat/completions", "/v1/completions"):
            return [(arrived, _response(404, _error("no such route", "not_found")))]
        try:
            body = msgspec.json.decode(raw, type=_Body)
        except msgspec.DecodeError as error:
            return [(arrived, _response(400, _error(str(error), "bad_request")))]
        options, index = self._options, next(self._indices)
        if options.stall_s and index == options.stall_after:
            self._stall = arrived, arrived + options.stall_s
        if options.fail_every and index % options.fail_every == options.fail_every - 1:
            return [(arrived, _response(503, _error("as asked", "busy")))]
        num_tokens = body.max_completion_tokens or body.max_tokens or options.num_tokens
        each = delays(options, body.last_prompt)
        due = [arrived + each.ttft_s + i * each.itl_s for i in range(num_tokens)]
        if not body.stream:
            whole = _whole("chat" in path, num_tokens)
            return [(due[-1], _response(200, whole))]
        first, piece, last = _stream("chat" in path, num_tokens)
        pieces = [first, *[piece] * (num_tokens - 2), last] if num_tokens > 1 else [first + last]
        return list(zip(due, pieces, strict=True))

    def leaves(self, due: float) -> float:
        """When what is due at `due` leaves: at the end of the stall if it falls into one."""
        begin, end = self._stall
        return end if begin <= due < end else due


async def converse(
    stub: Stub, pacer: Pacer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Read requests off one connection and answer them one after the other."""
    try:
        while True:
            head = await reader.readuntil(HEAD_END)
            request, *lines = head.decode("latin-1").strip().split("\r\n")
            named = [line.partition(":") for line in lines]
            headers = {name.lower(): value.strip() for name, _, value in named}
            length = headers.get("content-length", "0")
            words = request.split(" ")
            if len(words) != 3 or not length.isdigit() or "transfer-encoding" in headers:
                writer.write(_response(400, _error("not read here", "bad_request")))
                return
            raw = await reader.readexactly(int(length))
            pieces = stub.answer(words[0], words[1].partition("?")[0], raw, now())
            for due, part in pieces:
                while (leaves := stub.leaves(due)) > now():  # a stall may begin meanwhile
                    await pacer.until(leaves)
                writer.write(part)
            if headers.get("connection", "").lower() == "close":
                return
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the client is gone
    finally:
        writer.close()


def _error(message: str, code: str) -> bytes:
    error = {"message": message, "type": "error", "param": None, "code": code}
    return msgspec.json.encode({"error": error})


def _response(status: int, body: bytes) -> bytes:
    length = f"content-length: {len(body)}"
    return _head(status, "content-type: application/json", length) + body


def _head(status: int, *headers: str) -> bytes:
    line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"
    return "\r\n".join([line, *headers, "", ""]).encode()


@cache
def _whole(chat: bool, num_tokens: int) -> bytes:
    said = {"message": {"role": "assistant", "content": WORD * num_tokens, "refusal": None}}
    choice = said if chat else {"text": WORD * num_tokens}
    answer = _object("chat.completion" if chat else "text_completion", choice, "length")
    return msgspec.json.encode(answer | {"usage": _usage(num_tokens)})


@cache
def _stream(chat: bool, num_tokens: int) -> tuple[bytes, bytes, bytes]:
    """First piece, with the headers as from a real server, any one between, last piece and end."""
    kind = "chat.completion.chunk" if chat else "text_completion"
    choice: dict[str, Any] = {"delta": {"content": WORD}} if chat else {"text": WORD}
    end = {"id": "stub", "object": kind, "created": 0, "model": "stub", "choices": []}
    headers = ("content-type: text/event-stream", "cache-control: no-cache")
    head = _head(200, *headers, "transfer-encoding: chunked")
    piece = _chunk(_event(_object(kind, choice, None)))
    usage = _event(end | {"usage": _usage(num_tokens)})
    last = _event(_object(kind, choice, "length")) + usage + b"data: [DONE]\n\n"
    return head + (piece if num_tokens > 1 else b""), piece, _chunk(last) + LAST_CHUNK


def _object(kind: str, choice: dict[str, Any], reason: str | None) -> dict[str, Any]:
    whole = {"index": 0, "finish_reason": reason, "logprobs": None} | choice
    return {"id": "stub", "object": kind, "created": 0, "model": "stub", "choices": [whole]}


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": num_tokens + 1}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def serve(options: StubOptions, host: str, port: int) -> None:
    """Serve until cancelled; says its address on standard output once it listens."""
    stub = Stub(options)
    gc.freeze()  # a collection would be a delay
    with Pacer() as pacer:
        server = await asyncio.start_server(
            lambda reader, writer: converse(stub, pacer, reader, writer), host, port, backlog=1024
        )
        print(f"http://{host}:{server.sockets[0].getsockname()[1]}", flush=True)
        async with server:
            await server.serve_forever()


def main(argv: Sequence[str]) -> int:
    """A server with known delays."""
    parser = argparse.ArgumentParser(prog="kvlane bench stub", description=main.__doc__)
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
