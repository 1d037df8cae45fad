"""How a prefill worker paces itself: from what its steps and the links to it were measured at.

Two choices, both by estimates of the time until decode has everything (ADR 0016):
how many tokens a step takes, and whether its layer groups are announced one by one.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from worker.plan import LONG_STEP_TOKENS

MIN_STEP_TOKENS = 512  # below, what a step costs beside its tokens was not looked at
ANNOUNCE_S = 1e-4  # what one more announcement costs the loops of both workers
# Of a layer's time: attention, its output and the feed-forward block. In long steps the last layer
# computes little of that.
AFTER_STORE = 0.8


@dataclass(slots=True, frozen=True)
class StepTime:
    """A step of `num_tokens`, measured at the start; seconds."""

    num_tokens: int
    whole_s: float  # the fastest way to launch it
    grouped_s: float  # the fastest that says when each layer group is final


@dataclass(slots=True, frozen=True)
class Pace:
    """What is known of one worker; `times` ascending, empty where nothing was measured."""

    times: Sequence[StepTime]
    num_groups: int  # of the KV layout
    kv_bytes_per_token: int
    max_tokens: int  # of one step
    num_layers: int

    def step_tokens(self, num_queued: int, link_bytes_per_s: float) -> int:
        """Tokens of the next step at most, for `num_queued` that wait.

        All that waits is computed at the rate of such steps; what is pulled after the last one adds
        to it: a small step is announced early, a large one multiplies faster.
        `link_bytes_per_s` is 0 where it is not known.
        """
        best, best_s = self.max_tokens, float("inf")
        for each in self.times:
            if not MIN_STEP_TOKENS <= each.num_tokens <= self.max_tokens:
                continue
            last_s = self._pull_s(each.num_tokens, link_bytes_per_s)
            if self.groups_pay(each.num_tokens, link_bytes_per_s):
                last_s /= self.num_groups
            all_s = max(1.0, num_queued / each.num_tokens) * each.whole_s + last_s
            if all_s < best_s:
                best, best_s = each.num_tokens, all_s
        return best

    def groups_pay(self, num_tokens: int, link_bytes_per_s: float) -> bool:
        """Whether to announce the layer groups of a step one by one.

        All but the last group are pulled while the step computes, and no longer than it computes;
        the last one is announced as soon as the last layer has stored its KV, before what else
        that layer computes. Where the link is not known they are.
        """
        if self.num_groups == 1 or not link_bytes_per_s:
            return self.num_groups > 1
        at = bisect.bisect_left(self.times, num_tokens, key=attrgetter("num_tokens"))
        step = self.times[at] if at < len(self.times) else None
        hidden_s, early_s = self._pull_s(num_tokens, link_bytes_per_s), 0.0
        costs_s = (self.num_groups - 1) * ANNOUNCE_S
        if step is not None:
            hidden_s = min(hidden_s, step.grouped_s)
            if step.num_tokens < LONG_STEP_TOKENS:
                early_s = AFTER_STORE * step.grouped_s / self.num_layers
            costs_s += step.grouped_s - step.whole_s
        return (1 - 1 / self.num_groups) * hidden_s + early_s > costs_s

    def _pull_s(self, num_tokens: int, link_bytes_per_s: float) -> float:
        num_bytes = num_tokens * self.kv_bytes_per_token
        return num_bytes / link_bytes_per_s if link_bytes_per_s else 0.0
