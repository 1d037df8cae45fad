"""The custom collective: its choice of algorithms, and all of it over memory of processes.

The regions are a file that the ranks map instead of memory of GPUs, gloo stands beside the kernels
instead of NCCL, and the kernels run under Triton's interpreter. tests/contract/test_collective.py
and tests/gpu/test_all_reduce_on_cuda.py have the same on GPUs.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.test_collective import check_promises
from tests.support.interpreted import INTERPRETED
from tests.support.pairwise import in_whole
from tests.support.peer_interpreted import access_by_interpreter
from tests.support.processes import run_ranks
from worker.errors import PeerLost, Unsupported, UserError
from worker.peers import all_reduce_triton, custom
from worker.peers.custom import (
    NCCL,
    ONE_SHOT,
    TWO_SHOT,
    CustomCollective,
    choose,
    default_table,
    table_of,
)
from worker.peers.gloo import GlooCollective
from worker.peers.peer_layout import FAULT, MIB, PeerLayout
from worker.peers.rank_group import exchange

KIB = 1 << 10


class FileRegions:
    """Stands for PeerRegions: regions in a file a rank."""

    def __init__(
        self, rank: int, size: int, layout: PeerLayout, device: torch.device, store: Any
    ) -> None:
        del device
        folder = FileRegions.folder
        self.regions = [
            torch.from_file(f"{folder}/{peer}", True, layout.num_bytes, dtype=torch.uint8)
            for peer in range(size)
        ]
        self.region = self.regions[rank]
        layout.clear(self.region)
        self.addresses = [region.data_ptr() for region in self.regions]
        exchange(store, "mapped", rank, size, "")

    folder = ""

    def close(self) -> None:
        """Nothing."""


class GlooBeside(GlooCollective):
    """Stands for NcclCollective."""

    def __init__(
        self, rank: int, size: int, device: torch.device, init_method: str, meeting: Any
    ) -> None:
        del meeting
        super().__init__(rank, size, "cpu", f"{init_method}-beside")


def collective_of(rank: int, size: int, folder: str) -> CustomCollective:
    torch.set_num_threads(1)
    FileRegions.folder = folder
    changed: Any = custom
    changed.PeerRegions, changed.NcclCollective = FileRegions, GlooBeside
    changed.PeerLayout = lambda world: PeerLayout(world, 256 * KIB)
    changed.pinned_zeros = lambda count: torch.zeros(count, dtype=torch.int64)
    changed.synchronize = lambda device: None
    access_by_interpreter(all_reduce_triton)
    return CustomCollective(rank, size, torch.device("cpu"), f"file://{folder}/rendezvous")


if not INTERPRETED:

    def test_the_table_has_a_row_for_sizes_of_one_algorithm() -> None:
        times = {
            8 * KIB: {ONE_SHOT: 4.0, TWO_SHOT: 6.0, NCCL: 16.0},
            16 * KIB: {ONE_SHOT: 4.5, TWO_SHOT: 6.0, NCCL: 16.0},
            32 * KIB: {ONE_SHOT: 7.0, TWO_SHOT: 6.5, NCCL: 17.0},
            64 * KIB: {TWO_SHOT: 30.0, NCCL: 17.0},
        }
        table = table_of(times)
        assert table == ((16 * KIB, ONE_SHOT), (32 * KIB, TWO_SHOT), (64 * KIB, NCCL))
        sizes = (16, 16 * KIB, 16 * KIB + 16, 32 * KIB, 64 * KIB, 64 * KIB + 16)
        found = [choose(table, num_bytes) for num_bytes in sizes]
        assert found == [ONE_SHOT, ONE_SHOT, TWO_SHOT, TWO_SHOT, NCCL, NCCL]

    @pytest.mark.parametrize("size", range(2, 9))
    def test_unmeasured_the_small_go_by_one_shot_and_the_largest_by_nccl(size: int) -> None:
        found = [choose(default_table(size), n) for n in (8 * KIB, 16 * MIB, 65 * MIB)]
        assert found == [ONE_SHOT, TWO_SHOT, NCCL]

    def test_one_rank_and_a_cpu_are_refused(tmp_path: Path) -> None:
        with pytest.raises(Unsupported, match="2 to 8 ranks, not 1"):
            CustomCollective(0, 1, "cpu", f"file://{tmp_path}/rendezvous")
        with pytest.raises(UserError, match="for GPUs"):
            CustomCollective(0, 2, "cpu", f"file://{tmp_path}/rendezvous")

else:

    def keep_promises(rank: int, size: int, folder: str) -> None:
        collective = collective_of(rank, size, folder)
        check_promises(collective, torch.device("cpu"))

    def choose_by_bytes(rank: int, size: int, folder: str) -> None:
        collective = collective_of(rank, size, folder)
        collective.table = ((4 * KIB, ONE_SHOT), (32 * KIB, TWO_SHOT))
        assert collective.algorithm(4 * KIB, torch.bfloat16) == ONE_SHOT
        assert collective.algorithm(4 * KIB, torch.int32) == NCCL
        assert collective.algorithm(4 * KIB - 2, torch.bfloat16) == NCCL
        assert collective.algorithm(300 * KIB, torch.bfloat16) == NCCL
        layout = collective.memory.layout
        buffers = [collective.buffer((4, 256), torch.float32) for _ in range(4)]
        offsets = [collective.memory.offset(each) for each in buffers]
        assert offsets == [layout.buffers + i * layout.buffer_bytes for i in (0, 1, 2, 0)]
        large = collective.buffer((1024, 1024), torch.float32)
        assert collective.memory.offset(large) is None
        for rows, copied in ((1, False), (8, True), (64, False)):
            x = torch.full((rows, 1024), float(rank + 1))
            total = collective.all_reduce(x)
            assert bool((total == size * (size + 1) // 2).all())
            assert (total.data_ptr() != x.data_ptr()) is copied
            assert (collective.memory.offset(total) is not None) is copied
        empty = torch.empty(0, 1024)
        assert collective.all_reduce(empty) is empty
        collective.check()
        collective._control[FAULT] = 1  # as a kernel does
        with pytest.raises(PeerLost, match=f"custom rank {rank} of {size}"):
            collective.check()
        collective.close()
        collective.close()

    def lose_the_peer(rank: int, size: int, folder: str) -> None:
        collective = collective_of(rank, size, folder)
        collective.all_reduce(torch.ones(1, 64))
        collective.set_timeout(0.2)
        if rank < size - 1:
            collective.all_reduce(torch.ones(1, 64))
            with pytest.raises(
                PeerLost, match=f"custom rank {rank} of {size}: a peer did not come in time"
            ):
                collective.check()
        collective.close()

    LAWS = {
        "keeps the promises of collectives": keep_promises,
        "the algorithm is a function of bytes": choose_by_bytes,
        "a peer that does not come is a typed error": lose_the_peer,
    }

    @pytest.mark.parametrize("size", [2, *in_whole((4,))])
    @pytest.mark.parametrize("law", LAWS)
    def test_of_ranks(law: str, size: int, tmp_path: Path) -> None:
        run_ranks(LAWS[law], size, str(tmp_path), num_ranks=size)
