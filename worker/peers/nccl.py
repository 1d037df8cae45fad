"""Tensor parallelism on GPUs of any hosts, over PyTorch's NCCL."""

import os
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from worker.errors import PeerLost, UserError
from worker.peers.base import GroupCollective, join_parts
from worker.peers.rank_group import TIMEOUT_S, Meeting

# Read by NCCL and by torch when a group starts. A program that uses NVLink multicast can put the
# GPUs of a shared host out of service, and ours needs none. A call that is late aborts its group
# ("2") and leaves the process alone: `check` says why.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
}


class NcclCollective(GroupCollective):
    """See GroupCollective.

    Calls run on the current stream. One that was launched by itself is aborted after TIMEOUT_S;
    those of a replayed graph are not watched: the process has to end. `check` raises once
    torch's watchdog thread has noticed: a peer that is gone or late, or an abort.
    meeting: of the ranks, which go on with it; None: one of their own.
    """

    name: ClassVar[str] = "nccl"
    capturable: ClassVar[bool] = True

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device | str,
        init_method: str,
        meeting: Meeting | None = None,
    ) -> None:
        self.device = torch.device(device)
        if self.device.type != "cuda" or not dist.is_nccl_available():
            raise UserError(f"collective 'nccl' is for GPUs and needs NCCL, not for {device}")
        os.environ.update(ENVIRONMENT)
        self.rank, self.size = rank, size
        self._meeting = meeting or Meeting(rank, size, init_method)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=TIMEOUT_S)
        self._group: Any = None
        try:
            prefixed = c10d.PrefixStore("nccl", self._meeting.store)
            self._group = dist.ProcessGroupNCCL(prefixed, rank, size, options)
            # The communicator has to be there before a capture begins.
            with torch.cuda.device(self.device):
                self.all_reduce(torch.zeros(1, device=self.device))
                torch.cuda.synchronize()
        except RuntimeError as e:
            raise PeerLost(f"nccl rank {rank} of {size}: no group: {e}") from e
        self.check()
        self._meeting.part(stays=True)  # torch's watchdog asks it now and then

    def all_reduce(self, x: Tensor) -> Tensor:
        options = c10d.AllreduceOptions()
        options.asyncOp = False
        self._wait(self._group.allreduce, [x], options)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        x = x.contiguous()
        parts = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        options = c10d.AllgatherOptions()
        options.asyncOp = False
        self._wait(self._group._allgather_base, parts, x, options)
        return join_parts(parts, dim)

    def check(self) -> None:
        if not self._lost and self._group is not None:
            status = self._group.get_error()
            if status != c10d.ErrorType.SUCCESS:
                self._lost = f"torch's watchdog has found {status.name}"
        super().check()

    def close(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            group.abort()  # shutdown() waits for all ranks, and those of a worker end in turn
