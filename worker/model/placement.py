"""Where and how the parts of one rank of a model are built."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from worker.config.checkpoint.experts import Division
from worker.peers.base import Collective
from worker.weights.base import Format, Matrix, Parts
from worker.weights.plain import PLAIN


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one rank of a model is built: among which ranks, in which dtype, on which device."""

    collective: Collective
    dtype: torch.dtype
    device: torch.device
    experts: Division = "auto"  # how layers of experts are divided
    format: Format = PLAIN  # of matrices
    path: str = ""  # of the module that is built, in the checkpoint

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialised weight without gradient, of the model's dtype; the loader fills it."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(tensor, requires_grad=False)

    def below(self, name: str) -> "Placement":
        """The same for the module `name` of this one."""
        return replace(self, path=f"{self.path}.{name}" if self.path else name)

    @property
    def plain(self) -> "Placement":
        """The same for what is in the model's dtype, whatever format the files have."""
        return replace(self, format=PLAIN)

    def matrix(self, parts: Parts) -> Matrix:
        """An uninitialised matrix, or a stack: in the format if the files have all modules in it.

        Raises Unsupported if ranks cannot divide it.
        """
        modules = (f"{self.path}.{name}" for name in parts.modules or parts.rows)
        kept = self.format if all(map(self.format.takes, modules)) else PLAIN
        return kept.matrix(kept, parts, self.empty)
