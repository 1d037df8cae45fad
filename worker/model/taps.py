"""Hidden states that leave a model on the way: what a drafter is fed with."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from worker.model.layers import Placement


class Taps:
    """A buffer for the residual after some layers of a decoder, which each step fills anew.

    Args:
        layers: numbers of the tapped layers, ascending, each once.
        max_tokens: of a step, padding included.
        hidden_size: of the model.
        placement: of the model.
    """

    def __init__(
        self, layers: Sequence[int], max_tokens: int, hidden_size: int, placement: Placement
    ) -> None:
        assert all(a < b for a, b in pairwise(layers))
        shape = max_tokens, len(layers) * hidden_size
        self._buffer = torch.zeros(shape, dtype=placement.dtype, device=placement.device)
        parts = self._buffer.view(max_tokens, len(layers), hidden_size).unbind(1)
        self._columns = dict(zip(layers, parts, strict=True))

    def after(self, layer: int) -> Tensor | None:
        """Where the residual after `layer` goes: [max_tokens, hidden], strided; None: nowhere."""
        return self._columns.get(layer)

    def rows(self, num_tokens: int) -> Tensor:
        """What the latest step has left: [num_tokens, number of taps * hidden]."""
        return self._buffer[:num_tokens]
