"""All-reduce over peer memory among GPUs: many calls in a row, odd values, ranks that come late."""

import faulthandler
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.processes import run_ranks
from worker.errors import PeerLost
from worker.ops.norms import add_rms_norm_ref
from worker.peers import all_reduce_triton as kernels
from worker.peers.all_reduce_triton import all_reduce_ref, one_shot_rms_norm
from worker.peers.custom import NCCL, ONE_SHOT, TWO_SHOT, CustomCollective

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.gpu(2)

NUM_CALLS = 100_000
GRAPH_CALLS, MAX_REPLAYS, NUM_GRAPHS = 25, 40, 4
LATE_S, HANG_S = 2.0, 120.0
FUSED, GATHER = "fused", "gather"
KINDS = (ONE_SHOT, ONE_SHOT, ONE_SHOT, FUSED, FUSED, TWO_SHOT, TWO_SHOT, NCCL, GATHER)
FUSED_WIDTHS = (1000, 4096)  # each is compiled by itself
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
ODD = (float("nan"), 0.0, -0.0, float("inf"), -float("inf"), -1.0)
SHAPES = (
    (1, 4096), (2, 4096), (7, 1024), (1, 8), (16, 4096), (33, 2048), (64, 4096), (5, 8192),
    (130, 4096), (512, 4096), (300, 1000),
)  # fmt: skip


def join(rank: int, world: int, init_method: str) -> CustomCollective:
    """This process's end; one that hangs in spite of all ends with a trace."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    torch.cuda.set_device(rank)
    return CustomCollective(rank, world, torch.device("cuda", rank), init_method)


def on_all_gpus(target: Callable[..., None], place: Path, *args: object) -> None:
    """`target(rank, world, address, *args)` in a process for each GPU."""
    world = torch.cuda.device_count()
    run_ranks(target, world, f"file://{place}/rendezvous", *args, num_ranks=world)


class Case:
    """One shape and dtype: all ranks' parts, made alike everywhere, and what they sum to."""

    def __init__(self, number: int, shape: tuple[int, int], dtype: torch.dtype, world: int) -> None:
        generator = torch.Generator("cuda").manual_seed(number)
        parts = torch.randn((world, *shape), generator=generator, device="cuda").to(dtype)
        if number % 2:
            odd = torch.rand(parts.shape, generator=generator, device="cuda") < 0.05
            picks = torch.randint(0, len(ODD), parts.shape, generator=generator, device="cuda")
            chosen = torch.tensor(ODD, device="cuda").to(dtype)[picks]
            parts = torch.where(odd, chosen, parts)
            # Whole words of what stands for "nothing has come".
            parts.view(BITS[dtype]).view(world, -1)[:, :8] = -1
        self.parts, self.total = parts, all_reduce_ref(list(parts))
        self.residual = torch.randn(shape, generator=generator, device="cuda").to(dtype)
        self.weight = torch.randn(shape[1], generator=generator, device="cuda").to(dtype)
        self.normed, self.summed = add_rms_norm_ref(self.total, self.residual, self.weight, 1e-6)


def differ(got: Tensor, wanted: Tensor, nan: bool = True) -> Tensor:
    """How many values are not the same to the last bit; with `nan`, all NaNs are the same."""
    bits = BITS[got.dtype]
    same = got.view(bits) == wanted.view(bits)
    if nan:
        same |= got.isnan() & wanted.isnan()
    return (~same).sum()


def far(got: Tensor, wanted: Tensor) -> Tensor:
    """How many values are further apart than two roundings."""
    near = (got.float() - wanted.float()).abs() <= 2e-2 * wanted.float().abs() + 1e-4
    return (~(near | (got == wanted) | (got.isnan() & wanted.isnan()))).sum()


class Calls:
    def __init__(
        self, rank: int, world: int, init_method: str, dtypes: Sequence[torch.dtype]
    ) -> None:
        self.collective = join(rank, world, init_method)
        self.rank, self.layout = rank, self.collective.memory.layout
        self.order, self.skew = random.Random(0), random.Random(rank)
        numbers = enumerate((shape, dtype) for dtype in dtypes for shape in SHAPES)
        self.cases = [Case(i, shape, dtype, world) for i, (shape, dtype) in numbers]
        self.bad = torch.zeros((), dtype=torch.int64, device="cuda")
        self.digest = torch.zeros((), dtype=torch.int64, device="cuda")

    def call(self, case: Case, kind: str, registered: bool) -> None:
        part = case.parts[self.rank]
        num_rows, hidden = part.shape
        if kind == GATHER:
            found = self.collective.all_gather(part[:1], dim=0)
            self.bad += differ(found, case.parts[:, 0], nan=False)
            return
        fits = self.layout.fits_one_shot(part.nbytes)
        if kind == FUSED and hidden in FUSED_WIDTHS:
            fits = self.layout.fits_fused(num_rows, hidden * part.element_size())
        elif kind == FUSED:
            kind = ONE_SHOT
        kind = kind if fits or kind == NCCL else TWO_SHOT
        if registered:
            x = self.collective.buffer(tuple(part.shape), part.dtype).copy_(part)
        else:
            x = part.clone()
        if kind == FUSED:
            memory = self.collective.memory
            normed, found = one_shot_rms_norm(memory, x, case.residual, case.weight, 1e-6)
            self.bad += far(normed, case.normed)
            self.bad += differ(found, case.summed)
            self.digest.mul_(31).add_(normed.view(BITS[normed.dtype]).sum())
        else:
            found = self.collective.all_reduce_by(kind, x)
            self.bad += (far if kind == NCCL else differ)(found, case.total)
        self.digest.mul_(31).add_(found.view(BITS[found.dtype]).sum())

    def every(self) -> None:
        """Each kind of call of each case, so that all kernels are compiled."""
        for case in self.cases:
            for kind in KINDS:
                self.call(case, kind, registered=True)
                self.call(case, kind, registered=False)

    def some(self, count: int) -> None:
        """Calls that all ranks draw alike."""
        for _ in range(count):
            case, kind = self.order.choice(self.cases), self.order.choice(KINDS)
            self.call(case, kind, registered=self.order.random() < 0.5)

    def late(self, count: int) -> None:
        """some(), but a rank comes late now and then."""
        for _ in range(count):
            if self.skew.random() < 0.02:
                torch.cuda._sleep(self.skew.randrange(200_000))
            self.some(1)

    def graph(self, count: int) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.some(count)
        return graph

    def end(self) -> None:
        """All was right, and the same everywhere, NaNs too."""
        torch.cuda.synchronize()
        self.collective.check()
        assert int(self.bad) == 0
        digests = self.collective.all_gather(self.digest.view(1), dim=0).tolist()
        assert len(set(digests)) == 1, digests
        self.collective.close()


def many_calls(rank: int, world: int, init_method: str, pdl: bool, num_calls: int) -> None:
    if not pdl:
        kernels.overlap = lambda _, **options: {"PDL": False, **options}
    calls = Calls(rank, world, init_method, tuple(BITS) if pdl else (torch.bfloat16,))
    calls.every()
    torch.cuda.synchronize()
    assert int(calls.bad) == 0
    graphs = [calls.graph(GRAPH_CALLS) for _ in range(NUM_GRAPHS)]
    done = 0
    while done < num_calls:
        replays = calls.order.randrange(1, MAX_REPLAYS)
        graph = calls.order.choice(graphs)
        for _ in range(replays):
            graph.replay()
        calls.late(GRAPH_CALLS)
        done += GRAPH_CALLS * (replays + 1)
        if calls.skew.random() < 0.1:
            time.sleep(0.01 * calls.skew.random())
        torch.cuda.synchronize()
        calls.collective.check()
    del graph
    graphs.clear()  # before the group that their calls use
    calls.end()


@pytest.mark.parametrize("pdl", [True, False])
def test_calls_in_a_row_are_right_on_all_ranks(pdl: bool, tmp_path: Path) -> None:
    """Sizes, dtypes and algorithms change, graphs are mixed with calls, ranks come late."""
    on_all_gpus(many_calls, tmp_path, pdl, NUM_CALLS if pdl else NUM_CALLS // 10)


def lose_a_rank(rank: int, world: int, init_method: str, algorithm: str) -> None:
    collective = join(rank, world, init_method)
    collective.set_timeout(LATE_S)
    x = collective.buffer((16, 4096), torch.bfloat16).zero_()
    collective.all_reduce_by(algorithm, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(20):
            collective.all_reduce_by(algorithm, x)
    graph.replay()
    torch.cuda.synchronize()
    collective.check()
    if rank == 1:
        os._exit(0)
    began = time.monotonic()
    graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(PeerLost, match=f"rank {rank} of {world}"):
        collective.check()
    del graph
    assert time.monotonic() - began < 30
    collective.close()
    os._exit(0)  # torch's own threads of the group


@pytest.mark.parametrize("algorithm", [ONE_SHOT, TWO_SHOT])
def test_a_killed_rank_ends_the_calls_of_the_others(algorithm: str, tmp_path: Path) -> None:
    """Those of a replayed graph, with an error and no hang; NCCL's end with the worker."""
    on_all_gpus(lose_a_rank, tmp_path, algorithm)


def calibrated(rank: int, world: int, init_method: str) -> None:
    collective = join(rank, world, init_method)
    collective.calibrate()
    assert collective.table[0][1] == ONE_SHOT
    collective.calibrate()
    x = torch.ones(8, 4096, dtype=torch.bfloat16, device="cuda")
    assert bool((collective.all_reduce(x) == world).all())
    collective.close()


def test_all_ranks_go_by_one_measured_table(tmp_path: Path) -> None:
    on_all_gpus(calibrated, tmp_path)
