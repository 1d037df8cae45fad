"""Chromium: a page of another origin streams a chat; and one id's lines.

Debian's package `chromium` is enough. The port makes the origin another one.
"""

import json
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.harness import REPOSITORY, Serve
from tests.e2e.shared import Clusters
from tests.e2e.test_disconnects import ARGUMENTS
from tests.fault.router_doubles import DecodeDouble, make_model, serving, speak, wait_until
from tests.support.patience import HANG_S

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
PAGE = REPOSITORY / "tests" / "clients" / "page.html"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; Debian's is `chromium`")


@pytest.fixture
def cluster(clusters: Clusters) -> Serve:
    return clusters.lend(*ARGUMENTS)


class Site(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Visit)
        self.seen: queue.Queue[dict[str, Any]] = queue.Queue()


class Visit(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE.read_bytes())

    def do_POST(self) -> None:
        self.server.seen.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def command(profile: Path, *arguments: str) -> list[str]:
    assert CHROMIUM is not None
    return [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={profile}", *arguments,
    ]  # fmt: skip


@contextmanager
def browsing(profile: Path, url: str) -> Iterator[None]:
    process = subprocess.Popen(
        command(profile, "--remote-debugging-port=0", url),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(HANG_S)


def visit(api: str, profile: Path) -> dict[str, Any]:
    """What the page finds that asks `api`, and that came from another origin."""
    with Site() as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        try:
            with browsing(profile, f"http://127.0.0.1:{site.server_port}/?api={api}"):
                return site.seen.get(timeout=HANG_S)
        finally:
            site.shutdown()
            thread.join()


@needs_chromium
def test_a_page_of_another_origin_streams_a_chat(cluster: Serve, tmp_path: Path) -> None:
    seen = visit(cluster.url, tmp_path)
    assert (seen.get("error"), seen.get("status")) == (None, 200)
    assert seen["last"] == "[DONE]"
    assert seen["text"]
    assert seen["pieces"] > 1, "it came at once, so it was not streamed"
    assert seen["id"] == "asked-by-a-page"
    assert "prefill;dur=" in seen["timing"]
    cluster.wait_idle()


def test_one_id_names_a_request_in_the_lines_of_every_process(cluster: Serve) -> None:
    body = {"model": "tiny", "prompt": "one id " * 30, "max_tokens": 4}
    headers = {"X-Request-Id": "one-id-for-all"}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=HANG_S)
    assert answer.headers["x-request-id"] == "one-id-for-all"
    wanted = {"kvlane.access", "kvlane.router", "kvlane.decode", "kvlane.outbound"}

    def said() -> list[dict[str, str]]:
        whole = cluster.output.split("\n")[:-1]
        lines = (json.loads(line) for line in whole if line[0] != "[")  # as Ray's C++ begins
        ids = ("req_id", "xfer_id")
        return [e for e in lines if any(e.get(i, "").startswith("one-id-for-all") for i in ids)]

    wait_until(lambda: {line["logger"] for line in said()} == wanted)
    assert {line["process"] for line in said()} == {"router-0", "prefill-0", "decode-0"}
    assert {line["level"] for line in said()} == {"DEBUG"}
    cluster.wait_idle()


@needs_chromium
def test_a_page_of_an_origin_that_is_not_allowed_reads_nothing(tmp_path: Path) -> None:
    double = DecodeDouble(script=speak([5, 6]))
    with serving(make_model(tmp_path / "model"), double, cors_origins=[]) as (_, url):
        seen = visit(url, tmp_path / "profile")
    assert seen["text"] == ""
    assert "Failed to fetch" in seen["error"]
