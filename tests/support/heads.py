"""HTTP requests that are wrong in some way: in their heads, fields, framing, depth or size.

Bodies are those of `tests.support.mutants`; here everything around them is mutated, too.
"""

import json
import random
from collections.abc import Iterator
from typing import NamedTuple

from tests.support.mutants import mutated, seeds

KEY = b"fuzz"  # an API key, where there are any
HOWS = ("whole", "half", "left", "slow")
PATHS = (
    "/", "/health", "/live", "/ready", "/metrics", "/metrics/targets", "/config", "/docs",
    "/openapi.json", "/dashboard", "/dashboard/data", "/dashboard/own", "/dashboard/playground",
    "/dashboard/static/../../etc/passwd", "/dashboard/static/%2e%2e%2f%2e%2e", "/v1/models",
    "/v1/models/tiny", "/v1/models/%00", "/v1/models/" + "a" * 3000, "/v1/embeddings",
    "/v1/responses/a/b", "/v1/audio/%ff%fe", "/%", "/?a=" + "b" * 5000, "//", "/v1//chat",
    "*", "http://x/v1/models", "/v1/chat/completions/", "/V1/MODELS", "/\xe9",
)  # fmt: skip
METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "get",
           "PRI", "BREW", "")  # fmt: skip
FIELDS: tuple[bytes, ...] = (
    b"content-length: 5", b"content-length: -1", b"content-length: 99999999999999999999",
    b"content-length: 1e3", b"content-length:", b"transfer-encoding: chunked",
    b"transfer-encoding: chunked, chunked", b"transfer-encoding: gzip", b"expect: 100-continue",
    b"transfer-encoding : chunked", b"connection: close", b"connection: keep-alive, upgrade",
    b"upgrade: h2c", b"upgrade: websocket", b"host: y", b"host:", b"content-encoding: gzip",
    b"content-type: text/plain; charset=utf-16", b"accept: application/openmetrics-text",
    b"accept: " + b"*/*," * 500, b"authorization: Bearer \xff\xfe", b"authorization: Basic x",
    b"x-request-id: a b", b"x-request-id: " + b"a" * 200, b"x-request-id: \xff", b"x-api-key: \x01",
    b"idempotency-key: " + b"k" * 300, b"idempotency-key: k", b"idempotency-key: \xff",
    b"traceparent: 00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01", b"traceparent: 00-0-0-0",
    b"origin: http://x", b"access-control-request-method: POST", b"range: bytes=0-1", b"no colon",
    b": no name", b"a\x00b: c", b"a: b\x00c", b" folded: x", b"a: \xf0\x9f\x98\x80",
    b"te: trailers",
    b"cookie: " + b"a=b;" * 1000, b"if-none-match: *", b"x: " + b"y" * 20_000,
)  # fmt: skip


class Request(NamedTuple):
    """how: it is sent whole, or only half of it; its client leaves at once, or sends it in bits.

    is_plain: its head is a right one, so exactly one answer in full has to come.
    """

    kind: str
    path: str
    raw: bytes
    how: str = "whole"
    is_plain: bool = False


def requests(seed: int, model: str) -> Iterator[Request]:
    """An endless row of them, the same for the same seed."""
    rng, originals = random.Random(seed), seeds(model)
    makers = (_body, _body, _body, _field, _field, _page, _framed, _ahead, _junk, _deep)
    while True:
        path, body = rng.choice(originals)
        raw = mutated(rng, body) if rng.random() < 0.7 else json.dumps(body).encode()
        made = rng.choice(makers)(rng, path, raw)
        if rng.random() < 0.12:
            made = made._replace(how=rng.choice(HOWS[1:]))
        yield made


def head(method: str, path: str, *fields: bytes, version: str = "1.1", key: bytes = KEY) -> bytes:
    """Of a request; a host and a key come before these fields."""
    first = f"{method} {path} HTTP/{version}".encode("latin-1")
    lines = [first, b"host: x", b"x-api-key: %b" % key, *fields]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def post(path: str, body: bytes, *fields: bytes, key: bytes = KEY) -> bytes:
    """A right one."""
    sized = (b"content-type: application/json", b"content-length: %d" % len(body))
    return head("POST", path, *sized, *fields, key=key) + body


def chunked(rng: random.Random, path: str, body: bytes) -> bytes:
    """In chunks of random sizes, with trailers at times."""
    parts, at = [head("POST", path, b"transfer-encoding: chunked")], 0
    while at < len(body):
        size = rng.choice([1, 7, 100, 4000])
        piece = body[at : at + size]
        parts.append(b"%x\r\n%b\r\n" % (len(piece), piece))
        at += size
    return b"".join(parts) + b"0\r\n" + rng.choice([b"", b"a: b\r\n", b"host: z\r\n"]) + b"\r\n"


def _body(rng: random.Random, path: str, body: bytes) -> Request:
    return Request("body", path, post(path, body), is_plain=True)


def _field(rng: random.Random, path: str, body: bytes) -> Request:
    given = [rng.choice(FIELDS) for _ in range(rng.choice([1, 1, 2, 30]))]
    return Request("fields", path, post(path, body, *given))


def _page(rng: random.Random, path: str, body: bytes) -> Request:
    chosen, method = rng.choice(PATHS), rng.choice(METHODS)
    version = rng.choice(["1.1"] * 6 + ["1.0", "0.9", "2.0", "9.9", ""])
    given = [rng.choice(FIELDS) for _ in range(rng.choice([0, 0, 1, 2]))]
    return Request("page", chosen[:40], head(method, chosen, *given, version=version))


def _framed(rng: random.Random, path: str, body: bytes) -> Request:
    """A length that is a lie, or chunks that are wrong."""
    how = rng.random()
    if how < 0.4:
        return Request("chunks", path, chunked(rng, path, body))
    if how < 0.7:
        raw = bytearray(chunked(rng, path, body))
        for _ in range(rng.randint(1, 5)):
            raw[rng.randrange(len(raw))] = rng.choice(b"0f\r\n;\x00\xff-+")
        return Request("bad chunks", path, bytes(raw))
    size = max(0, len(body) + rng.choice([-3, -1, 1, 50]))
    return Request("length", path, head("POST", path, b"content-length: %d" % size) + body)


def _ahead(rng: random.Random, path: str, body: bytes) -> Request:
    """Several requests at once, the last one maybe none."""
    page = head("GET", rng.choice(PATHS[:6]))
    raw = b"".join(rng.choice([page, post(path, body)]) for _ in range(rng.randint(2, 8)))
    return Request("ahead", path, raw + rng.choice([b"", b"GET", b"\x00" * 9, b"\r\n\r\n"]))


def _junk(rng: random.Random, path: str, body: bytes) -> Request:
    """Bytes of a right one that are others, or nothing of HTTP at all."""
    how, raw = rng.random(), bytearray(post(path, body))
    if how < 0.7:
        end = raw.index(b"\r\n\r\n")
        for _ in range(rng.randint(1, 6)):
            raw[rng.randrange(end)] = rng.randrange(256)
    elif how < 0.85:
        raw[:0] = rng.choice(
            [b"\r\n", b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
        )
    else:
        raw = bytearray(rng.randbytes(rng.randint(1, 400)))
    return Request("bytes", path, bytes(raw))


def _deep(rng: random.Random, path: str, body: bytes) -> Request:
    """Levels, lists and names beyond all measure, within a body of a few hundred kilobytes."""
    num = rng.choice([500, 5_000, 100_000])
    name = rng.choice(["messages", "prompt", "tools", "guided_json", "logit_bias", "stop", "x"])
    value = rng.choice([
        "[" * num + "]" * num,
        '{"a":' * num + "1" + "}" * num,
        "[" * num,
        "[" + ",".join(["1"] * num) + "]",
        "{" + ",".join(f'"{i}":1' for i in range(num // 10)) + "}",
        "1" * min(num, 5000),
        '"' + "\\u0000" * (num // 10) + '"',
    ])  # fmt: skip
    raw = f'{{"model":"tiny","max_tokens":2,"{name}":{value}}}'.encode()
    return Request("depth", path, post(path, raw), is_plain=True)
