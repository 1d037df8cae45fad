"""API keys: names, limits, expiry, a file that changes while requests run."""

import logging
import os
import time
from concurrent.futures import Future
from pathlib import Path

import httpx
import pytest

import router.http.allowance
from router.errors import ApiError
from router.http.allowance import Keys
from router.http.keys import Key, read_keys
from tests.fault.router_doubles import (
    HELLO,
    Ask,
    DecodeDouble,
    Serve,
    connected,
    read_until,
    speak,
    wait_until,
)
from tests.support.patience import HANG_S
from worker.api import FinishReason
from worker.errors import UserError


def written(path: Path, *lines: str) -> str:
    """The file with these lines; its time differs from the one before."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text("\n".join(lines))
    os.utime(path, ns=(before + 10**9, before + 10**9))
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


class Clock:
    """Time as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(router.http.allowance.time, "monotonic", lambda: self.now)


def refusal(keys: Keys, num_tokens: int = 0) -> tuple[str, float | None]:
    """Code and seconds of the refusal of a request of `a`; ("", None): it may start."""
    try:
        keys.enter("a")
        keys.begin("a", num_tokens)
    except ApiError as error:
        return error.message, error.retry_after_s
    return "", None


def test_a_line_says_what_its_key_may_do(file: Path) -> None:
    written(
        file, "one name=a requests_per_minute=6 tokens_per_minute=70 concurrency=8", "", " two ",
        "three expires=1970-01-02",
    )  # fmt: skip
    one, two, three = read_keys(str(file))
    assert one == Key(b"one", "a", 6, 70, 8)
    assert (two.secret, two.requests_per_minute) == (b"two", 0)
    assert two.name != three.name
    assert b"two" not in two.name.encode()
    assert three.expires_at == 86400


def test_a_key_may_have_caches_of_its_own(file: Path) -> None:
    """Its salt tells nothing of it, and does not change with its name or its limits."""
    written(file, "one cache=own", "two name=b cache=own", "three")
    one, two, three = read_keys(str(file))
    assert len({one.own_salt, two.own_salt, three.own_salt}) == 3
    assert three.own_salt == ""
    assert "two" not in two.own_salt
    written(file, "two name=c concurrency=3 cache=own")
    assert read_keys(str(file))[0].own_salt == two.own_salt


@pytest.mark.parametrize(
    "line",
    [
        "secret concurrency=0",
        "secret colour=red",
        "secret expires=soon",
        "secret name=",
        "secret cache=mine",
    ],
)
def test_a_line_that_says_something_else_is_refused_without_its_key(file: Path, line: str) -> None:
    with pytest.raises(UserError) as caught:
        read_keys(written(file, "good", line))
    assert caught.value.param == "router.api_key_file"
    assert "line 2" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_two_keys_of_one_name_are_refused(file: Path) -> None:
    with pytest.raises(UserError, match="the same name"):
        read_keys(written(file, "one name=a", "two name=a"))


def test_requests_a_minute(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, keys = Clock(monkeypatch), Keys(written(file, "k name=a requests_per_minute=3"))
    assert [refusal(keys)[0] for _ in range(3)] == [""] * 3
    assert refusal(keys) == ("this API key is limited to 3 requests a minute", 20.0)
    clock.now += 20
    assert refusal(keys)[0] == ""
    assert refusal(keys)[0] != ""
    clock.now += 3600  # nobody saves up more than a minute's
    assert [bool(refusal(keys)[0]) for _ in range(4)] == [False, False, False, True]


def test_tokens_a_minute_count_prompts_at_once_and_answers_at_their_end(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, keys = Clock(monkeypatch), Keys(written(file, "k name=a tokens_per_minute=60"))
    assert refusal(keys, 50)[0] == ""
    keys.end("a", 40)  # 30 too many
    assert refusal(keys) == ("this API key is limited to 60 tokens a minute", 30.0)
    clock.now += 31
    assert refusal(keys, 5)[0] == ""


def test_requests_at_a_time(file: Path) -> None:
    keys = Keys(written(file, "k name=a concurrency=2", "other"))
    assert [refusal(keys)[0], refusal(keys)[0]] == ["", ""]
    assert refusal(keys)[0] == "this API key is limited to 2 requests at a time"
    keys.end("a", 5)
    keys.opens("a", -1)
    assert refusal(keys)[0] == ""
    keys.begin(keys.keys[1].name, 10**9)  # it has no limit


@pytest.mark.parametrize("limit", ["concurrency=1", "requests_per_minute=1"])
def test_a_limit_recovers_while_another_one_refuses(
    file: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Whoever tries again and again does not lose the tokens of that time."""
    clock = Clock(monkeypatch)
    keys = Keys(written(file, f"k name=a tokens_per_minute=60 {limit}"))
    assert refusal(keys, 90)[0] == ""  # 30 too many
    for _ in range(59):
        clock.now += 1
        assert "limited to 1 requests" in refusal(keys)[0]
    keys.end("a", 0)
    keys.opens("a", -1)
    clock.now += 2
    assert refusal(keys)[0] == ""


def test_each_router_allows_its_part(file: Path) -> None:
    keys = Keys(written(file, "k name=a concurrency=4 requests_per_minute=60"), num_routers=2)
    assert [bool(refusal(keys)[0]) for _ in range(3)] == [False, False, True]


def test_a_file_that_changes_is_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as once a second; what is unfit changes nothing."""
    clock, keys = Clock(monkeypatch), Keys(written(file, "old name=a"))
    for lines, valid in (
        (["old name=a", "new name=b"], {b"old", b"new"}),
        (["new name=b"], {b"new"}),
        (["new colour=red"], {b"new"}),
        (["last"], {b"last"}),
    ):
        written(file, *lines)
        clock.now += 2
        found = {token for token in (b"old", b"new", b"last") if keys.admits({b"x-api-key": token})}
        assert found == valid, lines


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
def test_a_key_that_has_expired_is_told_so(serve: Serve, file: Path, header: str) -> None:
    path = written(file, "gone expires=2020-01-01", "good name=me")
    _, url, _ = serve(DecodeDouble(script=speak([5])), api_key_file=path)
    scheme = "Bearer " if header == "authorization" else ""
    answers = [
        httpx.get(f"{url}/v1/models", headers={header: f"{scheme}{key}"})
        for key in ("gone", "good", "other")
    ]
    assert [answer.status_code for answer in answers] == [401, 200, 401]
    assert "expired" in answers[0].json()["error"]["message"]


@pytest.mark.parametrize("path", ["tokenize", "v1/chat/completions"])
def test_what_is_encoded_for_one_salt_is_encoded_again_for_another(
    serve: Serve, file: Path, path: str
) -> None:
    keys = written(file, "own cache=own", "other")
    _, url, router = serve(DecodeDouble(script=speak([5])), api_key_file=keys)
    encoder = router._served.text.encoder
    said = [{"role": "user", "content": f"{i} " + "hello " * 60} for i in range(5)]
    for key, salt, knows in (
        ("own", None, False), ("own", None, True), ("other", None, False), ("other", "a", False),
        ("own", "a", False), ("other", "a", True), ("other", None, True),
    ):  # fmt: skip
        before, body = encoder.num_known, {"messages": said, "cache_salt": salt}
        httpx.post(f"{url}/{path}", json=body, headers={"x-api-key": key}, timeout=HANG_S)
        assert (encoder.num_known > before) == knows, (key, salt)


def test_a_key_changes_under_load_and_no_request_fails(
    serve: Serve, ask: Ask, file: Path, ids: tuple[int, ...]
) -> None:
    """New beside old, clients take the new one, the old one goes; who has begun is served."""
    path = written(file, "old name=a concurrency=1")
    double, url, _ = serve(DecodeDouble(), api_key_file=path)

    def allowed(key: str) -> bool:
        headers = {"x-api-key": key}
        return httpx.get(f"{url}/v1/models", headers=headers, timeout=HANG_S).status_code == 200

    begun = ask(url, {"x-api-key": "old"})
    taken = double.take()
    limited = httpx.post(
        f"{url}/v1/chat/completions", json={"messages": HELLO}, headers={"x-api-key": "old"}
    )
    assert limited.status_code == 429
    assert limited.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(limited.headers["retry-after"]) >= 1
    written(file, "old name=a", "new name=b")
    wait_until(lambda: allowed("new"))
    assert allowed("old")
    written(file, "new name=b")
    wait_until(lambda: not allowed("old"))
    speak(ids)(double, *taken)
    assert begun.result().status_code == 200
    second = ask(url, {"x-api-key": "new"})
    speak(ids)(double, *double.take())
    assert second.result().status_code == 200


def test_a_key_at_its_limit_is_told_so_by_the_head_of_a_request(
    serve: Serve, ask: Ask, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Named once in the log, and counted; another key is served meanwhile."""
    caplog.set_level(logging.INFO, "kvlane.router")
    path = written(file, "one name=alice concurrency=1", "two name=bob")
    double, url, _ = serve(DecodeDouble(), api_key_file=path)
    first = ask(url, {"x-api-key": "one"})
    item = double.take()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nx-api-key: one\r\ncontent-length: 9\r\n\r\n"
    )
    for _ in range(3):
        with connected(url) as client:
            client.sendall(head)
            answer = read_until(client, b"}}")
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b'"rate_limit_exceeded"' in answer
    second = ask(url, {"x-api-key": "two"})
    for each in (item, double.take()):
        double.chunk(*each, finish=FinishReason.STOP)
    assert [each.result(HANG_S).status_code for each in (first, second)] == [200, 200]
    told = [record.message for record in caplog.records if "refused" in record.message]
    assert told == ["refused API key alice: it is limited to 1 requests at a time"]
    page = httpx.get(f"{url}/metrics", headers={"x-api-key": "two"}).text
    (line,) = (line for line in page.splitlines() if 'outcome="rate_limit_exceeded"' in line)
    assert line.endswith(" 3.0")


PAGES = (
    "/metrics", "/metrics/targets", "/config", "/dashboard", "/dashboard/data", "/dashboard/own",
    "/dashboard/static/style.css", "/config/", "/load",
)  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "opening"), [(["one", "two"], {"one", "two"}), (["one", "two admin=yes"], {"two"})]
)
def test_operators_pages_are_opened_by_keys(
    serve: Serve, file: Path, lines: list[str], opening: set[str]
) -> None:
    """Of those that say so, or of any; by a browser, too."""
    _, url, _ = serve(DecodeDouble(script=speak([5])), api_key_file=written(file, *lines))
    for path in PAGES:
        shut = httpx.get(url + path)
        assert (shut.status_code, shut.headers["www-authenticate"]) == (401, 'Basic realm="kvlane"')
        assert "digest" not in shut.text
        assert httpx.get(url + path, auth=("me", "three")).status_code == 401
    for key in ("one", "two"):
        for answer in (
            httpx.get(f"{url}/config", auth=("me", key)),
            httpx.get(f"{url}/config", headers={"x-api-key": key}),
            httpx.get(f"{url}/config", headers={"authorization": f"Bearer {key}"}),
        ):
            assert answer.status_code == (200 if key in opening else 403)
            assert ("tcp://" in answer.text) == (key in opening)
        assert httpx.get(f"{url}/v1/models", auth=("me", key)).status_code == 200
    for path in ("/live", "/docs", "/docs/static/style.css"):
        assert httpx.get(f"{url}{path}").status_code == 200
    assert httpx.get(f"{url}/config", headers={"authorization": "Basic no"}).status_code == 401


def test_who_has_no_key_is_counted_and_named_once(
    serve: Serve, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvlane.router")
    _, url, _ = serve(DecodeDouble(script=speak([5])), api_key_file=written(file, "one"))
    for _ in range(5):
        assert httpx.get(f"{url}/v1/models", headers={"x-api-key": "guess"}).status_code == 401
    told = [record.message for record in caplog.records if "refused" in record.message]
    assert told == ["refused 127.0.0.1 for '/v1/models': a valid API key is needed: "
                    "Authorization: Bearer KEY"]  # fmt: skip
    page = httpx.get(f"{url}/metrics", headers={"x-api-key": "one"}).text
    (line,) = (line for line in page.splitlines() if 'outcome="invalid_api_key"' in line)
    assert line.endswith(" 5.0")


def test_operators_pages_may_be_open(serve: Serve, file: Path) -> None:
    options = {"api_key_file": written(file, "one admin=yes"), "admin_access": "open"}
    _, url, _ = serve(DecodeDouble(script=speak([5])), **options)
    for path in PAGES:
        assert httpx.get(url + path).status_code == 200, path
    assert "tcp://" not in httpx.get(f"{url}/config").text, "who has no key learns no addresses"


def test_routers_know_each_other_by_their_keys(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a path, and for some minutes."""
    keys = Keys(written(file, "one", "two admin=yes"))
    word = keys.sibling_word("/metrics")
    assert keys.is_sibling_word(word, "/metrics")
    assert not keys.is_sibling_word(word, "/config")
    assert not Keys(written(file, "one", "three")).is_sibling_word(word, "/metrics")
    padded = f"{int(time.time()):020}" + "0" * 5000  # int() raises for so many digits
    bad = ("", ".", "9" * 5000, "1.é", padded)
    assert not any(keys.is_sibling_word(each, "/metrics") for each in bad)
    later = router.http.allowance.time.time() + router.http.allowance.WORD_S + 2
    monkeypatch.setattr(router.http.allowance.time, "time", lambda: later)
    assert not keys.is_sibling_word(word, "/metrics")


class Operating:
    """Notes orders; the second one cannot be carried out."""

    def __init__(self) -> None:
        self.orders: list[tuple[object, ...]] = []

    def drain(self, name: str, timeout_s: float | None) -> bool:
        self.orders.append(("drain", name, timeout_s))
        return True

    def turn(self, name: str, role: str, timeout_s: float | None) -> None:
        self.orders.append(("turn", name, role, timeout_s))
        raise UserError("nobody would be left to decode")


def test_orders_are_for_keys_that_say_admin(serve: Serve, file: Path) -> None:
    operating = Operating()
    double = DecodeDouble(script=speak([5]))
    keys = written(file, "one", "two admin=yes")
    _, url, _ = serve(double, api_key_file=keys, operator=operating)
    drain, role = ({"name": "decode-0"}, {"name": "decode-0", "role": "prefill", "timeout_s": 3})
    two = {"x-api-key": "two"}
    for headers, status in (({}, 401), ({"x-api-key": "one"}, 403)):
        assert httpx.post(f"{url}/admin/drain", json=drain, headers=headers).status_code == status
    for path, body in (
        ("drain", {}),
        ("drain", drain | {"timeout_s": -1}),
        ("role", drain),
        ("role", role | {"role": "router"}),
        ("drain", drain | {"force": True}),
    ):
        answer = httpx.post(f"{url}/admin/{path}", json=body, headers=two)
        assert answer.status_code == 400, answer.text
    assert not operating.orders
    answer = httpx.post(f"{url}/admin/drain", json=drain, headers=two)
    assert answer.json() == {"name": "decode-0", "finished": True}
    answer = httpx.post(f"{url}/admin/role", json=role, headers=two)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "nobody would be left to decode"
    assert operating.orders == [("drain", "decode-0", None), ("turn", "decode-0", "prefill", 3.0)]


def test_without_keys_nobody_gives_orders(serve: Serve) -> None:
    operating = Operating()
    _, url, _ = serve(DecodeDouble(script=speak([5])), operator=operating)
    answer = httpx.post(f"{url}/admin/drain", json={"name": "decode-0"})
    assert (answer.status_code, operating.orders) == (403, [])
    assert "admin=yes" in answer.json()["error"]["message"]


def test_no_key_gets_all_of_a_routers_room(serve: Serve, ask: Ask, file: Path) -> None:
    """The last eighth is for those that have less than a sixteenth."""
    path = written(file, "one", "two")
    double, url, router = serve(DecodeDouble(), max_inflight=16, api_key_file=path)
    waiting: list[Future[httpx.Response]] = []

    def ask_for(key: str, num: int) -> None:
        waiting.extend([ask(url, {"x-api-key": key}) for _ in range(num)])
        wait_until(lambda: len(router.front.dispatcher._reqs) == len(waiting))

    def refused(key: str, n: int = 1) -> str:
        body = {"prompt": "a", "n": n}
        headers = {"x-api-key": key}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=HANG_S)
        assert answer.status_code == 429
        return answer.json()["error"]["code"]

    assert refused("two", n=15) == "busy"
    ask_for("one", 14)
    assert refused("one") == "busy"
    ask_for("two", 1)
    assert refused("two") == refused("one") == "busy"
    for _ in waiting:
        double.chunk(*double.take(), finish=FinishReason.STOP)
    assert [each.result(HANG_S).status_code for each in waiting] == [200] * 15


def test_a_full_router_tells_so_to_whom_it_knows_alone(file: Path, serve: Serve, ask: Ask) -> None:
    path = written(file, "one name=a", "two expires=1970-01-02")
    double, url, _ = serve(DecodeDouble(), max_inflight=1, api_key_file=path)
    first = ask(url, headers={"x-api-key": "one"})
    item = double.take()
    told = {
        key: httpx.post(f"{url}/v1/completions", headers={"x-api-key": key}, timeout=HANG_S)
        for key in ("one", "two", "three")
    }
    assert {key: each.status_code for key, each in told.items()} == {
        "one": 429, "two": 401, "three": 401,
    }  # fmt: skip
    double.chunk(*item, finish=FinishReason.STOP)
    assert first.result(HANG_S).status_code == 200
