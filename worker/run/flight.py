"""Flight: the launched steps of a loop, at most two, and when the next thing is due.

    step n computes          ├──────────────────────────────┤
    launch of step n + 1                              ▲        as late as keeps the device busy
    settling of step n                                      ▲

A step takes the requests that are ready at its launch. If step n + 1 were launched as soon as step
n - 1 has settled, it would miss what is ready while step n computes. So if some are expected, it
waits, by measured times of steps and launches (ADR 0021), and the engine thread handles messages.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from worker.api import TokenLogprob
from worker.forward.draws import Masks
from worker.observe.meter import StepMeter
from worker.plan import Drawn, PaddedShape, Plan
from worker.run.base import Outcome
from worker.run.layer_groups import LayerGroups
from worker.run.stream import Handle

# Margin before a step's expected end. A timed wait of the OS, or a thread that holds the GIL, may
# delay the launch of the next step by this much.
SLACK_S = 4e-4
# How often the loop polls for a step's end: every NEAR_POLL_S within NEAR_S of its expected end,
# else every POLL_S. A step may end early, and the end of a step is not always predicted.
POLL_S = 2.5e-4
NEAR_S = 2e-4
NEAR_POLL_S = 3e-5
TOLD_S = 0.1  # wait of a loop that the end of a step wakes, and that need not poll
TAIL = "the tail of a masked step is not launched"
NUM_LAUNCHES = 8  # recent launches; the next is assumed to take as long as the longest of them


class StepResult(NamedTuple):
    """What a step has come to, on the host."""

    drawn: list[Drawn]  # of plan.sampled_rows
    scores: Sequence[TokenLogprob]  # of `Chunk.scored`, in order
    path: str  # how the step was launched, for metrics
    num_tokens: int  # of its forward, with padding


@dataclass(slots=True, frozen=True, eq=False)
class Step:
    """A launched step. Made by ModelRunner."""

    plan: Plan
    outcome: Handle  # of its last piece of work, an `Outcome`
    groups: LayerGroups | None = None  # the layer hook of a prefill step

    def done(self) -> bool:
        return self.outcome.done()

    def tells(self, wake: Callable[[], None]) -> bool:
        """See Handle.tells. Only on the CPU, where a loop that polls takes the step's own core."""
        return self.outcome.tells(wake)

    def wait(self) -> StepResult:
        """Block until the step has finished."""
        made: Outcome = self.outcome.wait()
        drawn = [] if made.result is None else made.result.read()
        scores = () if made.scores is None else made.scores.read()
        return StepResult(drawn, scores, made.path, made.num_tokens)


@dataclass(slots=True, frozen=True, eq=False)
class MaskedStep:
    """A step whose forward is launched, and whose tail waits for masks; see `launch_tail`."""

    plan: Plan
    verifies: Handle | None  # the drafts that it verifies; None: none
    groups: ClassVar[None] = None  # a prefill worker masks nothing

    def drafts(self) -> list[list[int]]:
        """Drafts that the rows verify: width - 1 ids, -1 = none. Width 1: [].

        Waits for the end of the step before. From then on masks can be made.
        """
        return [] if self.verifies is None else self.verifies.wait().ids.tolist()


Launched = Step | MaskedStep


class Followers(Protocol):
    """The ranks beside the leader, which launch what it launches; `worker.rank` has them."""

    def tell(self, message: Any) -> None:
        """Send to all of them."""
        ...

    def launch(self, plan: Plan, shape: PaddedShape) -> None:
        """Have a step launched; the leader launches it next."""
        ...

    def launch_tail(self, masks: Masks) -> None:
        """Have the tail of the masked step launched; masks: on the host."""
        ...

    def settled(self, step: Step, drawn: Sequence[Drawn]) -> None:
        """The leader's own step has ended."""
        ...


class Flight:
    """`running`, the step that the device computes, and the one that was launched behind it.

    A turn asks, in this order: `launch_due` (then `launched`), `take_ended`, `tail_due` (then
    `tail_launched`), `idle_s`. meter: predicts the ends of steps; overlap: a step is launched while
    the one before it runs; wake: begins a turn of the loop; a CPU stream's thread calls it at a
    step's end.
    """

    def __init__(
        self, meter: StepMeter, *, overlap: bool = True, wake: Callable[[], None] | None = None
    ) -> None:
        self.running: Launched | None = None
        self.overlap = overlap
        self.waits = True  # False: launch at once and block, so that a schedule can be repeated
        self._meter, self._wake = meter, wake
        self._next: Launched | None = None
        self._has_settled = False  # in this turn
        self._wait_s = 0.0  # until what this turn had to put off is due
        self._launches_s: deque[float] = deque(maxlen=NUM_LAUNCHES)

    @property
    def busy(self) -> bool:
        """Whether a step has been launched and not settled."""
        return self.running is not None or self._next is not None

    def launch_due(self, num_arriving: int = 0) -> bool:
        """Whether to launch a step now, if the scheduler has one.

        num_arriving: requests that may join the step, once their KV has landed or as they come.
        """
        self._wait_s, self._has_settled = 0.0, False
        if self._next is not None or (self.running is not None and not self.overlap):
            return False
        self._wait_s = self._launch_wait_s(num_arriving)
        return not self._wait_s

    def launched(self, step: Launched, took_s: float) -> None:
        """Take a step that was launched just now; took_s: how long the launch took."""
        self._next = step
        if step.plan.decode or self._meter.chunks_s is not None:
            self._launches_s.append(took_s)

    def take_ended(self) -> Step | None:
        """The running step, if it is to be settled now; the next one takes its place.

        A step that was launched behind no other becomes `running` here, and is not settled in
        the same turn.
        """
        step = self.running
        assert not isinstance(step, MaskedStep), TAIL
        if step is not None:
            self._wait_s = self._wait_s or self._settle_wait_s(step)
            if self._wait_s:
                return None
        self.running, self._next = self._next, None
        self._has_settled = step is not None
        return step

    @property
    def tail_due(self) -> MaskedStep | None:
        """The running step if its tail waits for masks; the step before has settled."""
        return self.running if isinstance(self.running, MaskedStep) else None

    def tail_launched(self, step: Step) -> None:
        """Take the step that `tail_due` has become."""
        self.running = step

    def idle_s(self, num_arriving: int = 0) -> float | None:
        """How long nothing is due; None: nothing will be due before something arrives."""
        if self._wait_s:
            return self._wait_s
        if self.running is None:
            return 0.0 if self._has_settled else None  # the settled step may have made room
        return self._launch_wait_s(num_arriving)

    def _launch_wait_s(self, num_arriving: int) -> float:
        """How long the launch behind `running` may wait; 0: it is due."""
        if self.running is None or not self.waits or not num_arriving:
            return 0.0
        assert not isinstance(self.running, MaskedStep), TAIL
        ends_at = self._meter.ends_at(self.running.plan)
        if ends_at is None or self.running.done():
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
        ends_at = self._meter.ends_at(step.plan)
        if ends_at is None:
            return POLL_S
        left_s = ends_at - time.monotonic()
        return NEAR_POLL_S if abs(left_s) < NEAR_S else POLL_S
