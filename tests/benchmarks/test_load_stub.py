"""The stub server over real sockets: what it promises any HTTP client, and the clock it keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from benchmarks.load.pacer import Pacer, now
from benchmarks.load.selfcheck import running_stub
from benchmarks.load.stub import StubOptions

CHAT = "/v1/chat/completions"
OPTIONS = StubOptions(ttft_s=0.02, itl_s=0.002, num_tokens=3)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_stub(OPTIONS) as found:
        yield found


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
