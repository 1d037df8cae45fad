"""StepMeter: what a loop knows of its own steps. WorkerStats and the metrics are made from it."""

import time
from collections import deque
from collections.abc import Callable, Sequence

from worker.observe.metrics import WorkerMetrics
from worker.observe.window_counts import WindowCounts
from worker.plan import Plan

WEIGHT = 0.2  # of the newest step in the moving average
NUM_RECENT = 8  # decode steps that the next one is expected to be like


class StepMeter:
    """Times steps until they settle, from the later of their launch and the last settling."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self.prefill_s_per_token = 0.0  # 0 = none measured yet
        self.num_steps = 0  # settled
        self.took_s = 0.0  # the last of them
        self.windows = WindowCounts()
        self.chunks_s: Callable[[Plan], float] | None = None  # time of a step of chunks, at least
        self._metrics = metrics
        self._launched_at: dict[int, float] = {}
        self._free_at = 0.0
        self._decodes_s: dict[int, deque[float]] = {}  # by width

    def verifies(self, windows: WindowCounts) -> None:
        """Count verify windows from now on, every place from 0 on."""
        self.windows, metrics = windows, self._metrics
        metrics.spec_simulated.set(windows.simulated)
        metrics.spec_steps.set_function(lambda: windows.num_windows)
        metrics.spec_accepted.set_function(lambda: sum(windows.accepted))
        metrics.spec_undrafted.set_function(lambda: windows.num_windows - sum(windows.drafted[:1]))
        metrics.spec_first_acceptance.set_function(lambda: windows.first_acceptance)
        for at in range(len(windows.drafted)):
            place = str(at + 1)
            metrics.spec_accepted_at(place).set_function(lambda at=at: windows.accepted[at])
            metrics.spec_drafted_at(place).set_function(lambda at=at: windows.drafted[at])

    def ends_at(self, plan: Plan) -> float | None:
        """When the launched step of `plan` may end at the earliest, in monotonic seconds.

        By `chunks_s`, or the shortest of the last decode steps of its width; None: not known.
        """
        least_s = min(self._decodes_s.get(plan.width, ()), default=0.0)
        if plan.chunks:
            least_s = 0.0 if self.chunks_s is None else self.chunks_s(plan)
        return max(self._launched_at[plan.step], self._free_at) + least_s if least_s else None

    def launched(self, plan: Plan) -> None:
        """Note when `plan` was enqueued."""
        self._launched_at[plan.step] = time.monotonic()

    def settled(self, plan: Plan, path: str) -> None:
        """Count and time the step of `plan`, which has finished; path: see StepResult."""
        now = time.monotonic()
        self.num_steps += 1
        kind = "prefill" if plan.chunks else "decode"
        how, _, why = path.partition("_")
        self._metrics.steps(kind, how).inc()
        if how == "eager":
            self._metrics.eager_steps(kind, why or "configured").inc()
        took_s = now - max(self._launched_at.pop(plan.step), self._free_at)
        self._free_at, self.took_s = now, took_s
        self._metrics.step_seconds(kind).observe(took_s)
        num_tokens = sum(len(chunk.tokens) for chunk in plan.chunks)
        if not num_tokens:
            recent = self._decodes_s.setdefault(plan.width, deque(maxlen=NUM_RECENT))
            recent.append(took_s)
            return
        self._metrics.prompt_tokens.inc(num_tokens)
        rate, old = took_s / num_tokens, self.prefill_s_per_token
        self.prefill_s_per_token = rate if old == 0 else (1 - WEIGHT) * old + WEIGHT * rate

    def verified(self, width: int, nums: Sequence[int], drafts: Sequence[Sequence[int]]) -> None:
        """Count the windows of a decode step of `width`.

        nums: tokens of the requests that had not ended meanwhile; drafts: what their windows
        verified, -1 from where there is none.
        """
        if nums:
            self._metrics.spec_width.observe(width)
            self.windows.count(width, nums, drafts)
