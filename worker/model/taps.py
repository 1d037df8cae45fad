"""Hidden states that leave a model on the way: what a drafter is fed with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


class Taps:
    """A registered buffer for the residual after some layers of a decoder.

    The norm behind a tapped layer writes the sum that it makes anyway into this buffer, so a tap
    costs no kernel, and graphs write it when they are replayed. A step reads what it has written
    itself; nothing is kept for the next.

    Args:
        layers: numbers of the tapped layers, ascending, each once.
        max_rows: tokens of a step at most, padding included.
        hidden_size: of the model.
        dtype: of the residual.
        device: of the buffer.
    """

    def __init__(
        self,
        layers: Sequence[int],
        max_rows: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert all(a < b for a, b in pairwise(layers))
        shape = max_rows, len(layers) * hidden_size
        self._buffer = torch.zeros(shape, dtype=dtype, device=device)
        parts = self._buffer.view(max_rows, len(layers), hidden_size).unbind(1)
        self._columns = dict(zip(layers, parts, strict=True))

    def after(self, layer: int, num_rows: int) -> Tensor | None:
        """Where the residual after `layer` goes: [num_rows, hidden], strided; None: nowhere."""
        column = self._columns.get(layer)
        return None if column is None else column[:num_rows]

    def rows(self, num_rows: int) -> Tensor:
        """What the latest step has left: [num_rows, number of taps * hidden]."""
        return self._buffer[:num_rows]
