"""RMS normalisation with its weight, and the sum over ranks that precedes it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from worker.model.linear import empty_parameter
from worker.model.shard import Shard, whole
from worker.ops.rms_norm import rms_norm
from worker.peers.base import Collective


class RMSNorm(nn.Module):
    """Every rank holds the whole weight."""

    def __init__(
        self,
        size: int,
        eps: float,
        collective: Collective,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size, dtype=dtype, device=device)
        self._collective = collective

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size] -> [..., size]."""
        return rms_norm(x, self.weight, self.eps)

    def reduce_add(
        self, part: Tensor, residual: Tensor, total: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(normed, new residual), new residual being residual + the sum of all ranks' `part`.

        part, residual: [num_tokens, size]; the content of `part` is lost.
        total: [num_tokens, size], where the new residual goes; None: to new memory.
        """
        return self._collective.all_reduce_rms_norm(part, residual, self.weight, self.eps, total)

    def shards(self, prefix: str) -> dict[str, Shard]:
        """Checkpoint name -> Shard, for every tensor that this layer holds."""
        return {f"{prefix}.weight": whole(self.weight.detach())}
