"""What the pages do: real routers and a real browser; workers are doubles, to be slow on demand.

python -m tests.browser.behaviour        # in half a minute
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from router.observe.board import Change, Start
from router.text.tokenizer import Text
from tests.browser.driver import NARROW, WIDE, Visit, chromium, visiting
from tests.fault.router_doubles import DecodeDouble, make_model, serving, speak
from worker.api import Abort, Card, Error, FinishReason, Generate, Stages, WorkerStats

PULLS = {"pull_s": 0.2, "pull_span_s": 0.3, "pulled_bytes": 24_000_000}
STAGES = Stages(0.05, 0.25, 0.125, 0.0625, 0.03125, "prefill-3/abc", **PULLS)
MARKUP = "<img src=x onerror=alert(1)>"
PLAYGROUND = "/dashboard/playground"
SLOW = WorkerStats(
    num_running=2, max_num_reqs=8, num_free_pages=40, num_pages=21_875, page_size=16,
    card=Card(61_200_000_000, 85_500_000_000, 412.4, 700.0, 1755),
)  # fmt: skip
FOCUSED = """() => {
  const at = document.activeElement, box = at.getBoundingClientRect();
  const style = getComputedStyle(at);
  return [at.id || at.textContent.trim(), style.outlineStyle, box.width > 0 && box.height > 0];
}"""


class Stand:
    def __init__(self, directory: Path) -> None:
        self.directory = make_model(directory, words=("<think>", "</think>"))
        self._text = Text(self.directory)

    def tokens(self, text: str) -> tuple[int, ...]:
        return self._text.encode(text, add_special_tokens=False)

    @contextmanager
    def visited(
        self, browser: Any, double: DecodeDouble, **settings: Any
    ) -> Iterator[tuple[Any, Visit]]:
        """A router with these settings before a worker, and a tab of its pages."""
        with (
            serving(self.directory, double, **settings) as (router, url),
            visiting(browser, url) as visit,
        ):
            yield router, visit


def focused(visit: Visit, key: str = "Tab") -> str:
    """What has the focus after a key; it has to be visible, and to look so."""
    visit.page.keyboard.press(key)
    name, outline, is_seen = visit.page.evaluate(FOCUSED)
    assert is_seen, f"{name} has the focus and no size"
    assert outline != "none", f"{name} does not look focused"
    return name


def ask(visit: Visit, message: str) -> None:
    visit.page.focus("#message")
    visit.page.keyboard.press("Control+A")  # what has failed is there again
    visit.page.keyboard.type(message)
    visit.page.keyboard.press("Enter")


def dashboard_by_keyboard(browser: Any, stand: Stand) -> None:
    """Every control is reached in order; Pause works, and so does the way to the other page."""
    with stand.visited(browser, DecodeDouble(stats=SLOW)) as (_, visit):
        visit.go("/dashboard")
        visit.wait("#headline", "The worker answers")
        order = [focused(visit) for _ in range(5)]
        assert order == ["Skip to the figures", "Dashboard", "Playground", "API", "pause"], order
        visit.page.keyboard.press("Space")
        visit.wait("#headline", "Paused")
        visit.wait("#age", "as of")
        visit.page.keyboard.press("Space")
        visit.wait("#headline", "The worker answers")
        assert focused(visit) == "minutes"
        assert focused(visit) == "hour"
        visit.page.keyboard.press("Space")
        assert visit.page.get_attribute("#hour", "aria-pressed") == "true"
        visit.go("/dashboard")
        focused(visit)
        visit.page.keyboard.press("Enter")
        assert visit.page.evaluate("document.activeElement.id") == "main"
        visit.go("/dashboard")
        for _ in range(3):
            focused(visit)
        visit.page.keyboard.press("Enter")
        visit.page.wait_for_url(f"{visit.host}{PLAYGROUND}")
        assert visit.page.evaluate("document.activeElement.id") == "message"


def figures_are_whole(browser: Any, stand: Stand) -> None:
    """A pool in tokens and requests, a GPU where there is one, a curve with axes and a pointer."""
    double = DecodeDouble(stats=SLOW)
    with stand.visited(browser, double) as (router, visit):
        visit.go("/dashboard")
        visit.wait("#workers", "350,000 tokens")
        visit.wait("#workers", "61 GB of 86 GB, 412 of 700 W, 1,755 MHz")
        visit.wait(".spark .until", "now")
        visit.page.hover(".plot", position={"x": 5, "y": 5})
        visit.wait(".spark .told", "s ago")
        visit.check()
        router.update_members(
            router.listed[:1], (), [Start("decode-0", "decode", "x", "load", 0.4, 9)]
        )
        visit.wait("#headline", "Starting: requests wait until decode-0 is ready")
        visit.wait("#workers", "loading 40%")
        visit.check()


def answers_are_text_with_stages(browser: Any, stand: Stand) -> None:
    """Reasoning stands apart, markup stays text, the bar has its table, facts are told."""
    said = stand.tokens(f"<think>I think</think>{MARKUP}")
    double = DecodeDouble(script=speak(said, stages=STAGES))
    with stand.visited(browser, double, reasoning_parser="qwen3") as (_, visit):
        visit.go(PLAYGROUND)
        ask(visit, "hello")
        visit.wait("#status", "Answered.")
        assert visit.text(".assistant .said") == MARKUP
        assert visit.text(".reasoning p") == "I think"
        assert visit.page.locator("#log img").count() == 0
        table = visit.text(".stages table")
        for words in (
            "Prefill: computing the prompt\t250 ms",
            "Waited for KV from the prefill worker\t125 ms",
            "KV moved to the decode worker\t200 ms\tbeside",
        ):
            assert words in table, table
        assert visit.page.locator(".bar span").count() >= 6
        assert "24 MB of KV at 120 MB/s, from 175 ms before" in visit.text(".stages")
        assert "ended by stop" in visit.text(".facts")
        visit.check()
        ask(visit, "again")
        visit.wait("li.assistant:nth-child(4) .facts", "ended by stop")
        assert visit.page.locator(".stages[open]").count() == 1
        visit.page.click("#clear")
        assert visit.page.locator("#log li").count() == 0


def stop_stops(browser: Any, stand: Stand) -> None:
    """By the button and by Esc; the worker is told, the text stays."""
    double = DecodeDouble()
    with stand.visited(browser, double) as (_, visit):
        visit.go(PLAYGROUND)
        for act in (lambda: visit.page.click("#stop"), lambda: visit.page.keyboard.press("Escape")):
            assert visit.page.is_disabled("#stop")
            ask(visit, "tell a long story")
            peer, generate = double.take()
            double.chunk(peer, generate, stand.tokens("once upon"))
            visit.wait("li.assistant:last-child .said", "once upon")
            act()
            visit.wait("#status", "Stopped.")
            assert double.expect(Abort).req_id == generate.req_id
            assert visit.text("li.assistant:last-child .said") == "once upon"
            visit.wait("li.assistant:last-child .facts", "stopped by you")
        settings = {"#temperature": "0.5", "#max-tokens": "7", "#system": "be brief"}
        for field, value in settings.items():
            visit.page.fill(field, value)
        ask(visit, "now")
        _, generate = double.take()
        assert (generate.sampling.temperature, generate.sampling.max_tokens) == (0.5, 7)
        visit.page.keyboard.press("Escape")
        visit.wait("#status", "Stopped.")


def errors_are_shown(browser: Any, stand: Stand) -> None:
    """Before and within an answer, with code and request id; and one of the network."""

    def fail(double: DecodeDouble, peer: str, generate: Generate) -> None:
        double.chunk(peer, generate, stand.tokens("half of"), stages=STAGES)
        error = Error("out_of_pages", "no page is left")
        double.chunk(
            peer, generate, at=len(stand.tokens("half of")), finish=FinishReason.ERROR, error=error
        )

    with stand.visited(browser, DecodeDouble(script=fail)) as (router, visit):
        visit.allowed = ("Failed to load resource",)
        visit.go(PLAYGROUND)
        ask(visit, "hello")
        visit.wait(".error", "no page is left")
        visit.wait(".error", "code out_of_pages · request id")
        assert "HTTP" not in visit.text(".error"), "it had begun well"
        assert visit.page.input_value("#message") == "hello"
        assert visit.text(".assistant .said") == "half of"
        visit.page.fill("#max-tokens", "100000")
        ask(visit, "hello")
        visit.wait("li.assistant:last-child .error", "HTTP 400 · code context_length_exceeded")
        visit.check()
        router.stop()
        ask(visit, "hello")
        visit.wait("li.assistant:last-child .error", "The server does not answer.")
        assert visit.page.is_enabled("#send")


def keys_are_asked_for(browser: Any, stand: Stand) -> None:
    """Where the figures need none, a chat does, and it is kept for the tab."""
    keys = stand.directory / "keys"
    keys.write_text("sesame")
    double = DecodeDouble(script=speak(stand.tokens("yes"), stages=STAGES))
    options = {"api_key_file": str(keys), "admin_access": "open"}
    with stand.visited(browser, double, **options) as (_, visit):
        visit.allowed = ("401",)
        visit.go("/dashboard")
        visit.wait("#headline", "The worker answers")
        visit.go(PLAYGROUND)
        ask(visit, "hello")
        visit.wait(".error", "a valid API key is needed")
        assert visit.page.evaluate("document.activeElement.id") == "key"
        visit.page.keyboard.type("sesame")
        for _ in range(2):
            ask(visit, "hello")
            visit.wait("li.assistant:last-child .said", "yes")
            visit.page.reload()


def old_figures_look_old(browser: Any, stand: Stand) -> None:
    """Once the router is gone, and until it is back."""
    double = DecodeDouble(stats=SLOW)
    with visiting(browser, "http://127.0.0.1") as visit:
        visit.allowed = ("Failed to load resource",)
        with serving(stand.directory, double) as (_, url):
            visit.page.goto(f"{url}/dashboard")
            visit.wait("#headline", "The worker answers")
        visit.wait("#headline", "No news from the router: it does not answer. All figures are old.")
        visit.wait("#age", "no answer for")
        assert visit.page.locator("body.stale").count() == 1
        with serving(stand.directory, DecodeDouble(), port=int(url.rpartition(":")[2])):
            visit.wait("#headline", "The worker answers")
            assert visit.page.locator("body.stale").count() == 0


def states_are_told(browser: Any, stand: Stand) -> None:
    """Narrow and wide, light and dark: a lost worker, a silent router, many changes."""
    double = DecodeDouble(stats=SLOW)
    why = "its process died (a long reason that says much and is shown in full)"
    changes = [Change(f"prefill-{i}", "prefill", "abc", "lost", why, 100.0 - i) for i in range(30)]
    with serving(stand.directory, double) as (router, url):
        router.update_members(router.listed, changes)
        for size in (NARROW, WIDE):
            for scheme in ("light", "dark"):
                with visiting(browser, url, size, scheme) as visit:
                    visit.go("/dashboard")
                    visit.wait("#headline", "prefill-3 is lost, and 26 more")
                    assert visit.page.locator("#changes li").count() == 30
                    visit.check()
                    for path in (PLAYGROUND, "/"):
                        visit.go(path)
                        visit.check()


def the_api_is_tried_out(browser: Any, stand: Stand) -> None:
    """Groups of paths, a key by the button, and an answer; nothing of another host."""
    keys = stand.directory / "keys"
    keys.write_text("sesame")
    double = DecodeDouble(script=speak(stand.tokens("yes"), stages=STAGES))
    with stand.visited(browser, double, api_key_file=str(keys)) as (_, visit):
        visit.go("/docs")
        for group in ("Generate", "Models and tokens", "Probes", "Operators"):
            visit.wait(".opblock-tag", group)
        visit.page.click("button.authorize")
        visit.page.fill(".auth-container input", "sesame")
        visit.page.click(".auth-container button.authorize")
        visit.page.click(".auth-container button.btn-done")
        visit.page.click("#operations-Generate-v1_chat_completions .opblock-summary-control")
        visit.page.click("#operations-Generate-v1_chat_completions .execute")
        visit.wait(".live-responses-table", "200")
        visit.wait(".live-responses-table", "yes")


CHECKS: tuple[Callable[[Any, Stand], None], ...] = (
    dashboard_by_keyboard, figures_are_whole, answers_are_text_with_stages, stop_stops,
    the_api_is_tried_out, errors_are_shown, keys_are_asked_for, old_figures_look_old,
    states_are_told,
)  # fmt: skip


def run(browser: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        stand = Stand(Path(directory) / "model")
        for check in CHECKS:
            began = time.monotonic()
            check(browser, stand)
            print(f"{check.__name__}: {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    with chromium() as opened:
        run(opened)
