"""Mutated bodies against the whole application: never a 5xx, and nothing is left open.

The application runs in this very loop over a wire that is a decode worker at once; every request
that reaches it must survive the wire's own encoding and fit float32.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.members import Members
from router.metrics import RouterMetrics
from router.policy import policy
from router.routes import application
from router.status import Front
from router.text import Text
from tests.fault.router_doubles import make_model, scores
from tests.unit.test_router_tools import QWEN, TOOLS
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

NUM_BODIES = 22_000
NUM_AT_ONCE = 16
MAX_BODY_BYTES = 100_000
WORKER = Member("decode-0", "decode", "x", "tcp://127.0.0.1:1")

CALL = {"id": "c", "type": "function", "function": {"name": "time", "arguments": "{}"}}
CHAT: dict[str, Any] = {
    "model": "small",
    "messages": [
        {"role": "system", "content": "be good"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
    ],
    "max_completion_tokens": 5,
    "temperature": 0.5,
    "n": 2,
    "logprobs": True,
    "top_logprobs": 2,
    "logit_bias": {"5": 1},
    "presence_penalty": 0.1,
    "chat_template_kwargs": {"enable_thinking": False},
    "stream_options": {"include_usage": True},
    "stream": True,
}
TOOL_CHAT = {
    "messages": [{"role": "user", "content": "hello"}],
    "tools": TOOLS,
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
FORMED = {"messages": [{"role": "user", "content": "hello"}], "response_format": FORM}
COMPLETION: dict[str, Any] = {
    "prompt": ["hello", "a"],
    "max_tokens": 4,
    "min_tokens": 1,
    "best_of": 2,
    "logprobs": 1,
    "stop": ["x"],
    "stop_token_ids": [3],
    "seed": 1,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "frequency_penalty": 1,
    "repetition_penalty": 1.1,
}
ECHO = {"prompt": [[1, 2], [3]], "echo": True, "stream": True, "ignore_eos": True}
REGEX = {"prompt": "a", "guided_regex": "a+", "structured_outputs": {}}
SEEDS: list[tuple[str, dict[str, Any]]] = [
    *[("/v1/chat/completions", body) for body in (CHAT, TOOL_CHAT, FORMED)],
    *[("/v1/completions", body) for body in (COMPLETION, ECHO, REGEX)],
    ("/tokenize", {"messages": CHAT["messages"], "tools": TOOLS, "return_token_strs": True}),
    ("/tokenize", {"prompt": "hello", "add_special_tokens": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]
DEEP: Any = []
for _ in range(60):
    DEEP = [DEEP, {"a": DEEP}] if len(json.dumps(DEEP)) < 2000 else [DEEP]
NASTY: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 128, 511, 512, 2**31, 2**63, -(2**63), 2**64, 10**30,
    10**400, 0.5, -0.0, 1e-300, 1e300, 1e308, -1e308, float("nan"), float("inf"), float("-inf"),
    "", "a", "0", "none", "required", "text", "json_object", "\x00", "\ud800", "😀" * 40,
    "a" * 3000, "{% raise %}", "{{ 7 }}", "<tool_call>", "<think>", "((((", "a{1,99999}",
    "<|im_end|>", "user", "wizard", "image_url", [], [[]], [None], [""], [1], [[1], "a"],
    [[]] * 40, ["a"] * 300, {}, {"": ""}, {"type": "image_url", "image_url": {"url": "x"}},
    {"type": "input_audio"}, {"type": "text"}, {"type": "object", "properties": 3}, {"$ref": "#"},
    {"$ref": "http://x/y"}, {"anyOf": []}, {"enum": []},
    {"type": "function", "function": {"name": "time"}}, DEEP,
]  # fmt: skip
NAMES = [
    *CHAT, *COMPLETION, *ECHO, *REGEX, *TOOL_CHAT, "guided_json", "guided_choice", "guided_grammar",
    "response_format", "max_tokens", "suffix", "include_stop_str_in_output", "unheard_of", "user",
]  # fmt: skip


class LoopWire:
    """A wire whose other end is a decode worker with room for everything."""

    def __init__(self) -> None:
        self.dispatcher: Dispatcher | None = None
        self.num_generates = 0

    def connect(self, peer: str, address: str) -> None:
        pass

    def disconnect(self, peer: str) -> None:
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
        tokens = tuple(
            random.Random(sampling.seed).choices(range(512), k=min(3, sampling.max_tokens))
        )
        scored = scores(tokens, sampling.logprobs)
        chunk = TokenChunk(
            message.req_id,
            message.dispatch,
            message.num_prompt_tokens,
            tokens,
            FinishReason.LENGTH,
            logprobs=scored,
        )
        assert self.dispatcher is not None
        asyncio.get_running_loop().call_soon(self.dispatcher.deliver, [(peer, Chunks((chunk,)))])


def check(*values: float) -> None:
    for value in values:
        struct.pack("f", value)  # raises beyond float32
        assert value == value


def places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every (container, key) in a body."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        found.append((value, key))
        if isinstance(value[key], dict | list):
            places(value[key], found)
    return found


def mutated(rng: random.Random, body: dict[str, Any]) -> bytes:
    """A body with one to three things wrong, in its values or in its bytes."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice([1, 1, 2, 3])):
        kind, where = rng.random(), places(body, [])
        holder, key = rng.choice(where) if where else (body, "a")
        if kind < 0.6 and where:
            holder[key] = copy.deepcopy(rng.choice(NASTY))
        elif kind < 0.75:
            body[rng.choice(NAMES)] = copy.deepcopy(rng.choice(NASTY))
        elif kind < 0.85 and isinstance(holder, dict):
            holder.pop(key, None)
        elif isinstance(holder, list):
            holder.append(copy.deepcopy(rng.choice(NASTY)))
    raw = bytearray(
        json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    )
    if rng.random() < 0.15:
        for _ in range(rng.randint(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
    if rng.random() < 0.05:
        del raw[rng.randrange(len(raw)) :]
    return bytes(raw)


App = Callable[..., Awaitable[None]]


async def ask(app: App, path: str, raw: bytes) -> tuple[int, bytes]:
    """Status and body of a POST."""
    parts: list[dict[str, Any]] = [{"type": "http.request", "body": raw, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return parts.pop() if parts else await asyncio.Future()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "headers": [], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def judge(status: int, found: bytes) -> None:
    if status == 200 and found.startswith((b"data:", b": ping")):
        assert found.endswith(b"data: [DONE]\n\n")
        assert b'"error"' not in found
    elif status == 200:
        json.loads(found, parse_constant=lambda name: 1 / 0)
    else:
        assert 400 <= status < 500
        error = json.loads(found)["error"]
        assert error.keys() == {"message", "type", "param", "code"}


async def one(app: App, path: str, raw: bytes, counts: dict[int, int]) -> None:
    try:
        status, found = await asyncio.wait_for(ask(app, path, raw), 30)
        judge(status, found)
    except Exception as error:
        raise AssertionError(f"{path}: {raw[:3000]!r}") from error
    counts[status] = counts.get(status, 0) + 1


def front_of(directory: Path, wire: LoopWire, max_body_bytes: int) -> Front:
    config, members, metrics = (
        RouterConfig(max_body_bytes=max_body_bytes),
        Members(),
        RouterMetrics("small"),
    )
    dispatcher = Dispatcher(config, wire, members, policy(config.policy), metrics)  # type: ignore[arg-type]
    wire.dispatcher = dispatcher
    dispatcher.update_members([WORKER])
    stats = WorkerStats(max_num_reqs=10_000, num_free_pages=100_000, num_pages=100_000)
    dispatcher.deliver([(WORKER.peer, Pong(WORKER.peer, stats))])
    text = Text(directory)
    return Front(config, text, "small", 1024, dispatcher, members, metrics, {})


async def rounds(
    directory: Path, bodies: Sequence[tuple[str, bytes]], max_body_bytes: int = MAX_BODY_BYTES
) -> dict[int, int]:
    """Ask everything; returns how often each status came."""
    wire = LoopWire()
    front = front_of(directory, wire, max_body_bytes)
    app, counts = application(front), dict[int, int]()
    for start in range(0, len(bodies), NUM_AT_ONCE):
        batch = bodies[start : start + NUM_AT_ONCE]
        await asyncio.gather(*(one(app, path, raw, counts) for path, raw in batch))
    assert front.num_open == 0
    assert front.dispatcher._reqs == {}
    assert front.metrics.render().decode().count("kvlane") > 0
    assert wire.num_generates > 0
    return counts


def test_no_body_makes_a_5xx_or_leaves_something_open(tmp_path: Path) -> None:
    directory = make_model(tmp_path, QWEN, ("<tool_call>", "</tool_call>"), 1024)
    rng = random.Random(7)
    bodies = [(path, mutated(rng, body)) for path, body in rng.choices(SEEDS, k=NUM_BODIES)]
    bodies += [(path, json.dumps(body).encode()) for path, body in SEEDS]
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


def test_ten_megabytes_are_refused_before_they_are_cut_into_tokens(tmp_path: Path) -> None:
    text = b"word " * (2 << 20)
    message = b'{"messages": [{"role": "user", "content": "' + text + b'"}]}'
    prompt = b'{"prompt": "' + text + b'"}'
    bodies = [
        ("/v1/chat/completions", message),
        ("/v1/completions", prompt),
        ("/v1/completions", b'{"prompt": [' + b"1," * (5 << 20) + b"1]}"),
        ("/tokenize", prompt),
        ("/tokenize", message),
    ]
    good = ("/v1/completions", b'{"prompt": "a"}')
    directory, began = make_model(tmp_path), time.monotonic()
    counts = asyncio.run(rounds(directory, [*bodies, good], max_body_bytes=32 << 20))
    assert counts == {400: len(bodies), 200: 1}
    assert time.monotonic() - began < 15
