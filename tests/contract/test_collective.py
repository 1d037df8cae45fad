"""Every collective keeps the same promises, at one rank, at two or at four."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import torch
from torch._C._distributed_c10d import ErrorType

from tests.support.processes import run_ranks
from worker.errors import PeerLost, UserError
from worker.ops.norms import add_rms_norm
from worker.peers.base import COLLECTIVES
from worker.peers.deaf import listening
from worker.peers.nccl import NcclCollective
from worker.peers.rank_group import Meeting, RankGroup, exchange
from worker.peers.rendezvous import free_rendezvous, own_address
from worker.registry import resolve

ON_GPUS = {"nccl", "custom"}
ROWS, HIDDEN = 5, 64


def part(rank: int, dtype: torch.dtype) -> torch.Tensor:
    noise = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(rank))
    return noise.to(dtype)


def device_of(rank: int, name: str) -> torch.device:
    if name not in ON_GPUS:
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def keep_promises(rank: int, name: str, size: int, init_method: str) -> None:
    torch.set_num_threads(1)
    device = device_of(rank, name)
    collective: Any = resolve("collective", name, COLLECTIVES)(rank, size, device, init_method)
    assert (collective.rank, collective.size) == (rank, size)
    check_promises(collective, device)


def check_promises(collective: Any, device: torch.device) -> None:
    """Of one rank's end of a group; all ranks call, and the group is closed."""
    rank, size = collective.rank, collective.size
    assert isinstance(collective.capturable, bool)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 0.05)):
        parts = [part(r, dtype).to(device) for r in range(size)]
        total = torch.stack([p.double() for p in parts]).sum(0)

        assert collective.algorithm(parts[rank].nbytes, dtype)
        summed = collective.all_reduce(parts[rank].clone())
        assert summed.dtype == dtype
        assert (summed.double() - total).abs().max() <= bound
        everyone = collective.all_gather(summed.unsqueeze(0), dim=0)
        assert all(torch.equal(other, summed) for other in everyone), "equal to the last bit"

        staged = collective.buffer((ROWS, HIDDEN), dtype)
        staged.copy_(parts[rank])
        assert torch.equal(collective.all_reduce(staged), summed)

        residual, weight = part(100, dtype).to(device), part(101, dtype)[0].to(device)
        normed, new_residual = collective.all_reduce_rms_norm(
            parts[rank].clone(), residual, weight, 1e-6
        )
        expected = add_rms_norm(summed, residual, weight, 1e-6)
        for found, wanted in zip((normed, new_residual), expected, strict=True):
            assert ((found - wanted).abs() <= bound * wanted.abs().clamp(min=1.0)).all()

        for dim in (0, 1, -1):
            kept = parts[rank].clone()
            assert torch.equal(collective.all_gather(kept, dim=dim), torch.cat(parts, dim=dim))
            assert torch.equal(kept, parts[rank])
        strided = parts[rank].t()
        expected_t = torch.cat([p.t() for p in parts], dim=1)
        assert torch.equal(collective.all_gather(strided, dim=1), expected_t)
        pairs = torch.tensor([[rank, -1], [-(1 << 40), 7]], device=device)
        everyone = collective.all_gather(pairs.unsqueeze(0), dim=0)
        assert everyone[:, 0, 0].tolist() == list(range(size))
        assert all(torch.equal(each.flatten()[1:], pairs.flatten()[1:]) for each in everyone)
    collective.check()
    collective.close()
    collective.close()


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=pytest.mark.gpu(size) if name in ON_GPUS else ())
        for name in sorted(COLLECTIVES)
        for size in ((1,) if name == "single" else (2, 4))
    ],
)
def test_collective_keeps_its_promises(name: str, size: int, tmp_path: Path):
    init_method = f"file://{tmp_path}/rendezvous"
    run_ranks(keep_promises, name, size, init_method, num_ranks=size)


def hear_nobody(rank: int, init_method: str) -> None:
    """A stranger gets no answer once the group stands; else each would cost a descriptor."""
    torch.set_num_threads(1)
    num_files, before = len(os.listdir("/proc/self/fd")), listening()
    assert len(os.listdir("/proc/self/fd")) == num_files
    collective: Any = resolve("collective", "gloo", COLLECTIVES)(rank, 2, "cpu", init_method)
    ones = collective.all_reduce(torch.ones(4))
    [listener] = listening() - before
    with socket.socket(fileno=os.dup(listener)) as gloo, socket.socket() as stranger:
        stranger.settimeout(0.3)
        with pytest.raises(TimeoutError):
            stranger.connect(gloo.getsockname())
    assert torch.equal(collective.all_reduce(ones), torch.full((4,), 4.0))
    collective.close()


def test_gloo_answers_nobody_once_its_ranks_are_there() -> None:
    run_ranks(hear_nobody, free_rendezvous("127.0.0.1"), num_ranks=2)


def meet_and_part(rank: int, address: str) -> None:
    """A stranger finds the store at its own address alone, and not once the ranks have met."""
    group = RankGroup(rank, 2, address, "w/1")
    assert group.gather(f"{rank}".encode()) == [b"0", b"1"]
    port = urlsplit(address).port or 0
    if rank == 0:
        (place,) = {each.laddr for each in psutil.Process().net_connections() if not each.raddr}
        assert place == ("127.0.0.1", port)
    group.gather(b"looked")
    group.part()
    group.part()
    if rank == 0:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    with pytest.raises(AssertionError, match="parted"):
        group.gather(b"")


def test_a_store_ends_when_the_ranks_have_met() -> None:
    run_ranks(meet_and_part, free_rendezvous("127.0.0.1"), num_ranks=2)


STRANGER = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    print("connected", flush=True)
    try:
        print(connection.recv(1))
    except ConnectionError:
        print(b"")
"""


def keep_a_store(rank: int, address: str) -> None:
    """A stranger that came before the ranks met is cut off, and one that comes later unheard."""
    port = str(urlsplit(address).port)
    meeting = Meeting(rank, 2, address)
    program = [sys.executable, "-c", STRANGER, port]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "connected\n"
        exchange(meeting.store, "here", rank, 2, "")
        meeting.part(stays=True)
        assert exchange(meeting.store, "still", rank, 2, str(rank)) == [b"0", b"1"]
        assert stranger.stdout.readline() == "b''\n"
    exchange(meeting.store, "cut", rank, 2, "")
    with pytest.raises(TimeoutError):
        socket.create_connection(("127.0.0.1", int(port)), 0.3)
    meeting.part()


def test_a_store_that_stays_hears_its_ranks_alone() -> None:
    run_ranks(keep_a_store, free_rendezvous("127.0.0.1"), num_ranks=2)


def test_a_rendezvous_that_is_taken_is_a_typed_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PeerLost, match="rank 0 of 2: nobody at tcp"):
            RankGroup(0, 2, address)


def lose_the_peer(rank: int, init_method: str) -> None:
    torch.set_num_threads(1)
    collective: Any = resolve("collective", "gloo", COLLECTIVES)(rank, 2, "cpu", init_method)
    collective.all_reduce(torch.ones(4))
    if rank == 1:
        os._exit(0)
    started = time.monotonic()
    with pytest.raises(PeerLost, match="gloo rank 0 of 2"):
        collective.all_reduce(torch.ones(4))
    with pytest.raises(PeerLost, match="gloo rank 0 of 2"):
        collective.check()
    assert time.monotonic() - started < 10
    collective.close()


def test_a_lost_peer_is_a_typed_error_and_not_a_hang(tmp_path: Path):
    run_ranks(lose_the_peer, f"file://{tmp_path}/rendezvous", num_ranks=2)


@pytest.mark.parametrize("found", ["TIMEOUT", "COMM_ERROR", "REMOTE_ERROR"])
def test_what_nccl_finds_while_nobody_calls_is_a_typed_error(found: str):
    """A double stands for the group, which needs GPUs; `check_promises` asks a real one."""
    state = SimpleNamespace(found=ErrorType.SUCCESS)
    collective = object.__new__(NcclCollective)
    collective.rank, collective.size, collective._lost = 0, 2, ""
    collective._group = SimpleNamespace(get_error=lambda: state.found, abort=lambda: None)
    collective.check()
    state.found = getattr(ErrorType, found)
    for _ in range(2):
        with pytest.raises(PeerLost, match=f"nccl rank 0 of 2: .*{found}"):
            collective.check()
    collective.close()
    with pytest.raises(PeerLost, match=found):
        collective.check()


def test_the_single_collective_refuses_two_ranks():
    single: Any = resolve("collective", "single", COLLECTIVES)
    with pytest.raises(UserError, match="one rank"):
        single(0, 2, "cpu", "")


def test_a_free_rendezvous_of_this_machine_can_be_bound_and_is_another_each_time() -> None:
    scheme, _, port = free_rendezvous("127.0.0.1").rpartition(":")
    assert scheme == "tcp://127.0.0.1"
    socket.create_server(("127.0.0.1", int(port))).close()
    assert len({free_rendezvous("127.0.0.1") for _ in range(8)}) > 1
    with pytest.raises(OSError, match="assign requested address"):
        free_rendezvous("192.0.2.1")


@pytest.mark.parametrize(
    "rendezvous", ["tcp://127.0.0.1:5000", "tcp://localhost:5000", "file:///x"]
)
def test_the_address_of_this_machine_is_that_on_the_way_there(rendezvous: str) -> None:
    assert own_address(rendezvous) in ("127.0.0.1", "::1")
