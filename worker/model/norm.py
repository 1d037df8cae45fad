"""RMS normalisation with its weight, and the sum over ranks that precedes it."""

from __future__ import annotations

from torch import Tensor, nn

from worker.model.shard import Shard, whole
from worker.model.weights import Placement
from worker.ops.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """Every rank holds the whole weight."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.weight = placement.empty(size)
        self.tap: Tensor | None = None  # [max_tokens, size], where sums are kept; see Decoder.tap
        self._collective = placement.collective

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size] -> [..., size]."""
        return rms_norm(x, self.weight, self.eps)

    def reduce_add(self, part: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(normed, new residual), new residual being residual + the sum of all ranks' `part`.

        part, residual: [num_tokens, size]; the content of `part` is lost. Without a residual
        `part` is whole, as the embedded tokens, and becomes the residual itself.
        """
        if residual is None:
            return self(part), part
        total = None if self.tap is None else self.tap[: len(part)]
        return self._collective.all_reduce_rms_norm(part, residual, self.weight, self.eps, total)

    def shards(self, prefix: str) -> dict[str, Shard]:
        """Checkpoint name -> Shard, for every tensor that this layer holds."""
        return {f"{prefix}.weight": whole(self.weight)}
