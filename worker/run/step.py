"""Step: one launched step of an engine."""

from __future__ import annotations

from collections.abc import Callable

from worker.draw.tail import Result
from worker.plan import Drawn, Plan
from worker.run.base import PaddedShape
from worker.run.groups import LayerGroups
from worker.run.stream import Handle


class Step:
    """A launched step; `wait()` blocks until it has finished. Filled by ModelRunner.

    Args:
        plan: of the step.
        shape: of a prefill step's batch.
        groups: the layer hook of a prefill step; None: it has none.
    """

    def __init__(self, plan: Plan, shape: PaddedShape, groups: LayerGroups | None = None) -> None:
        self.plan, self.shape, self.groups = plan, shape, groups
        # How it was launched, for metrics, and tokens of its forward, padding included; known once
        # it has been waited for.
        self.path, self.num_tokens = "", 0
        self.end: Handle | None = None  # of all of it; None: a masked step's tail is to come
        self.verifies: Handle | None = None  # the drafts of a masked step; None: the width is 1

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self.end is not None and self.end.done()

    def tells(self, wake: Callable[[], None]) -> bool:
        """Have another thread call `wake` when the step is done; False: nothing will.

        Only on the CPU, where a loop that polls takes the step's own core.
        """
        return self.end is not None and self.end.tells(wake)

    def drafts(self) -> list[list[int]]:
        """What each row of a masked step verifies, width - 1 ids; -1 = none. Width 1: [].

        Known as soon as the step before has ended, when masks can be made.
        """
        return [] if self.verifies is None else self.verifies.wait().ids.tolist()

    def wait(self) -> list[Drawn]:
        """Block until the step has finished; returns what plan.sampled_rows drew."""
        assert self.end is not None, "the tail of a masked step is not launched"
        result: Result | None = self.end.wait()
        return result.read() if result is not None else []
