"""What `router.http.connection` adds to httptools, seen through a raw socket."""

import asyncio
import gc
import socket
import struct
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from router.http import connection as connections
from router.http.answer import Answer
from router.http.connection import MAX_HEAD_BYTES
from tests.fault.router_doubles import (
    HANG_S,
    DecodeDouble,
    Served,
    read_all,
    read_until,
    speak,
    wait_until,
)
from worker.api import Abort, FinishReason

BODY = b'{"prompt": "hello", "stream": true}'
HEAD = b"POST /v1/completions HTTP/%b\r\nhost: a\r\n%bcontent-length: %d\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
SCRIPT = speak([65, 66])


@pytest.fixture
def client(served: Served, double: DecodeDouble) -> Iterator[socket.socket]:
    with served.connect() as found:
        yield found


def asked(version: bytes = b"1.1", headers: bytes = b"") -> bytes:
    return HEAD % (version, headers, len(BODY)) + BODY


def connection_of(served: Served, client: socket.socket) -> Any:
    """The server's side."""
    connections = served.router.server.server_state.connections  # type: ignore[union-attr]
    return next(each for each in connections if each.client == client.getsockname())


def turn(served: Served, seconds: float) -> None:
    """Let the server's loop turn for so long."""
    asyncio.run_coroutine_threadsafe(asyncio.sleep(seconds), served.router.loop).result(HANG_S)


def answer_to_endless(client: socket.socket, part: bytes) -> bytes:
    """What the server says while `part` is sent again and again; nothing if it says nothing."""
    parts = part * (1024 // len(part))
    client.settimeout(0.02)
    for _ in range(50 * MAX_HEAD_BYTES // len(parts)):
        try:
            client.sendall(parts)
            return client.recv(4096)
        except TimeoutError:
            continue
        except ConnectionError:
            break
    return b""


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_http_1_0_gets_an_answer_and_its_connection_is_closed(
    client: socket.socket, stream: bytes
) -> None:
    raw = BODY.replace(b"true", stream)
    client.sendall(HEAD % (b"1.0", b"connection: keep-alive\r\n", len(raw)) + raw)
    head, _, body = read_all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b'"choices":' in body


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"TLS/1.0"])
def test_a_request_that_would_rather_speak_another_protocol_is_answered(
    client: socket.socket, protocol: bytes, split: bool
) -> None:
    """Java's HTTP client asks every server without TLS for h2c."""
    headers = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: %b\r\nhttp2-settings: AAM\r\n"
    request = asked(headers=headers % protocol)
    for part in (request[:-20], request[-20:]) if split else (request,):
        client.sendall(part)
    assert read_until(client, b"[DONE]\n\n\r\n0\r\n\r\n").startswith(b"HTTP/1.1 200 OK\r\n")
    client.sendall(HEALTH)
    assert b'{"status":"ok"}' in read_until(client, b"}")


@pytest.mark.parametrize("late", [False, True])
def test_what_is_no_request_is_refused_behind_the_answers_before_it(
    client: socket.socket, double: DecodeDouble, late: bool
) -> None:
    double.script = None
    client.sendall(asked() + asked() + (b"" if late else b"\x00 rubbish\r\n\r\n"))
    peer, generate = double.take()
    double.chunk(peer, generate, [65])
    read_until(client, b"data: ")
    if late:
        client.sendall(b"\x00 rubbish\r\n\r\n")
    double.script = speak([65, 66])
    double.chunk(peer, generate, at=1, finish=FinishReason.STOP)
    rest = read_all(client)
    assert rest.count(b"data: [DONE]") == 2
    assert rest.count(b"HTTP/1.1 200 OK") == 1
    assert rest.rpartition(b"HTTP/1.1 ")[2].startswith(b"400 ")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET /h\xc3\xa9alth HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\nbad header\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nx\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT a:443 HTTP/1.1\r\nhost: a\r\n\r\n",
    ],
)
def test_heads_that_are_wrong_are_400(client: socket.socket, head: bytes) -> None:
    client.sendall(head)
    assert read_all(client).startswith(b"HTTP/1.1 400 ")


def test_requests_sent_ahead_are_answered_in_order_and_no_more_are_read(
    served: Served, client: socket.socket, double: DecodeDouble
) -> None:
    double.script = None
    client.sendall(asked() + HEALTH)
    peer, generate = double.take()
    client.settimeout(0.5)
    with pytest.raises(TimeoutError):  # the socket's buffers are full
        client.sendall(200_000 * HEALTH)
    client.settimeout(HANG_S)
    double.chunk(peer, generate, [65], finish=FinishReason.STOP)
    found = read_until(client, b'{"status":"ok"}')
    assert found.index(b"[DONE]") < found.index(b'{"status":"ok"}')


CHUNKED = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
TOKENIZE = b'{"prompt": "a"}'


def test_trailers_are_no_headers(client: socket.socket) -> None:
    trailer = b"0\r\ncontent-encoding: gzip\r\n\r\n"
    client.sendall(CHUNKED + b"%x\r\n%b\r\n" % (len(TOKENIZE), TOKENIZE) + trailer)
    assert read_until(client, b"}").startswith(b"HTTP/1.1 200 OK")


TRAILERS = CHUNKED + b"1\r\n{\r\n0\r\n"


@pytest.mark.parametrize(
    ("begin", "endless"),
    [(HEALTH[:-2] + b"x: ", b"a"), (TRAILERS, b"a: b\r\n"), (TRAILERS + b"x: ", b"a")],
)
def test_a_head_or_trailers_without_end_are_400(
    client: socket.socket, begin: bytes, endless: bytes
) -> None:
    client.sendall(begin)
    assert answer_to_endless(client, endless).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("request_", "later"),
    [
        (HEALTH, b"\r\n"),
        (b"POST /nowhere HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\n", b"12345"),
    ],
)
def test_an_idle_connection_is_timed_whatever_came_last(
    served: Served, client: socket.socket, request_: bytes, later: bytes
) -> None:
    client.sendall(request_)
    read_until(client, b"}")
    client.sendall(later)
    mine = connection_of(served, client)
    turn(served, 0.1)  # until it has arrived
    assert mine.timeout_keep_alive_task is not None


def test_a_bad_chunk_is_refused_behind_the_answer_before_it(
    client: socket.socket, double: DecodeDouble
) -> None:
    double.script = None
    client.sendall(asked() + CHUNKED + b"nonsense\r\n")
    peer, generate = double.take()
    double.chunk(peer, generate, [65])
    begun = read_until(client, b"data: ")
    double.chunk(peer, generate, at=1, finish=FinishReason.STOP)
    assert b" 400 " not in begun + read_until(client, b"[DONE]\n\n\r\n0\r\n\r\n")


def test_answers_are_freed_without_a_collection(
    client: socket.socket, double: DecodeDouble
) -> None:
    """Else the collector finds thousands of them at a time, and every stream waits for it."""

    def answers() -> list[Answer]:
        return [each for each in gc.get_objects() if type(each) is Answer]

    gc.collect()
    gc.disable()
    try:
        others = answers()  # that other modules' routers and tests hold
        for _ in range(5):
            client.sendall(asked())
            read_until(client, b"[DONE]\n\n\r\n0\r\n\r\n")
        wait_until(lambda: len(answers()) <= len(others) + 1)
    finally:
        gc.enable()


RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close resets


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("sent", ["nothing", "a part", "all, answered", "all", "ahead"])
def test_connections_are_freed_without_a_collection(
    served: Served, client: socket.socket, double: DecodeDouble, sent: str, resets: bool
) -> None:
    """Else those of a flood keep their memory, and what lies between, until one is made. Where the
    client had reset it, uvicorn's timer for the next request kept one for a minute more."""
    gc.collect()
    gc.disable()
    try:
        client.sendall(HEALTH)
        read_until(client, b"}")
        lost = weakref.ref(connection_of(served, client))
        if sent == "all":
            double.script = None
        client.sendall(
            {"nothing": b"", "a part": asked()[:-9], "ahead": 3 * asked()}.get(sent, asked())
        )
        if sent == "all, answered":
            read_until(client, b"[DONE]\n\n\r\n0\r\n\r\n")
        elif sent == "all":
            double.chunk(*double.take(), [65])
            read_until(client, b"data: ")
        if resets:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        client.close()
        wait_until(lambda: lost() is None)
    finally:
        gc.enable()


def test_what_is_written_leaves_at_once(served: Served, client: socket.socket) -> None:
    """Else Nagle's algorithm waits for the client's acknowledgement, which it delays by 40 ms."""
    client.sendall(HEALTH)
    read_until(client, b"}")
    mine = connection_of(served, client).transport.get_extra_info("socket")
    assert mine.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_a_client_that_leaves_after_a_large_body_is_noticed(
    served: Served, client: socket.socket, double: DecodeDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn stops reading when much of a body has come at once."""
    monkeypatch.setattr("uvicorn.protocols.http.httptools_impl.HIGH_WATER_LIMIT", 10)
    double.script = None
    connections = served.router.server.server_state.connections
    client.sendall(asked()[: -len(BODY)])
    wait_until(lambda: any(c.cycle and c.client == client.getsockname() for c in connections))
    turn(served, 0.05)  # until the route waits for the body
    client.sendall(BODY)
    _, generate = double.take()
    client.close()
    while double.expect(Abort).req_id != generate.req_id:
        pass  # of a request of a test before


@pytest.mark.parametrize("rest_s", [0.0, 3600.0])
def test_the_rest_of_a_refused_body_is_read_at_its_own_pace(
    served: Served, client: socket.socket, rest_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REST_S", rest_s)
    monkeypatch.setattr(connections, "PACE", connections.Pace())
    num_bytes = 64 << 20
    client.sendall(HEAD % (b"1.1", b"", num_bytes))
    assert read_until(client, b"}").startswith(b"HTTP/1.1 413 ")
    client.settimeout(1.0 if rest_s else HANG_S)
    try:
        client.sendall(bytes(num_bytes))
    except TimeoutError:
        assert rest_s, "it waits for its turn"
        assert connections.PACE.num_waiting == 1
    else:
        assert not rest_s
        client.sendall(HEALTH)
        assert read_until(client, b"\r\n").startswith(b"HTTP/1.1 200 ")
        wait_until(lambda: connections.PACE.num_waiting == 0)
