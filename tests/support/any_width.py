"""Widths of verify windows that change at random."""

import random
from collections.abc import Sequence

from worker.schedule.width import WidthPolicy


class AnyWidth(WidthPolicy):
    def __init__(self, widths: Sequence[int], rng: random.Random) -> None:
        super().__init__(widths)
        self._random = rng

    def choose(self, num_rows: int) -> int:
        return self._random.choice(self._widths)
