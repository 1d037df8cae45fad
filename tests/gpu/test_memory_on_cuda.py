"""What `worker.start.memory` does to a real device."""

import threading

import pytest
import torch

from tests.support.patience import HANG_S
from worker.config import EngineConfig
from worker.start.memory import CudaMemory, process_lock

pytestmark = pytest.mark.gpu(1)
MIB = 1 << 20


def test_what_is_taken_stays_taken_and_is_used() -> None:
    memory = CudaMemory(EngineConfig())
    free = memory.free_bytes()
    before = torch.cuda.memory_reserved()
    with memory.taking(1024 * MIB):
        kept = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    taken = torch.cuda.memory_reserved() - before
    assert 1024 * MIB <= taken <= 1088 * MIB
    assert free - torch.cuda.mem_get_info()[0] >= 1024 * MIB  # as other processes see it
    more = torch.empty(700 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() - before == taken
    del kept, more
    memory.free_bytes()


def test_a_load_holds_the_device_by_its_uuid() -> None:
    name = f"kvlane-build-{torch.cuda.get_device_properties().uuid}"
    inside = threading.Event()

    def load() -> None:
        with process_lock(name, "a test"):
            inside.set()

    other = threading.Thread(target=load)
    with CudaMemory(EngineConfig()).exclusive():
        other.start()
        assert not inside.wait(0.5)
    assert inside.wait(HANG_S)
    other.join()
