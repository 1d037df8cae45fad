"""The load harness's client against servers that answer well, badly and not at all."""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.load.client import Client, Target, discover
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


def sends(raw: bytes, piece: int = 64, *, cut: bool = False) -> Handler:
    """Answers with a stream of these bytes, `piece` at a time."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for start in range(0, len(raw), piece):
            await response.write(raw[start : start + piece])
            await asyncio.sleep(0)
        if cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    return handler


says_a = sends(events([chunk(content="a")]))


async def refuses(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "says 429"}}, status=429)


async def silence(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(HANG_S)
    raise AssertionError


def drive(
    sessions: list[Session], handler: Handler, concurrency: int = 0, timeout_s: float = HANG_S
) -> list[Outcome]:
    """What becomes of sessions at a server that answers with `handler`."""

    async def main() -> list[Outcome]:
        found: list[Outcome] = []
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handler)
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(TestServer(app))
            target = Target((str(server.make_url("")).rstrip("/"),), "m", timeout_s=timeout_s)
            client, pacer = Client(target), stack.enter_context(Pacer())
            driver, numbered = Driver(target, client, pacer, found.append), enumerate(sessions)
            client.origin = now()
            if concurrency:
                await driver.closed_loop(list(numbered), concurrency, None)
            else:
                await driver.open_loop(list(numbered))
            assert driver.num_running == 0
            await client.close()
        return found

    return asyncio.run(main())


@pytest.mark.parametrize(("piece", "end", "names"), [
    (1, "\n\n", ("reasoning_content",)), (7, "\r\n\r\n", ("reasoning",)),
    (64, "\n\n", ("reasoning", "reasoning_content")),
])  # fmt: skip
def test_every_piece_of_a_stream_counts(piece: int, end: str, names: tuple[str, ...]) -> None:
    told = [*WHOLE[:2], chunk(**dict.fromkeys(names, "b")), *WHOLE[3:]]
    (outcome,) = drive([Session((TURN,), 0.0)], sends(events(told, end), piece))
    assert (outcome.error, outcome.text, outcome.finish_reason) == ("", "abünï", "stop")
    assert len(outcome.chunk_s) == 3
    assert outcome.sent_s <= outcome.chunk_s[0] <= outcome.chunk_s[-1] <= outcome.end_s
    found = outcome.num_prompt_tokens, outcome.num_output_tokens, outcome.num_cached_tokens
    assert found == (7, 3, 4)
    (without,) = drive([Session((TURN,), 0.0)], sends(events(WHOLE[:-1])))
    assert (without.counted, without.num_output_tokens) == (False, 3), "pieces are counted"


@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
def test_models_are_listed_in_any_type(kind: str) -> None:
    """As of SGLang's router."""

    async def main(text: str) -> dict[str, Any]:
        async def listed(_: web.Request) -> web.Response:
            return web.Response(text=text, content_type=kind)

        app = web.Application()
        app.router.add_get("/v1/models", listed)
        async with TestServer(app) as server:
            return await discover(str(server.make_url("")).rstrip("/"), {})

    assert asyncio.run(main('{"data": [{"id": "m"}]}')) == {"id": "m"}
    for wrong in ("no JSON", "[]", ""):
        with pytest.raises(ConnectionError):
            asyncio.run(main(wrong))


FAILURES: list[tuple[Handler, str, str]] = [
    (refuses, "http_429", "says 429"),
    (sends(events(WHOLE)[:-40]), "cut", "[DONE]"),
    (sends(events(WHOLE)[:200], cut=True), "cut", ""),
    (sends(events([chunk(content="a"), {"error": {"message": "lost"}}])), "stream_error", "lost"),
    (sends(b"data: {nonsense\n\ndata: [DONE]\n\n"), "bad_answer", ""),
    (silence, "timeout", ""),
]


@pytest.mark.parametrize(("handler", "error", "message"), FAILURES, ids=[f[1] for f in FAILURES])
def test_every_failure_has_a_class(handler: Handler, error: str, message: str) -> None:
    timeout_s = 0.05 if handler is silence else HANG_S
    outcome, later = drive([Session((TURN, TURN), 0.0)], handler, timeout_s=timeout_s)
    assert (outcome.error, later.error) == (error, "session_broken")
    assert message in outcome.message
    assert outcome.end_s > 0
    assert not (outcome.chunk_s and error.startswith("http")), "a refusal is no piece"


def test_a_session_carries_its_conversation_and_thinks() -> None:
    bodies: list[list[dict[str, Any]]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append((await request.json())["messages"])
        return await says_a(request)

    turns = (Turn("q1", 5), Turn("q2", 5, think_s=0.05), Turn("q3", 5, think_s=0.05))
    found = drive([Session(turns, 0.02)], handler)
    assert [message["content"] for message in bodies[2]] == ["q1", "a", "q2", "a", "q3"]
    assert [each.turn for each in found] == [0, 1, 2]
    assert found[0].intended_s == 0.02
    for before, after in itertools.pairwise(found):
        assert after.sent_s >= after.intended_s == pytest.approx(before.end_s + 0.05)


def test_a_closed_loop_keeps_its_concurrency() -> None:
    running = most = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return await says_a(request)

    found = drive([Session((TURN,))] * 30, handler, concurrency=4)
    assert sorted(each.session for each in found) == list(range(30))
    assert most == 4


def test_the_pacer_wakes_in_order_and_never_early_though_one_is_cancelled() -> None:
    woken: list[tuple[int, float]] = []

    async def sleeper(pacer: Pacer, number: int, moment: float) -> None:
        await pacer.until(moment)
        woken.append((number, now()))

    async def main() -> list[float]:
        with Pacer() as pacer:
            due = [now() + delay for delay in (0.03, 0.01, -1.0, 0.02, 0.015)]
            *tasks, cancelled = (
                asyncio.create_task(sleeper(pacer, *each)) for each in enumerate(due)
            )
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.gather(*tasks)
            await pacer.until(now() + 0.001)
            return due

    due = asyncio.run(asyncio.wait_for(main(), HANG_S))
    assert [number for number, _ in woken] == [2, 1, 3, 0]
    assert all(moment >= due[number] for number, moment in woken)
