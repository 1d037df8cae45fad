"""The ways to sum over ranks that `benchmarks.all_reduce` times."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from worker.ops.rms_norm import add_rms_norm, add_rms_norm_ref
from worker.peers import all_reduce_triton as kernels
from worker.peers.custom import CustomCollective
from worker.peers.gloo import GlooCollective
from worker.peers.peer_layout import (
    PeerLayout,
    PeerMemory,
    Tiles,
    fits_fused,
    fits_one_shot,
    share_of,
)
from worker.peers.table import NCCL, ONE_SHOT, TWO_SHOT

Way = tuple[Tensor, Callable[[], Any]]  # the input, and what sums it; None: in place
SCALE = 2.0**-60
TORCH_ONE_SHOT_BYTES = 8 << 20  # beyond, it is far behind
HANG = datetime.timedelta(seconds=60)


class Ways:
    """What both kinds of device have; every rank makes the same calls."""

    table: Any = None

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.notes: dict[str, str] = {}

    def of_size(self, num_bytes: int) -> dict[str, Way]:
        """name -> way, for a message of bf16."""
        raise NotImplementedError

    def norms(self, num_rows: int, hidden: int, residual: Tensor, weight: Tensor) -> dict[str, Way]:
        """name -> way that returns (normed, total); the first is the reference."""
        raise NotImplementedError

    def meet(self) -> None:
        """All ranks, on the device."""

    def gather(self, times: list[float]) -> list[list[float]]:
        """Every rank's."""
        return [each.tolist() for each in self.gather_tensors(torch.tensor(times).to(self.device))]

    def gather_tensors(self, x: Tensor) -> list[Tensor]:
        """Every rank's x."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x)
        return parts

    def close(self) -> None:
        """Leave the groups."""
        dist.destroy_process_group()


class GpuWays(Ways):
    """Ours, NCCL's, torch's."""

    def __init__(self, rank: int, size: int, port: int, tiles: bool) -> None:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        super().__init__(rank, size, device)
        self.ours = CustomCollective(rank, size, device, f"tcp://127.0.0.1:{port}")
        self.ours.timeout_s = 20.0
        if not tiles:
            self.ours.calibrate()
        self.table = None if tiles else self.ours.table
        self.tiles = tiles
        # The default group's store comes after ours, at a port of its own.
        store = PrefixStore("torch", self.ours._store)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
        dist.all_reduce(torch.zeros(1, device=device))
        self._world: Any = dist.group.WORLD
        self._backend: Any = self._world._get_backend(device)
        self._pools: list[torch.cuda.MemPool] = []
        self.other: dict[str, Callable[[int], Way | None]] = {
            "nccl symm": self._nccl_symm,
            "torch one": partial(self._torch, "one_shot_all_reduce"),
            "torch two": partial(self._torch, "two_shot_all_reduce_"),
        }
        self._token = torch.zeros(8, dtype=torch.bfloat16, device=device)

    def meet(self) -> None:
        self.ours.all_reduce_by(ONE_SHOT, self._token)

    def of_size(self, num_bytes: int) -> dict[str, Way]:
        if self.tiles:
            return self._tiled(num_bytes)
        found: dict[str, Way] = {}
        count = num_bytes // 2
        if fits_one_shot(self.ours.memory.layout, num_bytes):
            found["one shot"] = self._own(ONE_SHOT, count)
        found["two shots"] = self._own(TWO_SHOT, count)
        x = self.ours.buffer((count,), torch.bfloat16)
        found["chosen"] = x, partial(self.ours.all_reduce, x)
        x = torch.empty(count, dtype=torch.bfloat16, device=self.device)
        found["nccl"] = x, partial(self.ours.all_reduce_by, NCCL, x)
        for name, make in list(self.other.items()):
            try:
                way = make(num_bytes)
                if way is not None:
                    way[1]()
                    torch.cuda.synchronize()
                    found[name] = way
            except (RuntimeError, AttributeError, TypeError, ImportError) as e:
                self.notes[name] = f"{num_bytes} bytes: {e}".splitlines()[0]
                del self.other[name]
        return found

    def _own(self, algorithm: str, count: int) -> Way:
        x = self.ours.buffer((count,), torch.bfloat16)
        return x, partial(self.ours.all_reduce_by, algorithm, x)

    def _nccl_symm(self, num_bytes: int) -> Way:
        """NCCL on memory that is registered as a symmetric window."""
        pool = torch.cuda.MemPool(self._backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            x = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=self.device)
        self._backend.register_mem_pool(pool, symm=True)
        self._pools.append(pool)
        return x, partial(dist.all_reduce, x)

    def _torch(self, op: str, num_bytes: int) -> Way | None:
        """One of torch's kernels over symmetric memory."""
        from torch.distributed import _symmetric_memory as symmetric

        if op.startswith("one") and num_bytes > TORCH_ONE_SHOT_BYTES:
            return None
        x = symmetric.empty(num_bytes // 2, dtype=torch.bfloat16, device=self.device)
        name = self._world.group_name
        symmetric.rendezvous(x, name)
        return x, partial(getattr(torch.ops.symm_mem, op), x, "sum", name)

    def _tiled(self, num_bytes: int) -> dict[str, Way]:
        """Ours by other numbers of programs and chunks of a tile."""
        found: dict[str, Way] = {}
        memory, count = self.ours.memory, num_bytes // 2
        for programs in (8, 16, 32, 64, 128):
            for block in (256, 512, 1024):
                x = self.ours.buffer((count,), torch.bfloat16)
                tiles = Tiles.of(num_bytes // 16, block, programs)
                if tiles.programs == programs and tiles.steps * block <= memory.layout.piece:
                    found[f"1x{programs}x{block}"] = (
                        x,
                        partial(kernels.one_shot, memory, x, tiles=tiles),
                    )
            for block in (512, 1024, 2048):
                x = self.ours.buffer((count,), torch.bfloat16)
                share = share_of(num_bytes // 16, self.size)
                tiles = Tiles.of(share, block, programs)
                if tiles.programs == programs:
                    found[f"2x{programs}x{block}"] = (
                        x,
                        partial(kernels.two_shot, memory, x, tiles=tiles),
                    )
        return found

    def norms(self, num_rows: int, hidden: int, residual: Tensor, weight: Tensor) -> dict[str, Way]:
        shape = (num_rows, hidden)
        found: dict[str, Way] = {}
        x = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        by_nccl = partial(self.ours.all_reduce_by, NCCL)
        found["nccl"] = x, lambda x=x: add_rms_norm(by_nccl(x), residual, weight, 1e-6)
        x = self.ours.buffer(shape, torch.bfloat16)
        found["parts"] = (
            x,
            lambda x=x: add_rms_norm(self.ours.all_reduce(x), residual, weight, 1e-6),
        )
        if fits_fused(self.ours.memory.layout, num_rows, hidden * 2):
            x = self.ours.buffer(shape, torch.bfloat16)
            fused = partial(kernels.one_shot_rms_norm, self.ours.memory)
            found["fused"] = x, partial(fused, x, residual, weight, 1e-6)
        return found

    def close(self) -> None:
        torch.cuda.synchronize()
        self.ours.check()
        for pool in self._pools:
            self._backend.deregister_mem_pool(pool)
        self.ours.close()
        super().close()


class InterpretedWays(Ways):
    """Ours under Triton's interpreter, and gloo's."""

    def __init__(self, rank: int, size: int, port: int, regions: list[Tensor]) -> None:
        super().__init__(rank, size, torch.device("cpu"))
        torch.set_num_threads(1)
        address = f"tcp://127.0.0.1:{port}"
        self.gloo = GlooCollective(rank, size, "cpu", address)
        store = PrefixStore("torch", self.gloo._store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=HANG)
        self.region, self._control = regions[rank], torch.tensor([0, 60 * 10**9])
        layout = PeerLayout(size, (regions[0].nbytes - PeerLayout(size, 0).num_bytes) // 3)
        bases = tuple(region.data_ptr() for region in regions)
        self.memory = PeerMemory(rank, layout, bases, self._control.data_ptr())

    def buffer(self, *shape: int) -> Tensor:
        """Of this rank's region."""
        x = torch.empty(shape, dtype=torch.bfloat16)
        start = self.memory.layout.buffers
        return self.region[start : start + x.nbytes].view(x.dtype).view(shape)

    def of_size(self, num_bytes: int) -> dict[str, Way]:
        x = self.buffer(num_bytes // 2)
        return {
            "one shot": (x, partial(kernels.one_shot, self.memory, x)),
            "two shots": (x, partial(kernels.two_shot, self.memory, x)),
            "gloo": (x, partial(self.gloo.all_reduce, x)),
        }

    def norms(self, num_rows: int, hidden: int, residual: Tensor, weight: Tensor) -> dict[str, Way]:
        x = self.buffer(num_rows, hidden)
        fused = partial(kernels.one_shot_rms_norm, self.memory)
        by_gloo = self.gloo.all_reduce
        return {
            "gloo": (x, lambda: add_rms_norm_ref(by_gloo(x), residual, weight, 1e-6)),
            "fused": (x, partial(fused, x, residual, weight, 1e-6)),
        }


def gpu_ways(rank: int, size: int, port: int, regions: list[Tensor], tiles: bool) -> Ways:
    """This rank's, on the GPU of its number."""
    del regions
    return GpuWays(rank, size, port, tiles)


def interpreted_ways(rank: int, size: int, port: int, regions: list[Tensor], tiles: bool) -> Ways:
    """This rank's, on the CPU."""
    del tiles
    return InterpretedWays(rank, size, port, regions)
