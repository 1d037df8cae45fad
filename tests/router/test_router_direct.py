"""Streams whose text leaves without a task: byte for byte those that take the general way."""

import asyncio
import json
import random
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from router.dispatch.mailbox import Delta
from router.http.connection import Outlet
from router.observe.metrics import ITL_BUCKETS
from router.observe.tally import Tallies
from router.openai.body import Body
from router.text.tokenizer import Text
from tests.fault.router_doubles import HANG_S, Served, connected, raw_post, scores, wait_until
from worker.api import FinishReason, Generate, TokenChunk

ODD = '"\\/\b\f\n\r\t\x00\x1f\x7f\u2028é😀<|im_end|>'
OPTIONS: list[dict[str, Any]] = [
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"n": 3},
    {"n": 2, "stop": ["zzz", "the e"], "stream_options": {"include_usage": True}},
    {"logprobs": True, "top_logprobs": 2},
]
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALL = '<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>'


ROUTER = {"reasoning_parser": "qwen3"}


class Raw:
    """A client that sees every write."""

    def __init__(self, url: str, body: dict[str, Any], *, buffer: int = 0) -> None:
        path = "chat/completions" if "messages" in body else "completions"
        self.sock = connected(url, buffer)
        self.sock.sendall(raw_post(path, **{"stream": True} | body))
        self.data = b""

    def read(self, until: Callable[[bytes], bool]) -> bytes:
        """Read until what has arrived satisfies `until`."""
        while not until(self.data):
            part = self.sock.recv(1 << 16)
            assert part, "closed"
            self.data += part
        return self.data

    def read_more(self, num_bytes: int, seconds: float) -> None:
        """Read so many bytes more, or what comes until nothing has come for so long."""
        size = len(self.data) + num_bytes
        self.sock.settimeout(seconds)
        with suppress(TimeoutError):
            self.read(lambda data: len(data) >= size)
        self.sock.settimeout(HANG_S)

    def body(self) -> bytes:
        """The whole body, without the marks of HTTP's chunks, ids and times."""
        self.read(lambda data: data.endswith(b"0\r\n\r\n"))
        self.sock.close()
        rest, body = self.data.partition(b"\r\n\r\n")[2], b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        body = re.sub(rb'"id":"(cmpl-|chatcmpl-|call_)[0-9a-f]+"', b'"id":""', body)
        return re.sub(rb'"created":\d+', b'"created":0', body)


def pieces_of(tokens: tuple[int, ...], rng: random.Random) -> list[tuple[int, ...]]:
    cuts = sorted(rng.sample(range(1, len(tokens)), min(len(tokens) - 1, rng.randint(2, 12))))
    return [tokens[i:j] for i, j in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]


def spoken(text: Text, rng: random.Random) -> tuple[int, ...]:
    """Words, characters of several tokens, halves of them, escapes, reasoning and calls."""
    words = ["the quick", " brown", ODD, "<think>", "so", "</think>", CALL, " é", "😀 the end", "q"]
    written = "".join(rng.choices(words, k=rng.randint(3, 14)))
    tokens = list(text.encode(written, add_special_tokens=False))
    for _ in range(rng.randint(0, 3)):  # bytes that make no character
        tokens.insert(rng.randrange(len(tokens)), text.encode("é", add_special_tokens=False)[0])
    return tuple(tokens)


def in_step(served: Served, body: dict[str, Any], said: list[Any]) -> bytes:
    """The answer, whose frames are sent one after the other, each once the last was dealt with.

    `said` are the frames: of each choice, in order, the tokens or None.
    """
    double, url, router = served
    client = Raw(url, body)
    taken = [double.take() for _ in range(body.get("n", 1))]
    taken.sort(key=lambda item: item[1].req_id)
    at = [0] * len(taken)
    stale = router.front.metrics.stale_chunks._value

    async def a_few_turns() -> None:
        for _ in range(8):
            await asyncio.sleep(0)

    for frame in [*said, None]:
        chunks = [TokenChunk("nobody's", 1, 0)]  # it is counted when the frame is looked at
        for i, (_, each) in enumerate(taken):
            if frame is None:
                chunks.insert(0, chunk(each, (), at[i], last=True))
            elif frame[i]:
                chunks.insert(0, chunk(each, frame[i], at[i]))
                at[i] += len(frame[i])
        before = stale.get()
        double.send(taken[0][0], *chunks)
        wait_until(lambda before=before: stale.get() > before)
        asyncio.run_coroutine_threadsafe(a_few_turns(), router.loop).result(HANG_S)
    return client.body()


def chunk(each: Generate, tokens: tuple[int, ...], at: int, *, last: bool = False) -> TokenChunk:
    key = each.req_id, each.dispatch, each.num_prompt_tokens + at
    logprobs = scores(tokens, each.sampling.logprobs)
    return TokenChunk(*key, tokens, FinishReason.STOP if last else None, logprobs=logprobs)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["chat", "tools", "completion"])
def test_what_is_written_directly_is_what_the_general_way_writes(
    served: Served, text: Text, options: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{options}{kind}")
    body: dict[str, Any] = {"prompt": "a"} if kind == "completion" else dict(CHAT)
    body |= {"tools": TOOLS} if kind == "tools" else {}
    body |= {k: v for k, v in options.items() if kind != "completion" or k != "top_logprobs"}
    if kind == "completion" and "logprobs" in options:
        body["logprobs"] = 1
    written: list[bytes] = []
    write_now = Outlet.write_now

    def count(outlet: Outlet, part: bytes) -> None:
        written.append(part)
        write_now(outlet, part)

    for _ in range(3):
        choices = [pieces_of(spoken(text, rng), rng) for _ in range(body.get("n", 1))]
        longest = max(map(len, choices))
        said = [[c[i] if i < len(c) else None for c in choices] for i in range(longest)]
        with monkeypatch.context() as patch:
            patch.setattr(Outlet, "write_now", count)
            direct = in_step(served, body, said)
        with monkeypatch.context() as patch:
            patch.setattr(Outlet, "is_open", property(lambda self: False))
            patch.setattr(Outlet, "write_now", lambda *_: pytest.fail("not the general way"))
            general = in_step(served, body, said)
        assert direct == general
        assert direct.endswith(b"data: [DONE]\n\n")
    assert written, "nothing was written directly"


@pytest.mark.parametrize("seed", range(3))
def test_a_client_that_pauses_gets_everything_in_order(
    served: Served, text: Text, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    double, url, router = served
    rng = random.Random(seed)
    words = text.encode("the quick brown fox; " * 40, add_special_tokens=False)
    # Accepted sockets inherit it: the connection is full after little.
    router.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ways = {True: 0, False: 0}
    is_open = Outlet.is_open.fget
    assert is_open is not None

    def look(outlet: Outlet) -> bool:
        found = is_open(outlet)
        ways[found] += 1
        return found

    monkeypatch.setattr(Outlet, "is_open", property(look))
    client = Raw(url, {"prompt": "a", "n": 2}, buffer=4096)
    taken = sorted((double.take() for _ in range(2)), key=lambda item: item[1].req_id)
    said = [list[int](), list[int]()]
    for round_ in range(6):
        num_frames = 0  # sent while the client does not read
        while num_frames < 60 or (round_ == 0 and not ways[False] and num_frames < 5000):
            num_frames += 1
            frame = []
            for (_, each), tokens in zip(taken, said, strict=True):
                part = tuple(rng.choices(words, k=rng.randint(1, 60)))
                frame.append(chunk(each, part, len(tokens)))
                tokens += part
            double.send(taken[0][0], *frame)
            if num_frames > 60:
                time.sleep(0.005)  # a router that lags would be sent megabytes before it is full
        client.read_more(rng.randint(1, 100_000), 0.2)
    ends = [chunk(each, (), len(s), last=True) for (_, each), s in zip(taken, said, strict=True)]
    double.send(taken[0][0], *ends)
    events = [line[6:] for line in client.body().split(b"\n") if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    found, reasons = ["", ""], 0
    for event in map(json.loads, events):
        (choice,) = event["choices"]
        found[choice["index"]] += choice["text"]
        reasons += choice["finish_reason"] is not None
    assert found == [text.decode(tokens) for tokens in said]
    assert reasons == 2
    assert all(ways.values()), ways


def test_head_and_first_chunk_are_one_write(
    served: Served, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    double, url, _ = served
    writes: list[bytes] = []
    write = Outlet.write

    def note(outlet: Outlet, part: bytes) -> None:
        before = outlet._held
        write(outlet, part)
        if not outlet._held:
            writes.append(before + part)

    monkeypatch.setattr(Outlet, "write", note)
    client, hello = Raw(url, dict(CHAT)), text.encode("hello", add_special_tokens=False)
    peer, generate = double.take()
    double.chunk(peer, generate, hello)
    client.read(lambda data: b"hello" in data)
    wait_until(lambda: bool(writes))
    (first,) = writes
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert first.count(b"data: ") == 2  # the role, then the text
    double.chunk(peer, generate, at=len(hello), finish=FinishReason.STOP)
    client.body()


def test_an_answer_that_cannot_be_written_fails_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    double, url, _ = served
    clients = [Raw(url, {"prompt": "a"}) for _ in range(2)]
    taken = [double.take() for _ in clients]
    double.send(taken[0][0], *(chunk(each, (64,), 0) for _, each in taken))
    for client in clients:
        client.read(lambda data: b"data: " in data)
    broken = taken[0][1].req_id.rpartition("-")[0]
    events = Body.events

    def fail(body: Body, deltas: list[Delta]) -> bytes:
        if body.answer_id.endswith(broken):
            raise ZeroDivisionError
        return events(body, deltas)

    monkeypatch.setattr(Body, "events", fail)
    double.send(taken[0][0], *(chunk(each, (65,), 1) for _, each in taken))
    double.send(taken[0][0], chunk(taken[1][1], (66,), 2, last=True))
    bodies = sorted((client.body() for client in clients), key=lambda body: b'"error"' in body)
    assert b'"finish_reason":"stop"' in bodies[0]
    assert b'"code":"internal_error"' in bodies[1]
    assert all(body.endswith(b"data: [DONE]\n\n") for body in bodies)


def test_tallies_are_exposed_as_prometheus_histograms_are() -> None:
    exposed = []
    for ours in (True, False):
        registry = CollectorRegistry()
        name, labels, values = "a_seconds", ("model", "role"), ("m", "r")
        if ours:
            series: Any = Tallies(name, "Text", labels, ITL_BUCKETS, registry).labels(*values)
        else:
            family = Histogram(name, "Text", labels, registry=registry, buckets=ITL_BUCKETS)
            series = family.labels(*values)
        for value in (0.0, 0.002, 0.0021, 0.3, 7.999, 8.0, 8.1, 1e9, *ITL_BUCKETS):
            series.observe(value)
        lines = generate_latest(registry).decode().split("\n")
        exposed.append([line for line in lines if "_created" not in line])
    assert exposed[0] == exposed[1]
