"""What one client does so that others would wait: bounded, told, and never on the router's loop."""

import asyncio
import json
import re
import select
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.config import RouterConfig
from router.dispatch import pool
from router.dispatch.turns import MAX_CLIENTS, Turns
from router.errors import ApiError
from router.http import answer, request_body
from router.http.answer import Answer
from router.http.arrivals import Arrivals
from router.http.request_body import check_values
from router.http.source import Sources
from router.http.starts import MAX_STARTS, Starts
from router.openai import prepare
from router.text.template import ChatTemplate
from router.text.writing import QUICK_CHARS, Slow, TooMuch, quickly
from tests.fault.router_doubles import (
    HELLO,
    DecodeDouble,
    Serve,
    connected,
    make_model,
    read_until,
    speak,
    wait_until,
)
from tests.support import pairwise
from tests.support.heads import head, post
from tests.support.patience import HANG_S
from worker import api
from worker.config import credit

INDENTS = "{% for m in messages %}{{ m.data | tojson(indent=4) }}{% endfor %}"
CHATTY = {
    "a loop": "{% for m in messages %}{% for n in messages %}{{ n.data[0] }}{% endfor %}"
    "{% endfor %}",
    "indents": INDENTS,
    "a macro": "{% macro f(m) %}{% for n in messages %}{{ n.data[0] }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{% set x = f(m) %}{% endfor %}",
    "sums": "{% set s = namespace(t='') %}{% for m in messages %}{% for n in messages %}"
    "{% set s.t = s.t + n.data[0] %}{% endfor %}{% endfor %}",
    "joins": "{% set s = namespace(t='') %}{% for m in messages %}{% for n in messages %}"
    "{% set s.t = s.t ~ n.data[0] %}{% endfor %}{% endfor %}",
}


def deep(levels: int) -> Any:
    inner: Any = ["a" * 100] * 200
    for _ in range(levels):
        inner = [inner]
    return inner


@pytest.mark.parametrize("how", CHATTY)
def test_a_template_is_stopped_while_it_writes(how: str) -> None:
    data = deep(20) if how == "indents" else ["a" * 1000]
    messages = [{"role": "user", "data": data}] * 300
    template = ChatTemplate(CHATTY[how], {}, max_chars=100_000)
    with pytest.raises(TooMuch, match="writes more than 100000 characters"):
        template.render(messages)
    assert template.render(messages[:1]) is not None
    with quickly(), pytest.raises(Slow, match=f"{QUICK_CHARS}"):
        ChatTemplate(CHATTY[how], {}).render(messages)


def test_a_template_is_stopped_when_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.text.writing.MAX_CPU_S", 0.05)
    slow = "{% for i in range(9000) %}{% set x = messages[0].t.split('b') %}{% endfor %}"
    with pytest.raises(TooMuch, match=r"0\.05 s of CPU time"):
        ChatTemplate(slow, {}).render([{"t": "ab" * 10_000}])


def test_what_a_template_refuses_to_write_is_too_long_a_prompt(
    serve: Serve, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Small as it is, it leaves the loop; the context is named, by which clients shorten."""
    served = serve(directory=make_model(tmp_path_factory.mktemp("model"), INDENTS))
    refused = served.refusal("chat/completions", messages=[{**HELLO[0], "data": deep(150)}])
    assert refused["code"] == "context_length_exceeded"
    assert "the chat template writes more than 65536 characters" in refused["message"]


@pytest.mark.parametrize("stretch", [2, 7, request_body.STRETCH])
def test_a_body_may_have_so_many_values(stretch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "STRETCH", stretch)
    texts = [",[{" * 3000, 'a\\"', '"[,']
    check_values(json.dumps([1] * 500 + texts).encode(), 1000)
    long = b'["' + b'\\"' * 2000 + b'", ' + b"1," * 1000
    for raw in (json.dumps([{}] * 600).encode(), long):
        with pytest.raises(ApiError) as caught:
            check_values(raw, 1000)
        assert (caught.value.status, "1000 values" in caught.value.message) == (413, True)


def test_bodies_on_their_way_are_bounded_and_one_client_has_half() -> None:
    arrivals = Arrivals(RouterConfig(max_bodies_mib=4, max_body_bytes=1 << 20))
    first, others = arrivals.begin("a"), [arrivals.begin(name) for name in "bcd"]
    first.takes(2 << 20)
    with pytest.raises(ApiError, match=r"one client's .* 2 MiB at most \(router.max_bodies_mib\)"):
        first.takes(1)
    with pytest.raises(ApiError):
        arrivals.begin("a").expects(1)
    others[0].takes(2 << 20)
    with pytest.raises(ApiError, match="4 MiB at most"):
        others[1].takes(1)
    first.over()
    first.over()
    others[1].takes(1 << 20)
    for each in others:
        each.over()
    assert (arrivals.num, arrivals.num_bytes, arrivals.num_of("b")) == (1, 0, 0)


@pytest.mark.parametrize(
    "path",
    [
        "v1/chat/completions",
        "tokenize",
        "detokenize",
        "v1/messages/count_tokens",
        "v1/responses/input_tokens",
    ],
)
def test_a_key_s_requests_at_a_time_count_from_their_head_on(
    serve: Serve, tmp_path_factory: pytest.TempPathFactory, path: str
) -> None:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("k name=a concurrency=1\nother name=b")
    _, url, _ = serve(api_key_file=str(keys))
    head = f"POST /{path} HTTP/1.1\r\nhost: a\r\nx-api-key: k\r\ncontent-length: 90\r\n\r\n"

    def refused() -> bool:
        return httpx.post(f"{url}/{path}", headers={"x-api-key": "k"}, json={}).status_code == 429

    with connected(url) as client:
        client.sendall(head.encode())
        wait_until(refused)
        other = httpx.post(f"{url}/{path}", headers={"x-api-key": "other"}, json={})
        assert other.status_code == 400
    wait_until(lambda: not refused())


def test_a_body_that_is_too_much_beside_others_is_told_to_come_later(serve: Serve) -> None:
    limits = {"max_bodies_mib": 1, "max_body_bytes": 1 << 20}
    _, url, _ = serve(**limits)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n"
    with connected(url) as client, connected(url) as other:
        client.sendall(head + b" " * 900_000)
        time.sleep(0.2)  # or the second one is there before the first
        other.sendall(head)
        answer = read_until(other, b"max_bodies_mib")
        assert answer.startswith(b"HTTP/1.1 429")
        assert re.search(rb"retry-after: 1\r\n", answer)
    wait_until(lambda: httpx.post(f"{url}/v1/completions", json={}).status_code == 400)


PROXIES = {"trusted_proxies": ("10.0.0.0/8", "fd00::/8")}


@pytest.mark.parametrize(
    ("peer", "headers", "expected"),
    [
        ("203.0.113.7", {}, "203.0.113.7"),
        ("203.0.113.7", {"x-forwarded-for": "198.51.100.1"}, "203.0.113.7"),
        ("10.0.0.1", {}, "10.0.0.1"),
        ("10.0.0.1", {"x-forwarded-for": "6.6.6.6, 198.51.100.1"}, "198.51.100.1"),
        ("10.0.0.1", {"x-forwarded-for": "198.51.100.1, 10.3.3.3"}, "198.51.100.1"),
        ("::ffff:10.0.0.1", {"x-forwarded-for": "198.51.100.1:4711"}, "198.51.100.1"),
        ("10.0.0.1", {"x-forwarded-for": "2001:db8:1:2:3::4"}, "2001:db8:1:2::/64"),
        ("fd00::1", {"forwarded": 'for="[2001:db8:1:2::9]:80";proto=https'}, "2001:db8:1:2::/64"),
        ("10.0.0.1", {"forwarded": "for=6.6.6.6, by=10.0.0.2;FOR=198.51.100.1"}, "198.51.100.1"),
        ("10.0.0.1", {"forwarded": "for=unknown"}, "10.0.0.1"),
        ("10.0.0.1", {"x-forwarded-for": "what, 10.0.0.2"}, "10.0.0.2"),
        ("10.0.0.1", {"x-forwarded-for": ""}, "10.0.0.1"),
        ("10.0.0.1", {"x-forwarded-for": "6.6.6.6", "forwarded": "for=7.7.7.7"}, "10.0.0.1"),
        ("10.0.0.1", {"x-forwarded-for": "6.6.6.6", "forwarded": "for=6.6.6.6"}, "6.6.6.6"),
        ("10.0.0.1", {"x-forwarded-for": ", ".join(["10.9.9.9"] * 500)}, "10.9.9.9"),
        ("", {}, ""),
    ],
)
def test_whom_a_request_counts_for(peer: str, headers: dict[str, str], expected: str) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert Sources(RouterConfig(**PROXIES)).of((peer, 1), raw) == expected


@pytest.mark.parametrize("fair_by", ["key", "address"])
def test_requests_count_for_keys_or_addresses(
    serve: Serve, tmp_path_factory: pytest.TempPathFactory, fair_by: str
) -> None:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("k name=a")
    double, url, router = serve(
        DecodeDouble(), api_key_file=str(keys), fair_by=fair_by, trusted_proxies=["127.0.0.0/8"]
    )
    headers = {"x-api-key": "k", "x-forwarded-for": "198.51.100.1"}
    ask = threading.Thread(
        target=lambda: httpx.post(f"{url}/v1/completions", headers=headers, json={"prompt": "a"})
    )
    ask.start()
    peer, asked = double.take()
    assert router.front is not None
    num_of = router.front.dispatcher.num_of
    own, other = ("a", "198.51.100.1") if fair_by == "key" else ("198.51.100.1", "a")
    assert (num_of(own), num_of(other)) == (1, 0)
    double.chunk(peer, asked, finish=api.FinishReason.STOP)
    ask.join(HANG_S)


def test_sources_that_ask_nothing_are_forgotten() -> None:
    turns: Turns[Any] = Turns()
    turns.runs("busy", 1)
    for i in range(3 * MAX_CLIENTS):
        turns.charge(str(i), i)
    assert len(turns._clients) <= MAX_CLIENTS
    assert turns.num_of("busy") == 1
    assert str(3 * MAX_CLIENTS - 1) in turns._clients


def test_requests_begin_in_turn_between_sources() -> None:
    """Who sends many at once does not go before whoever comes a moment later; few begin a turn."""

    async def run() -> list[tuple[int, str]]:
        starts, begun, number = Starts(), list[tuple[int, str]](), 0

        async def one(source: str) -> None:
            await starts.turn(source)
            begun.append((number, source))

        tasks = [asyncio.create_task(one("many")) for _ in range(100)]
        await asyncio.sleep(0)
        tasks[50].cancel()
        tasks += [asyncio.create_task(one(source)) for source in ("few", "few", "other")]
        while not all(task.done() for task in tasks):
            number += 1
            await asyncio.sleep(0)
        number += 1
        await one("few")  # at once: nobody waits
        return begun

    begun = asyncio.run(run())
    sources = [source for _, source in begun]
    assert Counter(sources) == {"many": 99, "few": 3, "other": 1}
    assert max(Counter(number for number, _ in begun).values()) <= MAX_STARTS
    assert Counter(sources[:10]) == {"many": 7, "few": 2, "other": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"prompt": "a b"}), ("/v1/responses", {"input": "a", "background": True})],
)
def test_a_probe_does_not_wait_for_a_crowd(serve: Serve, path: str, body: Any) -> None:
    """It comes behind 200 requests of another address, and is answered before most of them."""
    served = serve(DecodeDouble(script=speak([5])))
    port = int(served.url.rpartition(":")[2])
    raw, probe = post(path, json.dumps(body).encode()), head("GET", "/live")
    gate, is_answered, seen = (threading.Event() for _ in range(3))
    with ExitStack() as stack:
        stack.callback(seen.set)
        mine, *crowd = (
            stack.enter_context(socket.create_connection(("127.0.0.1", port), HANG_S, (source, 0)))
            for source in ["127.0.0.1", *["127.0.0.2"] * 200]
        )
        mine.sendall(probe)
        read_until(mine, b"live")
        loop = served.router.loop
        assert loop is not None

        def look() -> None:
            if select.select([mine], [], [], 0)[0]:
                is_answered.set()
                seen.wait()
            else:
                loop.call_soon(look)

        loop.call_soon_threadsafe(gate.wait)  # all come while it stands still
        for one in crowd:
            one.sendall(raw)
        mine.sendall(probe)
        loop.call_soon_threadsafe(look)
        gate.set()
        assert is_answered.wait(HANG_S)
        assert len(select.select(crowd, [], [], 0)[0]) < 60
        seen.set()
        read_until(mine, b"live")
        wait_until(lambda: len(select.select(crowd, [], [], HANG_S)[0]) == len(crowd))


@pytest.mark.parametrize(("most", "first"), [(1, "one three two"), (2, "much one two")])
def test_threads_go_round_between_sources(
    most: int, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks much leaves a thread to others, and waits for its turn."""
    monkeypatch.setattr(pool, "MAX_OWN", most)
    go, begun = threading.Event(), list[str]()

    def work(name: str) -> str:
        begun.append(name)
        assert go.wait(HANG_S)
        return name

    async def main() -> list[str]:
        own = pool.Pool()
        names = [*["much"] * 6, "one", "two", "three"]
        tasks = [asyncio.create_task(own.run(n, lambda n=n: work(n))) for n in names]
        await asyncio.to_thread(wait_until, lambda: len(begun) == pool.NUM_THREADS)
        assert sorted(begun) == ["much", *first.split()]
        go.set()
        return list(await asyncio.gather(*tasks))

    assert asyncio.run(main()) == [*["much"] * 6, "one", "two", "three"]
    assert "three" in begun[:6]


class Panic(BaseException):
    """As what a library in Rust raises."""


def test_a_thread_outlives_its_work_and_begins_what_is_wanted_alone() -> None:
    begun, go = list[str](), threading.Event()

    def work(name: str, error: type[BaseException] | None = None) -> None:
        begun.append(name)
        assert go.wait(HANG_S)
        if error is not None:
            raise error(name)

    async def main() -> None:
        own = pool.Pool()
        panics = [asyncio.create_task(own.run(name, partial(work, name, Panic))) for name in "abcd"]
        await asyncio.to_thread(wait_until, lambda: len(begun) == pool.NUM_THREADS)
        left, last = (asyncio.create_task(own.run("a", partial(work, n))) for n in ("left", "last"))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.sleep(0)
        go.set()
        for panic in panics:
            with pytest.raises(Panic):
                await panic
        await asyncio.wait_for(last, HANG_S)

    asyncio.run(main())
    assert begun[-1] == "last"
    assert len(begun) == pool.NUM_THREADS + 1


def background(served: Any, **how: Any) -> httpx.Response:
    return served.post("responses", input="a", background=True, **how)


def test_a_client_s_responses_in_the_background_are_bounded(serve: Serve) -> None:
    served = serve(DecodeDouble(), max_inflight=128)
    first, second, third = (background(served) for _ in range(3))
    assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
    assert "2 responses in the background" in third.json()["error"]["message"]
    assert third.headers["retry-after"] == "5"
    served.post(f"responses/{first.json()['id']}/cancel")
    wait_until(lambda: background(served).status_code == 200)


def test_a_prompt_of_many_choices_is_scored_and_charged_once(
    serve: Serve, text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And written once; what is long leaves in parts."""
    written, parts, of_prompt, write = list[int](), list[int](), prepare.of_prompt, Answer._write

    def counted(scored: Any, **how: Any) -> Any:
        written.append(len(scored))
        return of_prompt(scored, **how)

    async def sized(answer: Answer, send: Any, body: bytes, *, more: bool = True) -> None:
        parts.append(len(body))
        await write(answer, send, body, more=more)

    monkeypatch.setattr(prepare, "of_prompt", counted)
    monkeypatch.setattr(answer, "PART_BYTES", 100)
    monkeypatch.setattr(Answer, "_write", sized)
    served = serve(DecodeDouble())
    tokens = text.encode("ab", add_special_tokens=False)
    served.double.script = speak(tokens, kept=True, finish=api.FinishReason.STOP)
    body = {"prompt": "hello there", "n": 3, "prompt_logprobs": 1, "max_tokens": 9}
    choices = served.post("completions", **body).json()["choices"]
    assert len({json.dumps(choice["prompt_logprobs"]) for choice in choices}) == 1
    assert len(choices[0]["prompt_logprobs"]) > 1
    assert len(written) == 1
    assert len(parts) > 5
    assert set(parts[:-1]) == {100}
    asked = [served.double.take()[1] for _ in choices]
    assert sorted(each.sampling.prompt_logprobs for each in asked) == [-1, -1, 1]


LARK = "start: /[a-z ]{1,9}/\n" + "// a comment that is long\n" * 2_000


def test_a_grammar_is_sent_to_a_worker_once(serve: Serve, text: Any) -> None:
    """For all choices, also of other requests; to the one that goes on with them once more."""
    ends = speak(text.encode("ab", add_special_tokens=False), kept=True)
    first = DecodeDouble("decode-0")
    _, url, router = serve(first)
    body = {"prompt": "a", "n": 16, "max_tokens": 9, "guided_grammar": LARK}
    with ThreadPoolExecutor(2) as threads:
        post = partial(httpx.post, f"{url}/v1/completions", timeout=HANG_S)
        futures = [threads.submit(post, json=body) for _ in range(2)]
        grammars = {first.take()[1].sampling.grammar for _ in range(8)}
        second = DecodeDouble("decode-1", script=ends, stats=first.stats)
        router.update_members([second.member])
        first.die()
        assert [future.result(HANG_S).status_code for future in futures] == [200, 200]
    grammars |= {second.take()[1].sampling.grammar for _ in range(32)}
    assert len(grammars) == 1
    for double in (first, second):
        assert max(double.frame_bytes) > len(LARK) > sum(sorted(double.frame_bytes)[:-1])
    second.die()


NUM, LONG = (80, 128_000) if pairwise.whole else (30, 30_000)


def test_a_worker_dies_with_many_long_prompts(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are more than its successor may be told at once: they wait here, and no link is cut."""
    if not pairwise.whole:
        monkeypatch.setattr(credit, "MAX_UNITS", 1000)
        monkeypatch.setattr(credit, "UNITS_PER_S", 2000)
    directory = make_model(tmp_path / "model", max_len=LONG + 99)
    fields = json.loads((directory / "config.json").read_text()) | {"vocab_size": 1 << 18}
    (directory / "config.json").write_text(json.dumps(fields))
    stats = api.WorkerStats(max_num_reqs=NUM, num_free_pages=10**6, num_pages=10**6)
    first = DecodeDouble("decode-0", stats=stats)
    _, url, router = serve(first, directory=directory)
    bodies = [{"prompt": [100_000 + i] * LONG, "max_tokens": 1} for i in range(NUM)]
    with ThreadPoolExecutor(NUM) as threads:
        post = partial(httpx.post, f"{url}/v1/completions", timeout=HANG_S)
        futures = [threads.submit(post, json=body) for body in bodies]
        for _ in bodies:
            first.take()
        script = speak([5], finish=api.FinishReason.LENGTH)
        second = DecodeDouble("decode-1", script=script, stats=stats)
        router.update_members([second.member])
        first.die()
        assert [future.result(HANG_S).status_code for future in futures] == [200] * NUM
    assert second._wire.refusals.num_messages == first._wire.refusals.num_messages == 0
    second.die()
