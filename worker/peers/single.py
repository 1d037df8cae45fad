"""The group of one."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from worker.errors import UserError
from worker.peers.base import Collective


class SingleCollective(Collective):
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
        self.rank, self.size, self.device = rank, size, torch.device(device)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x

    def algorithm(self, num_bytes: int, dtype: torch.dtype) -> str:
        return "none"
