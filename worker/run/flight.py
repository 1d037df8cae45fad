"""Flight: the launched steps of a loop; when to launch the next and to settle the oldest.

    step n computes          ├──────────────────────────────┤
    launch of step n + 1                              ▲        as late as keeps the device busy
    settling of step n                                      ▲

A step takes what has arrived by its launch. Step n + 1, if launched as soon as step n - 1 has
settled, would miss all that arrives while step n computes. So with KV under way the launch waits,
by the measured times of steps and launches. All waits are the engine thread's wait for messages, so
arrivals are handled meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from worker.forward.draws import Masks
from worker.run.engine import Engine
from worker.run.runner import Step

# Margin before a step's expected end: a timed wait of the OS, or other threads that hold the
# interpreter lock, may delay the launch of the next step by this much.
SLACK_S = 4e-4
# How often the loop polls for a step's end: every NEAR_POLL_S within NEAR_S of its expected end,
# else every POLL_S, as it may end early and the end of a step with chunks is not predicted.
POLL_S = 2.5e-4
NEAR_S = 2e-4
NEAR_POLL_S = 3e-5
TOLD_S = 0.1  # where the end of a step wakes the loop, which need not poll
NUM_LAUNCHES = 8  # recent ones; the next takes at most the longest of them, presumably


class Flight:
    """Up to two steps: `pending`, which runs, and the one that was launched behind it.

    Args:
        engine: launches and times steps.
        launch: launches the next step; None if nothing can run now.
        settle: waits until a step has ended and takes what it made; called in order of launch.
        masks: makes the masks of a masked step, once all steps before it have settled.
        wake: begins a turn of the loop, from any thread; for steps that say when they end.
    """

    def __init__(
        self,
        engine: Engine,
        launch: Callable[[], Step | None],
        settle: Callable[[Step], None],
        masks: Callable[[Step], Masks] | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        self.pending: Step | None = None
        # Whether a step is launched while the one before it runs.
        self._overlap = engine.config.spec.overlap
        self.waits = True  # False: launch at once and block, so that a schedule can be repeated
        self._next: Step | None = None
        self._engine = engine
        self._launch = launch
        self._settle = settle
        self._masks = masks
        self._wake = wake
        self._launches_s: deque[float] = deque(maxlen=NUM_LAUNCHES)  # host times of decode steps

    @property
    def busy(self) -> bool:
        """Whether a step is in flight."""
        return self.pending is not None

    def advance(self, num_arriving: int = 0) -> float | None:
        """Launch and settle what is due; returns in how many seconds to call again.

        None: nothing runs, and nothing can be launched before something arrives.
        num_arriving: requests that may join a step as soon as their KV has landed.
        """
        if self._next is None and (self._overlap or self.pending is None):
            if wait_s := self._launch_wait_s(num_arriving):
                return wait_s
            self._launch_next()
        settled = self.pending
        if settled is not None:
            if wait_s := self._settle_wait_s(settled):
                return wait_s
            self._settle(settled)
        self.pending, self._next = self._next, None
        if self.pending is None:
            return None if settled is None else 0.0  # what has settled may have made room
        if self.pending.plan.masked:  # masks follow from the tokens of the step before
            assert self._masks is not None
            self._engine.launch_tail(self.pending, self._masks(self.pending))
        return self._launch_wait_s(num_arriving)

    def _launch_next(self) -> None:
        began_at = time.monotonic()
        self._next = self._launch()
        if self._next is not None and self._next.plan.decode:
            self._launches_s.append(time.monotonic() - began_at)

    def _launch_wait_s(self, num_arriving: int) -> float:
        """How long the launch behind `pending` may wait; 0: it is due."""
        if self.pending is None or not self.waits or not num_arriving:
            return 0.0
        ends_at = self._engine.meter.ends_at(self.pending.plan)
        if ends_at is None or self.pending.done():
            return 0.0
        launch_s = max(self._launches_s, default=0.0)
        wait_s = ends_at - launch_s - SLACK_S - time.monotonic()
        return min(max(wait_s, 0.0), POLL_S)

    def _settle_wait_s(self, step: Step) -> float:
        """How long to wait for messages before polling `step` again; 0: settle it now."""
        if not self.waits or step.done():
            return 0.0
        # With layer groups, keep polling: nothing wakes the loop when one becomes final.
        if self._wake is not None and step.groups is None and step.tells(self._wake):
            return TOLD_S
        ends_at = self._engine.meter.ends_at(step.plan)
        if ends_at is None:
            return POLL_S
        left_s = ends_at - time.monotonic()
        return NEAR_POLL_S if abs(left_s) < NEAR_S else POLL_S
