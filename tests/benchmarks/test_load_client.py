"""The load harness's client against servers that answer well, badly and not at all."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.load.client import Client, Conversation, Target, discover
from benchmarks.load.drive import Driver
from benchmarks.load.pacer import Pacer, now
from benchmarks.load.records import Outcome, Session, Turn
from tests.support.patience import HANG_S

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
TURN = Turn("hello", 5)
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


def chunk(**delta: Any) -> dict[str, Any]:
    reason = delta.pop("finish_reason", None)
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


WHOLE = [
    chunk(role="assistant", content=""),
    chunk(content="a"),
    chunk(reasoning_content="b"),
    chunk(tool_calls=[{"index": 0, "function": {"arguments": "ünï"}}]),
    chunk(finish_reason="stop"),
    {"choices": [], "usage": USAGE},
]


def events(bodies: list[dict[str, Any]], end: str = "\n\n") -> bytes:
    lines = [f"data: {json.dumps(body, ensure_ascii=False)}{end}" for body in bodies]
    return "".join([": ping" + end, *lines, f"data: [DONE]{end}"]).encode()


def sends(raw: bytes, *, piece: int = 0, cut: bool = False) -> Handler:
    """Answers with a stream of these bytes, `piece` at a time."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for start in range(0, len(raw), piece or len(raw)):
            await response.write(raw[start : start + (piece or len(raw))])
            await asyncio.sleep(0)
        if cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    return handler


def status(code: int) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": f"says {code}"}}, status=code)

    return handler


async def silence(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    raise AssertionError


async def served(stack: AsyncExitStack, handler: Handler) -> str:
    """The URL of a server that answers with `handler` until the stack closes."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    server = await stack.enter_async_context(TestServer(app))
    return str(server.make_url("")).rstrip("/")


def ask(handler: Handler, *, timeout_s: float = 5.0, **target: Any) -> Outcome:
    """One request to a server that answers with `handler`."""

    async def main() -> Outcome:
        async with AsyncExitStack() as stack:
            wanted = Target((await served(stack, handler),), "m", timeout_s=timeout_s, **target)
            client = Client(wanted)
            outcome = Outcome(0, 0, 0.0)
            body = Conversation("chat").body(TURN, wanted)
            await client.ask(outcome, json.dumps(body).encode())
            await client.close()
            return outcome

    return asyncio.run(main())


@pytest.mark.parametrize(("piece", "end"), [(0, "\n\n"), (1, "\n\n"), (7, "\r\n\r\n")])
def test_every_piece_of_a_stream_counts(piece: int, end: str) -> None:
    outcome = ask(sends(events(WHOLE, end), piece=piece))
    assert outcome.error == ""
    assert outcome.text == "abünï"
    assert len(outcome.chunk_s) == 3
    assert outcome.sent_s <= outcome.chunk_s[0] <= outcome.chunk_s[-1] <= outcome.end_s
    assert outcome.finish_reason == "stop"
    assert outcome.counted
    found = outcome.num_prompt_tokens, outcome.num_output_tokens, outcome.num_cached_tokens
    assert found == (7, 3, 4)


def test_without_usage_pieces_are_counted_and_it_says_so() -> None:
    outcome = ask(sends(events(WHOLE[:-1])))
    assert not outcome.counted
    assert outcome.num_output_tokens == 3


def test_a_whole_answer() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        assert "stream" not in await request.json()
        choice = {"index": 0, "message": {"content": "hi"}, "finish_reason": "length"}
        return web.json_response({"choices": [choice], "usage": USAGE})

    outcome = ask(handler, streamed=False)
    assert (outcome.error, outcome.text, outcome.finish_reason) == ("", "hi", "length")
    assert (outcome.num_output_tokens, len(outcome.chunk_s)) == (3, 1)


FAILURES: list[tuple[Handler, str, str]] = [
    (status(429), "http_429", "says 429"),
    (status(500), "http_500", "says 500"),
    (sends(events(WHOLE)[:-40]), "cut", "[DONE]"),
    (sends(events(WHOLE)[:200], cut=True), "cut", ""),
    (sends(events([chunk(content="a"), {"error": {"message": "lost"}}])), "stream_error", "lost"),
    (sends(b"data: {nonsense\n\ndata: [DONE]\n\n"), "bad_answer", ""),
    (silence, "timeout", ""),
]


@pytest.mark.parametrize(("handler", "error", "message"), FAILURES, ids=[f[1] for f in FAILURES])
def test_every_failure_has_a_class(handler: Handler, error: str, message: str) -> None:
    outcome = ask(handler, timeout_s=0.5)
    assert outcome.error == error
    assert message in outcome.message
    assert outcome.end_s > 0
    assert not (outcome.chunk_s and error.startswith("http")), "a refusal is no piece"


def test_nobody_there() -> None:
    async def main() -> Outcome:
        target = Target(("http://127.0.0.1:9",), "m")
        with pytest.raises(ConnectionError, match="cannot be asked"):
            await discover(target.urls[0], {})
        client, outcome = Client(target), Outcome(0, 0, 0.0)
        await client.ask(outcome, b"{}")
        await client.close()
        return outcome

    assert asyncio.run(main()).error == "connection"


def drive(
    sessions: list[Session], handler: Handler, concurrency: int = 0, num_servers: int = 1
) -> list[Outcome]:
    async def main() -> list[Outcome]:
        found: list[Outcome] = []
        async with AsyncExitStack() as stack:
            urls = [await served(stack, handler) for _ in range(num_servers)]
            target = Target(tuple(urls), "m")
            client = Client(target)
            with Pacer() as pacer:
                driver = Driver(target, client, pacer, found.append)
                numbered = list(enumerate(sessions))
                client.origin = now()
                if concurrency:
                    await driver.closed_loop(numbered, concurrency, None)
                else:
                    await driver.open_loop(numbered)
                assert driver.num_running == 0
            await client.close()
        return found

    return asyncio.run(main())


def test_a_session_carries_its_conversation_and_thinks() -> None:
    bodies: list[list[dict[str, Any]]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append((await request.json())["messages"])
        return await sends(events([chunk(content=f"a{len(bodies)}")]))(request)

    turns = (Turn("q1", 5), Turn("q2", 5, think_s=0.05), Turn("q3", 5, think_s=0.05))
    found = drive([Session(turns, 0.02)], handler)
    assert [message["content"] for message in bodies[2]] == ["q1", "a1", "q2", "a2", "q3"]
    assert [message["role"] for message in bodies[1]] == ["user", "assistant", "user"]
    assert [each.turn for each in found] == [0, 1, 2]
    assert found[0].intended_s == 0.02
    for before, after in itertools.pairwise(found):
        assert after.intended_s == pytest.approx(before.end_s + 0.05)
        assert after.sent_s >= after.intended_s


def test_a_broken_session_accounts_for_its_other_turns() -> None:
    found = drive([Session((TURN, TURN, TURN), 0.0)], status(503))
    assert [each.error for each in found] == ["http_503", "session_broken", "session_broken"]


def test_a_slow_server_does_not_move_the_schedule() -> None:
    """Nobody is answered before all have asked; each counts from the time at which it was due."""
    starts, all_asked, end = [0.01 * n for n in range(20)], asyncio.Barrier(20), now() + HANG_S

    async def handler(request: web.Request) -> web.StreamResponse:
        await asyncio.wait_for(all_asked.wait(), end - now())
        return await sends(events([chunk(content="a")]))(request)

    found = drive([Session((TURN,), start) for start in starts], handler)
    assert sorted(each.intended_s for each in found) == starts
    assert all(not o.error and o.e2e_s >= starts[-1] - o.intended_s for o in found)


def test_a_closed_loop_keeps_its_concurrency() -> None:
    running = most = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return await sends(events([chunk(content="a")]))(request)

    found = drive([Session((TURN,))] * 30, handler, concurrency=4)
    assert sorted(each.session for each in found) == list(range(30))
    assert most == 4


def test_of_several_servers_the_least_loaded_is_asked() -> None:
    asked: list[int] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.url.port is not None
        asked.append(request.url.port)
        slow = len(asked) > 6 and request.url.port == asked[0]
        await asyncio.sleep(0.5 if slow else 0.001)
        return await sends(events([chunk(content="a")]))(request)

    drive([Session((TURN,))] * 6, handler, concurrency=1, num_servers=2)
    assert Counter(asked) == dict.fromkeys(asked, 3), "in turn while nothing runs"
    asked.clear()
    drive([Session((TURN,))] * 20, handler, concurrency=2, num_servers=2)
    assert min(Counter(asked).values()) <= 5, "the slow one has one of two at almost all times"
