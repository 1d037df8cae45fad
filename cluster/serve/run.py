"""`serve` in the supervisor's child: start, show progress, wait for the end, end cleanly."""

import contextlib
import os
import signal
import time
from dataclasses import dataclass, replace
from typing import Any, TextIO

from cluster.config import ClusterConfig, Config
from cluster.control.controller import Progress
from cluster.control.replicas import State
from cluster.diagnose.checks import check_port
from cluster.serve import launch
from cluster.serve.lifetime import Running
from cluster.serve.progress import JsonScreen, Screen, Stages
from cluster.serve.supervisor import Lent
from cluster.sites.ray_private import RAY
from worker.errors import WorldError

POLL_S = 0.2


class Stopped(Exception):
    """A signal has asked for the end."""


@dataclass(slots=True)
class Serving:
    """The controller of a cluster, and what this process has shown of it."""

    controller: Any
    screen: Screen
    signals: list[int]  # that the supervisor, or who signals all processes at once, has sent
    num_seen: int = 0  # events

    def joined(self, config: Config) -> None:
        """Another `serve` runs here: wait until it is ready, and leave it alone."""
        with contextlib.suppress(Stopped):
            urls: tuple[str, ...] = self._result(self.controller.join.remote(config))
            self.screen.line(f"it runs already, with this configuration, at {' '.join(urls)}")

    def start(self) -> tuple[str, ...]:
        """Show progress until everything is ready; the cluster's URLs."""
        reference = self.controller.start.remote()
        stages = Stages(self.screen)
        while True:
            is_over = launch.is_over(reference, POLL_S)
            progress = self._progress()
            for event in progress.events:
                if event.state is State.LOST:  # the stages tell of all others
                    self.screen.event(event)
            if progress.drained:  # before it was ready
                raise Stopped
            if is_over:
                launch.wait_for(reference)
            if is_over and progress.urls:
                self.screen.line("ready")
                return progress.urls
            stages.show(progress.starting, progress.waiting)

    def watch(self) -> None:
        """Show what happens to the cluster, until it was drained."""
        while True:
            progress = self._progress()
            for event in progress.events:
                self.screen.event(event)
            if progress.drained:
                self.screen.line("drained")
                return
            time.sleep(POLL_S)

    def stop(self, limits: ClusterConfig) -> None:
        """Ask the controller to end everything. What it cannot end, leaving Ray does."""
        reference = self.controller.stop.remote(limits.drain_timeout_s)
        try:
            if not launch.is_over(reference, limits.stop_limit_s):
                self.screen.line("the controller does not answer; ending it")
            elif not launch.wait_for(reference):
                self.screen.line(f"some requests were cut off after {limits.drain_timeout_s:g} s")
        except WorldError as error:
            self.screen.line(str(error))
        RAY.kill(self.controller)

    def _progress(self) -> Progress:
        progress: Progress = self._result(self.controller.progress.remote(self.num_seen))
        self.num_seen += len(progress.events)
        return progress

    def _result(self, reference: Any) -> Any:
        """Of a call to the controller. Raises Stopped after a signal."""
        while not launch.is_over(reference, POLL_S):
            if self.signals:
                raise Stopped
        result = launch.wait_for(reference)
        if self.signals:
            raise Stopped
        return result


def serve(config: Config, address: str, auth_mode: str, lent: Lent, out: TextIO) -> int:
    """Run a cluster until it is told to end; the exit code.

    config: with absolute paths if it starts a Ray of its own.
    address: of a Ray cluster to join; "": start one. auth_mode: RAY_AUTH_MODE in force.

    Raises UserError or WorldError if it could not start, or lost its controller.
    """
    screen = JsonScreen(out) if config.cluster.log_format == "json" else Screen(out)
    signals: list[int] = []
    if lent.directory is None:
        screen.line(f"joining the Ray cluster at {address}")
        address = launch.join(address)
    else:
        screen.line("starting Ray on this machine")
        address = launch.start_local(config, lent.directory)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # now, as Ray sets its own
        signal.signal(number, lambda number, _: signals.append(number))
    controller = launch.find_controller()
    try:
        if controller is not None:
            Serving(controller, screen, signals).joined(config)
            return 0
        local = lent.directory is not None
        if not local:
            check_port(config)
        serving = Serving(launch.create_controller(config, local=local), screen, signals)
        running = Running(os.getppid(), address, local, auth_mode, ())
        lent.state.write(running)
        try:
            urls = serving.start()
            lent.state.write(replace(running, urls=urls))
            lent.ready()
            _welcome(config, urls, screen)
            serving.watch()
        except Stopped:
            screen.line("stopping (again Ctrl-C: at once)")
        finally:
            serving.stop(config.cluster)
        return 0
    finally:
        RAY.shutdown()  # most of a Ray of our own ends with it
        if controller is None:
            screen.line("stopped")


def _welcome(config: Config, urls: tuple[str, ...], screen: Screen) -> None:
    url = urls[0]
    body = f'{{"model": "{config.model.name}", "messages": [{{"role": "user", "content": "Hi"}}]}}'
    screen.line(f"kvlane serves {config.model.name} at {' '.join(f'{u}/v1' for u in urls)}")
    screen.hint(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\")
    screen.hint(f"    -d '{body}'")
    screen.hint(f"  {url}/dashboard shows what it does; kvlane top does so here")
    screen.hint("Ctrl-C stops it.")
