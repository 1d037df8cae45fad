"""A real cluster in a real browser: what the pages do, and their pictures in router/docs.

tests/browser/install                    # once
python -m tests.browser.screens          # as root, for a network namespace; minutes
python -m tests.browser.screens --cluster       # without what needs no cluster
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.namespace import start_over
from tests.browser import behaviour
from tests.browser.driver import NARROW, WIDE, Visit, chromium, visiting
from tests.e2e.harness import INSIDE, REPOSITORY, Serve

PICTURES = REPOSITORY / "router" / "docs"
MAX_BYTES = 200_000
OCTREE = 2  # of Pillow: keeps rare colours
ARGUMENTS = (
    "--prefill", "2", "--decode", "2", "--router", "2", "--set", "disaggregation.mode=always",
)  # fmt: skip
NUM_CLIENTS = 24
LOADED_S = 25.0
QUESTION = "Tom has 34 apples and buys 3 bags of 12 apples. How many apples does Tom have?"
ALL_WELL = "All 4 workers answer"
READY_S = 240.0  # on a busy machine


@contextmanager
def load(url: str) -> Iterator[None]:
    """Clients that chat until the end of the block; what a death breaks is not their matter."""
    over = threading.Event()

    def one(client: int) -> None:
        asked = 0
        while not over.is_set():
            asked += 1
            text = QUESTION.replace("34", str(100 * client + asked))
            messages = [{"role": "user", "content": text}]
            body = {"messages": messages, "max_tokens": 400, "ignore_eos": True}
            try:
                httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
            except httpx.TransportError:
                time.sleep(0.5)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def picture(visit: Visit, name: str) -> None:
    """Into the repository."""
    from PIL import Image  # installed beside Playwright

    path = PICTURES / f"{name}.png"
    visit.page.screenshot(path=path, full_page=True)
    with Image.open(path) as taken:
        taken.convert("RGB").quantize(method=OCTREE).save(path, optimize=True)
    size = path.stat().st_size
    assert size < MAX_BYTES, f"{path} has {size} bytes"
    print(f"  {path.relative_to(REPOSITORY)}: {size} bytes", flush=True)


def pictures(browser: Any, url: str, name: str, words: str) -> None:
    """Of the dashboard: wide and light, wide and dark, narrow; each is checked as well."""
    for size, scheme, more in (
        (WIDE, "light", ""),
        (WIDE, "dark", "-dark"),
        (NARROW, "light", "-narrow"),
    ):
        with visiting(browser, url, size, scheme) as visit:
            visit.go("/dashboard")
            visit.wait("#headline", words)
            visit.check()
            picture(visit, f"dashboard-{name}{more}")


def a_death(browser: Any, serve: Serve) -> None:
    """A worker is killed under load: it is shown as lost, with the reason, then as replaced."""
    victim = serve.status()["decode-1"]["pid"]
    with visiting(browser, serve.url) as visit:
        visit.go("/dashboard")
        visit.wait("#headline", ALL_WELL)
        os.kill(victim, signal.SIGKILL)
        visit.wait("#workers tr", "lost")
        visit.wait("#changes li", "its process died")
        visit.page.wait_for_timeout(500)
        picture(visit, "dashboard-death")
        visit.check()
        visit.wait("#headline", ALL_WELL, READY_S)
        first = visit.text("#changes li:first-child")
        assert "decode-1 ready" in first, first
        visit.page.wait_for_timeout(3000)
        picture(visit, "dashboard-replaced")


def a_chat(browser: Any, url: str) -> None:
    """An answer with its stages, wide, dark and narrow."""
    for size, scheme, more in (
        (WIDE, "light", ""),
        (WIDE, "dark", "-dark"),
        (NARROW, "light", "-narrow"),
    ):
        with visiting(browser, url, size, scheme) as visit:
            visit.go(behaviour.PLAYGROUND)
            behaviour.ask(visit, QUESTION)
            visit.wait("#status", "Answered.", 60)
            assert visit.text(".assistant .said").endswith("#### 70")
            assert "decoded by decode-" in visit.text(".stages")
            visit.check()
            picture(visit, f"playground{more}")


def routers_die(browser: Any, serve: Serve) -> None:
    """Both at once: the page says that it hears nothing, and recovers by itself."""
    with visiting(browser, serve.url) as visit:
        visit.allowed = ("Failed to load resource",)
        visit.go("/dashboard")
        visit.wait("#headline", ALL_WELL)
        rows = serve.status()
        for name in ("router-0", "router-1"):
            os.kill(rows[name]["pid"], signal.SIGKILL)
        visit.wait("#headline", "No news from the router: it does not answer")
        picture(visit, "dashboard-no-router")
        visit.wait("#headline", ALL_WELL, READY_S)
        visit.wait("#changes", "router-0 lost")


def main() -> None:
    """Doubles first, then the cluster."""
    if INSIDE not in os.environ:
        os.environ[INSIDE] = "1"
        command = [sys.executable, "-m", "tests.browser.screens", *sys.argv[1:]]
        start_over(command, ["mount", "-t", "tmpfs", "kvlane", "/dev/shm"])
    PICTURES.mkdir(exist_ok=True)
    with chromium() as browser, tempfile.TemporaryDirectory() as root:
        if "--cluster" not in sys.argv:
            behaviour.run(browser)
        serve = Serve(Path(root)).start(*ARGUMENTS)
        try:
            serve.wait_ready(READY_S)
            assert f"{serve.url}/dashboard" in serve.output
            pictures(browser, serve.url, "idle", ALL_WELL)
            a_chat(browser, serve.url)
            with load(serve.url):
                time.sleep(LOADED_S)
                pictures(browser, serve.url, "loaded", ALL_WELL)
                a_death(browser, serve)
            print(serve.command("top").stdout)
            routers_die(browser, serve)
        finally:
            serve.end()
    print("all is well")


if __name__ == "__main__":
    main()
