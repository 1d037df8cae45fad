"""`serve`: start, show progress, wait for Ctrl-C or a drain, end cleanly."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any, TextIO

from cluster import launch
from cluster.config import Config
from cluster.controller import Progress
from cluster.owned import Running
from cluster.ray_private import RAY
from cluster.seats import State
from cluster.supervisor import Lent
from worker.errors import WorldError

POLL_S = 0.2
STAGES_SAID = {"load": "loading", "capture": "capturing graphs of"}
STAGES = list(STAGES_SAID)
BAR_WIDTH = 24
LINE_EVERY_S = 10.0  # of "still starting" lines where there is no terminal


class Screen:
    """Lines of progress on `out`; on a terminal one more line below them that keeps changing."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.is_terminal = out.isatty()
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
        if self.is_terminal:
            shown = f"  … {text} ({time.monotonic() - self._said_at:.0f} s)" if text else ""
            if shown != self._live:
                self._out.write(f"\r\x1b[K{shown}\r")  # so that a line of Ray begins at the left
                self._out.flush()
                self._live = shown
        elif text and time.monotonic() - self._said_at > LINE_EVERY_S:
            self.line(text)


class Stages:
    """The stages of a start, each with a line; on a terminal with a bar while it lasts.

    The cluster is in the stage of the process that is least far.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._num_processes = 0
        self._now = ""

    def show(self, progress: Progress) -> None:
        """Say what goes on."""
        stages = progress.starting.values()
        self._num_processes = max(self._num_processes, len(stages))
        if progress.waiting or not stages:
            self._screen.live(progress.waiting)
            return
        name = min((stage.name for stage in stages), key=STAGES.index)
        said = f"{STAGES_SAID[name]} {', '.join(progress.starting)}"
        if name != self._now:
            self._now = name
            self._screen.line(said)
        there = [stage.part for stage in stages if stage.name == name]
        done = (self._num_processes - len(there) + sum(there)) / self._num_processes
        filled = round(done * BAR_WIDTH)
        bar = "█" * filled + "░" * (BAR_WIDTH - filled)
        self._screen.live(f"{bar if self._screen.is_terminal else said + ':'} {done:4.0%}")


class Signals:
    """Whether the supervisor, or who signals all processes at once, has asked for the end."""

    def __init__(self) -> None:
        self.asked = False

    def install(self) -> None:
        """To be called after Ray has started: it installs handlers of its own."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self.asked = True


class Stopped(Exception):
    """A signal has asked for the end."""


def serve(config: Config, address: str, auth_mode: str, lent: Lent, out: TextIO) -> int:
    """Run a cluster until it is told to end; the exit code. Runs in the supervisor's child.

    Args:
        config: with absolute paths if it starts a Ray of its own.
        address: of a Ray cluster to join; "": start one.
        auth_mode: RAY_AUTH_MODE in force.
        lent: by the supervisor.
        out: for progress.

    Raises:
        UserError, WorldError: it could not start, or it lost its controller.
    """
    screen, signals = Screen(out), Signals()
    if lent.directory is None:
        screen.line(f"joining the Ray cluster at {address}")
        session = launch.join(address)
    else:
        screen.line("starting Ray on this machine")
        session = launch.start_local(config, lent.directory)
    signals.install()
    try:
        controller = launch.create_controller(config, session)
        running = Running(os.getppid(), session.address, session.local, auth_mode, ())
        lent.state.write(running)
        try:
            urls, num_seen = _start(controller, screen, signals)
            lent.state.write(replace(running, urls=urls))
            lent.ready()
            _welcome(config, urls, screen)
            _watch(controller, screen, num_seen, signals)
        except Stopped:
            screen.line("stopping (again Ctrl-C: at once)")
        finally:
            _stop(controller, config, screen)
        return 0
    finally:
        session.close()
        screen.line("stopped")


def _start(controller: Any, screen: Screen, signals: Signals) -> tuple[tuple[str, ...], int]:
    """Show progress until everything is ready; the routers' URLs, and the events shown."""
    reference = controller.start.remote()
    stages = Stages(screen)
    num_seen = 0
    while True:
        over = launch.over(reference, POLL_S)
        progress = _progress(controller, num_seen, signals)
        num_seen += len(progress.events)
        for event in progress.events:
            if event.state is State.LOST:  # the stages tell of all others
                screen.line(f"{event.name}: {event.text}")
        if over:
            launch.wait_for(reference)
            screen.line("ready")
            return progress.urls, num_seen
        stages.show(progress)


def _watch(controller: Any, screen: Screen, num_seen: int, signals: Signals) -> None:
    """Returns when the cluster was drained; shows what happens to it until then."""
    while True:
        progress = _progress(controller, num_seen, signals)
        num_seen += len(progress.events)
        for event in progress.events:
            screen.line(f"{event.name}: {event.text}")
        if progress.drained:
            screen.line("drained")
            return
        time.sleep(POLL_S)


def _progress(controller: Any, num_seen: int, signals: Signals) -> Progress:
    """What is new. Raises Stopped after a signal."""
    reference = controller.progress.remote(num_seen)
    while not launch.over(reference, POLL_S):
        if signals.asked:
            raise Stopped
    progress: Progress = launch.wait_for(reference)
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
    drain_timeout_s = config.cluster.drain_timeout_s
    reference = controller.stop.remote(drain_timeout_s)
    try:
        if not launch.over(reference, config.cluster.stop_limit_s):
            screen.line("the controller does not answer; ending it")
        elif not launch.wait_for(reference):
            screen.line(f"some requests were cut off after {drain_timeout_s:g} s")
    except WorldError as error:
        screen.line(str(error))
    RAY.kill(controller)
