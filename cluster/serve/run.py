"""`serve` in the supervisor's child: start, show progress, wait for the end, end cleanly."""

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from ray.exceptions import RayError

from cluster.config import ClusterConfig, Config
from cluster.control.controller import Progress
from cluster.control.replicas import State
from cluster.diagnose.checks import check_port
from cluster.serve import launch
from cluster.serve.lifetime import Running
from cluster.serve.progress import JsonScreen, Screen, Stages
from cluster.serve.ray_watch import Gcs, JoinedRay, OwnRay, RayGone, RayWatch
from cluster.serve.supervisor import Lent
from cluster.sites.estate import Done, Estate
from cluster.sites.handles import Identity, kill_for_certain
from cluster.sites.ray_private import RAY, raylet_socket
from worker.errors import WorldError

POLL_S = 0.2
SILENT_S = 10.0  # then the controller is ended, and another takes over
ADOPT_S = 60.0
MAX_DELAY_S = 30.0  # between two that have not come up


class Stopped(Exception):
    """A signal has asked for the end."""


@dataclass(slots=True)
class Serving:
    """The controller of a cluster, what it may leave to its successor, and what was shown of it."""

    config: Config
    local: bool  # this process has started Ray
    ray: RayWatch
    screen: Screen
    signals: list[int]  # that the supervisor, or who signals all processes at once, has sent
    estate: Estate = field(init=False)
    controller: Any = None
    identity: Identity | None = None  # of the controller
    num_seen: int = 0  # events
    done: list[Done] = field(default_factory=list[Done])  # orders

    def __post_init__(self) -> None:
        self.estate = Estate(self.config)

    def check(self) -> None:
        """Raises Stopped after a signal, RayGone."""
        if self.signals:
            raise Stopped
        self.ray.check()

    def create(self) -> None:
        """A controller, the first or the next one."""
        self.num_seen, self.done, self.identity = 0, [], None
        self.controller = launch.create_controller(self.estate.bequeath(), local=self.local)

    def start(self) -> tuple[str, ...]:
        """Show progress until everything is ready; the cluster's URLs."""
        self.identity = result(self.controller.identify.remote(), self.check)
        reference = self.controller.start.remote()
        stages = Stages(self.screen)
        while True:
            is_over = launch.is_over(reference, 0.0)
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
        """Show what happens to the cluster, until it was drained; a lost controller is replaced."""
        while True:
            try:
                progress = self._progress()
            except launch.ControllerGone as error:
                self._replace(error)
                continue
            for event in progress.events:
                self.screen.event(event)
            if progress.drained:
                self.screen.line("drained")
                return

    def stop(self, limits: ClusterConfig) -> None:
        """Ask the controller to end everything. What it cannot end, leaving Ray does."""
        reference = self.controller.stop.remote(limits.drain_timeout_s)
        deadline = time.monotonic() + limits.stop_limit_s
        try:
            while not launch.is_over(reference, 0.0) and time.monotonic() < deadline:
                asked = self._asked()
                while not launch.is_over(asked, POLL_S) and time.monotonic() < deadline:
                    pass
                if launch.is_over(asked, 0.0):
                    self._take(launch.wait_for(asked))
            if not launch.is_over(reference, 0.0):
                self.screen.line("the controller does not answer; ending it")
            elif not launch.wait_for(reference):
                self.screen.line(f"some requests were cut off after {limits.drain_timeout_s:g} s")
        except WorldError as error:
            self.screen.line(str(error))
        RAY.kill(self.controller)

    def _progress(self) -> Progress:
        """Raises as `check`, and ControllerGone."""
        return self._take(result(self._asked(), self.check, SILENT_S))

    def _asked(self) -> Any:
        return self.controller.progress.remote(self.num_seen, self.done)

    def _take(self, progress: Progress) -> Progress:
        self.num_seen += len(progress.events)
        self.done = [self.estate.done(order) for order in progress.orders]
        return progress

    def _replace(self, error: launch.ControllerGone) -> None:
        """Until one has taken over. Workers and routers serve meanwhile."""
        began_at, delay_s = time.monotonic(), 0.0
        self.screen.line(f"{error}; another one begins")
        while True:
            try:
                self._end_controller()
                self.create()
                self.identity = result(self.controller.identify.remote(), self.check)
                num = result(self.controller.adopt.remote(), self.check, ADOPT_S)
            except RayGone:
                raise
            except (RayError, ValueError, WorldError) as failure:
                delay_s = min(delay_s + 1.0, MAX_DELAY_S)
                self.screen.line(f"no controller: {failure}; again in {delay_s:g} s")
                until = time.monotonic() + delay_s
                while time.monotonic() < until:
                    time.sleep(POLL_S)
                    self.check()
                continue
            took_s = time.monotonic() - began_at
            self.screen.line(f"a new controller keeps the {num} processes, after {took_s:.1f} s")
            return

    def _end_controller(self) -> None:
        """A stopped one must not wake beside its successor."""
        RAY.kill(self.controller)
        if self.identity is not None:
            kill_for_certain(self.identity.pid, self.identity.start_ticks)
        launch.wait_gone()


def result(reference: Any, check: Callable[[], None], limit_s: float = math.inf) -> Any:
    """Of a call to the controller. Raises ControllerGone, and what `check` raises.

    limit_s: of our own time. While this process was stopped, the controller was not late.
    """
    waited_s = 0.0
    while not launch.is_over(reference, POLL_S):
        waited_s += POLL_S
        check()
        if waited_s > limit_s:
            raise launch.ControllerGone(f"the controller does not answer for {limit_s:g} s")
    answer = launch.wait_for(reference)
    check()
    return answer


def serve(config: Config, address: str, lent: Lent, out: TextIO) -> int:
    """Run a cluster until it is told to end; the exit code.

    config: with absolute paths if it starts a Ray of its own.
    address: of a Ray cluster to join; "": start one.

    Raises UserError or WorldError if it could not start, or lost its Ray.
    """
    screen = JsonScreen(out) if config.cluster.log_format == "json" else Screen(out)
    signals: list[int] = []
    if lent.directory is None:
        screen.line(f"joining the Ray cluster at {address}")
        address = launch.join(address)
    else:
        screen.line("starting Ray on this machine")
        address = launch.start_local(config, lent.directory)
    local, gcs = lent.directory is not None, Gcs(address)
    own = OwnRay(gcs, lent.directory / launch.AGENT_NOTES) if lent.directory is not None else None
    ray = RayWatch(own or JoinedRay(gcs, raylet_socket()), screen)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # now, as Ray sets its own
        signal.signal(number, lambda number, _: signals.append(number))
    serving = Serving(config, local, ray, screen, signals)
    controller = launch.find_controller()
    try:
        if controller is not None:
            with contextlib.suppress(Stopped):
                urls = result(controller.join.remote(config), serving.check)
                screen.line(f"it runs already, with this configuration, at {' '.join(urls)}")
            return 0
        if not local:
            check_port(config)
        serving.create()
        mode, token = (os.environ.get(f"RAY_AUTH_{name}", "") for name in ("MODE", "TOKEN_PATH"))
        running = Running(os.getppid(), address, local, mode, token, ())
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
            if not ray.cause:
                serving.stop(config.cluster)
        return 0
    finally:
        ray.close()
        RAY.shutdown()  # most of a Ray of our own ends with it
        if controller is None:
            screen.line("stopped")


def _welcome(config: Config, urls: tuple[str, ...], screen: Screen) -> None:
    url = urls[0]
    body = f'{{"model": "{config.model.name}", "messages": [{{"role": "user", "content": "Hi"}}]}}'
    screen.line(f"kvlane serves {config.model.name} at {' '.join(f'{u}/v1' for u in urls)}")
    screen.hint(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\")
    if config.router.api_key_file:
        screen.hint("    -H 'Authorization: Bearer KEY' \\")
    screen.hint(f"    -d '{body}'")
    screen.hint(f"  {url}/dashboard shows what it does; kvlane top does so here")
    screen.hint("Ctrl-C stops it.")
