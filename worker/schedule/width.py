"""The width of a step's verify windows: acceptance of drafts against the cost of a wider step.

A window of W tokens is expected to keep 1 + c1 + c1 c2 + ... + c1 ... c(W-1) tokens. c(j) is the
share of windows whose draft j was accepted, among windows whose drafts before j were. The policy
takes the width with most kept tokens a second, by measured times of steps. Host only.
"""

from collections.abc import Mapping, Sequence

from worker.plan import Drawn, max_rows

PRIOR_SHARE, PRIOR_WINDOWS = 0.75, 4  # assumed acceptance, which weighs as much as so many windows
MAX_WINDOWS = 2048  # beyond it, counts of windows are halved, so that old windows fade
TIME_WEIGHT = 0.05  # of the newest step in a moving average
NUM_MEASURED = 4  # a time from the start-up check counts as so many steps
OUTLIER = 1.5  # a step's time counts as so many times the average at most
DWELL = 64  # steps between two choices; before the first DWELL, choices at steps 1, 2, 4, 8 ...
SURE_WINDOWS = 256  # with fewer windows observed, no choice before DWELL
GAIN = 1.03  # another width has to yield so many times the tokens a second
# After so many steps, two steps have a neighbouring width, to learn of it. The first of them makes
# drafts for a window of that width, the second verifies them.
PROBE = 512


class WidthPolicy:
    """Chooses among `widths`, which ascend, by what has been observed.

    step_s has measured seconds of steps by (rows, width); the rest is learnt. may_miss: the drafter
    often has no draft; a missing one, if asked for, counts as rejected.
    """

    def __init__(
        self,
        widths: Sequence[int],
        step_s: Mapping[tuple[int, int], float] | None = None,
        *,
        may_miss: bool = False,
    ) -> None:
        self._widths = tuple(widths)
        self.max_width = max(widths)
        self._may_miss = may_miss
        self._last_width = 1  # of the step observed last, which asked for that many drafts, less 1
        self._step_s = dict(step_s or {})
        # Number of steps that a time stands for; a time from the start-up check stands for several.
        self._timed = dict.fromkeys(self._step_s, NUM_MEASURED)
        self._known_rows = sorted({rows for rows, _ in self._step_s})
        self._tried = [float(PRIOR_WINDOWS)] * self.max_width
        self._accepted = [PRIOR_SHARE * PRIOR_WINDOWS] * self.max_width
        self._chosen: dict[int, int] = {}  # by bucket of rows
        self._steps: dict[int, int] = {}  # by bucket of rows

    def choose(self, num_rows: int) -> int:
        """The width of the next step of so many rows; 1 if all of `widths` are too wide."""
        allowed = [width for width in self._widths if num_rows <= max_rows(width, num_rows)]
        if len(allowed) < 2:
            return allowed[0] if allowed else 1
        bucket = self._bucket(num_rows)
        self._steps[bucket] = number = self._steps.get(bucket, -1) + 1
        for width in allowed:
            if (bucket, width) not in self._step_s:
                return width  # to learn what it costs
        now = self._chosen.get(bucket, 0)
        soon = number & (number - 1) == 0 and self._tried[1] >= SURE_WINDOWS
        if now not in allowed or number % DWELL == 0 or soon:
            now = self._chosen[bucket] = self._best(bucket, allowed, now)
        if number % PROBE >= PROBE - 2:
            side = 1 if number // PROBE % 2 == 0 or now == allowed[0] else -1
            return allowed[min(allowed.index(now) + side, len(allowed) - 1)]
        return now

    def observe(self, width: int, drawn: Sequence[Drawn]) -> None:
        """Learn from the draws of a settled step.

        A row's first window has no drafts, and a window after a narrower step has few. A missing
        draft is not counted, except with `may_miss`: if it was asked for, it counts as rejected.
        """
        asked, self._last_width = self._last_width if self._may_miss else 1, width
        if width == 1:
            return
        for row in drawn:
            num = len(row.tokens)
            for place in range(1, min(num + 1, width)):
                if row.drafts[place - 1] < 0 and place >= asked:
                    break  # it is missing
                if place == num and row.finished:
                    break  # the request ended before it
                self._tried[place] += 1
                self._accepted[place] += place < num
        for place in range(1, width):
            if self._tried[place] > MAX_WINDOWS:
                self._tried[place] /= 2
                self._accepted[place] /= 2

    def took(self, num_rows: int, width: int, seconds: float) -> None:
        """Learn how long a step took. A step that was held up changes little.

        Steps of all widths take longer as contexts grow, by about the same factor. So a step of the
        chosen width scales the times of all widths, and times of unused widths stay comparable. A
        step of another width scales its own time alone.
        """
        if len(self._widths) < 2:
            return
        bucket = self._bucket(num_rows)
        key = bucket, width
        old = self._step_s.setdefault(key, seconds)
        self._timed[key] = number = self._timed.get(key, 0) + 1
        if number == 2:
            self._step_s[key] = min(old, seconds)  # one of the first two may have compiled
            return
        seconds = min(seconds, OUTLIER * old)
        factor = 1 + max(TIME_WEIGHT, 1 / number) * (seconds / old - 1)
        for scaled in self._widths if width == self._chosen.get(bucket) else (width,):
            if (bucket, scaled) in self._step_s:
                self._step_s[bucket, scaled] *= factor

    def expected_tokens(self, width: int) -> float:
        """Tokens that a window of `width` is expected to keep."""
        total = reached = 1.0
        for place in range(1, width):
            reached *= self._accepted[place] / self._tried[place]
            total += reached
        return total

    def _best(self, bucket: int, allowed: Sequence[int], now: int) -> int:
        rates = {
            width: self.expected_tokens(width) / self._step_s[bucket, width] for width in allowed
        }
        best = max(rates, key=rates.__getitem__)
        return now if now in rates and rates[best] < GAIN * rates[now] else best

    def _bucket(self, num_rows: int) -> int:
        """The measured number of rows that stands for this one, else the next power of two."""
        larger = (rows for rows in self._known_rows if rows >= num_rows)
        return next(larger, 1 << (num_rows - 1).bit_length())
