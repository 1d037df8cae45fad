"""Mutated bodies against a router: never a 5xx, and nothing is left open.

No worker is asked for what it cannot compute.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.e2e.raw import Connection
from tests.fault.router_doubles import (
    HANG_S,
    QWEN,
    DecodeDouble,
    Serve,
    make_model,
    metric,
    wait_until,
)
from tests.support.mutants import judge, mutants, seeds
from tests.support.pairwise import whole
from worker.api import MAX_LOGPROBS, FinishReason, Generate, WorkerStats

NUM_BODIES = 3_000 if whole else 800  # a real cluster gets more: tests/fault/fuzz_http.py
NUM_AT_ONCE = 16
MAX_BODY_BYTES = 100_000
ROOM = WorkerStats(max_num_reqs=10_000, num_free_pages=100_000, num_pages=100_000)
MAX_FLOAT32 = 3.4028235e38


def can_be_computed(generate: Generate) -> bool:
    """Whether all values fit a device's types."""
    sampling = generate.sampling
    values = (
        sampling.temperature, sampling.top_p, sampling.min_p, sampling.presence_penalty,
        sampling.frequency_penalty, sampling.repetition_penalty,
        *(value for _, value in sampling.logit_bias),
    )  # fmt: skip
    return (
        all(abs(value) <= MAX_FLOAT32 for value in values)  # no NaN, either
        and -1 <= sampling.logprobs <= MAX_LOGPROBS
        and all(0 <= token < 512 for token in generate.tokens)
    )


async def client(port: int, bodies: Iterator[tuple[str, bytes]], counts: Counter[int]) -> None:
    """Ask for what is left, one after another."""
    connection = Connection(port)
    for path, raw in bodies:
        try:
            await connection.send(path, raw)
            status = await asyncio.wait_for(connection.head(), HANG_S)
            judge(status, await asyncio.wait_for(connection.body(), HANG_S))
        except Exception as error:
            raise AssertionError(f"{path}: {raw[:3000]!r}") from error
        counts[status] += 1
    connection.drop()


async def ask(port: int, bodies: Sequence[tuple[str, bytes]]) -> Counter[int]:
    counts, left = Counter[int](), iter(bodies)
    await asyncio.gather(*(client(port, left, counts) for _ in range(NUM_AT_ONCE)))
    return counts


def rounds(
    serve: Serve,
    directory: Path,
    bodies: Sequence[tuple[str, bytes]],
    max_body_bytes: int = MAX_BODY_BYTES,
) -> Counter[int]:
    """Ask everything; returns how often each status came."""
    wrong: list[Generate] = []

    def answer(double: DecodeDouble, peer: str, generate: Generate) -> None:
        if not can_be_computed(generate):
            wrong.append(generate)
        num_tokens = min(3, generate.sampling.max_tokens)
        tokens = random.Random(generate.sampling.seed).choices(range(512), k=num_tokens)
        double.score(peer, generate)
        double.chunk(peer, generate, tokens, finish=FinishReason.LENGTH)

    double = DecodeDouble(script=answer, stats=ROOM)
    _, url, router = serve(double, directory=directory, max_body_bytes=max_body_bytes)
    counts = asyncio.run(ask(int(url.rpartition(":")[2]), bodies))
    wait_until(lambda: router.num_inflight() == 0)
    assert metric(url, "requests_running") == metric(url, "requests_waiting") == 0
    assert not wrong
    return counts


def test_no_body_makes_a_5xx_or_leaves_something_open(serve: Serve, tmp_path: Path) -> None:
    directory = make_model(tmp_path, QWEN, ("<tool_call>", "</tool_call>"), 1024)
    bodies = list(mutants(NUM_BODIES, seed=7, model="small"))
    bodies += [(path, json.dumps(body).encode()) for path, body in seeds("small")]
    counts = rounds(serve, directory, bodies)
    assert sum(counts.values()) == len(bodies)
    assert counts[200] > NUM_BODIES / 10
    assert counts[400] > NUM_BODIES / 4


def test_extreme_bodies(serve: Serve, tmp_path: Path) -> None:
    directory = make_model(tmp_path)
    raws = [
        b"", b"\x00", b"\xff\xfe{", b"{}" * 3, b"[" * 50_000, b'{"prompt":' * 9_000, b"NaN",
        b"1e999", b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "\\ud800"}',
        b'{"max_tokens": ' + b"9" * 9_000, b'{"prompt": "a", "seed": ' + b"9" * 5_000 + b"}",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}', b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "' + b"a" * 90_000 + b'"}', b'{"prompt": "a", "x": "' + b"y" * 99_000 + b'"}',
        b'{"prompt": "", "messages": []}', b'{"prompt": [[]]}', b'{"prompt": [[], [1]]}',
        b" " * 200_000,
    ]  # fmt: skip
    paths = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
    bodies = [(path, raw) for raw in raws for path in paths]
    good = ("/v1/completions", b'{"prompt": "a"}')
    counts = rounds(serve, directory, [*bodies, good])
    assert counts[413] == len(paths)
    assert counts.keys() == {200, 400, 413}


def test_ten_megabytes_are_refused_before_they_are_cut_into_tokens(
    serve: Serve, tmp_path: Path
) -> None:
    text = b"word " * (2 << 20)
    message = b'{"messages": [{"role": "user", "content": "' + text + b'"}]}'
    prompt = b'{"prompt": "' + text + b'"}'
    bodies = [
        ("/v1/chat/completions", message), ("/v1/completions", prompt), ("/tokenize", prompt),
        ("/v1/completions", b'{"prompt": [' + b"1," * (5 << 20) + b"1]}"), ("/tokenize", message),
    ]  # fmt: skip
    good = ("/v1/completions", b'{"prompt": "a"}')
    directory, began = make_model(tmp_path), time.monotonic()
    counts = rounds(serve, directory, [*bodies, good], max_body_bytes=32 << 20)
    assert counts == {400: len(bodies) - 1, 413: 1, 200: 1}  # of the ids there are too many
    assert time.monotonic() - began < 15
