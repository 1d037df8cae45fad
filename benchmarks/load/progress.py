"""What is shown while a run goes on: one line, drawn again and again on a terminal."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Sequence
from typing import TextIO

import numpy as np

from benchmarks.load.pacer import now
from benchmarks.load.records import Outcome

WINDOW_S = 10.0
EVERY_S = (0.2, 10.0)  # on a terminal; elsewhere


class Progress:
    """Told of outcomes as they come; draws counts, and latencies of the last ten seconds.

    Args:
        total: requests of the workload.
        out: where to, standard error by default; lines are drawn over on a terminal only.
        label: stands before every line.
    """

    def __init__(self, total: int, out: TextIO | None = None, label: str = "") -> None:
        self._total = total
        self._out = out = out or sys.stderr
        self._label = label
        self._terminal = out.isatty()
        self._recent: deque[tuple[float, Outcome]] = deque()
        self._errors: Counter[str] = Counter()
        self._num_done = 0
        self._drawn_at = self._began = now()

    def __call__(self, outcomes: Sequence[Outcome], num_running: int) -> None:
        """New outcomes, and how many requests are under way now."""
        moment = now()
        self._num_done += len(outcomes)
        self._errors.update(each.error for each in outcomes if each.error)
        self._recent.extend((moment, each) for each in outcomes)
        while self._recent and moment - self._recent[0][0] > WINDOW_S:
            self._recent.popleft()
        if moment - self._drawn_at >= EVERY_S[0 if self._terminal else 1]:
            self._drawn_at = moment
            self._draw(self._line(moment, num_running))

    def close(self) -> None:
        """Leave the terminal's line."""
        if self._terminal:
            self._draw("")

    def _line(self, moment: float, num_running: int) -> str:
        served = [each for _, each in self._recent if not each.error]
        seconds = min(WINDOW_S, max(moment - self._began, 0.1))
        parts = [
            f"{moment - self._began:5.0f} s",
            f"{self._num_done}/{self._total} done, {num_running} running",
            f"{len(served) / seconds:.1f} req/s",
            f"{sum(each.num_output_tokens for each in served) / seconds:.0f} tok/s",
        ]
        ttft = [each.ttft_s for each in served if each.ttft_s is not None]
        gaps = [gap for each in served for gap in each.gaps_s]
        for name, values in (("TTFT", ttft), ("gap", gaps)):
            if values:
                middle, high = 1000 * np.percentile(values, (50, 99))
                parts.append(f"{name} p50 {middle:.1f} p99 {high:.1f} ms")
        if self._errors:
            parts.append(", ".join(f"{name} {num}" for name, num in self._errors.most_common(3)))
        return self._label + " | ".join(parts)

    def _draw(self, line: str) -> None:
        end = "" if self._terminal else "\n"
        start = "\r\x1b[K" if self._terminal else ""
        print(start + line, end=end, file=self._out, flush=True)
