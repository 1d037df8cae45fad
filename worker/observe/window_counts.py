"""WindowCounts: what a worker's verify windows have come to."""

from collections.abc import Sequence

from worker.observe.metrics import NUM_FIRST

TOKENS_WEIGHT = 0.05  # of the newest decode step in the moving average of tokens


class WindowCounts:
    """What verify windows have drafted and accepted since the start.

    max_width: of the windows; 1: nothing is verified. simulated: acceptance is, so every place
    counts as a draft. reads_text: acceptance depends on the text, so no first acceptance is kept.
    """

    def __init__(
        self, max_width: int = 1, *, simulated: bool = False, reads_text: bool = False
    ) -> None:
        self.num_windows = 0
        self.drafted = [0] * (max_width - 1)  # windows that had a draft, by place
        self.accepted = [0] * (max_width - 1)  # windows that accepted it, by place
        self.tokens_per_row = 0.0  # moving average of what a row gets of a decode step; 0: none yet
        self.first_acceptance = 0.0  # at place 1, of the first NUM_FIRST drafts; 0 until then
        self.simulated = simulated
        self._is_young = not reads_text

    def count(self, width: int, nums: Sequence[int], drafts: Sequence[Sequence[int]]) -> None:
        """Count a decode step; see StepMeter.verified."""
        num_rows, num_tokens = len(nums), sum(nums)
        old = self.tokens_per_row or 1.0
        self.tokens_per_row = old + TOKENS_WEIGHT * (num_tokens / num_rows - old)
        if width == 1:
            return
        self.num_windows += num_rows
        accepted, yielded = num_rows, bytes(nums)
        # By place and not by row: there are hundreds of rows, and metrics have 1 % of a step.
        for at, column in enumerate(zip(*drafts, strict=False)):
            accepted -= yielded.count(at + 1)  # of windows that ended here
            self.accepted[at] += accepted
            self.drafted[at] += num_rows if self.simulated else num_rows - column.count(-1)
        if self._is_young and self.drafted[0] >= NUM_FIRST:
            self._is_young = False
            self.first_acceptance = self.accepted[0] / self.drafted[0]
