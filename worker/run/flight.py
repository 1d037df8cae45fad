"""Flight: the launched steps of a loop, at most two, and when the next thing is due.

    step n computes          ├──────────────────────────────┤
    launch of step n + 1                              ▲        as late as keeps the device busy
    settling of step n                                      ▲

A step takes the requests that are ready at its launch. If step n + 1 were launched as soon as step
n - 1 has settled, it would miss requests whose KV lands while step n computes. So as long as KV is
under way the launch waits, by the measured times of steps and launches (ADR 0021). The engine
thread waits for messages meanwhile, so it handles whatever arrives.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from worker.api import TokenLogprob
from worker.cache.layout import KVLayout
from worker.draw.sampler import Result
from worker.forward.draws import Masks
from worker.observe.meter import StepMeter
from worker.plan import Drawn, Plan
from worker.run.base import PaddedShape
from worker.run.stream import Handle, Stream

# Margin before a step's expected end. A timed wait of the OS, or a thread that holds the GIL, may
# delay the launch of the next step by this much.
SLACK_S = 4e-4
# How often the loop polls for a step's end: every NEAR_POLL_S within NEAR_S of its expected end,
# else every POLL_S. A step may end early, and the end of a step with chunks is not predicted.
POLL_S = 2.5e-4
NEAR_S = 2e-4
NEAR_POLL_S = 3e-5
TOLD_S = 0.1  # wait of a loop that the end of a step wakes, and that need not poll
NUM_LAUNCHES = 8  # recent launches; the next is assumed to take as long as the longest of them


class LayerGroups:
    """The layer hook of one prefill step: records an event as each layer group becomes final.

    Pages of other regions (a drafter's) travel with the last group, whose event is recorded once
    these are written, too. With several ranks a layer's KV is final when all have stored theirs.
    The leader knows that after the layer's all-reduce: a group is final from the next layer on.

    If the stream launches in the engine thread, `while_launching` is called at each layer, once the
    store of its KV is enqueued. The callback announces the groups of the previous step.
    """

    def __init__(
        self,
        layout: KVLayout,
        stream: Stream,
        while_launching: Callable[[], None],
        num_ranks: int = 1,
    ) -> None:
        self._events = [stream.event() for _ in range(layout.num_groups)]
        self._layers_per_group = layout.target.layers_per_group
        self._late = num_ranks > 1
        # Groups that `on_layer` records; the last may have to wait for `on_regions`.
        self._by_layers = layout.num_groups - (len(layout.regions) > 1 or self._late)
        self._while_launching = while_launching if stream.launches_here else None
        self._failed = False

    @property
    def num_groups(self) -> int:
        """Number of layer groups of the KV layout."""
        return len(self._events)

    @property
    def num_final(self) -> int:
        """How many groups, counted from the first, are final; 0 if the step failed. Never waits."""
        pending = (i for i, event in enumerate(self._events) if not event.query())
        return 0 if self._failed else next(pending, len(self._events))

    def wait(self, group: int) -> None:
        """Block until group number `group` is final, or the step has failed."""
        self._events[group].synchronize()

    def on_layer(self, layer_id: int) -> None:
        """See ForwardContext.on_layer."""
        num_final, rest = divmod(layer_id + (not self._late), self._layers_per_group)
        if not rest and 0 < num_final <= self._by_layers:
            self._events[num_final - 1].record()
        if self._while_launching is not None:
            self._while_launching()

    def on_regions(self) -> None:
        """Make the groups that are left final: the step has written all regions."""
        for event in self._events[self._by_layers :]:
            event.record()

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """If the step fails, record all events so that `wait` returns; the step raises."""
        try:
            yield
        except BaseException:
            self._failed = True
            for event in self._events:
                event.record()
            raise


class Step:
    """A launched step; `wait()` blocks until it has finished. Filled by ModelRunner.

    shape: of a prefill step's batch; groups: its layer hook, if it has one.
    """

    def __init__(self, plan: Plan, shape: PaddedShape, groups: LayerGroups | None = None) -> None:
        self.plan, self.shape, self.groups = plan, shape, groups
        self.path = ""  # how it was launched, for metrics; "" until then
        self.num_tokens = 0  # of its forward, with padding; 0 until it has run
        self.end: Handle | None = None  # of the step; None: a masked step's tail is to come
        self.scores: Sequence[TokenLogprob] = ()  # of `Chunk.scored`, in order, once it has ended
        self.verifies: Handle | None = None  # the drafts that a masked step verifies; None: none

    def done(self) -> bool:
        return self.end is not None and self.end.done()

    def tells(self, wake: Callable[[], None]) -> bool:
        """See Handle.tells. Only on the CPU, where a loop that polls takes the step's own core."""
        return self.end is not None and self.end.tells(wake)

    def drafts(self) -> list[list[int]]:
        """Drafts that each row of a masked step verifies: width - 1 ids, -1 = none. Width 1: [].

        Waits for the end of the step before. From then on masks can be made.
        """
        return [] if self.verifies is None else self.verifies.wait().ids.tolist()

    def wait(self) -> list[Drawn]:
        """Block until the step has finished; returns the draws of plan.sampled_rows."""
        assert self.end is not None, "the tail of a masked step is not launched"
        result: Result | None = self.end.wait()
        if result is None:
            return []
        self.scores = result.scores.read() if result.scores is not None else ()
        return result.read()


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

    A turn asks, in this order: `launch_due` (then `launched`), `take_ended`, `take_tail_due`,
    `idle_s`. meter: predicts the ends of steps; overlap: a step is launched while the one before it
    runs; wake: begins a turn of the loop; a CPU stream's thread calls it at a step's end.
    """

    def __init__(
        self, meter: StepMeter, *, overlap: bool = True, wake: Callable[[], None] | None = None
    ) -> None:
        self.running: Step | None = None
        self.overlap = overlap
        self.waits = True  # False: launch at once and block, so that a schedule can be repeated
        self._meter, self._wake = meter, wake
        self._next: Step | None = None
        self._tail_due = False
        self._has_settled = False  # in this turn
        self._wait_s = 0.0  # until what this turn had to put off is due
        self._launches_s: deque[float] = deque(maxlen=NUM_LAUNCHES)

    @property
    def busy(self) -> bool:
        """Whether a step has been launched and not settled."""
        return self.running is not None or self._next is not None

    def launch_due(self, num_arriving: int = 0) -> bool:
        """Whether to launch a step now, if the scheduler has one.

        num_arriving: requests that may join the step once their KV has landed.
        """
        self._wait_s, self._has_settled = 0.0, False
        if self._next is not None or (self.running is not None and not self.overlap):
            return False
        self._wait_s = self._launch_wait_s(num_arriving)
        return not self._wait_s

    def launched(self, step: Step, took_s: float) -> None:
        """Take a step that was launched just now; took_s: how long the launch took."""
        self._next = step
        if step.plan.decode:
            self._launches_s.append(took_s)

    def take_ended(self) -> Step | None:
        """The running step, if it is to be settled now; the next one takes its place.

        A step that was launched behind no other becomes `running` here, and is not settled in
        the same turn.
        """
        step = self.running
        if step is not None:
            self._wait_s = self._wait_s or self._settle_wait_s(step)
            if self._wait_s:
                return None
        self.running, self._next = self._next, None
        self._tail_due = self.running is not None and self.running.plan.masked
        self._has_settled = step is not None
        return step

    def take_tail_due(self) -> Step | None:
        """The running step if its tail waits for masks; once, when the step before has settled."""
        due, self._tail_due = self._tail_due, False
        return self.running if due else None

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
