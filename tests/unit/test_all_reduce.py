"""Sums over ranks, of processes that poll each other's memory, under Triton's interpreter."""

import itertools
import re
import time
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import pairwise
from tests.support.interpreted import INTERPRETED, WHY, ptx_of
from tests.support.peer_interpreted import access_by_interpreter
from tests.support.processes import run_ranks
from worker.ops.jit import HAS_TRITON, power_of_two
from worker.ops.norms import rms_norm_ref
from worker.peers import all_reduce_triton as all_reduce
from worker.peers.all_reduce_triton import (
    all_reduce_ref,
    gather,
    one_shot,
    one_shot_rms_norm,
    two_shot,
)
from worker.peers.peer_layout import (
    CHANNELS,
    FAULT,
    GATHER_BLOCK,
    PeerLayout,
    PeerMemory,
    one_shot_tiles,
    share_of,
    two_shot_tiles,
)

if INTERPRETED:  # in ranks' processes too, which import this file
    access_by_interpreter(all_reduce)

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
        self.rank, self.world, self.regions = rank, len(regions), regions
        self.region = regions[rank]
        self.control = torch.tensor([0, limit_ns])
        self.layout = PeerLayout(self.world, BUFFER_BYTES)
        bases = tuple(region.data_ptr() for region in regions)
        self.memory = PeerMemory(rank, self.layout, bases, self.control.data_ptr())

    def buffer(self, x: Tensor, number: int = 0) -> Tensor:
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


def types_of(world: int, pointers: dict[str, str], integers: str) -> dict[str, Any]:
    shared: dict[str, Any] = {"own": "i64", "control": "i64", "rank": "i32"}
    shared |= (
        {"bases": ("i64",) * world} if "share" in integers else {"peers": ("i64",) * (world - 1)}
    )
    return pointers | shared | dict.fromkeys(integers.split(), "i32")


if not INTERPRETED:

    @pytest.mark.skipif(not HAS_TRITON, reason=WHY)
    @pytest.mark.parametrize(
        ("world", "dtype", "pdl"),
        [(2, "bf16", False), (3, "fp16", True), *pairwise.in_whole((8, "fp32", True))],
    )
    def test_the_kernels_compile_for_hopper_without_one(world: int, dtype: str, pdl: bool) -> None:
        layout = PeerLayout(world)
        options = {"launch_pdl": True} if pdl else {}
        shared = {"WORLD": world, "CHANNELS": CHANNELS, "PDL": pdl}
        slots = {"SLOTS": layout.slots, "PIECE": layout.piece}
        cases: list[tuple[Any, dict[str, Any], dict[str, Any], int]] = []
        pointers = dict.fromkeys(("x", "out"), f"*{dtype}")
        types = types_of(world, pointers, "num_chunks steps")
        for block in (256, 1024):
            constants = shared | slots | {"BLOCK": block}
            cases.append((all_reduce._one_shot_kernel, types, constants, 8))
        names = "x", "residual", "weight", "normed", "total"
        types = types_of(
            world, dict.fromkeys(names, f"*{dtype}"), "num_rows steps stride_residual stride_total"
        )
        constants = shared | slots | {"ROW": 500, "BLOCK": 512}
        fused = all_reduce._one_shot_rms_norm_kernel, types | {"eps": "fp32"}, constants, 16
        types = types_of(world, {"x": f"*{dtype}"}, "num_chunks share steps")
        constants = {"WORLD_2": power_of_two(world), "FLAGS": layout.flags, "BLOCK": 1024}
        two_shots = all_reduce._two_shot_kernel, types, shared | constants, 16
        types = types_of(world, {"x": "*i32", "out": "*i32"}, "num_pairs steps")
        constants = {"MARKED": layout.marked, "PIECE": layout.marked_piece, "BLOCK": GATHER_BLOCK}
        gathers = all_reduce._gather_kernel, types, shared | constants, 4
        for kernel, types, constants, num_warps in (*cases, fused, two_shots, gathers):
            ptx = ptx_of(kernel, types, constants, num_warps=num_warps, **options)
            assert ("griddepcontrol.wait" in ptx) is pdl
            assert re.search(r"ld\.relaxed\.sys\.global\.v(4\.b32|2\.b64)", ptx)
            assert re.search(r"st\.relaxed\.sys\.global\.v(4\.b32|2\.b64)", ptx)
            told = "st.release.sys" in ptx and "ld.acquire.sys" in ptx
            assert told is (kernel is all_reduce._two_shot_kernel)

    @pytest.mark.parametrize("world", range(2, 9))
    def test_regions_hold_what_is_cut_for_them(world: int) -> None:
        layout = PeerLayout(world)
        edges = layout.flags, layout.marked, layout.slots, layout.buffers, layout.num_bytes
        assert sorted(edges) == list(edges)
        assert all(edge % 128 == 0 for edge in edges)
        assert layout.flags >= 3 * CHANNELS * 4, "turns end before"
        for num_bytes in (16, 4096, 100_000, 1 << 20, 1 << 23, 1 << 26):
            chunks = num_bytes // 16
            for tiles in (one_shot_tiles(chunks), two_shot_tiles(chunks, world)):
                assert 0 < tiles.programs <= CHANNELS
            tiles = one_shot_tiles(chunks)
            assert tiles.programs * tiles.steps * tiles.block >= chunks
            share, tiles = share_of(chunks, world), two_shot_tiles(chunks, world)
            assert share * world >= chunks
            assert tiles.programs * tiles.steps * tiles.block >= share
        assert layout.fits_one_shot(1 << 20)
        assert not layout.fits_one_shot(1 << 26)
        assert layout.fits_fused(128, 16384)
        assert not layout.fits_fused(1, 1000), "rows are whole chunks"
        assert not layout.fits_fused(1, 65536), "a row is held in registers"
        assert layout.fits_gather(8)
        assert not layout.fits_gather(4)
        assert not layout.fits_gather(1 << 20)

else:

    def sum_everything(rank: int, regions: list[Tensor], digests: Tensor, num_calls: int) -> None:
        """Algorithms, dtypes and sizes change from call to call, in the same order everywhere."""
        here = Rank(rank, regions)
        order = torch.Generator().manual_seed(here.world)
        cases = list(itertools.product(range(4), BITS))
        for call in range(num_calls):
            if call % len(cases) == 0:
                numbers = torch.randperm(len(cases), generator=order).tolist()
            kind, dtype = cases[numbers[call % len(cases)]]
            shape = int(torch.randint(1, 6, (1,), generator=order)), 136
            parts = parts_of(call, here.world, shape, dtype)
            x, total = parts[rank].clone(), sum_of(parts)
            if (call + rank) % 7 == 0:
                time.sleep(0.002)
            if kind == 0:
                found = two_shot(here.memory, here.buffer(x, call % 3))
                here.check(found, total)
            elif kind == 1:
                residual, weight = parts_of(1000 + call, 2, shape, dtype)
                # The new residual goes to a column of features.
                taps = torch.zeros(shape[0], 3 * shape[1], dtype=dtype)
                tap = taps[:, shape[1] : 2 * shape[1]]
                normed, found = one_shot_rms_norm(here.memory, x, residual, weight[0], 1e-6, tap)
                assert found is tap
                summed = sum_of([total, residual])
                here.check(found.contiguous(), summed)
                wanted = rms_norm_ref(summed, weight[0], 1e-6)
                torch.testing.assert_close(normed, wanted, rtol=1e-2, atol=1e-5, equal_nan=True)
                assert torch.equal(x.view(BITS[dtype]), parts[rank].view(BITS[dtype])), "x is kept"
            elif kind == 2:
                found = gather(here.memory, x)
                assert torch.equal(found.view(torch.uint8), torch.stack(parts).view(torch.uint8))
            else:
                found = one_shot(here.memory, x)
                assert found is x
                here.check(found, total)
            bits = found.contiguous().view(BITS[dtype]).to(torch.int64).sum()
            digests[rank] = digests[rank] * 31 + bits

    @pytest.mark.parametrize("world", [3, *pairwise.in_whole((2,), (4,), (8,))])
    def test_sums_are_those_of_the_ranks_in_their_order(world: int) -> None:
        digests = torch.zeros(world, dtype=torch.int64).share_memory_()
        num_calls = 300 if pairwise.whole else 5  # each algorithm and dtype
        run_ranks(sum_everything, regions_of(world), digests, num_calls, num_ranks=world)
        assert digests[0] != 0
        assert (digests == digests[0]).all()

    def hold(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (time.sleep(0.02), function(*arguments))[1]

    def hold_shared(load: Callable[..., Any]) -> Callable[..., Any]:
        held = hold(load)
        return lambda at, mask, shared=False: (held if shared else load)(at, mask, shared)

    def sum_in_hard_times(rank: int, regions: list[Tensor], path: str) -> None:
        """Ranks come late to a call, and are slow to read; by the kernels in a file."""
        here = Rank(rank, regions, limit_ns=10**9)
        spec = spec_from_file_location("changed_kernels", path)
        kernels: Any = module_from_spec(spec)
        spec.loader.exec_module(kernels)
        access_by_interpreter(kernels)
        if rank == 0:  # slow to read what has come
            kernels.poll_chunks = hold(kernels.poll_chunks)
            kernels.load_chunks = hold_shared(kernels.load_chunks)
        for call in range(5):
            parts = parts_of(3 * call, here.world, (1, 64), torch.float32)
            if rank == 1:  # late to the call
                time.sleep(0.02)
            here.check(kernels.one_shot(here.memory, parts[rank].clone()), all_reduce_ref(parts))
        for call in range(2):
            parts = parts_of(call, here.world, (3, 64), torch.float32)
            x = here.buffer(parts[rank])
            if rank == 1:
                time.sleep(0.02)
            here.check(kernels.two_shot(here.memory, x).clone(), all_reduce_ref(parts))

    def run_often(*arguments: Any) -> None:
        """On a busy machine all may be late together, so that a mutant is right for once."""
        for _ in range(5):
            run_ranks(*arguments, num_ranks=3)

    MUTANTS = {
        "none": ("", ""),
        "one set of slots": ("(turn & 1)", "(turn & 0)"),
        "ABSENT is sent": ("0x7FFF7FFF", "-1"),
        "slots are not reset": ("store_chunks(slot, (absent, absent, absent, absent), sent)", "0"),
        "a rank's own part first": (
            "for source in tl.static_range(1, WORLD):\n"
            "        part = _take(mine, slot + source * (PIECE * 16), source, rank",
            "for nth in tl.static_range(1, WORLD):\n"
            "        source = (rank + nth) % WORLD\n"
            "        part = _take(mine, slot + source * (PIECE * 16), source, rank",
        ),
        "no wait for the others' x": (
            "poll_flags(own + begun + ids * 8, turn, control, ids < WORLD) & 0xFFFFFFFF",
            "ids.to(tl.int64) * 0 + here",
        ),
        "no wait for the others' sums": (
            "    poll_flags(own + ended + ids * 8, turn, control, ids < WORLD)\n",
            "",
        ),
    }

    @pytest.mark.parametrize("name", pairwise.one_in(8, MUTANTS))
    def test_each_part_of_the_protocol_is_needed(name: str, tmp_path: Path) -> None:
        before, after = MUTANTS[name]
        text = Path(all_reduce.__file__).read_text()
        assert before in text
        if name == "a rank's own part first":
            first = "_take(mine, slot, 0, rank, control, mask)"
            assert first in text
            text = text.replace(first, first.replace("slot, 0", OWN_SLOT))
        path = tmp_path / "kernels.py"
        path.write_text(text.replace(before, after))
        arguments = sum_in_hard_times, regions_of(3), str(path)
        if name == "none":
            run_ranks(*arguments, num_ranks=3)
        else:
            with pytest.raises(Exception, match="AssertionError"):
                run_often(*arguments)

    OWN_SLOT = "slot + rank * (PIECE * 16), rank"

    @pytest.mark.parametrize("kind", ["one_shot", "two_shot", "gather", "fused"])
    def test_a_peer_that_never_comes_sets_the_fault(kind: str) -> None:
        here = Rank(0, regions_of(2), limit_ns=10**7)
        x = here.buffer(torch.ones(2, 64))
        assert here.control[FAULT] == 0
        for _ in range(3):
            if kind == "fused":
                one_shot_rms_norm(here.memory, x, x, x[0], 1e-6)
            else:
                getattr(all_reduce, kind)(here.memory, x)
            assert here.control[FAULT] == 1
