"""Pace: how long a prefill step is, and whether its layer groups are announced one by one.

Both are chosen by the estimated time until decode has all KV, from step times measured at start-up
and link rates measured by decode workers (ADR 0016). At start-up nothing is before a chunk; what
attention to that adds is learnt from steps that ran.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

from worker.plan import LONG_STEP_TOKENS

# Shorter steps are not chosen. Measured times are of the forward alone; the rest of a step (host
# work, messages) is not measured, and weighs the more the shorter the step.
MIN_STEP_TOKENS = 512
ANNOUNCE_S = 1e-4  # what one more announcement costs the loops of both workers
WEIGHT = 0.2  # of the newest step in the moving average of what attention adds
# Share of a layer's time after its KV is stored: attention, output projection, feed-forward. A long
# step (`LONG_STEP_TOKENS`) counts as gaining no time in the last layer, as only attention runs for
# all tokens there.
AFTER_STORE = 0.8

Stretch: TypeAlias = tuple[int, int]  # tokens of a prompt: how many, and how many are before them


@dataclass(slots=True, frozen=True)
class StepTime:
    """Measured times of a step of `num_tokens`."""

    num_tokens: int
    whole_s: float  # by the fastest kind of launch
    grouped_s: float  # by the fastest kind that can call the layer hook


@dataclass(slots=True)
class Pace:
    """Chooses step lengths and announcements for one prefill worker, from measured times."""

    times: Sequence[StepTime]  # by num_tokens, ascending; empty = none measured
    num_groups: int  # of the KV layout
    kv_bytes_per_token: int
    max_tokens: int  # of one step
    num_layers: int
    beside: float = 0.0  # share of a page's bytes in regions that travel with the last layer group
    pair_s: float = 0.0  # learnt: what a token of a chunk takes for one that is before the chunk

    @property
    def last_share(self) -> float:
        """Share of a page's bytes that is announced with the last layer group."""
        return (1 - self.beside) / self.num_groups + self.beside

    def step_tokens(self, num_queued: int, link_bytes_per_s: float) -> int:
        """Choose how many tokens the next step may have, given `num_queued` waiting tokens.

        Minimises the time to compute all of them, in steps of one size and a last step with the
        rest, plus the time of the pull after the last step. Small steps leave little to pull; large
        steps compute a token faster. Even a short rest costs a whole read of the weights. `whole_s`
        counts for every step, also if groups are announced. link_bytes_per_s: 0 = not known.
        """
        best, best_s = self.max_tokens, float("inf")
        for step in self.times:
            if not MIN_STEP_TOKENS <= step.num_tokens <= self.max_tokens:
                continue
            num_full, rest = divmod(num_queued, step.num_tokens)
            all_s, num_last = num_full * step.whole_s, rest or step.num_tokens
            if rest and (padded := self._padded(rest)) is not None:
                all_s += padded.whole_s
            last_s = self._pull_s(num_last, link_bytes_per_s)
            if self.announce_groups(num_last, link_bytes_per_s):
                last_s *= self.last_share
            if all_s + last_s < best_s:
                best, best_s = step.num_tokens, all_s + last_s
        return best

    def short_step(self, most: int, waiting: Sequence[Stretch]) -> int:
        """Choose a step of up to `most` tokens for which a prompt that comes meanwhile can wait.

        It takes no longer than the longest step without a token before its chunks: the further a
        long prompt is computed, the smaller its chunks. But it stays a long step
        (`LONG_STEP_TOKENS`), as attention of shorter ones is slower. waiting: in their order.
        """
        sizes = [step.num_tokens for step in self.times if step.num_tokens <= self.max_tokens]
        for size in reversed(sizes):
            if size <= LONG_STEP_TOKENS:
                break
            if size <= most:
                most = size
                if self.step_s(_first(size, waiting)) <= self.step_s([(sizes[-1], 0)]):
                    break
        return most

    def step_s(self, chunks: Sequence[Stretch]) -> float:
        """How long a step of these chunks takes; 0 if none of so many tokens was measured."""
        alone_s = self._alone_s(sum(size for size, _ in chunks))
        return alone_s and alone_s + self.pair_s * num_pairs(chunks)

    def took(self, chunks: Sequence[Stretch], seconds: float) -> None:
        """Learn from a step that ran, if there were many tokens before its chunks."""
        num_tokens, pairs = sum(size for size, _ in chunks), num_pairs(chunks)
        alone_s, old = self._alone_s(num_tokens), self.pair_s
        if not alone_s or pairs < num_tokens * LONG_STEP_TOKENS:
            return
        pair_s = max(0.0, seconds - alone_s) / pairs
        self.pair_s = old + WEIGHT * (min(pair_s, 2 * old) - old) if old else pair_s

    def announce_groups(self, num_tokens: int, link_bytes_per_s: float) -> bool:
        """Whether to announce the layer groups of a step one by one.

        All groups but the last are pulled while the step computes, which hides the step's time at
        most. The last group is announced once the last layer has stored its KV, before that layer's
        attention; if other regions travel with it, at the end of the step. Returns True if the
        link's rate is not known and there are several groups.
        """
        if self.num_groups == 1 or not link_bytes_per_s:
            return self.num_groups > 1
        step = self._padded(num_tokens)
        hidden_s, early_s = self._pull_s(num_tokens, link_bytes_per_s), 0.0
        costs_s = (self.num_groups - 1) * ANNOUNCE_S
        if step is not None:
            hidden_s = min(hidden_s, step.grouped_s)
            if step.num_tokens < LONG_STEP_TOKENS and not self.beside:
                early_s = AFTER_STORE * step.grouped_s / self.num_layers
            costs_s += step.grouped_s - step.whole_s
        return (1 - self.last_share) * hidden_s + early_s > costs_s

    def _alone_s(self, num_tokens: int) -> float:
        """With nothing before it: between measured steps by a line, as such a step need not be
        padded; 0 beyond the longest."""
        at = self._at(num_tokens)
        if at == len(self.times):
            return 0.0
        step, shorter = self.times[at], self.times[max(at - 1, 0)]
        missing = step.num_tokens - num_tokens
        if not at or not missing:
            return step.whole_s
        slope_s = (step.whole_s - shorter.whole_s) / (step.num_tokens - shorter.num_tokens)
        return step.whole_s - missing * slope_s

    def _at(self, num_tokens: int) -> int:
        """Place of the shortest measured step that holds `num_tokens`, or behind the last."""
        return bisect.bisect_left(self.times, num_tokens, key=attrgetter("num_tokens"))

    def _padded(self, num_tokens: int) -> StepTime | None:
        """That step, if there is one."""
        at = self._at(num_tokens)
        return self.times[at] if at < len(self.times) else None

    def _pull_s(self, num_tokens: int, link_bytes_per_s: float) -> float:
        num_bytes = num_tokens * self.kv_bytes_per_token
        return num_bytes / link_bytes_per_s if link_bytes_per_s else 0.0


def num_pairs(chunks: Sequence[Stretch]) -> int:
    """Pairs of a token of a chunk and one before that chunk."""
    return sum(size * before for size, before in chunks)


def _first(num_tokens: int, waiting: Sequence[Stretch]) -> list[Stretch]:
    """The chunks of a step of `num_tokens`."""
    chunks: list[Stretch] = []
    for left, before in waiting:
        chunks.append((min(left, num_tokens), before))
        num_tokens -= chunks[-1][0]
    return chunks
