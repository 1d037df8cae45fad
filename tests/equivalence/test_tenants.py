"""Nobody measures another's prompts: of two salts, or two keys, neither has cached tokens of the
other; who has the same has them.

A real router over real workers, by HTTP.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.dispatch.queue import Queue
from router.http.api import Api
from router.http.app import RouterServer
from tests.equivalence.test_failover import Losing, change
from tests.fault.router_doubles import routed
from tests.support.engines import Running, running, value
from tests.support.laws import sections
from tests.support.pairwise import one_in
from tests.support.patience import HANG_S
from tests.support.shallow import shallow
from worker.requests.admission import Admission
from worker.schedule.prefill import PrefillScheduler
from worker.schedule.queues import DecodeQueues
from worker.transfer.fetch import Fetch

KEYS = """
one name=one cache=own
two name=two cache=own
three name=three
four name=four
"""
SIZE = 16  # tokens of a page
SAID = "Tom has 3 apples and Ann has 4 more. "
CASES = ["chat", "text"]


@dataclass
class Tenants:
    """A router with keys, and the workers behind it."""

    url: str
    router: RouterServer
    cluster: Running
    number: int = 0  # of prompts: none begins as one before

    def prompt(self, size: int = 4) -> str:
        self.number += 1
        return f"{self.number}: {SAID * size}"

    def post(self, kind: str, key: str, prompt: str, **more: Any) -> httpx.Response:
        said: dict[str, Any] = {"prompt": prompt}
        if kind == "chat":
            said = {"messages": [{"role": "user", "content": prompt}]}
        path = "chat/completions" if kind == "chat" else "completions"
        body = {"max_tokens": 4, "temperature": 0} | said | more
        headers = {"x-api-key": key}
        return httpx.post(f"{self.url}/v1/{path}", json=body, headers=headers, timeout=HANG_S)

    def cached(self, kind: str, key: str, prompt: str, **more: Any) -> int:
        """How many tokens of its prompt a request is told to have found."""
        response = self.post(kind, key, prompt, **more)
        assert response.status_code == 200, response.text
        found = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.cluster.wait_idle()
        return found

    def roots(self) -> set[str]:
        """The salts of all that prefix trees hold; "": what has none."""
        trees = [worker.engine.book.tree for worker in self.cluster.workers.values()]
        keys = [key for tree in trees for key in tree.root.children]
        return {str(key[0]) if len(key) > SIZE else "" for key in keys}

    def forget(self) -> None:
        """Empty the prefix trees."""
        for worker in self.cluster.workers.values():
            book = worker.engine.book
            book._allocator.free(book.tree.evict(book.num_pages))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Running]:
    made = sections("always", SIZE, num_pages=120, growth_tokens=1)
    with running(made, num_decode=2, decode_sections={"engine": {"num_pages": 50}}) as found:
        yield found


@pytest.fixture
def tenants(cluster: Running, tmp_path: Path) -> Iterator[Tenants]:
    path = tmp_path / "keys"
    path.write_text(KEYS)
    with routed(shallow(), cluster.members, api_key_file=str(path)) as (router, url):
        found = Tenants(url, router, cluster)
        found.forget()
        yield found


def seen(tenants: Tenants, kind: str) -> list[bool]:
    """Of keys and salts in turn, who finds something of the first's prompt; each asks twice."""
    prompt = tenants.prompt()
    found = []
    for key, more in (
        ("three", {}), ("four", {}), ("four", {"cache_salt": None}),
        ("three", {"cache_salt": "a"}), ("four", {"cache_salt": "a"}),
        ("three", {"cache_salt": "b"}),
        ("one", {}), ("two", {}), ("one", {"cache_salt": "a"}), ("two", {"cache_salt": "a"}),
    ):  # fmt: skip
        found.append(tenants.cached(kind, key, prompt, **more) > 0)
        assert tenants.cached(kind, key, prompt, **more) > SIZE, "who has the same salt shares"
    assert tenants.cached(kind, "three", prompt) > SIZE, "nothing was evicted meanwhile"
    return found


FOREIGN = [False, True, True, False, True, False, False, False, False, False]


@pytest.mark.parametrize("kind", CASES)
def test_cached_tokens_are_of_the_same_key_and_salt_alone(tenants: Tenants, kind: str) -> None:
    assert seen(tenants, kind) == FOREIGN


def test_a_longer_prompt_finds_its_beginning_by_its_salt_alone(tenants: Tenants) -> None:
    prompt = tenants.prompt()
    assert tenants.cached("text", "one", prompt) == 0
    longer = prompt + "How many are there?"
    assert tenants.cached("text", "two", longer) == 0
    assert tenants.cached("text", "three", longer, cache_salt="one") == 0
    assert tenants.cached("text", "one", longer) > SIZE


def test_prefixes_are_forgotten_on_demand(tenants: Tenants) -> None:
    prompt, url = tenants.prompt(), f"{tenants.url}/reset_prefix_cache"
    tenants.cached("text", "three", prompt)
    assert tenants.cached("text", "three", prompt) > SIZE
    assert httpx.post(url, timeout=HANG_S).status_code == 401
    assert httpx.post(url, headers={"x-api-key": "three"}, timeout=HANG_S).status_code == 200
    assert tenants.cached("text", "three", prompt) == 0
    assert tenants.cached("text", "three", prompt) > SIZE


def pressed(tenants: Tenants, losing: Losing) -> None:
    """Many at once with a salt, more than a decode worker's pages can hold; each is lost once."""
    engines = [each.engine for name, each in tenants.cluster.workers.items() if "decode" in name]
    preempted = sum(value(each.metrics.preemptions) for each in engines)
    losing.at = 20
    prompts = [tenants.prompt(12) for _ in range(3)]
    body = {"prompt": prompts, "n": 3, "max_tokens": 90, "ignore_eos": True, "cache_salt": "a"}
    response = httpx.post(
        f"{tenants.url}/v1/completions", json=body, headers={"x-api-key": "one"}, timeout=HANG_S
    )
    assert response.status_code == 200, response.text
    tenants.cluster.wait_idle()
    assert sum(value(each.metrics.preemptions) for each in engines) > preempted


def test_a_salt_lasts_through_preemption_and_failover(
    tenants: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    losing = Losing(monkeypatch)
    pressed(tenants, losing)
    assert len(losing.lost) == 9
    (salt,) = tenants.roots()
    assert salt


# Whose salt is lost where.
MUTANTS: dict[str, tuple[Any, str, str, str]] = {
    "prefill is not told": (Fetch, "begin", ", req.salt,", ", '',"),
    "prefill does not listen": (PrefillScheduler, "admit", "salt=asked.salt", "salt=''"),
    "decode is not told": (Queue, "_send", "salt=req.salt", "salt=''"),
    "decode does not listen": (Admission, "admit", "salt=message.salt", "salt=''"),
    "not on a second admission": (
        DecodeQueues, "admit", "salt=req.salt", "salt=req.salt if new else ''"
    ),
    "not at a second worker": (
        Queue, "_send", "salt=req.salt", "salt=req.salt if req.dispatch == 1 else ''"
    ),
    "of the body alone": (
        Api, "generate", "prepare(raw, exchange.own_salt)", "prepare(raw, '')"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", one_in(8, MUTANTS))
def test_a_mutant_is_red(tenants: Tenants, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, *MUTANTS[name])
    if name == "of the body alone":
        assert seen(tenants, "text") != FOREIGN
        return
    pressed(tenants, Losing(monkeypatch))
    assert "" in tenants.roots()
