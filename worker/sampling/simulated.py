"""Simulated acceptance: throughput of speculation on weights that no drafter was trained for."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.kernels.step.philox import philox_ref

PERIOD = 4096  # positions after which the numbers repeat


class SimulatedAcceptance:
    """How many drafts of a window are accepted, drawn once for each position.

    Counter-based, so that runs repeat: the number depends on the position alone. A window that is
    too narrow, a stop token or the request's end still cut it.

    Args:
        mean_len: tokens of a step that count on average, at least 1; each step has the whole number
            below or above.
        device: of the table.
    """

    def __init__(self, mean_len: float, device: torch.device) -> None:
        self._num = torch.empty(PERIOD, dtype=torch.int64, device=device)
        self.change(mean_len)

    def change(self, mean_len: float) -> None:
        """Accept `mean_len` from now on, in graphs that were captured too."""
        assert mean_len >= 1
        zero = torch.zeros((), dtype=torch.int64)
        words = philox_ref(torch.arange(PERIOD), zero, zero, zero, zero)[0]
        least = int(mean_len) - 1
        above = words.double() / 2**32 < mean_len - 1 - least
        self._num.copy_(least + above.long())

    def num_accepted(self, position: Tensor) -> Tensor:
        """Drafts that are accepted in a window that draws at `position` [n] first; [n] i64."""
        return self._num[position % PERIOD]
