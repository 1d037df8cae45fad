"""What `worker.start.memory` does to a real device."""

from __future__ import annotations

import socket

import pytest
import torch

from worker.start import memory

MIB = 1 << 20


@pytest.mark.gpu(1)
def test_what_is_taken_stays_taken_and_is_used() -> None:
    device = torch.device("cuda")
    free = memory.free_bytes(device)
    before = torch.cuda.memory_reserved(device)
    with memory.taking(1024 * MIB, device):
        kept = torch.empty(256 * MIB, dtype=torch.uint8, device=device)
    taken = torch.cuda.memory_reserved(device) - before
    assert 1024 * MIB <= taken <= 1088 * MIB
    assert free - torch.cuda.mem_get_info(device)[0] >= 1024 * MIB  # as other processes see it
    more = torch.empty(700 * MIB, dtype=torch.uint8, device=device)
    assert torch.cuda.memory_reserved(device) - before == taken
    del kept, more
    memory.free_bytes(device)


@pytest.mark.gpu(1)
def test_a_turn_holds_the_device_by_its_uuid() -> None:
    device = torch.device("cuda")
    name = f"kvlane-build-{torch.cuda.get_device_properties(device).uuid}"
    with socket.socket(socket.AF_UNIX) as other:
        with memory.turn(device):
            assert not memory._bound(other, name)
        assert memory._bound(other, name)
