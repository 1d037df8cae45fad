"""/dashboard: files and their headers, and the data behind them."""

import re
from typing import Any
from urllib.parse import urljoin

import httpx
import msgspec
import pytest

from cluster.clients.top import picture
from cluster.tables import plain
from router.observe.board import Board, Change, Start
from router.show.pages import STATIC
from tests.fault.router_doubles import DecodeDouble, Serve, Served, speak, wait_until
from worker.api import Member, WorkerStats

LOAD = WorkerStats(
    num_running=3, num_waiting=2, max_num_reqs=8, num_free_pages=25, num_pages=100,
    num_queued_tokens=70, tokens_per_row=2.25,
)  # fmt: skip


def board(url: str) -> Board:
    return msgspec.json.decode(httpx.get(f"{url}/dashboard/data").content, type=Board)


@pytest.mark.parametrize("path", ["dashboard", "dashboard/playground", "docs"])
def test_a_page_has_all_that_it_needs_here_and_may_run_nothing_else(url: str, path: str) -> None:
    answer = httpx.get(f"{url}/{path}")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    inline = re.findall(r"<style|<script(?![^>]*\ssrc=)|<[^>]*\s(?:on\w+|style)=", answer.text)
    assert not inline, "the policy forbids it"
    for link in re.findall(r'\s(?:src|href)="([^"]+)"', answer.text):
        assert not re.match(r"[a-z]+:|//", link), "of another host"
        if not link.startswith("#"):
            assert httpx.get(urljoin(str(answer.url), link)).status_code == 200, link
    slash = httpx.get(f"{url}/{path}/")
    assert (slash.status_code, urljoin(f"{url}/{path}/", slash.headers["location"])) == (
        307, f"{url}/{path}",
    )  # fmt: skip


def test_files_have_types_and_are_asked_for_again_only_if_they_have_changed(url: str) -> None:
    types = {".js": "javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
    for file in STATIC.iterdir():
        answer = httpx.get(f"{url}/dashboard/static/{file.name}")
        assert types[file.suffix] in answer.headers["content-type"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache"
        again = httpx.get(str(answer.url), headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    for wrong in ("nothing.js", "..%2fpages.py", ""):
        missing = httpx.get(f"{url}/dashboard/static/{wrong}")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


def test_scripts_insert_no_markup_and_name_no_other_host() -> None:
    for path in (*STATIC.glob("*.js"), *STATIC.glob("*.css"), *STATIC.glob("*.html")):
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert set(re.findall(r"https?://[^\"' ]+", text)) <= {"http://www.w3.org/2000/svg"}, path


def test_data_are_what_workers_say_and_what_was_served(serve: Serve, ids: tuple[int, ...]) -> None:
    served = serve(DecodeDouble(script=speak(ids, cached=1), stats=LOAD))
    for prompt, status in {"a": 200, "b": 200, "c": 200, "": 400}.items():
        assert served.post("completions", prompt=prompt).status_code == status
    found = board(served.url)
    (worker,) = found.workers
    assert (worker.name, worker.state, worker.role) == ("decode-0", "ready", "decode")
    assert (worker.running, worker.waiting, worker.max_running) == (3, 2, 8)
    assert (worker.free_pages, worker.pages, worker.queued_tokens) == (25, 100, 70)
    assert (worker.drafter, worker.tokens_per_row) == ("", 2.25)
    assert worker.heard_s is not None
    assert [(each.name, each.state) for each in found.routers] == [("router-0", "ready")]
    assert found.outcomes == {"stop": 3, "invalid_value": 1}
    assert found.errors == {}, "a client's mistake is none of ours"
    assert found.latencies["time_to_first_token"].count == 3
    assert found.latencies["end_to_end"].count == 3
    assert (found.cached_tokens, found.running, found.waiting) == (3, 0, 0)
    assert found.rates.output_tokens > 0
    assert (found.model, found.state, found.told_by) == ("small", "good", "router-0")


def told(name: str, state: str, text: str, ago_s: float) -> Change:
    role: Any = name.partition("-")[0]
    return Change(name, role, "abc", state, text, ago_s)


def test_a_start_is_progress_and_no_failure(served: Served) -> None:
    _, url, router = served
    before = router.listed
    try:
        router.update_members(
            [before[0]], (), [Start("decode-0", "decode", "x", "load", 0.42, 7.0)]
        )
        wait_until(lambda: board(url).state == "wait")
        found = board(url)
        reasons = [httpx.get(f"{url}/{path}").json()["reason"] for path in ("health", "ready")]
    finally:
        router.update_members(before)
        wait_until(lambda: board(url).state == "good")
    assert found.summary == "Starting: requests wait until decode-0 is ready"
    (row,) = found.workers
    assert (row.state, row.part, row.progress[:11]) == ("starting", 0.42, "loading 42%")
    assert re.search(r"decode-0 +starting +- .*loading 42% after 7 s", plain(picture(found, url)))
    assert all(reason.startswith("decode-0 is loading 42%") for reason in reasons)


def test_deaths_and_replacements_are_shown_with_reasons(served: Served) -> None:
    _, url, router = served
    before = router.listed
    changes = (
        told("decode-1", "ready", "after 3.0 s", 90.0),
        told("prefill-0", "lost", "its process died", 20.0),
        told("prefill-0", "ready", "after 2.0 s", 15.0),
        told("decode-1", "lost", "it does not answer (silent for 3.1 s)", 10.0),
        told("decode-2", "drained", "", 5.0),
        told("router-1", "lost", "its process died", 2.0),
    )
    prefill = Member("prefill-0", "prefill", "new", "tcp://127.0.0.1:9")
    other = Member("router-2", "router", "x", before[0].address, metrics_address="127.0.0.1:9")
    try:
        router.update_members((*before, prefill, other), changes)
        wait_until(lambda: len(board(url).changes) == len(changes))
        found = board(url)
        deaths = re.findall(r"worker_deaths_total{.*} (.*)", httpx.get(f"{url}/metrics").text)
    finally:
        router.update_members(before)
    assert [(each.name, each.state) for each in found.changes] == [
        (each.name, each.state) for each in reversed(changes)
    ]
    assert 2.0 <= found.changes[0].ago_s < 60.0
    assert deaths == ["0.0", "0.0"], "they were before this router"
    rows = {row.name: (row.state, row.reason) for row in found.workers}
    assert rows == {
        "decode-0": ("ready", ""),
        "decode-1": ("lost", "it does not answer (silent for 3.1 s)"),
        "prefill-0": ("starting", ""),  # listed, and has not answered yet
    }
    routers = {row.name: row.state for row in found.routers}
    assert routers == {"router-0": "ready", "router-1": "lost", "router-2": "silent"}
    assert found.state == "bad"
