"""Random delays between everything that a worker does on the host, on the device and on the wire.

On a CPU the device is the runner's stream thread, and a delay is a sleep in it. On CUDA a delay is
a kernel that spins, enqueued where the sleep would be; the host runs ahead of it.
"""

import functools
import random
import time
from collections.abc import Callable
from typing import Any

import torch

from tests.support.lockstep import DECODE
from tests.support.pulls import WrappedPeer, WrappedPull
from worker.api import PeerId
from worker.transfer.base import Pull, PullState

SHORT_S = 0.002
CYCLES_PER_S = 1.5e9  # of a GPU, roughly


class Delays:
    """Puts delays into the `loops` and `engines` of `served`, drawn from `seed`.

    Those on the device are up to `longest_s`, at a `share` of the places each time; of the worker
    that is not `slowest` they are shorter, so that messages and pulls overtake the other's steps.
    """

    def __init__(
        self,
        served: Any,
        seed: int,
        longest_s: float = SHORT_S,
        slowest: PeerId = DECODE,
        share: float = 0.5,
    ) -> None:
        self._share = share
        self._host, self._stream = random.Random(seed), random.Random(seed + 1000)
        self._pulls = random.Random(seed + 2000)
        self.num_on_device = 0
        for loop in served.loops.values():
            self._wrap(loop.scheduler, "plan", self._sleep)
        for peer, engine in served.engines.items():
            runner: Any = engine.runner
            spins = engine.pool.device.type == "cuda"
            device = functools.partial(
                self._spin if spins else self._stream_sleep,
                longest_s if peer == slowest else longest_s / 8,
            )
            for name in ("run", "forward", "tail", "draw"):
                self._wrap(runner, name, device)
            for graphs in (runner.graphs.chunks, runner.graphs.decode):
                self._wrap(graphs, "launch", device)  # between the change of rows and the forward
            self._delay_steps(runner, device)
            if peer == DECODE:
                transport: Any = engine.transport
                connect = transport.connect
                transport.connect = lambda *args, _real=connect: WrappedPeer(
                    _real(*args), lambda pull: SlowPull(pull, self._pulls)
                )

    def _wrap(self, owner: Any, name: str, delay: Callable[[], None]) -> None:
        real = getattr(owner, name)

        def delayed(*args: Any, **kwargs: Any) -> Any:
            delay()
            result = real(*args, **kwargs)
            delay()
            return result

        setattr(owner, name, delayed)

    def _delay_steps(self, runner: Any, delay: Callable[[], None]) -> None:
        """Before and after a layer group is said to be final, between launching a step and settling
        the one before, and around the wait itself.
        """
        real = runner.launch

        def launch(plan: Any, groups: Any = None, shape: Any = None) -> Any:
            if groups is not None:
                self._wrap(groups, "on_layer", delay)
            step = real(plan, groups, shape)
            self._wrap(step, "wait", self._sleep)
            self._sleep()
            return step

        runner.launch = launch

    def _sleep(self) -> None:
        time.sleep(self._host.choice([0.0, 0.0, SHORT_S / 4, SHORT_S]))

    def _stream_sleep(self, longest_s: float) -> None:
        if self._stream.random() < self._share:
            self.num_on_device += 1
            time.sleep(self._stream.random() * longest_s)

    def _spin(self, longest_s: float) -> None:
        if self._stream.random() < self._share:
            self.num_on_device += 1
            torch.cuda._sleep(int(self._stream.random() * longest_s * CYCLES_PER_S))


class SlowPull(WrappedPull):
    """Now and then it does nothing when it is polled."""

    def __init__(self, pull: Pull, rng: random.Random) -> None:
        super().__init__(pull)
        self._rng = rng

    def poll(self) -> PullState:
        return PullState.RUNNING if self._rng.random() < 0.5 else super().poll()
