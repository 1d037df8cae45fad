"""A real cluster in a real browser: what the pages do, and their pictures in router/docs.

tests/browser/install                    # once
python -m tests.browser.screens          # as root, for a network namespace; minutes
python -m tests.browser.screens --cluster       # without what needs no cluster
"""

import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.browser import behaviour
from tests.browser.driver import WIDE, Visit, chromium, visiting
from tests.e2e.harness import REPOSITORY, Serve, enter_namespace_of
from tests.monitoring.load import steady

PICTURES = REPOSITORY / "router" / "docs"
MAX_BYTES = 150_000
BACKOFF_S = 20  # for a death to be looked at
ARGUMENTS = (
    "--prefill", "2", "--decode", "2", "--router", "2", "--set", "disaggregation.mode=always",
    "--spec", "chain", "--set", f"cluster.restart_backoff_s={BACKOFF_S}",
)  # fmt: skip
PHONE = (390, 844)
FORMS = ((WIDE, "light", ""), (WIDE, "dark", "-dark"), (PHONE, "light", "-narrow"))
NUM_CLIENTS = "24"
LOADED_S = 25.0
QUESTION = "Tom has 34 apples and buys 3 bags of 12 apples. How many apples does Tom have?"
ALL_WELL = "All 4 workers answer"
READY_S = 240.0  # on a busy machine


def picture(visit: Visit, name: str) -> None:
    from PIL import Image  # installed beside Playwright

    path = PICTURES / f"{name}.png"
    visit.page.screenshot(path=path, full_page=True)
    if not name.startswith("playground"):  # a palette would lose the small patches of the stages
        with Image.open(path) as taken:
            taken.convert("RGB").quantize().save(path, optimize=True)
    size = path.stat().st_size
    assert size < MAX_BYTES, f"{path} has {size} bytes"
    print(f"  {path.relative_to(REPOSITORY)}: {size} bytes", flush=True)


def pictures(browser: Any, url: str, name: str, words: str) -> None:
    """Of the dashboard in every form; each is checked as well."""
    for size, scheme, more in FORMS:
        with visiting(browser, url, size, scheme) as visit:
            visit.go("/dashboard")
            visit.wait("#headline", words)
            visit.check()
            picture(visit, f"dashboard-{name}{more}")


def a_start(browser: Any, serve: Serve) -> None:
    """A router is there before any decode worker: who loads is told, and nothing is red.

    It lasts for seconds, so what the router said then is shown to each tab.
    """
    said = answer = ""
    until = time.monotonic() + READY_S
    while not said or '"state":"wait"' in answer:  # the last of what was said meanwhile
        assert time.monotonic() < until, serve.output
        with suppress(httpx.TransportError):
            answer = httpx.get(f"{serve.url}/dashboard/data").text
            said = answer if "decode-0 or decode-1 is ready" in answer else said
        time.sleep(0.1)
    for size, scheme, more in FORMS:
        with visiting(browser, serve.url, size, scheme) as visit:
            visit.page.route("**/dashboard/data", lambda route: route.fulfill(body=said))
            visit.go("/dashboard")
            visit.wait("#headline", "Starting: requests wait until decode-0 or decode-1 is ready")
            visit.check()
            picture(visit, f"dashboard-loading{more}")


def a_death(browser: Any, serve: Serve) -> None:
    """A worker is killed under load: it is shown as lost, with the reason, then as replaced."""
    victim = serve.status()["decode-1"]["pid"]
    with ExitStack() as stack:
        visits = []
        for size, scheme, more in FORMS:
            visit = stack.enter_context(visiting(browser, serve.url, size, scheme))
            visit.go("/dashboard")
            visit.wait("#headline", ALL_WELL)
            visits.append((visit, more))
        os.kill(victim, signal.SIGKILL)
        for visit, more in visits:
            visit.wait("#workers tr", "lost")
            visit.wait("#changes li", "its process died")
            visit.wait("#headline", "decode-1 is lost")
            picture(visit, f"dashboard-death{more}")
            assert visit.text("#headline") == "decode-1 is lost", "the picture was taken too late"
        visits[0][0].check()
        for visit, _ in visits:
            visit.wait("#headline", ALL_WELL, READY_S)
            first = visit.text("#changes li:first-child")
            assert "decode-1 ready" in first, first
        picture(visits[0][0], "dashboard-replaced")


def a_chat(browser: Any, url: str) -> None:
    """An answer with its stages, wide, dark and narrow."""
    for size, scheme, more in FORMS:
        with visiting(browser, url, size, scheme) as visit:
            visit.go(behaviour.PLAYGROUND)
            behaviour.ask(visit, QUESTION)
            visit.wait("#status", "Answered.", 60)
            assert visit.text(".assistant .said").endswith("#### 70")
            assert "decoded by decode-" in visit.text(".stages")
            visit.check()
            picture(visit, f"playground{more}")


def the_api(browser: Any, url: str) -> None:
    """/docs, whose colours are Swagger UI's in part: axe judges our own pages."""
    for size, scheme, more in FORMS[:2]:
        with visiting(browser, url, size, scheme) as visit:
            visit.go("/docs")
            visit.wait(".opblock-tag", "Operators")
            picture(visit, f"api{more}")


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
    enter_namespace_of("tests.browser.screens")
    PICTURES.mkdir(exist_ok=True)
    with chromium() as browser, tempfile.TemporaryDirectory() as root:
        if "--cluster" not in sys.argv:
            behaviour.run(browser)
        serve = Serve(Path(root)).start(*ARGUMENTS)
        try:
            a_start(browser, serve)
            serve.wait_ready(READY_S)
            assert f"{serve.url}/dashboard" in serve.output
            pictures(browser, serve.url, "idle", ALL_WELL)
            the_api(browser, serve.url)
            a_chat(browser, serve.url)
            with steady(serve.url, ("--source", "problems", "--concurrency", NUM_CLIENTS)):
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
