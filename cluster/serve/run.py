"""`serve` in the supervisor's child: start, show progress, wait for the end, end cleanly."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any, TextIO

from cluster.config import Config
from cluster.control.controller import Progress
from cluster.control.replicas import State
from cluster.diagnose.settings import check_port
from cluster.serve import launch
from cluster.serve.lifetime import Running
from cluster.serve.progress import JsonScreen, Screen, Stages
from cluster.serve.supervisor import Lent
from cluster.sites.ray_private import RAY
from worker.errors import WorldError

POLL_S = 0.2


# Numbers of the signals with which the supervisor, or who signals all processes at once, has asked
# for the end.
Signals = list[int]


class Stopped(Exception):
    """A signal has asked for the end."""


def serve(config: Config, address: str, auth_mode: str, lent: Lent, out: TextIO) -> int:
    """Run a cluster until it is told to end; the exit code.

    Args:
        config: with absolute paths if it starts a Ray of its own.
        address: of a Ray cluster to join; "": start one.
        auth_mode: RAY_AUTH_MODE in force.
        out: for progress.

    Raises:
        UserError, WorldError: it could not start, or it lost its controller.
    """
    screen = JsonScreen(out) if config.cluster.log_format == "json" else Screen(out)
    signals: Signals = []
    if lent.directory is None:
        screen.line(f"joining the Ray cluster at {address}")
        address = launch.join(address)
    else:
        screen.line("starting Ray on this machine")
        address = launch.start_local(config, lent.directory)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # now, as Ray sets its own
        signal.signal(number, lambda number, _: signals.append(number))
    if (controller := launch.find_controller()) is not None:
        return _joined(controller, config, screen, signals)
    try:
        local = lent.directory is not None
        if not local:
            check_port(config)
        controller = launch.create_controller(config, local=local)
        running = Running(os.getppid(), address, local, auth_mode, ())
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
        launch.leave()
        screen.line("stopped")


def _joined(controller: Any, config: Config, screen: Screen, signals: Signals) -> int:
    """This Ray cluster has a kvlane: wait until that is ready, and leave it alone."""
    try:
        urls: tuple[str, ...] = _result(controller.join.remote(config), signals)
        screen.line(f"it runs already, with this configuration, at {' '.join(urls)}")
    except Stopped:
        pass
    finally:
        launch.leave()
    return 0


def _start(controller: Any, screen: Screen, signals: Signals) -> tuple[tuple[str, ...], int]:
    """Show progress until everything is ready; the cluster's URLs, and the events shown."""
    reference = controller.start.remote()
    stages = Stages(screen)
    num_seen = 0
    while True:
        is_over = launch.is_over(reference, POLL_S)
        progress = _progress(controller, num_seen, signals)
        num_seen += len(progress.events)
        for event in progress.events:
            if event.state is State.LOST:  # the stages tell of all others
                screen.event(event)
        if progress.drained:  # before it was ready
            raise Stopped
        if is_over:
            launch.wait_for(reference)
        if is_over and progress.urls:
            screen.line("ready")
            return progress.urls, num_seen
        stages.show(progress.starting, progress.waiting)


def _watch(controller: Any, screen: Screen, num_seen: int, signals: Signals) -> None:
    """Returns when the cluster was drained; shows what happens to it until then."""
    while True:
        progress = _progress(controller, num_seen, signals)
        num_seen += len(progress.events)
        for event in progress.events:
            screen.event(event)
        if progress.drained:
            screen.line("drained")
            return
        time.sleep(POLL_S)


def _progress(controller: Any, num_seen: int, signals: Signals) -> Progress:
    return _result(controller.progress.remote(num_seen), signals)


def _result(reference: Any, signals: Signals) -> Any:
    """Of a call to the controller. Raises Stopped after a signal."""
    while not launch.is_over(reference, POLL_S):
        if signals:
            raise Stopped
    result = launch.wait_for(reference)
    if signals:
        raise Stopped
    return result


def _welcome(config: Config, urls: tuple[str, ...], screen: Screen) -> None:
    url = urls[0]
    body = f'{{"model": "{config.model.name}", "messages": [{{"role": "user", "content": "Hi"}}]}}'
    screen.line(f"kvlane serves {config.model.name} at {' '.join(f'{u}/v1' for u in urls)}")
    screen.hint(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\")
    screen.hint(f"    -d '{body}'")
    screen.hint(f"  {url}/dashboard shows what it does; kvlane top does so here")
    screen.hint("Ctrl-C stops it.")


def _stop(controller: Any, config: Config, screen: Screen) -> None:
    """Ask the controller to end everything. What it cannot end, closing the session does."""
    drain_timeout_s = config.cluster.drain_timeout_s
    reference = controller.stop.remote(drain_timeout_s)
    try:
        if not launch.is_over(reference, config.cluster.stop_limit_s):
            screen.line("the controller does not answer; ending it")
        elif not launch.wait_for(reference):
            screen.line(f"some requests were cut off after {drain_timeout_s:g} s")
    except WorldError as error:
        screen.line(str(error))
    RAY.kill(controller)
