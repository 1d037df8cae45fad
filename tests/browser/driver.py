"""Chromium, driven by Playwright, and what has to hold of every page at any time."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parents[2] / ".tools" / "browser"
AXE = TOOLS / "node_modules" / "axe-core" / "axe.min.js"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
WIDE, NARROW = (1200, 900), (360, 740)
SERIOUS = ("serious", "critical")

sys.path.append(str(TOOLS))


@dataclass
class Visit:
    """One tab, and what went wrong in it."""

    page: Any  # Playwright's
    host: str  # the only one that it may talk to
    faults: list[str] = field(default_factory=list[str])
    allowed: tuple[str, ...] = ()  # parts of messages that a check provokes

    def watch(self) -> None:
        page = self.page
        page.on("console", lambda m: m.type in ("error", "warning") and self._fault(m.text))
        page.on("pageerror", lambda error: self._fault(str(error)))
        page.on("request", lambda r: r.url.startswith(self.host) or self._fault(f"asks {r.url}"))

    def _fault(self, text: str) -> None:
        if not any(part in text for part in self.allowed):
            self.faults.append(text)

    def go(self, path: str) -> None:
        self.page.goto(f"{self.host}{path}")

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def wait(self, selector: str, words: str, timeout_s: float = 30) -> None:
        part = self.page.locator(selector, has_text=words)
        part.first.wait_for(state="visible", timeout=1000 * timeout_s)

    def check(self) -> None:
        """No serious finding of axe, nothing beyond the right edge, and no fault so far."""
        width, shown = self.page.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert width <= shown, f"{self.page.url} is {width} px wide of {shown}"
        self.page.evaluate(AXE.read_text())
        violations = self.page.evaluate("axe.run().then(found => found.violations)")
        for each in violations:
            where = ", ".join(str(node["target"]) for node in each["nodes"])
            print(f"  axe: {each['impact']} {each['id']}: {each['help']} ({where})")
        assert not [each["id"] for each in violations if each["impact"] in SERIOUS]
        assert not self.faults, self.faults


@contextmanager
def chromium() -> Iterator[Any]:
    if not AXE.exists() or CHROMIUM is None:
        raise SystemExit("tests/browser/install installs what this needs; and Debian's chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visiting(
    browser: Any, host: str, size: tuple[int, int] = WIDE, scheme: str = "light"
) -> Iterator[Visit]:
    """A tab of its own, with a session of its own; nothing may have gone wrong at its end."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, reduced_motion="reduce"
    )
    try:
        visit = Visit(context.new_page(), host)
        visit.watch()
        yield visit
        assert not visit.faults, visit.faults
    finally:
        context.close()
