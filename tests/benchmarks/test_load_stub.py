"""The stub server over real sockets: what it promises any HTTP client, and the clock it keeps."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.load.pacer import Pacer, now
from benchmarks.load.selfcheck import running_stub
from benchmarks.load.stub import StubOptions
from tests.support.patience import HANG_S

CHAT = "/v1/chat/completions"
OPTIONS = StubOptions(ttft_s=0.02, itl_s=0.002, num_tokens=3)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_stub(OPTIONS) as found:
        yield found


def request(path: str = CHAT, *headers: str, **body: Any) -> bytes:
    raw = json.dumps({"messages": [{"role": "user", "content": "hi"}], **body}).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: stub", f"Content-Length: {len(raw)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + raw


def answers(url: str, raw: bytes, num: int) -> list[bytes]:
    """Send `raw` in two halves; what comes back, cut at every end of a chunked answer."""
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80), timeout=HANG_S) as peer:
        peer.sendall(raw[: len(raw) // 2])
        peer.sendall(raw[len(raw) // 2 :])
        found = b""
        while found.count(b"\r\n0\r\n\r\n") < num:
            part = peer.recv(65536)
            assert part, found
            found += part
        return found.split(b"\r\n0\r\n\r\n")[:num]


def test_a_stream_is_headers_pieces_usage_and_an_end(url: str) -> None:
    with (
        httpx.Client(base_url=url) as client,
        client.stream(
            "POST", CHAT, json={"messages": [{"content": "a"}], "stream": True, "max_tokens": 4}
        ) as response,
    ):
        assert response.headers["content-type"] == "text/event-stream"
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    *chunks, usage = (json.loads(line) for line in lines)
    assert [each["choices"][0]["delta"]["content"] for each in chunks] == [" word"] * 4
    assert [each["choices"][0]["finish_reason"] for each in chunks] == [None] * 3 + ["length"]
    assert usage["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_the_shortest_streams_are_whole(url: str, num_tokens: int) -> None:
    (answer,) = answers(url, request(stream=True, max_tokens=num_tokens), 1)
    assert answer.count(b'"content"') == num_tokens
    assert answer.count(b"HTTP/1.1 200 OK") == answer.count(b"[DONE]") == 1


def test_requests_of_one_connection_are_answered_in_turn(url: str) -> None:
    raw = b"".join(request(stream=True, max_tokens=n) for n in (3, 1, 2))
    assert [each.count(b'"content"') for each in answers(url, raw, 3)] == [3, 1, 2]


def test_a_whole_answer_and_both_endpoints(url: str) -> None:
    with httpx.Client(base_url=url) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "stub"
        chat = client.post(CHAT, json={"messages": [{"content": "a"}]}).json()
        assert chat["choices"][0]["message"]["content"] == " word" * OPTIONS.num_tokens
        text = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).json()
        assert text["choices"][0]["text"] == " word word"
        assert client.post("/elsewhere", json={}).status_code == 404
        for bad in (b"{", b'{"max_tokens": -1}', b'{"messages": ["x"]}'):
            assert client.post(CHAT, content=bad).status_code == 400


def test_a_connection_is_closed_when_it_is_asked_to_be(url: str) -> None:
    with httpx.Client(base_url=url) as client:
        whole = client.post(CHAT, json={"messages": [{"content": "a"}]})
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80), timeout=HANG_S) as peer:
        peer.sendall(request(CHAT, "Connection: close"))
        found = b""
        while part := peer.recv(65536):
            found += part
    assert found.endswith(whole.content)


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
    ],
)
def test_what_it_cannot_read_is_refused(url: str, raw: bytes) -> None:
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80), timeout=HANG_S) as peer:
        peer.sendall(raw)
        assert peer.recv(65536).startswith(b"HTTP/1.1 400 ")
        assert not peer.recv(65536)


def test_the_pacer_calls_in_order_and_never_early() -> None:
    called: list[tuple[int, float]] = []

    async def main() -> list[float]:
        with Pacer() as pacer:
            due = [now() + delay for delay in (0.03, 0.01, -1.0, 0.02)]
            for number, moment in enumerate(due):
                pacer.at(moment, lambda number=number: called.append((number, now())))
            await pacer.until(max(due))
            await pacer.until(now() + 0.001)
            return due

    due = asyncio.run(main())
    assert [number for number, _ in called] == [2, 1, 3, 0]
    assert all(moment >= due[number] for number, moment in called)


def test_a_call_that_fails_does_not_stop_the_others() -> None:
    async def main() -> list[str]:
        said: list[str] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: said.append(str(context["exception"])))
        with Pacer() as pacer:
            pacer.at(now() + 0.001, lambda: 1 // 0)
            await pacer.until(now() + 0.01)
        return said

    assert "division" in asyncio.run(main())[0]


def test_a_stall_holds_back_what_waits_when_it_begins() -> None:
    """The first answer's second piece is due half a second into the stall of the second request."""
    options = StubOptions(ttft_s=0.01, itl_s=1.0, stall_after=1, stall_s=1.5, num_tokens=2)

    async def main(url: str) -> list[float]:
        async with httpx.AsyncClient(base_url=url) as client:

            async def last_s(delay_s: float) -> float:
                await asyncio.sleep(delay_s)
                await client.post(CHAT, json={"messages": [{"content": "a"}], "stream": True})
                return now()

            began = now()
            ends = await asyncio.gather(last_s(0.0), last_s(0.5))
            return [end - began for end in ends]

    with running_stub(options) as url:
        first, second = asyncio.run(main(url))
    assert first >= 2.0, "not at 1.01, but at the end of the stall"
    assert second >= 2.0
