"""The front door: methods and paths that mean the same, refused bodies, CORS, slow clients."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.config import load
from router.config import RouterConfig
from router.http.access import origins
from router.http.connection import GRACE_S
from tests.fault.router_doubles import (
    HANG_S,
    DecodeDouble,
    Serve,
    Served,
    asking,
    ended,
    read_all,
    serving,
    speak,
)
from worker.api import FinishReason
from worker.errors import UserError

GETS = ("/", "/docs", "/openapi.json", "/v1/models", "/v1/models/small", "/health", "/live",
        "/ready", "/metrics", "/metrics/targets", "/config")  # fmt: skip
ORIGIN = {"origin": "https://page.example"}
PREFLIGHT = ORIGIN | {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}
LIMIT_S = 0.4
SCRIPT = speak([5])


def post(url: str, content: bytes, **headers: str) -> httpx.Response:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(f"{url}/v1/completions", content=content, headers=headers, timeout=HANG_S)


def test_head_is_served_wherever_get_is(url: str) -> None:
    with httpx.Client(base_url=url) as client:  # one connection: a body would be read as a response
        for path in GETS:
            whole, head = client.get(path), client.head(path)
            assert (head.status_code, head.content) == (whole.status_code, b"") == (200, b""), path
            assert head.headers["content-type"] == whole.headers["content-type"]
            assert set(client.put(path).headers["allow"].split(", ")) == {"GET", "HEAD"}
        wrong = client.get("/v1/completions")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert wrong.json()["error"]["code"] == "method_not_allowed"


def test_a_slash_at_the_end_means_nothing(url: str) -> None:
    assert httpx.get(f"{url}/v1/models/").json() == httpx.get(f"{url}/v1/models").json()
    assert httpx.get(f"{url}/v1/models/small/").json()["id"] == "small"
    response = httpx.post(f"{url}/v1/completions/", json={"prompt": "a"})
    assert response.status_code == 200
    assert httpx.get(f"{url}/health//").status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip", "deflate"])
def test_an_encoded_body_is_415(url: str, encoding: str) -> None:
    response = post(url, b"\x1f\x8b\x08\x00", content_encoding=encoding)
    assert response.status_code == 415
    assert response.headers["accept-encoding"] == "identity"
    assert response.json()["error"]["code"] == "unsupported"
    assert encoding in response.json()["error"]["message"]


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"], ids=["plain", "bom"])
def test_a_body_may_begin_with_a_byte_order_mark(url: str, start: bytes) -> None:
    response = post(url, start + '{"prompt": "é"}'.encode(), content_encoding="identity")
    assert response.status_code == 200


def test_pages_of_any_origin_may_ask_a_keyless_server_on_loopback(url: str) -> None:
    response = httpx.options(f"{url}/v1/chat/completions", headers=PREFLIGHT)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "*"
    assert "authorization" in response.headers["access-control-allow-headers"]
    assert "POST" in response.headers["access-control-allow-methods"]
    for answer in (
        httpx.get(f"{url}/v1/models", headers=ORIGIN),
        httpx.post(f"{url}/v1/completions", json={"prompt": "a", "stream": True}, headers=ORIGIN),
        httpx.post(f"{url}/v1/completions", json={}, headers=ORIGIN),
        httpx.get(f"{url}/nothing", headers=ORIGIN),
    ):
        assert answer.headers["access-control-allow-origin"] == "*"
        exposed = answer.headers["access-control-expose-headers"].lower().split(", ")
        assert {"x-request-id", "server-timing", "retry-after"} <= set(exposed)


def test_pages_of_named_origins_only(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key")
    named = {"cors_origins": ["https://page.example"], "api_key_file": str(keys)}
    _, url, _ = serve(**named)
    allowed = httpx.options(f"{url}/v1/models", headers=PREFLIGHT)  # has no key
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"
    refused = httpx.get(f"{url}/v1/models", headers=ORIGIN)  # and the page may read why
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://page.example"
    other = {"origin": "https://other.example"}
    assert "access-control-allow-origin" not in httpx.get(url, headers=other).headers


@pytest.mark.parametrize(
    ("host", "config", "expected"),
    [
        ("127.0.0.1", {}, ("*",)),
        ("127.1.2.3", {}, ("*",)),
        ("::1", {}, ("*",)),
        ("localhost", {}, ("*",)),
        ("127.0.0.1", {"api_key_file": "keys"}, ()),
        ("127.0.0.1", {"cors_origins": []}, ()),
        ("0.0.0.0", {}, ()),
        ("::", {}, ()),
        ("10.0.0.7", {}, ()),
        ("loopback.example", {}, ()),
        ("0.0.0.0", {"cors_origins": ["*"]}, ("*",)),
    ],
    ids=str,
)
def test_origins_by_default(host: str, config: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert origins(RouterConfig(**config), host) == expected


@pytest.mark.parametrize("wrong", ["https://a.example/", "a.example", "any", ["*", "b"]], ids=str)
def test_what_is_no_origin_is_refused_by_the_field(wrong: Any) -> None:
    """A browser sends none with a slash at its end, so that one would never match."""
    with pytest.raises(UserError) as caught:
        load(None, flags={"router.cors_origins": wrong if isinstance(wrong, list) else [wrong]})
    assert caught.value.param == "router.cors_origins"


@pytest.fixture(scope="module")
def hasty(directory: Path) -> Iterator[Served]:
    """A router that waits for nothing longer than LIMIT_S."""
    double = DecodeDouble(script=speak([5]))
    limits = {"header_timeout_s": LIMIT_S, "body_timeout_s": LIMIT_S}
    with serving(directory, double, **limits) as (router, url):
        yield Served(double, url, router)


def trickle(connection: socket.socket, part: bytes) -> threading.Thread:
    """Send `part` again and again, until the server closes."""

    def run() -> None:
        deadline = time.monotonic() + HANG_S
        with suppress(OSError):
            while time.monotonic() < deadline:
                connection.sendall(part)
                time.sleep(LIMIT_S / 10)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9999\r\n\r\n"
WHOLE = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"


@pytest.mark.parametrize("before", [b"", WHOLE], ids=["new", "kept"])
@pytest.mark.parametrize("part", [b"", b"a: b\r\n"], ids=["half", "trickled"])
def test_a_head_that_does_not_come_is_cut(hasty: Served, before: bytes, part: bytes) -> None:
    connection = hasty.connect()
    connection.sendall(before + b"GET /health HTTP/1.1\r\n")
    thread = trickle(connection, part) if part else None
    answer = read_all(connection)
    if thread is not None:
        thread.join()
    else:
        last = answer.rpartition(b"HTTP/1.1 ")[2]
        assert last.startswith(b"408 ")
        assert json.loads(last.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
    assert answer.count(b"HTTP/1.1 200 ") == (1 if before else 0)


def test_a_connection_that_says_nothing_is_closed_without_an_answer(hasty: Served) -> None:
    assert read_all(hasty.connect()) == b""


@pytest.mark.parametrize("expects", [b"", b"expect: 100-continue\r\n"], ids=["", "100-continue"])
@pytest.mark.parametrize("part", [b"", b" "], ids=["half", "trickled"])
def test_a_body_that_does_not_come_is_408(hasty: Served, part: bytes, expects: bytes) -> None:
    connection = hasty.connect()
    connection.sendall(HEAD.replace(b"host", expects + b"host") + b'{"prompt": ')
    thread = trickle(connection, part) if part else None
    answer = read_all(connection).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    if thread is not None:
        thread.join()
    if answer or not part:  # else the close overtook the answer: bytes of ours were on their way
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"x-request-id: " in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


def test_a_late_body_is_told_so_by_a_router_that_stood_still(hasty: Served) -> None:
    """The route's limit and the connection's are over at once."""
    connection = hasty.connect()
    connection.sendall(HEAD + b'{"prompt": ')
    loop = hasty.router.loop
    assert loop is not None
    begins_s = LIMIT_S / 2  # until then the route has begun to read
    loop.call_soon_threadsafe(loop.call_later, begins_s, time.sleep, LIMIT_S + GRACE_S)
    assert read_all(connection).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("path", ["nothing", "v1/models", "v1/embeddings"])
def test_a_body_that_nobody_wants_is_not_waited_for(hasty: Served, path: str) -> None:
    connection = hasty.connect()
    connection.sendall(HEAD.replace(b"v1/completions", path.encode()))
    thread = trickle(connection, b" ")
    assert read_all(connection).startswith(b"HTTP/1.1 40")
    thread.join()


def test_who_is_only_slow_to_ask_again_or_to_be_answered_is_not_cut(hasty: Served) -> None:
    double, url, _ = hasty
    with httpx.Client(base_url=url) as client, asking() as ask:
        before = client.get("/health").extensions["network_stream"]
        double.script = None
        future = ask(url)
        peer, generate = double.take()
        double.chunk(peer, generate, [5])
        time.sleep(3 * LIMIT_S)
        double.chunk(peer, generate, [6], at=1, finish=FinishReason.STOP)
        assert ended(future)[1] == "stop"
        double.script = speak([5])
        assert client.get("/health").extensions["network_stream"] is before, "a new connection"
