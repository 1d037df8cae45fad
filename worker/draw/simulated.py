"""Simulated acceptance: throughput of speculation on weights that no drafter was trained for."""

import math
from typing import Any

import torch
from torch import Tensor

from worker.ops.philox import philox_ref
from worker.step.rows import NUM_COUNTS, SampledRows, accept_rows

PERIOD = 4096  # the drawn numbers repeat after so many positions
PRIME, STRIDE = 4093, 613  # a request begins at one of these positions, by all bits of its seed


class SimulatedAcceptance:
    """Stands in for `accept_rows`: draws how many drafts of a window count, by seed and position.

    A window that is too narrow, a stop token or the request's end still cut it. Places without a
    draft count as drafts: token 0 stands for these. seed: [num_rows + 1] i64, of the step state.
    """

    def __init__(self, seed: Tensor, kept: float) -> None:
        self._seed = seed
        self._num = torch.zeros(PERIOD, dtype=torch.int64, device=seed.device)
        self.change(kept)

    def change(self, kept: float) -> None:
        """Set how much is kept from now on, also by graphs that are captured already.

        kept: from 1 on, mean tokens of a step, which keeps the whole number below or above; below
        1, the share of drafts that count if all before them did, (1 - kept^W) / (1 - kept) of W.
        """
        assert kept > 0
        zero = torch.zeros((), dtype=torch.int64)
        words = philox_ref(torch.arange(PERIOD), zero, zero, zero, zero)[0]
        uniform = (words.double() + 0.5) / 2**32  # above 0 and below 1
        if kept < 1:
            self._num.copy_((uniform.log() / math.log(kept)).long())
        else:
            least = int(kept) - 1
            self._num.copy_(least + (uniform < kept - 1 - least).long())

    def __call__(self, sampled: SampledRows, *rest: Any) -> Tensor:
        """accept_rows, with its arguments but for `num_accepted`."""
        width = sampled.width
        if width == 1:
            return accept_rows(sampled, *rest)
        seed = self._seed.index_select(0, sampled.rows).repeat_interleave(width)
        num_accepted = self.num_accepted(sampled.position, seed)
        drawn = accept_rows(sampled, *rest, num_accepted=num_accepted)
        drawn[:, width + NUM_COUNTS :].clamp_(min=0)
        return drawn

    def num_accepted(self, position: Tensor, seed: Tensor) -> Tensor:
        """Drafts accepted in a window that draws at `position` first, by seed; all [n] i64."""
        return self._num[(position + seed % PRIME * STRIDE) % PERIOD]
