"""The stub server over real sockets: what it promises any HTTP client, and the clock it keeps."""

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.load import stub
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


def request(*headers: str, **body: Any) -> bytes:
    raw = json.dumps(body).encode()
    lines = [f"POST {CHAT} HTTP/1.1", f"Content-Length: {len(raw)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + raw


def told(url: str, raw: bytes) -> bytes:
    """All that comes back until the connection is closed."""
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80), timeout=HANG_S) as peer:
        peer.sendall(raw)
        return b"".join(iter(lambda: peer.recv(65536), b""))


def test_a_whole_answer_both_endpoints_and_refusals(url: str) -> None:
    with httpx.Client(base_url=url) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "stub"
        chat = client.post(CHAT, json={"messages": [{"content": "a"}]}).json()
        assert chat["choices"][0]["message"]["content"] == " word" * OPTIONS.num_tokens
        text = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).json()
        assert text["choices"][0]["text"] == " word word"
        assert client.post("/elsewhere", json={}).status_code == 404
        for bad in (b"{", b'{"max_tokens": -1}', b'{"messages": ["x"]}'):
            assert client.post(CHAT, content=bad).status_code == 400
    for head in ("a", "GET / 1\r\nContent-Length: x", "GET / 1\r\nTransfer-Encoding: a"):
        raw = f"{head}\r\nConnection: close\r\n\r\n".encode()
        assert told(url, raw).startswith(b"HTTP/1.1 400 ")
    failing = stub.Stub(StubOptions(fail_every=3))
    answers = [failing.answer("POST", CHAT, b"{}", 0.0)[0][1] for _ in range(6)]
    assert [each[9:12] for each in answers] == [b"200", b"200", b"503"] * 2


def test_the_pacer_calls_in_order_and_never_early_though_a_call_fails() -> None:
    called: list[tuple[int, float]] = []
    bad: list[Exception] = []

    async def main() -> list[float]:
        asyncio.get_running_loop().set_exception_handler(lambda _, it: bad.append(it["exception"]))
        with Pacer() as pacer:
            pacer.at(now() + 0.015, lambda: 1 // 0)
            due = [now() + delay for delay in (0.03, 0.01, -1.0, 0.02)]
            for number, moment in enumerate(due):
                pacer.at(moment, lambda number=number: called.append((number, now())))
            await pacer.until(max(due))
            await pacer.until(now() + 0.001)
            return due

    due = asyncio.run(asyncio.wait_for(main(), HANG_S))
    assert [number for number, _ in called] == [2, 1, 3, 0]
    assert [type(each) for each in bad] == [ZeroDivisionError]
    assert all(moment >= due[number] for number, moment in called)
