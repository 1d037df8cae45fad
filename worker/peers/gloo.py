"""Tensor parallelism on the CPU, over PyTorch's gloo."""

from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from worker.errors import PeerLost, UserError
from worker.peers.base import GroupCollective, join_parts
from worker.peers.deaf import deafen, with_listener
from worker.peers.rank_group import TIMEOUT_S, Meeting
from worker.peers.rendezvous import own_address


class GlooCollective(GroupCollective):
    """See GroupCollective."""

    name: ClassVar[str] = "gloo"
    capturable: ClassVar[bool] = False

    def __init__(self, rank: int, size: int, device: torch.device | str, init_method: str) -> None:
        if torch.device(device).type != "cpu":
            raise UserError(f"collective 'gloo' is for the CPU, not for {device}")
        self.rank, self.size, self.device = rank, size, torch.device("cpu")
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=TIMEOUT_S)
        address = own_address(init_method)
        device, listener = with_listener(lambda: gloo.create_device(address, lazy_init=False))
        options._devices = [device]
        meeting = Meeting(rank, size, init_method)
        try:
            self._group: Any = gloo(meeting.store, rank, size, options)
        except RuntimeError as e:
            raise PeerLost(f"gloo rank {rank} of {size}: no group at {init_method}: {e}") from e
        meeting.part()
        if listener is not None:
            deafen(listener)  # all ranks are connected

    def all_reduce(self, x: Tensor) -> Tensor:
        self._wait(self._group.allreduce, [x])
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        x = x.contiguous()
        parts = torch.empty((self.size, *x.shape), dtype=x.dtype)
        self._wait(self._group.allgather, [list(parts)], [x])
        return join_parts(parts, dim)

    def close(self) -> None:
        if self._group is not None:
            self._group.shutdown()
            self._group = None
