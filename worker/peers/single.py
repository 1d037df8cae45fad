"""The group of one."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from worker.errors import UserError
from worker.ops.rms_norm import add_rms_norm


class SingleCollective:
    """A worker without tensor parallelism: every call is what it is on one rank.

    Raises:
        UserError: `size` is not 1.
    """

    capturable: ClassVar[bool] = True

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: torch.device | str = "cpu",
        init_method: str = "",
    ) -> None:
        if size != 1 or rank != 0:
            raise UserError(f"collective 'single' is for one rank, not rank {rank} of {size}")
        self.rank = rank
        self.size = size
        self._device = torch.device(device)

    def all_reduce(self, x: Tensor) -> Tensor:
        """x."""
        return x

    def all_reduce_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        total: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See Collective.all_reduce_rms_norm."""
        return add_rms_norm(x, residual, weight, eps, total)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """x."""
        return x

    def algorithm(self, num_bytes: int, dtype: torch.dtype) -> str:
        """Nothing is summed."""
        return "none"

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See Collective.buffer."""
        return torch.empty(shape, dtype=dtype, device=self._device)

    def calibrate(self) -> None:
        """There is one algorithm, or the library chooses."""

    def check(self) -> None:
        """There is no peer."""

    def close(self) -> None:
        """Nothing is held."""
