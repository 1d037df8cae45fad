"""What `serve` shows of its progress."""

import errno
import time
from collections.abc import Mapping
from typing import TextIO

from cluster import logs
from cluster.control.replicas import Event, State
from cluster.sites.process import Stage

STAGES_SAID = {"load": "loading", "capture": "capturing graphs of"}
STAGES = list(STAGES_SAID)
BAR_WIDTH = 24
LINE_EVERY_S = 10.0  # of "still starting" lines where there is no terminal


class Screen:
    """Lines of progress on `out`; on a terminal one more line below them that keeps changing."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.is_terminal = out.isatty()
        self._began_at = self._said_at = time.monotonic()
        self._live = ""

    def line(self, text: str) -> None:
        """One line that stays, after the seconds since the start."""
        self.hint(f"[{time.monotonic() - self._began_at:6.1f} s] {text}")

    def event(self, event: Event) -> None:
        """What has happened to a process."""
        self.line(f"{event.name}: {event.text}")

    def hint(self, text: str) -> None:
        """A line for people only."""
        cleared, self._live = "\r\x1b[K" if self._live else "", ""
        self._said_at = time.monotonic()
        try:
            self._out.write(f"{cleared}{text}\n")
            self._out.flush()
        except OSError as error:  # the disk is full: what serves goes on, lines come later
            if error.errno != errno.ENOSPC:
                raise

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


class JsonScreen(Screen):
    """The same for machines: an object a line, as in the logs of all processes."""

    def __init__(self, out: TextIO) -> None:
        super().__init__(out)
        self.is_terminal = False

    def line(self, text: str) -> None:
        super().hint(logs.line(text, "serve"))

    def event(self, event: Event) -> None:
        level = "WARNING" if event.state is State.LOST else "INFO"
        super().hint(logs.line(event.text, event.name, level, state=str(event.state)))

    def hint(self, text: str) -> None:
        """Machines need none."""


class Stages:
    """The stages of a start, a line for one; on a terminal with a bar while it lasts.

    The cluster is in the stage of the process that is least far.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._num_processes = 0
        self._now = ""

    def show(self, starting: Mapping[str, Stage], waiting: str) -> None:
        """Say how far processes are that are not ready, or what placement waits for."""
        stages = starting.values()
        self._num_processes = max(self._num_processes, len(stages))
        if waiting or not stages:
            self._screen.live(waiting)
            return
        name = min((stage.name for stage in stages), key=STAGES.index)
        said = f"{STAGES_SAID[name]} {', '.join(starting)}"
        if name != self._now:
            self._now = name
            self._screen.line(said)
        there = [stage.part for stage in stages if stage.name == name]
        done = (self._num_processes - len(there) + sum(there)) / self._num_processes
        filled = round(done * BAR_WIDTH)
        bar = "█" * filled + "░" * (BAR_WIDTH - filled)
        self._screen.live(f"{bar if self._screen.is_terminal else said + ':'} {done:4.0%}")
