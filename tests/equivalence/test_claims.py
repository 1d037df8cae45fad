"""A client that asks again with its idempotency key gets the answer that has begun, wherever.

Two routers over real workers. The law: the answer is the undisturbed one, and its tokens have been
computed once; what nobody asks for again is given back.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

import router.dispatch.claims
import router.http.api
import worker.requests.kept
from router.dispatch.dispatcher import Dispatcher
from router.http.app import RouterServer
from tests.equivalence.test_failover import BODIES, QUESTION, Losing, change, near
from tests.fault.router_doubles import Served, events, routed, told_by
from tests.support.engines import Running, running, value
from tests.support.pairwise import one_in, whole
from tests.support.patience import HANG_S, until
from tests.support.shallow import shallow
from worker.requests.kept import KeptAnswers
from worker.wire import _Links

NUM_TOKENS = 96
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
WAYS = ["client gone", "router stops", "router killed", "router hangs", "ended", "resumed before"]
CASES = [(way, kind) for way in WAYS for kind in BODIES]
if not whole:
    CASES = [("router killed", "choices")]


@dataclass
class Pair:
    """Two routers over the same workers; the first may not live through a test."""

    cluster: Running
    stack: ExitStack

    def router(self) -> tuple[RouterServer, Served]:
        made, url = self.stack.enter_context(routed(shallow(), self.cluster.members))
        return made, Served(None, url, made)  # type: ignore[arg-type]

    @property
    def num_drawn(self) -> float:
        """Tokens that decode workers have drawn, preemption and padding apart."""
        return sum(
            value(each.engine.metrics.generated_tokens) for each in self.cluster.workers.values()
        )

    @property
    def kept(self) -> list[KeptAnswers]:
        """Of the decode workers."""
        workers = self.cluster.workers
        return [each.loop.requests.kept for name, each in workers.items() if "decode" in name]

    def wait_idle(self) -> None:
        self.cluster.wait_idle()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Running]:
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(shallow()), "dtype": "float32", "max_model_len": 256},
        "engine": {"threads": 1, "max_num_reqs": 8, "num_pages": 200, "strict": True},
    }
    with running(sections, num_decode=2) as made:
        yield made


@pytest.fixture
def pair(cluster: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(router.dispatch.claims, "CLAIM_S", HANG_S)  # a busy worker has time
    with ExitStack() as stack:
        yield Pair(cluster, stack)


def body_of(kind: str, **more: Any) -> dict[str, Any]:
    return {"messages": QUESTION, "max_tokens": NUM_TOKENS} | BODIES[kind] | more


def asked(served: Served, body: dict[str, Any], key: str = "") -> tuple[Any, bool]:
    """Choices and usage of a stream, and whether it had been asked before."""
    headers = {"idempotency-key": key} if key else {}
    url = f"{served.url}/v1/chat/completions"
    response = httpx.post(url, json=body | STREAM, headers=headers, timeout=HANG_S)
    choices, usage = told_by(response, streamed=True)
    counts = usage["prompt_tokens"], usage["completion_tokens"]
    return (near(choices), counts), "idempotent-replayed" in response.headers


def begin(served: Served, body: dict[str, Any], key: str) -> None:
    """Ask for a stream, and leave after its first events."""
    headers = {"idempotency-key": key}
    url = f"{served.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body | STREAM, headers=headers, timeout=HANG_S) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)


def begin_in(
    way: str, pair: Pair, body: dict[str, Any], key: str, patch: pytest.MonkeyPatch
) -> None:
    """Ask for a request at a router of its own, and have that end in this way."""
    first, served = pair.router()
    if way == "ended":
        asked(served, body, key)
        return
    if way == "resumed before":
        losing = Losing(patch)
        losing.at = 2
    if way in ("router killed", "router hangs"):  # nobody is told anything
        patch.setattr(Dispatcher, "give_up", lambda *_, **__: None)
    if way == "router killed":
        patch.setattr(_Links, "part", _Links.forget)
    begin(served, body, key)
    if way in ("router stops", "router killed"):
        first.stop()
    patch.undo()
    patch.setattr(router.dispatch.claims, "CLAIM_S", HANG_S)


@pytest.mark.parametrize(("way", "kind"), CASES)
def test_who_asks_again_gets_the_answer_that_has_begun(
    pair: Pair, way: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, other = pair.router()
    body, key = body_of(kind), f"{way} {kind}"
    expected, _ = asked(other, body)
    pair.wait_idle()
    before = pair.num_drawn
    begin_in(way, pair, body, key, monkeypatch)
    found, was_asked = asked(other, body, key)
    assert found == expected
    pair.wait_idle()
    # What was drawn elsewhere has no logprobs, so choices that were resumed are computed anew.
    assert was_asked or (way, kind) == ("resumed before", "choices")
    drawn = pair.num_drawn - before
    _, (_, num_tokens) = expected
    if way != "resumed before":  # there a second worker draws, too
        assert num_tokens <= drawn <= num_tokens + len(expected[0]), "computed twice"


def test_a_stop_string_ends_what_nobody_had_looked_at(pair: Pair) -> None:
    """While nobody looks for it, its worker goes on; whoever comes back finds it."""
    _, other = pair.router()
    body = body_of("seeded")
    text = asked(other, body)[0][0][0]["text"]
    body["stop"] = text[len(text) // 2 : len(text) // 2 + 6]
    expected, _ = asked(other, body)
    assert expected[0][0]["text"] == text[: text.index(body["stop"])]
    begin(pair.router()[1], body, "stop")
    pair.wait_idle()  # it has run on to its last token
    assert asked(other, body, "stop") == (expected, True)


def test_two_at_once_the_first_is_told(pair: Pair) -> None:
    (_, one), (_, other) = pair.router(), pair.router()
    body = body_of("seeded", max_tokens=200)
    expected, _ = asked(other, body)
    with ThreadPoolExecutor(1) as threads:
        url, headers = f"{one.url}/v1/chat/completions", {"idempotency-key": "twice"}
        first = threads.submit(httpx.post, url, json=body | STREAM, headers=headers, timeout=HANG_S)
        until(lambda: any(kept._running for kept in pair.kept))
        found, was_asked = asked(other, body, "twice")
        response = first.result()
    assert found == expected
    assert was_asked
    told = [response.json()] if response.status_code == 409 else events(response)
    assert told[-1]["error"]["code"] == "taken_over"


@pytest.mark.parametrize("other_by", one_in(3, ["body", "key", "none"]))
def test_another_request_is_another_one(pair: Pair, other_by: str) -> None:
    _, served = pair.router()
    body = body_of("greedy", max_tokens=8)
    asked(served, body, "same")
    if other_by == "body":
        body["max_tokens"] = 9
    key = {"body": "same", "key": "another", "none": ""}[other_by]
    assert not asked(served, body, key)[1]


def test_without_a_seed_a_key_gives_one(pair: Pair) -> None:
    """So the answer is the same even where its worker is gone, too."""
    (_, one), (_, other) = pair.router(), pair.router()
    body = body_of("greedy", temperature=2.0, max_tokens=16)
    found, _ = asked(one, body, "unseeded")
    for kept in pair.kept:
        kept._ended.clear()
    assert asked(other, body, "unseeded") == (found, False)
    others = [asked(other, body, f"another {number}")[0] for number in range(4)]
    assert any(each != found for each in others), "all four seeds say the same by chance"


def test_nobody_comes_back(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for kept in pair.kept:  # of tests before
        kept._ended.clear()
    monkeypatch.setattr(worker.requests.kept, "KEPT_S", 0.3)
    _, served = pair.router()
    body = body_of("seeded", max_tokens=120)
    begin(served, body, "left")
    pair.wait_idle()
    until(lambda: not any(kept._ended or kept._running for kept in pair.kept))
    assert not asked(served, body, "left")[1]


MUTANTS: dict[str, tuple[Any, str, str, str]] = {
    "choices share a key": (
        router.http.api, "give_keys", "repr((req.index, req.prompt))", "repr(req.prompt)",
    ),
    "computed anew": (KeptAnswers, "orphan", "return True", "return False"),
}  # fmt: skip


@pytest.mark.parametrize("name", one_in(4, MUTANTS))
def test_a_mutant_is_red(pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, other = pair.router()
    body = body_of("choices")
    expected, _ = asked(other, body)
    change(monkeypatch, *MUTANTS[name])
    begin(pair.router()[1], body, name)
    pair.wait_idle()  # its router has noticed that the client is gone
    try:
        found, was_asked = asked(other, body, name)
    except (AssertionError, KeyError):  # the answer is an error
        return
    assert found != expected or not was_asked
