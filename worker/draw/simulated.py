"""Simulated acceptance: throughput of speculation on weights that no drafter was trained for."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from worker.ops.philox import philox_ref
from worker.step.rows import NUM_COUNTS, accept_rows

PERIOD = 4096  # the drawn numbers repeat after so many positions
PRIME, STRIDE = 4093, 613  # a request begins at one of these positions, by all bits of its seed


class SimulatedAcceptance:
    """Stands in for `accept_rows`: draws how many drafts of a window count.

    The number depends on seed and position alone, so runs repeat. The width of the window, a stop
    token or the request's end still limit it. A place without a draft counts as a draft, token 0.

    Args:
        seed: [num_rows + 1] i64, a column of the step state.
        kept: see `change`.
    """

    def __init__(self, seed: Tensor, kept: float) -> None:
        self._seed = seed
        self._num = torch.zeros(PERIOD, dtype=torch.int64, device=seed.device)
        self.change(kept)

    def change(self, kept: float) -> None:
        """Set how much is kept from now on, also by graphs that are captured already.

        kept: from 1 on, mean tokens of a step; a step keeps the whole number below or above. Below
            1, the share of drafts that count if all drafts before them did: a window of W tokens
            keeps (1 - kept^W) / (1 - kept) tokens on average.
        """
        assert kept > 0
        if kept < 1:
            self._num.copy_((_uniform().log() / math.log(kept)).long())
        else:
            least = int(kept) - 1
            self._num.copy_(least + (_uniform() < kept - 1 - least).long())

    def __call__(self, rows: Tensor, position: Tensor, *rest: Any) -> Tensor:
        """Call accept_rows with these arguments and a drawn `num_accepted`."""
        width = len(position) // len(rows)
        if width == 1:
            return accept_rows(rows, position, *rest)
        seed = self._seed.index_select(0, rows).repeat_interleave(width)
        drawn = accept_rows(rows, position, *rest, num_accepted=self.num_accepted(position, seed))
        drawn[:, width + NUM_COUNTS :].clamp_(min=0)
        return drawn

    def num_accepted(self, position: Tensor, seed: Tensor) -> Tensor:
        """How many drafts are accepted in windows that begin to draw at `position`.

        position, seed of the request, result: [n] i64.
        """
        return self._num[(position + seed % PRIME * STRIDE) % PERIOD]


def _uniform() -> Tensor:
    """[PERIOD] f64, above 0 and below 1."""
    zero = torch.zeros((), dtype=torch.int64)
    words = philox_ref(torch.arange(PERIOD), zero, zero, zero, zero)[0]
    return (words.double() + 0.5) / 2**32
