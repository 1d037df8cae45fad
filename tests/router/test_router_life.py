"""Clients, deadlines and the router's own life: leaving, draining, stopping, members, ports."""

import gc
import socket
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from router.http.admission import Admission
from router.http.connection import LimitedProtocol
from router.http.exchange import Exchange
from router.http.garbage import FEW, IDLE_LOOKS, MAX_YOUNG, MIN_YOUNG, USUAL, Collector, is_due
from router.http.table import GENERATING
from router.http.turn import MAX_TURN_EVENTS
from router.openai.body import Prepared
from router.openai.prepare import Preparer
from tests.fault.router_doubles import (
    HANG_S,
    HELLO,
    Ask,
    DecodeDouble,
    Serve,
    Served,
    connected,
    ended,
    failed,
    metric,
    num_live,
    raw_post,
    read_all,
    read_until,
    speak,
    wait_until,
)
from worker.api import Abort, Ack, Error, FinishReason, Member, WorkerStats
from worker.errors import UserError

LENGTH = FinishReason.LENGTH
Ids = tuple[int, ...]


@pytest.fixture
def full(serve: Serve, ask: Ask, ids: Ids) -> Iterator[str]:
    """A router that has all the requests that it may have; they end well."""
    double, url, _ = serve(DecodeDouble(), max_inflight=1)
    first = ask(url)
    item = double.take()
    yield url
    speak(ids)(double, *item)
    assert ended(first) == ("abcdefgh", "stop", None)


def test_too_many_requests_are_429_at_once(full: str) -> None:
    with openai.OpenAI(base_url=f"{full}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="small", prompt="a")
        assert caught.value.code == "busy"
    unread = httpx.post(f"{full}/v1/completions", content=b"{no JSON", timeout=HANG_S)
    assert (unread.status_code, unread.headers["retry-after"]) == (429, "1")
    assert unread.headers["x-request-id"]
    assert metric(full, 'requests_total{model="small",outcome="busy"') == 2
    assert httpx.get(f"{full}/v1/models").status_code == 200
    assert httpx.get(f"{full}/load").json() == {"server_load": 1}


def test_refusals_by_the_head_are_those_of_the_routes(
    full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of other origins get theirs from the routes."""
    late_ones, enter = list[str](), Admission.enter

    def counted(admission: Admission, exchange: Exchange, **how: bool) -> None:
        late_ones.append(exchange.source)
        enter(admission, exchange, **how)

    monkeypatch.setattr(Admission, "enter", counted)
    for path in GENERATING:
        with httpx.Client(timeout=HANG_S, headers={"x-request-id": "me"}) as client:
            early = client.post(full + path, content=b"{no JSON")
            assert client.get(f"{full}/live").status_code == 200  # over the same connection
            late = client.post(full + path, headers={"origin": "http://a"})
        assert early.status_code == late.status_code == 429
        assert early.content == late.content
        assert early.json().get("type") == ("error" if path == "/v1/messages" else None)
        for one in (early, late):
            assert one.headers.pop("server-timing").startswith("total;dur=")
            one.headers.pop("date")
        beside = {name for name, _ in late.headers.items() - early.headers.items()}
        assert all(name.startswith("access-control-") or name == "vary" for name in beside), beside
    assert late_ones == ["127.0.0.1"] * len(GENERATING)


def test_the_body_of_what_was_refused_may_come_later_or_never(full: str) -> None:
    request = raw_post(prompt="a" * 100)
    with connected(full) as client:
        for _ in range(2):
            client.sendall(request[:-50])
            assert read_until(client, b"}}").startswith(b"HTTP/1.1 429 ")
            client.sendall(request[-50:])
        client.sendall(request[:-50])
        assert read_until(client, b"}}").startswith(b"HTTP/1.1 429 ")
    with connected(full) as client:
        client.sendall(raw_post(headers="connection: close\r\n"))
        assert read_all(client).startswith(b"HTTP/1.1 429 ")


@pytest.mark.parametrize("what", ["connect", "send"])
def test_a_turn_of_the_loop_takes_little(served: Served, what: str) -> None:
    """Whoever is here already has its turn between those who come or say something at once."""
    method = {"connect": "connection_made", "send": "data_received"}[what]
    num, loop, usual = 4 * MAX_TURN_EVENTS, served.router.loop, getattr(LimitedProtocol, method)
    assert loop is not None
    held, here = threading.Event(), threading.Event()
    at_turn: Counter[int] = Counter()
    turn = 0

    def count() -> None:
        nonlocal turn
        turn += 1
        if not here.is_set():
            loop.call_soon(count)

    def seen(connection: LimitedProtocol, given: Any) -> None:
        at_turn[turn] += 1
        usual(connection, given)
        if at_turn.total() == num:
            here.set()

    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        clients = [
            stack.enter_context(connected(served.url)) for _ in range(num * (what == "send"))
        ]
        patch.setattr(LimitedProtocol, method, seen)
        loop.call_soon_threadsafe(lambda: held.wait(HANG_S))
        for client in clients:
            client.sendall(b"GET ")
        for _ in range(num - len(clients)):
            stack.enter_context(connected(served.url))
        loop.call_soon_threadsafe(count)
        held.set()
        assert here.wait(HANG_S)
    assert max(at_turn.values()) <= MAX_TURN_EVENTS


def test_few_connections_wait_for_none_of_many(served: Served) -> None:
    """One of another address, the last to be ready, is among the first that are heard."""
    loop, usual, heard = served.router.loop, LimitedProtocol.data_received, list[str]()
    assert loop is not None
    host, port = served.url.removeprefix("http://").split(":")
    sources = [*["127.0.0.2"] * (4 * MAX_TURN_EVENTS), "127.0.0.3"]
    asleep, held, here = (threading.Event() for _ in range(3))

    def sleep() -> None:
        asleep.set()
        held.wait(HANG_S)

    def seen(connection: LimitedProtocol, given: Any) -> None:
        assert connection.client is not None
        heard.append(connection.client[0])
        usual(connection, given)
        if len(heard) == len(sources):
            here.set()

    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        clients = [
            stack.enter_context(socket.create_connection((host, int(port)), HANG_S, (source, 0)))
            for source in sources
        ]
        for client in clients:  # it is accepted
            client.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
            read_until(client, b"live")
        patch.setattr(LimitedProtocol, "data_received", seen)
        loop.call_soon_threadsafe(sleep)
        assert asleep.wait(HANG_S)
        for client in clients:
            client.sendall(b"GET ")
        held.set()
        assert here.wait(HANG_S)
    assert heard.index("127.0.0.3") < 2


def test_full_collections_wait_until_they_hold_few_up(serve: Serve) -> None:
    router = serve(DecodeDouble()).router
    assert gc.get_threshold()[2] > 1 << 20
    router.stop()
    assert gc.get_threshold() == USUAL
    assert [is_due(MIN_YOUNG, num_open) for num_open in (0, FEW, FEW + 1)] == [True, True, False]
    assert is_due(MAX_YOUNG, 4096)
    assert not is_due(MIN_YOUNG - 1, 0)


def test_an_idle_router_collects_once_what_is_old() -> None:
    class Ring:
        def __init__(self) -> None:
            self.own = self

    collector, ring = Collector(), Ring()
    gone = weakref.ref(ring)
    gc.collect()  # it is old from now on
    del ring
    looks = []
    for num_open in (0, 1, *[0] * (IDLE_LOOKS[0] + 1)):
        collector.look(num_open)
        looks.append(gone() is None)
    assert looks == [False] * (IDLE_LOOKS[0] + 1) + [True, True]


@pytest.mark.parametrize("phase", ["waiting", "sent", "started"])
def test_client_that_goes_is_an_abort(serve: Serve, ids: Ids, streamed: bool, phase: str) -> None:
    double, url, router = serve(DecodeDouble(stats=WorkerStats(max_num_reqs=1, num_running=1)))
    with connected(url) as client:
        client.sendall(raw_post(prompt="a", stream=streamed))
        peer, generate = double.take()
        if phase == "waiting":
            double.refuse(peer, generate, retry_after_s=10_000)
            wait_until(lambda: metric(url, "requests_waiting") == 1)
        elif phase == "started":
            double.chunk(peer, generate, ids[:2])
            wait_until(lambda: metric(url, "time_to_first_token_seconds_count") == 1)
    if phase != "waiting":
        abort = double.expect(Abort)
        assert (abort.req_id, abort.dispatch) == (generate.req_id, generate.dispatch)
    wait_until(lambda: router.num_inflight() == 0)
    assert metric(url, 'requests_total{model="small",outcome="abort"') == 1
    assert metric(url, "requests_waiting") == metric(url, "requests_running") == 0


def test_client_that_goes_while_its_body_is_prepared_leaves_nothing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on, prepare = threading.Event(), threading.Event(), Preparer.completion

    def slowly(preparer: Preparer, raw: bytes, own_salt: str) -> Prepared:
        entered.set()
        assert go_on.wait(HANG_S)
        return prepare(preparer, raw, own_salt)

    monkeypatch.setattr(Preparer, "completion", slowly)
    double, url, router = serve(DecodeDouble())
    with connected(url) as client:
        client.sendall(raw_post(prompt="a", n=3, user="x" * 10_000))
        assert entered.wait(HANG_S)
    go_on.set()
    wait_until(lambda: metric(url, 'requests_total{model="small",outcome="abort"') == 3)
    wait_until(lambda: router.num_inflight() == 0)
    aborted = {double.expect(Abort).req_id for _ in range(3)}
    assert aborted == {double.take()[1].req_id for _ in range(3)}
    assert metric(url, "requests_waiting") == metric(url, "requests_running") == 0


@pytest.mark.parametrize("started", [False, True])
def test_deadline_is_a_typed_error_and_an_abort(
    serve: Serve, ask: Ask, ids: Ids, started: bool
) -> None:
    timeout_s = 1.5 if started else 0.3
    double, url, _ = serve(DecodeDouble(), request_timeout_s=timeout_s)
    future = ask(url)
    peer, generate = double.take()
    assert 0 < generate.timeout_s <= timeout_s
    if started:
        double.chunk(peer, generate, ids[:2])
        assert ended(future) == ("ab", None, "timeout")
    else:
        assert failed(future)[:2] == (504, "timeout")
    assert double.expect(Abort).req_id == generate.req_id


@pytest.mark.parametrize(
    ("code", "status"),
    [("worker_lost", 502), ("timeout", 504), ("out_of_pages", 429), ("invalid_value", 400)],
)
def test_error_of_the_worker_reaches_the_client(
    serve: Serve, ask: Ask, ids: Ids, code: str, status: int
) -> None:
    double, url, _ = serve(DecodeDouble())
    for num_tokens in (0, 2):
        future = ask(url)
        peer, generate = double.take()
        if num_tokens:
            double.chunk(peer, generate, ids[:num_tokens])
            wait_until(lambda: metric(url, "time_to_first_token_seconds_count") == 1)
        error, finish = Error(code, "because"), FinishReason.ERROR
        double.chunk(peer, generate, at=num_tokens, finish=finish, error=error)
        if num_tokens:
            assert ended(future)[2] == code
        else:
            *told, headers = failed(future)
            assert told == [status, code]
            assert headers.get("retry-after") == ("1" if status == 429 else None)
        double.expect(Ack)


BROKEN: dict[str, tuple[dict[str, Any], bytes]] = {  # a body, and in what its stream ends
    "messages": ({"messages": HELLO, "max_tokens": 9}, b'event: error\ndata: {"type":"error",'
                 b'"error":{"type":"api_error","message":"broken"}}'),
    "responses": ({"input": "a"},
                  b'"error":{"code":"server_error","message":"broken"}'),
}  # fmt: skip


@pytest.mark.parametrize("path", BROKEN)
def test_a_stream_that_breaks_says_so_in_the_form_of_its_path(
    served: Served, double: DecodeDouble, path: str
) -> None:
    body, last = BROKEN[path]
    with served.connect() as client:
        client.sendall(raw_post(path, **body, stream=True))
        peer, generate = double.take()
        double.chunk(peer, generate, [5])
        read_until(client, b"delta")
        error = Error("internal_error", "broken")
        double.chunk(peer, generate, at=1, finish=FinishReason.ERROR, error=error)
        assert last in read_until(client, b"0\r\n\r\n")


def test_one_failed_choice_ends_the_request_and_aborts_the_others(
    served: Served, double: DecodeDouble, ask: Ask
) -> None:
    future = ask(served.url, prompt=["a", "b"])
    (peer, first), (_, second) = double.take(), double.take()
    error = Error("internal_error", "broken")
    double.chunk(peer, first, finish=FinishReason.ERROR, error=error)
    assert failed(future)[:2] == (500, "internal_error")
    assert double.expect(Abort).req_id == second.req_id
    wait_until(lambda: served.router.num_inflight() == 0)


def test_drain_refuses_new_requests_and_finishes_old_ones(serve: Serve, ask: Ask, ids: Ids) -> None:
    double, url, router = serve(DecodeDouble())
    old = ask(url)
    item = double.take()
    assert router.num_inflight() == 1
    router.drain()
    wait_until(lambda: httpx.get(f"{url}/ready").status_code == 503)
    status, code, headers = failed(ask(url))
    assert (status, code) == (503, "draining")
    assert "retry-after" in headers
    speak(ids)(double, *item)
    assert ended(old) == ("abcdefgh", "stop", None)
    wait_until(lambda: router.num_inflight() == 0)


def test_stop_ends_open_streams_with_an_error_and_leaves_no_thread(
    serve: Serve, ask: Ask, ids: Ids
) -> None:
    before = set(threading.enumerate())
    double, url, router = serve(DecodeDouble())
    ours = {t.name for t in set(threading.enumerate()) - before}
    assert "kvlane-router" in ours
    started, silent = ask(url), ask(url, stream=False)
    first, second = double.take(), double.take()
    double.chunk(*first, ids[:2])
    double.chunk(*second, ids[:2])
    wait_until(lambda: metric(url, "time_to_first_token_seconds_count") == 2)
    router.stop()
    assert ended(started) == ("ab", None, "draining")
    assert failed(silent)[:2] == (503, "draining")
    router.stop()
    router.update_members([])
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    left = {t.name for t in set(threading.enumerate()) - before}
    assert "kvlane-router" not in left


def test_not_ready_while_every_decode_worker_drains(serve: Serve) -> None:
    _, url, _ = serve(DecodeDouble(stats=WorkerStats(max_num_reqs=8, draining=True)))
    ready = httpx.get(f"{url}/ready")
    assert ready.status_code == 503
    assert ready.json()["reason"] == "every decode worker is draining"


def test_a_port_that_another_router_has_is_refused_by_name(serve: Serve, url: str) -> None:
    port = int(url.rsplit(":", 1)[1])
    expected = f"cannot listen on 127.0.0.1:{port}: Address already in use"
    with pytest.raises(UserError, match=expected):
        serve(port=port)


def test_member_that_came_back_is_asked_again(serve: Serve, ask: Ask, ids: Ids) -> None:
    double, url, router = serve(DecodeDouble())
    away = Member("decode-9", "decode", "1", "tcp://127.0.0.1:9")
    router.update_members([double.member, away])
    router.update_members([double.member])
    wait_until(lambda: num_live(url) == 1)
    router.update_members([])
    wait_until(lambda: num_live(url) == 0)
    router.update_members([double.member])
    double.script = speak(ids)
    assert ended(ask(url)) == ("abcdefgh", "stop", None)


def test_a_client_that_does_not_read_is_given_up(serve: Serve, ids: Ids) -> None:
    double, url, router = serve(DecodeDouble(), keep_alive_s=2)
    with connected(url, 4096) as client:
        client.sendall(raw_post(prompt="a", stream=True, n=120, logprobs=20))
        for _ in range(120):
            double.chunk(*double.take(), ids * 30, finish=LENGTH)
        wait_until(lambda: metric(url, "requests_total") == 120)
        assert router.num_inflight() == 1
        wait_until(lambda: router.num_inflight() == 0)
