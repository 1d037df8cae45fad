"""`serve`: start, show progress, wait for Ctrl-C or a drain, end cleanly."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TextIO

from cluster import launch
from cluster.config import Config
from cluster.controller import Progress
from cluster.launch import RaySession
from cluster.owned import Running, StateFile
from cluster.ray_private import RAY
from worker.errors import WorldError

POLL_S = 0.2
LINE_EVERY_S = 10.0  # of "still starting" lines where there is no terminal
EXIT_INTERRUPTED = 130
STOP_MARGIN_S = 15.0  # beyond the configured time-outs, before stopping is given up


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the CLI read from its environment."""

    address: str  # of a Ray cluster to join; "": start one
    runtime_dir: Path  # for the state file
    temp_root: Path  # for Ray's files
    auth_mode: str  # RAY_AUTH_MODE in force


class Screen:
    """Lines of progress on `out`; on a terminal one more line below them that keeps changing."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._tty = out.isatty()
        self._began_at = time.monotonic()
        self._live = ""
        self._said_at = time.monotonic()

    def line(self, text: str) -> None:
        """One line that stays, after the seconds since the start."""
        self.plain(f"[{time.monotonic() - self._began_at:6.1f} s] {text}")

    def plain(self, text: str) -> None:
        """One line that stays."""
        if self._live:
            self._out.write("\r\x1b[K")
            self._live = ""
        self._out.write(text + "\n")
        self._out.flush()
        self._said_at = time.monotonic()

    def live(self, text: str) -> None:
        """Show what is going on at present."""
        if self._tty:
            shown = f"  … {text} ({time.monotonic() - self._said_at:.0f} s)" if text else ""
            if shown != self._live:
                self._out.write(f"\r\x1b[K{shown}\r")  # so that a line of Ray begins at the left
                self._out.flush()
                self._live = shown
        elif text and time.monotonic() - self._said_at > LINE_EVERY_S:
            self.line(text)


class Signals:
    """The first SIGINT or SIGTERM asks for an end, the second one enforces it.

    While Ray starts or is joined nothing looks at `asked`, so the first one interrupts that.
    """

    def __init__(self) -> None:
        self.asked = False
        self.session: RaySession | None = None
        self.state: StateFile | None = None

    def install(self) -> None:
        """To be called before Ray starts and again after it: Ray installs handlers of its own."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        again, self.asked = self.asked, True
        if self.session is None:
            raise KeyboardInterrupt  # if Ray swallows it, `asked` ends `serve` a little later
        if again:
            self._now()

    def _now(self) -> NoReturn:
        if self.state is not None:
            self.state.remove()
        if self.session is not None and self.session.local:
            self.session.kill()
        # In a Ray cluster that we joined, Ray ends our processes as soon as this one is gone.
        os._exit(EXIT_INTERRUPTED)


class Stopped(Exception):
    """A signal has asked for the end."""


def serve(config: Config, around: Surroundings, out: TextIO) -> int:
    """Run a cluster until it is told to end; the exit code.

    Raises:
        UserError, WorldError: it could not start, or it lost its controller. Nothing is left.
    """
    screen, signals = Screen(out), Signals()
    session, state = None, None
    signals.install()
    try:
        if around.address:
            screen.line(f"joining the Ray cluster at {around.address}")
            session = launch.join(around.address)
        else:
            screen.line("starting Ray on this machine")
            session = launch.start_local(config, around.temp_root)
        signals.session = session
        signals.install()
        controller = launch.create_controller(config, session)
        state = signals.state = StateFile(around.runtime_dir)
        running = Running(os.getpid(), session.address, session.local, around.auth_mode, ())
        state.write(running)
        try:
            urls, num_seen = _start(controller, screen, signals)
            state.write(replace(running, urls=urls))
            _welcome(config, urls, screen)
            _watch(controller, screen, num_seen, signals)
        except Stopped:
            screen.line("stopping (again Ctrl-C: at once)")
        finally:
            _stop(controller, config, screen)
        return 0
    finally:
        if state is not None:
            state.remove()
        if session is not None:
            session.close()
            screen.line("stopped")


def _start(controller: Any, screen: Screen, signals: Signals) -> tuple[tuple[str, ...], int]:
    """Show progress until everything is ready; the routers' URLs, and the events shown."""
    reference = controller.start.remote()
    num_seen = 0
    while True:
        over = launch.over(reference, POLL_S)
        progress = _show(controller, screen, num_seen, signals)
        num_seen += len(progress.events)
        if over:
            launch.wait_for(reference)
            return progress.urls, num_seen
        screen.live(progress.waiting or "waiting for " + ", ".join(progress.starting))


def _watch(controller: Any, screen: Screen, num_seen: int, signals: Signals) -> None:
    """Returns when the cluster was drained; shows what happens to it until then."""
    while True:
        progress = _show(controller, screen, num_seen, signals)
        num_seen += len(progress.events)
        if progress.drained:
            screen.line("drained")
            return
        time.sleep(POLL_S)


def _show(controller: Any, screen: Screen, num_seen: int, signals: Signals) -> Progress:
    """Print what is new. Raises Stopped after a signal."""
    reference = controller.progress.remote(num_seen)
    while not launch.over(reference, POLL_S):
        if signals.asked:
            raise Stopped
    progress: Progress = launch.wait_for(reference)
    for event in progress.events:
        screen.line(f"{event.name}: {event.text}")
    if signals.asked:
        raise Stopped
    return progress


def _welcome(config: Config, urls: tuple[str, ...], screen: Screen) -> None:
    url = urls[0]
    body = f'{{"model": "{config.model.name}", "messages": [{{"role": "user", "content": "Hi"}}]}}'
    screen.plain("")
    screen.plain(f"kvlane serves {config.model.name} at {' '.join(f'{u}/v1' for u in urls)}")
    screen.plain(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\")
    screen.plain(f"    -d '{body}'")
    screen.plain("Ctrl-C stops it.")


def _stop(controller: Any, config: Config, screen: Screen) -> None:
    """Ask the controller to end everything. What it cannot end, closing the session does."""
    cluster = config.cluster
    reference = controller.stop.remote(cluster.drain_timeout_s)
    limit_s = 2 * (cluster.drain_timeout_s + cluster.stop_timeout_s) + STOP_MARGIN_S
    try:
        if not launch.over(reference, limit_s):
            screen.line("the controller does not answer; ending it")
        elif not launch.wait_for(reference):
            screen.line(f"some requests were cut off after {cluster.drain_timeout_s:g} s")
    except WorldError as error:
        screen.line(str(error))
    RAY.kill(controller)
