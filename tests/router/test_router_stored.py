"""What is kept of responses: its bounds, and one store of several routers."""

import gc
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.json import decode as from_json
from msgspec.json import encode as to_json

from router.adapters.store import (
    MAX_PARTS,
    NOTHING,
    OPEN,
    Kept,
    MissingResponse,
    ResponseStore,
    fewer,
    items_of,
    joined,
    owner_of,
    packed,
    unpacked,
)
from router.text.tokenizer import Text
from tests.fault.router_doubles import DecodeDouble, Serve, speak
from tests.support import pairwise
from tests.support.patience import HANG_S, until
from tests.support.stored_model import KEYS, Several, equal, model_for_it
from worker.api import FinishReason

MIB = 1 << 20


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_for_it(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("num", [2, 4])
def test_all_routers_are_one_store(place: Path, tmp_path: Path, num: int) -> None:
    operations = 10_000 if pairwise.whole else 150
    done = equal(place, tmp_path / "keys", num=num, operations=operations, seed=num)
    assert sum(done.values()) >= operations


@pytest.fixture
def several(place: Path, tmp_path: Path) -> Iterator[Several]:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{secret} name={name}\n" for name, secret in KEYS.items()))
    found = Several(place, {"api_key_file": str(keys), "stored_response_mib": 1})
    found.start("router-0", "router-1", "router-2")
    yield found
    found.end()


def ask(several: Several, router: int, method: str, path: str = "", **how: Any) -> httpx.Response:
    url = f"{several.url(f'router-{router}')}/v1/responses{path}"
    headers = {"authorization": f"Bearer {KEYS[how.pop('owner', 'alice')]}"}
    body = {"model": "small", **how} if how else None
    return httpx.request(method, url, json=body, headers=headers, timeout=HANG_S)


def test_what_a_router_keeps_that_leaves_goes_to_others_and_can_be_deleted(
    several: Several,
) -> None:
    several.word = "one"
    first = ask(several, 0, "POST", input="a").json()
    name = ask(several, 0, "POST", input="b", previous_response_id=first["id"]).json()["id"]
    several.stop("router-0")
    for router in (1, 2):
        assert ask(several, router, "GET", f"/{first['id']}").json() == first
        assert ask(several, router, "GET", f"/{name}", owner="bob").status_code == 404
    more = ask(several, 2, "POST", input="c", previous_response_id=name).json()
    assert several.prompts[-1].count("<|im_start|>user") == 3
    several.stop("router-1")  # it goes on to the last one
    assert ask(several, 2, "DELETE", f"/{name}").status_code == 200
    for known, status in ((first["id"], 200), (name, 404), (more["id"], 200)):
        assert ask(several, 2, "GET", f"/{known}").status_code == status


def test_one_that_ends_after_it_was_deleted_stays_deleted(several: Several) -> None:
    several.waits = True
    url, key = several.url("router-0"), {"authorization": f"Bearer {KEYS['alice']}"}
    name = ask(several, 0, "POST", input="a", background=True).json()["id"]
    assert ask(several, 1, "DELETE", f"/{name}").status_code == 200
    body = {"model": "small", "input": "a", "stream": True}
    until(lambda: bool(several.waiting))
    several.waiting.clear()
    first = several.text.encode("o", add_special_tokens=False)

    def begin() -> None:
        until(lambda: bool(several.waiting))
        several.double.chunk(*several.waiting[0], first)

    beginning = threading.Thread(target=begin)  # until then no stream is open
    beginning.start()
    with httpx.stream("POST", f"{url}/v1/responses", json=body, headers=key, timeout=None) as made:
        beginning.join()
        lines = (line for line in made.iter_lines() if line.startswith("data: "))
        streamed = from_json(next(lines)[6:])["response"]["id"]
        assert ask(several, 1, "GET", f"/{streamed}").json()["status"] == OPEN
        assert ask(several, 2, "DELETE", f"/{streamed}").status_code == 200
        several.word = "ne"
        rest = several.text.encode("ne", add_special_tokens=False)
        several.double.chunk(*several.waiting[0], rest, at=len(first), finish=FinishReason.STOP)
        assert from_json([*lines][-1][6:])["response"]["status"] == "completed"
    for router in range(3):
        for each in (name, streamed):
            assert ask(several, router, "GET", f"/{each}").status_code == 404


def test_other_routers_alone_ask_at_the_doors_between_them(several: Several) -> None:
    several.word = "one"
    name = ask(several, 0, "POST", input="a").json()["id"]
    url = several.url("router-0")
    for path in (f"/all/{owner_of('alice')}/{name}", "/take/0/0", "/ready/0/0"):
        for key, status in ((None, 401), (KEYS["alice"], 403)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            answer = httpx.post(f"{url}/dashboard/responses{path}", headers=headers)
            assert answer.status_code == status


def test_what_the_api_does_not_have_is_not_kept(several: Several) -> None:
    several.word = "one"
    junk = {"junk": ["x" * 1000]}
    inputs = [
        {"role": "user", "content": "a", **junk},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b", **junk}], **junk},
        {"type": "reasoning", "summary": [], "content": [], "encrypted_content": "x" * 999, **junk},
        {"role": "user", "content": [{"type": "input_text", "text": "c", **junk}]},
    ]
    schema = {"type": "object", "properties": {"junk": {"type": "string"}}}
    tool = {"type": "function", "name": "f", "parameters": schema}
    more = {"text": {"format": {"type": "text", **junk}, **junk}, "reasoning": {**junk}}
    body: dict[str, Any] = {"input": inputs, "tools": [tool | junk], **more, **junk}
    made = ask(several, 0, "POST", **body).json()
    assert made["tools"] == [tool]
    items = ask(several, 1, "GET", f"/{made['id']}/input_items?order=asc").json()["data"]
    assert [item.get("role") for item in items] == ["user", "assistant", None, "user"]
    assert items[1]["content"][0] == {"type": "output_text", "text": "b", "annotations": []}
    assert "xxx" not in str([made, items])
    ask(several, 2, "POST", input="d", previous_response_id=made["id"])
    assert "assistant\nb<|im_end|>" in several.prompts[-1]
    assert "user\nc<|im_end|>" in several.prompts[-1]


def test_too_large_a_response_is_refused_with_the_name_of_its_bound(several: Several) -> None:
    several.word = "one"
    large = {"role": "user", "content": "a", "id": "x" * (600 << 10)}  # no template writes it
    first = ask(several, 0, "POST", input=[large]).json()
    for router in (0, 1):
        more = {"previous_response_id": first["id"], "input": [large | {"id": "y" * (600 << 10)}]}
        refused = ask(several, router, "POST", **more)
        assert refused.status_code == 400
        assert "router.stored_response_mib (1)" in refused.json()["error"]["message"]
        assert ask(several, router, "POST", **more, store=False).status_code == 200
    assert (
        ask(several, 2, "GET", f"/{first['id']}/input_items").json()["data"][0]["id"] == large["id"]
    )


def test_an_answer_that_is_too_large_to_be_kept_says_so(serve: Serve, text: Text) -> None:
    tokens = [text.encode("a", add_special_tokens=False)[0]] * 60
    double = DecodeDouble(script=speak(tokens, sizes=[60]))
    served = serve(double, directory=text.directory, stored_responses_mib=1, stored_response_mib=1)
    large = {"role": "user", "content": "a", "id": "x" * ((1 << 20) - (12 << 10))}
    about = {"input": [large], "include": ["message.output_text.logprobs"], "top_logprobs": 20}
    made = served.post("responses", **about).json()
    assert (made["status"], made["store"]) == ("completed", False)
    assert httpx.get(f"{served.url}/v1/responses/{made['id']}").status_code == 404
    name = served.post("responses", **about, background=True).json()["id"]
    while (found := httpx.get(f"{served.url}/v1/responses/{name}").json())["status"] == OPEN:
        time.sleep(0.005)
    assert found["status"] == "failed"
    assert "router.stored_response_mib" in found["error"]["message"]


def kept(name: str, size: int = 100, owner: str = "", parts: tuple[bytes, ...] = ()) -> Kept:
    head = to_json({"id": name, "pad": "x" * size})
    return Kept(owner, name, head, (*parts, to_json([name]), NOTHING), "completed")


def names_of(store: ResponseStore, owner: str, *names: str) -> list[str]:
    found = list[str]()
    for name in names:
        try:
            found.append(store.get(owner, name).name)
        except MissingResponse:
            continue
    return found


def test_the_oldest_go_of_who_has_stored_most_and_all_in_time() -> None:
    now = time.monotonic()
    store = ResponseStore(100_000, 50_000, 10.0, lambda: now)
    for i in range(20):
        assert store.put(kept(str(i), 10_000))
        assert store.num_bytes <= 100_000
    there = names_of(store, "", *map(str, range(20)))
    assert there == [str(i) for i in range(20 - len(there), 20)]
    assert 6 < len(there) < 10
    store.put(kept("other", 5_000, "bob"))
    for i in range(20):
        store.put(kept(f"more {i}", 10_000))
    assert names_of(store, "bob", "other", "19") == ["other"]
    assert names_of(store, "", "other") == []
    assert not store.put(kept("huge", 60_000))
    assert store.put(kept("other", 7_000, "bob"))  # in place of the other
    now += 10
    assert names_of(store, "bob", "other") == names_of(store, "", "more 19") == []
    store.put(kept("9"))
    assert store.num_bytes < 10_000, "what is too old is gone"


def test_a_turn_costs_what_is_new_of_it() -> None:
    store = ResponseStore(MIB, MIB, 10.0)
    parts, made = (), 0
    for i in range(500):
        parts = (*fewer(parts), to_json([{"content": "x" * 800, "id": i}]), NOTHING)
        assert store.put(Kept("", str(i), b"{}", parts, "completed"))
    assert len(parts) <= MAX_PARTS + 2
    made = [item["id"] for item in items_of(parts)]
    assert made == list(range(500))
    assert from_json(joined(parts)) == [*items_of(parts)]
    assert len(names_of(store, "", *map(str, range(500)))) > 100
    for i in range(500):
        store.drop("", str(i))
    assert store.num_bytes == 0


def test_responses_travel_with_their_parts_once() -> None:
    shared = b'["' + b"x" * 10_000 + b'"]'
    pairs = [(kept(str(i), parts=(shared,)), 1.5) for i in range(10)]
    raw = packed(pairs)
    assert len(raw) < 20_000
    assert unpacked(raw) == pairs


@pytest.mark.parametrize("size", [100, 20_000])
def test_bytes_are_counted_as_memory_has_them(size: int) -> None:
    store = ResponseStore(64 * MIB, MIB, 10.0)
    num = 4 * MIB // size if size > 1000 else 4000
    gc.collect()
    tracemalloc.start()
    for i in range(num):
        raw = to_json([{"content": str(i) + "x" * size}])
        store.put(Kept("", f"resp_{i:032}-00000000", b'{"a":1}', (raw, NOTHING), "completed"))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.5 < store.num_bytes / taken < 3, (store.num_bytes, taken)
    assert taken < store.num_bytes + MIB


def test_collections_of_garbage_do_not_walk_through_what_is_kept() -> None:
    store = ResponseStore(MIB, MIB, 10.0)
    gc.collect()
    before = len(gc.get_objects())
    for i in range(100):
        item = {"type": "message", "content": [{"type": "text", "text": str(i)}]}
        raw = to_json([item] * 20)
        store.put(Kept("", str(i), b"{}", (raw, NOTHING), "completed"))
    assert [*items_of(store.get("", "7").parts)][19]["content"][0]["text"] == "7"
    gc.collect()
    assert len(gc.get_objects()) - before < 500
