"""Simulated acceptance: throughput of speculation on weights that no drafter was trained for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from worker.ops.philox import philox_ref

PERIOD = 4096  # positions after which the numbers repeat
PRIME, STRIDE = 4093, 613  # requests begin elsewhere among them, by all bits of their seeds


class SimulatedAcceptance:
    """How many drafts of a window are accepted, drawn once for each position.

    Counter-based, so that runs repeat: the number depends on seed and position alone. A window that
    is too narrow, a stop token or the request's end still cut it.

    Args:
        device: of the table. Nothing is accepted until `change` or `change_share` is called.
    """

    def __init__(self, device: torch.device) -> None:
        self._num = torch.zeros(PERIOD, dtype=torch.int64, device=device)

    def change(self, mean_len: float) -> None:
        """Keep `mean_len` tokens of a step on average from now on, in graphs that were captured
        too; each step has the whole number below or above. At least 1.
        """
        assert mean_len >= 1
        least = int(mean_len) - 1
        self._num.copy_(least + (_uniform() < mean_len - 1 - least).long())

    def change_share(self, share: float) -> None:
        """Accept each draft whose predecessors all are with probability `share`, from 0 to 1.

        A window of W tokens keeps (1 - share^W) / (1 - share) of them on average.
        """
        assert 0 < share < 1
        self._num.copy_((_uniform().log() / math.log(share)).long())

    def num_accepted(self, position: Tensor, seed: Tensor) -> Tensor:
        """Drafts that are accepted in a window that draws at `position` first, of a request of
        `seed`; all [n] i64."""
        return self._num[(position + seed % PRIME * STRIDE) % PERIOD]


def _uniform() -> Tensor:
    """[PERIOD] f64, above 0 and below 1."""
    zero = torch.zeros((), dtype=torch.int64)
    words = philox_ref(torch.arange(PERIOD), zero, zero, zero, zero)[0]
    return (words.double() + 0.5) / 2**32
