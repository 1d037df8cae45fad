"""Sums over ranks, of processes that poll each other's memory, under Triton's interpreter."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from tests.support.interpreted import INTERPRETED
from tests.support.processes import run_ranks
from worker.kernels.all_reduce import (
    PeerLayout,
    PeerMemory,
    all_reduce_ref,
    gather,
    one_shot,
    one_shot_rms_norm,
    two_shot,
)
from worker.kernels.rms_norm import rms_norm_ref

HANG_NS = 60 * 10**9
BUFFER_BYTES = 1 << 20
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
# What an all-reduce could take for "nothing has come yet", and what a sum could lose.
ODD = (float("nan"), 0.0, -0.0, float("inf"), -float("inf"), -1.0)


def regions_of(world: int) -> list[Tensor]:
    """Memory that all processes map, one region a rank."""
    layout = PeerLayout(world, BUFFER_BYTES)
    regions = [
        torch.empty(layout.num_bytes, dtype=torch.uint8).share_memory_() for _ in range(world)
    ]
    for region in regions:
        layout.clear(region)
    return regions


class Rank:
    """One process of a test: its view of the regions."""

    def __init__(self, rank: int, regions: list[Tensor], limit_ns: int = HANG_NS) -> None:
        torch.set_num_threads(1)
        self.rank, self.world, self.region = rank, len(regions), regions[rank]
        self.control = torch.tensor([0, limit_ns])
        self.layout = PeerLayout(self.world, BUFFER_BYTES)
        bases = tuple(region.data_ptr() for region in regions)
        self.memory = PeerMemory(rank, self.layout, bases, self.control.data_ptr())

    def buffer(self, x: Tensor, number: int = 0) -> Tensor:
        """x in one of the buffers of this rank's region."""
        start = self.layout.buffers + number * BUFFER_BYTES
        return self.region[start : start + x.nbytes].view(x.dtype).view(x.shape).copy_(x)

    def check(self, got: Tensor, wanted: Tensor) -> None:
        """Equal to the last bit, where not NaN; and nobody was late."""
        assert self.control[0] == 0, "a peer was late"
        assert got.dtype == wanted.dtype
        nan = wanted.isnan()
        assert torch.equal(got.isnan(), nan)
        bits = BITS[got.dtype]
        assert torch.equal(
            got.masked_fill(nan, 0).view(bits), wanted.masked_fill(nan, 0).view(bits)
        )


def sum_of(parts: list[Tensor]) -> Tensor:
    """all_reduce_ref, rounded as the interpreter rounds: it cuts bf16 off."""
    if parts[0].dtype != torch.bfloat16:
        return all_reduce_ref(parts)
    total = all_reduce_ref([part.float() for part in parts])
    return (total.view(torch.int32) & -65536).view(torch.float32).bfloat16()


def parts_of(call: int, world: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Every rank's part of one call, the same in every process; some values are odd."""
    generator = torch.Generator().manual_seed(call)
    parts = torch.randn((world, *shape), generator=generator).to(dtype)
    odd = torch.rand(parts.shape, generator=generator) < 0.2 * (call % 3)
    chosen = torch.tensor(ODD)[torch.randint(0, len(ODD), parts.shape, generator=generator)]
    parts = torch.where(odd, chosen.to(dtype), parts)
    flat = parts.view(world, -1)
    flat[:, : 16 // parts.element_size()].view(torch.uint8).fill_(0xFF)  # whole words of ABSENT
    return list(parts)


if INTERPRETED:

    def sum_everything(rank: int, regions: list[Tensor], num_calls: int, seed: int) -> None:
        """Algorithms, dtypes and sizes change from call to call, in the same order everywhere."""
        here = Rank(rank, regions)
        order = torch.Generator().manual_seed(seed)
        dtypes = list(BITS)
        for call in range(num_calls):
            kind, rows, dtype_of = (
                int(torch.randint(0, n, (1,), generator=order)) for n in (4, 5, 3)
            )
            dtype, shape = dtypes[dtype_of], (rows + 1, 136)
            parts = parts_of(call, here.world, shape, dtype)
            x, total = parts[rank].clone(), sum_of(parts)
            if (call + rank) % 7 == 0:
                time.sleep(0.002)
            if kind == 0:
                here.check(one_shot(here.memory, x), total)
            elif kind == 1:
                here.check(two_shot(here.memory, here.buffer(x, call % 3)), total)
            elif kind == 2:
                residual, weight = parts_of(1000 + call, 2, shape, dtype)
                found = one_shot_rms_norm(here.memory, x, residual, weight[0], 1e-6)
                summed = sum_of([total, residual])
                normed = rms_norm_ref(summed, weight[0], 1e-6)
                here.check(found[1], summed)
                good = ~(normed.isnan() | found[0].isnan())
                assert torch.equal(normed.isnan(), found[0].isnan())
                torch.testing.assert_close(found[0][good], normed[good], rtol=1e-2, atol=1e-5)
            else:
                gathered = gather(here.memory, x)
                assert torch.equal(gathered.view(torch.uint8), torch.stack(parts).view(torch.uint8))

    @pytest.mark.parametrize("world", [2, 3])
    def test_sums_are_those_of_the_ranks_in_their_order(world: int) -> None:
        run_ranks(sum_everything, regions_of(world), 60, world, num_ranks=world)
