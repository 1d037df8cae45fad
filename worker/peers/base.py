"""Collectives among the ranks of one worker: the contract, their table, and the group of one."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from worker.errors import PeerLost, UserError
from worker.ops.norms import add_rms_norm

COLLECTIVES: Mapping[str, str] = {
    "single": "worker.peers.base:SingleCollective",
    "gloo": "worker.peers.gloo:GlooCollective",
    "nccl": "worker.peers.nccl:NcclCollective",
    "custom": "worker.peers.custom:CustomCollective",
}


class Collective(Protocol):
    """One rank's end of a group of `size` ranks; every rank makes the same calls in one order.

    Built as `cls(rank, size, device, init_method)`; `init_method` is a rendezvous of this group
    alone ("tcp://host:port", "file:///path"), so two groups in one process do not meet. UserError:
    not for this device; PeerLost: not all ranks came in time. A call that cannot end because a peer
    is gone raises PeerLost; the group is then of no use and the worker ends. A body here is
    right for a group that has nothing of its own to do there.
    """

    capturable: ClassVar[bool]  # may a CUDA graph hold these calls?
    rank: int
    size: int
    device: torch.device

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, equal to the last bit on all; may be `x` itself.

        x: contiguous, same shape and dtype on all ranks; its content is lost.
        """
        ...

    def all_reduce_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """add_rms_norm(all_reduce(x), residual, weight, eps, total) -> (normed, new residual).

        x: [num_tokens, hidden], this rank's part of a sum; its content is lost.
        residual: [num_tokens, hidden], equal on all ranks; weight: [hidden].
        total: [num_tokens, hidden], where the new residual goes; None: to new memory.
        """
        return add_rms_norm(self.all_reduce(x), residual, weight, eps, total)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Every rank's `x`, in rank order, joined along `dim`; `x` is kept."""
        ...

    def algorithm(self, num_bytes: int, dtype: torch.dtype) -> str:
        """How `all_reduce` sums a message: by its bytes and dtype alone, once calibrated."""
        ...

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An empty tensor that `all_reduce` takes without a copy of its own.

        The third next call may give the same memory again, also where the sum still lies in it. Do
        not keep it over three calls, nor carry it from a graph into eager code or back: graphs have
        the buffers of their capture.
        """
        return torch.empty(shape, dtype=dtype, device=self.device)

    def calibrate(self) -> None:
        """Choose the fastest algorithms here: all ranks at once, before any is captured."""

    def check(self) -> None:
        """Raise PeerLost if a peer was late in a call that has ended on the device.

        For calls that the host does not await: after its wait for a step. Their results are junk.
        """

    def close(self) -> None:
        """Leave the group and free its resources; no graph may hold its calls. Idempotent."""


class SingleCollective(Collective):
    """A worker without tensor parallelism; UserError if `size` is not 1."""

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


class GroupCollective(Collective):
    """A process group of its own; torch.distributed's default group is neither used nor needed."""

    name: ClassVar[str]  # key of COLLECTIVES
    _lost = ""  # why the group is of no use; "": it is

    def algorithm(self, num_bytes: int, dtype: torch.dtype) -> str:
        return self.name

    def check(self) -> None:
        if self._lost:
            raise PeerLost(f"{self.name} rank {self.rank} of {self.size}: {self._lost}")

    def _wait(self, begin: Callable[..., Any], *arguments: object) -> None:
        """Begin a call of the group's, and wait for its end, or on a GPU until it is enqueued."""
        try:
            if (work := begin(*arguments)) is not None:
                work.wait()
        except RuntimeError as e:
            self._lost = str(e)
            self.check()


def join_parts(parts: Tensor, dim: int) -> Tensor:
    """parts: [size, *shape] -> all of `shape`, joined along its dimension `dim`."""
    if dim % (parts.dim() - 1) == 0:
        return parts.flatten(0, 1)
    return torch.cat(parts.unbind(0), dim=dim)
