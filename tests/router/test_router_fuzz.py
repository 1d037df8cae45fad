"""Mutated bodies against the whole application: never a 5xx, and nothing is left open.

The application runs in this very loop over a wire that is a decode worker at once; every request
that reaches it must survive the wire's own encoding and fit float32.
"""

import asyncio
import json
import random
import struct
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from starlette.types import Receive, Scope, Send

from router.config import RouterConfig
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.members import Members
from router.dispatch.policy import Fleet, policy
from router.http.admission import Admission
from router.http.responses import Nowhere
from router.http.routes import application
from router.observe.metrics import RouterMetrics
from router.openai.served import Served
from router.show.front import Front
from router.show.siblings import Siblings
from router.text.tokenizer import Text
from tests.fault.router_doubles import QWEN, make_model, scores
from tests.support.mutants import judge, mutants, seeds
from worker.api import (
    MAX_LOGPROBS,
    Chunks,
    FinishReason,
    Generate,
    Member,
    Pong,
    TokenChunk,
    WorkerStats,
    decode,
    encode,
)

NUM_BODIES = 3_000  # a real cluster gets more: tests/fault/fuzz_http.py
NUM_AT_ONCE = 16
MAX_BODY_BYTES = 100_000
WORKER = Member("decode-0", "decode", "x", "tcp://127.0.0.1:1")


class LoopWire:
    """A wire whose other end is a decode worker with room for everything."""

    def __init__(self) -> None:
        self.dispatcher: Dispatcher | None = None
        self.num_generates = 0

    def connect(self, peer: str, address: str, key: str) -> None:
        pass

    def send(self, peer: str, message: Any) -> None:
        assert decode(encode(message)) == message
        if not isinstance(message, Generate):
            return
        self.num_generates += 1
        sampling = message.sampling
        check(sampling.temperature, sampling.top_p, sampling.min_p)
        check(sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
        check(*(value for _, value in sampling.logit_bias))
        assert -1 <= sampling.logprobs <= MAX_LOGPROBS
        assert all(0 <= token < 512 for token in message.tokens)
        num_tokens = min(3, sampling.max_tokens)
        tokens = tuple(random.Random(sampling.seed).choices(range(512), k=num_tokens))
        scored, key = scores(tokens, sampling.logprobs), (message.req_id, message.dispatch)
        of_prompt = scores(message.tokens[1:], sampling.prompt_logprobs)
        chunk = TokenChunk(
            *key,
            message.num_prompt_tokens,
            tokens,
            FinishReason.LENGTH,
            logprobs=scored,
            prompt_logprobs=of_prompt,
        )
        assert self.dispatcher is not None
        asyncio.get_running_loop().call_soon(self.dispatcher.deliver, [(peer, Chunks((chunk,)))])


def check(*values: float) -> None:
    for value in values:
        struct.pack("f", value)  # raises beyond float32
        assert value == value


async def one(client: httpx.AsyncClient, path: str, raw: bytes, counts: Counter[int]) -> None:
    try:
        answer = await asyncio.wait_for(client.post(path, content=raw), 30)
        judge(answer.status_code, answer.content)
    except Exception as error:
        raise AssertionError(f"{path}: {raw[:3000]!r}") from error
    counts[answer.status_code] += 1


def front_of(directory: Path, wire: LoopWire, max_body_bytes: int) -> Front:
    config, members = RouterConfig(max_body_bytes=max_body_bytes), Members()
    metrics = RouterMetrics("small", "router-0")
    dispatcher = Dispatcher(config, Fleet(wire, members, policy(config.policy)), metrics)  # type: ignore[arg-type]
    wire.dispatcher = dispatcher
    dispatcher.update_members([WORKER])
    stats = WorkerStats(max_num_reqs=10_000, num_free_pages=100_000, num_pages=100_000)
    dispatcher.deliver([(WORKER.peer, Pong(WORKER.peer, stats))])
    served = Served("small", Text(directory), config, members, 1024)
    return Front(served, dispatcher, metrics, Siblings(members, WORKER, lambda _: {}), {})


async def rounds(
    directory: Path, bodies: Sequence[tuple[str, bytes]], max_body_bytes: int = MAX_BODY_BYTES
) -> Counter[int]:
    """Ask everything; returns how often each status came."""
    wire = LoopWire()
    front = front_of(directory, wire, max_body_bytes)
    app, counts = application(front, Admission(front)), Counter[int]()

    async def connected(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "outlet": Nowhere()}, receive, send)

    transport = httpx.ASGITransport(connected)
    async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
        for start in range(0, len(bodies), NUM_AT_ONCE):
            batch = bodies[start : start + NUM_AT_ONCE]
            await asyncio.gather(*(one(client, path, raw, counts) for path, raw in batch))
    assert front.num_open == 0
    assert front.metrics.live.running() == front.metrics.live.waiting() == 0
    assert front.metrics.render().decode().count("kvlane") > 0
    assert wire.num_generates > 0
    return counts


def test_no_body_makes_a_5xx_or_leaves_something_open(tmp_path: Path) -> None:
    directory = make_model(tmp_path, QWEN, ("<tool_call>", "</tool_call>"), 1024)
    bodies = list(mutants(NUM_BODIES, seed=7, model="small"))
    bodies += [(path, json.dumps(body).encode()) for path, body in seeds("small")]
    counts = asyncio.run(rounds(directory, bodies))
    assert sum(counts.values()) == len(bodies)
    assert counts[200] > NUM_BODIES / 10
    assert counts[400] > NUM_BODIES / 4


def test_extreme_bodies(tmp_path: Path) -> None:
    directory = make_model(tmp_path)
    raws = [
        b"", b"\x00", b"\xff\xfe{", b"{}" * 3, b"[" * 50_000, b'{"prompt":' * 9_000, b"NaN",
        b"1e999", b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "\\ud800"}',
        b'{"max_tokens": ' + b"9" * 9_000, b'{"prompt": "a", "seed": ' + b"9" * 5_000 + b"}",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}', b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "' + b"a" * 90_000 + b'"}', b'{"prompt": "a", "x": "' + b"y" * 99_000 + b'"}',
        b'{"prompt": "", "messages": []}', b'{"prompt": [[]]}', b'{"prompt": [[], [1]]}',
        b" " * (10 << 20),
    ]  # fmt: skip
    paths = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
    bodies = [(path, raw) for raw in raws for path in paths]
    good = ("/v1/completions", b'{"prompt": "a"}')
    counts = asyncio.run(rounds(directory, [*bodies, good]))
    assert counts[413] == len(paths)
    assert counts.keys() == {200, 400, 413}


def test_ten_megabytes_are_refused_before_they_are_cut_into_tokens(tmp_path: Path) -> None:
    text = b"word " * (2 << 20)
    message = b'{"messages": [{"role": "user", "content": "' + text + b'"}]}'
    prompt = b'{"prompt": "' + text + b'"}'
    bodies = [
        ("/v1/chat/completions", message), ("/v1/completions", prompt), ("/tokenize", prompt),
        ("/v1/completions", b'{"prompt": [' + b"1," * (5 << 20) + b"1]}"), ("/tokenize", message),
    ]  # fmt: skip
    good = ("/v1/completions", b'{"prompt": "a"}')
    directory, began = make_model(tmp_path), time.monotonic()
    counts = asyncio.run(rounds(directory, [*bodies, good], max_body_bytes=32 << 20))
    assert counts == {400: len(bodies), 200: 1}
    assert time.monotonic() - began < 15
