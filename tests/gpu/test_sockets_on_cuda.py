"""KV over sockets between memory of a GPU: staged by way of pinned memory, bit for bit."""

import pytest
import torch

from tests.support.patience import HANG_S
from tests.support.pulls import OK, ended
from worker.cache.layout import MemoryRegion
from worker.transfer.base import Run
from worker.transfer.sockets import SocketTransport

pytestmark = pytest.mark.gpu(1)
NUM_BYTES = 64 << 20


def test_pulled_bytes_are_the_peers_and_no_others_change() -> None:
    source = torch.randint(256, (NUM_BYTES,), dtype=torch.uint8, device="cuda")
    here = torch.full_like(source, 0xEE)
    wanted, runs = here.clone(), list[Run]()
    for number in range(300):
        at, there, size = number << 17, (NUM_BYTES >> 1) - (number << 10), 100_000 + number
        wanted[at : at + size] = source[there : there + size]
        runs.append(Run(0, at, there, size))
    runs.append(Run(0, 48 << 20, 3, 9 << 20))
    wanted[48 << 20 : 57 << 20] = source[3 : 3 + (9 << 20)]
    torch.cuda.synchronize()
    ends = [SocketTransport("127.0.0.1") for _ in range(2)]
    for end, memory in zip(ends, (source, here), strict=True):
        end.register([MemoryRegion("target", memory.data_ptr(), NUM_BYTES, None)])
    try:
        pull = ends[1].connect(ends[0].endpoint(), HANG_S).pull(runs)
        assert ended(pull) is OK, pull.error
        assert torch.equal(here, wanted)
    finally:
        for end in ends:
            end.close()
