"""KV over NVLink: a killed source's GPU memory comes back once its peer is closed.

An NVLink engine maps its peer's memory by CUDA IPC, and the mapping keeps that memory allocated
after the peer was killed: a restarted worker would find no room. Source and reader are processes of
their own, as IPC wants it; this one only watches the source's device. With `-s` it prints how long
memory took to come back, and the reader's log says how long the GIL was held.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import pytest
import torch

from worker.cache.layout import MemoryRegion
from worker.transfer.base import Endpoint, Peer, PullState, Run
from worker.transfer.mooncake import MooncakeTransport

HOST = "127.0.0.1"
MIB = 1 << 20
SIZES = {"target": 4096 * MIB, "draft": 256 * MIB}
POOL_BYTES = sum(SIZES.values())
NUM_KILLS = 5
# A process that maps memory of another device has a CUDA context there from then on.
CONTEXT_BYTES = 1024 * MIB
LEAK_BYTES = 64 * MIB
START_S = 120.0  # of a process, CUDA included
BACK_S = 10.0  # for memory to come back: 1 s by design
CONNECT_S = 10.0


def fill(device: str, seed: int) -> list[torch.Tensor]:
    """What the source with this seed serves; the same on every device of one model."""
    generator = torch.Generator(device).manual_seed(seed)
    return [
        torch.randint(0, 256, (size,), dtype=torch.uint8, device=device, generator=generator)
        for size in SIZES.values()
    ]


def register(kind: str, pool: Sequence[torch.Tensor]) -> MooncakeTransport:
    """A transport of this process that serves and fills `pool`."""
    transport = MooncakeTransport(HOST, kind)
    named = zip(SIZES, pool, strict=True)
    transport.register([MemoryRegion(n, t.data_ptr(), t.nbytes, None) for n, t in named])
    return transport


def begin(device: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(processName)s %(name)s: %(message)s")
    if device.startswith("cuda"):
        torch.cuda.set_device(device)


def serve(kind: str, device: str, seed: int, conn: Connection) -> None:
    """Main function of a source: serve until killed, or until the test is gone."""
    begin(device)
    pool = fill(device, seed)
    transport = register(kind, pool)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    conn.send(transport.endpoint())
    with contextlib.suppress(EOFError):
        conn.recv()
    os._exit(0)


class Reader:
    """The reader's process: what it does for each command."""

    def __init__(self, kind: str, device: str) -> None:
        self.device = device
        self.pool = [torch.zeros(n, dtype=torch.uint8, device=device) for n in SIZES.values()]
        self.transport = register(kind, self.pool)
        self.peer: Peer | None = None

    def connect(self, endpoint: Endpoint) -> None:
        self.peer = self.transport.connect(endpoint, CONNECT_S)

    def pull(self) -> str:
        """Pull all of both regions in runs that are no power of two; the final state."""
        assert self.peer is not None
        step = 300 * MIB + 4096
        runs = [
            Run(region, at, at, min(step, size - at))
            for region, size in enumerate(SIZES.values())
            for at in range(0, size, step)
        ]
        pull = self.peer.pull(runs)
        while (state := pull.poll()) is PullState.RUNNING:
            time.sleep(0.0002)
        return state.value

    def holds(self, seed: int) -> bool:
        """Whether the pool is, byte for byte, that of the source with this seed; then wipes it."""
        same = all(map(torch.equal, self.pool, fill(self.device, seed)))
        for tensor in self.pool:
            tensor.zero_()
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()
        return same

    def close(self) -> None:
        assert self.peer is not None
        self.peer.close()
        self.peer = None

    def multiply(self) -> float:
        """Whether the CUDA context works: 2**20 if it does."""
        ones = torch.ones(1024, 1024, device=self.device)
        return (ones @ ones).sum().item() / 1024


def read(kind: str, device: str, conn: Connection) -> None:
    """Main function of the reader: answer commands until the test is gone."""
    begin(device)
    reader = Reader(kind, device)
    conn.send(None)
    with contextlib.suppress(EOFError):
        while True:
            name, *arguments = conn.recv()
            conn.send(getattr(reader, name)(*arguments))
    os._exit(0)


@dataclass
class Child:
    process: SpawnProcess
    conn: Connection

    def answer(self) -> Any:
        assert self.conn.poll(START_S), f"{self.process.name} does not answer"
        return self.conn.recv()

    def ask(self, *command: Any) -> Any:
        self.conn.send(command)
        return self.answer()

    def kill(self) -> None:
        assert self.process.pid is not None
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.conn.close()


@contextlib.contextmanager
def child(main: Any, *arguments: Any) -> Iterator[tuple[Child, Any]]:
    """A process that runs `main`, and the first thing it says; killed in the end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=main, args=(*arguments, theirs), name=main.__name__)
    process.start()
    theirs.close()
    made = Child(process, ours)
    try:
        yield made, made.answer()
    finally:
        made.kill()


def free_bytes(device: str) -> int:
    return torch.cuda.mem_get_info(device)[0]


def wait_for(wanted: int, device: str) -> tuple[int, float]:
    """Free bytes once they are `wanted` or BACK_S have passed, and how long that was."""
    began = time.monotonic()
    while (free := free_bytes(device)) < wanted and time.monotonic() - began < BACK_S:
        time.sleep(0.01)
    return free, time.monotonic() - began


def check(kind: str, source_device: str, reader_device: str) -> None:
    """Sources are pulled from, killed and closed, one after the other."""
    left: list[int] = []  # free bytes after each kill and close
    with child(read, kind, reader_device) as (reader, _):
        for seed in range(NUM_KILLS):
            before = free_bytes(source_device)
            with child(serve, kind, source_device, seed) as (source, endpoint):
                reader.ask("connect", endpoint)
                assert reader.ask("pull") == "ok"
                assert reader.ask("holds", seed)
                source.kill()
                time.sleep(1.0)
                held = before - free_bytes(source_device)
                assert held > POOL_BYTES // 2, "nothing to see: the mapping did not hold the pool"
                assert reader.ask("pull") in ("ok", "failed")
                reader.ask("close")
                lost = LEAK_BYTES if seed else CONTEXT_BYTES
                free, seconds = wait_for(before - lost, source_device)
            left.append(free)
            print(f"{held / MIB:.0f} MiB held; after the close {(before - free) / MIB:.0f} MiB")
            print(f"memory came back {seconds:.2f} s after the close")
            assert before - free <= lost
            assert reader.ask("multiply") == 2**20
    assert left[1] - left[-1] <= LEAK_BYTES


@pytest.mark.gpu(2, alone=True)
@pytest.mark.timeout(600)
def test_a_killed_sources_memory_comes_back_on_another_gpu() -> None:
    check("nvlink", "cuda:0", "cuda:1")


@pytest.mark.gpu(1, alone=True)
@pytest.mark.timeout(600)
def test_a_killed_sources_memory_comes_back_on_a_shared_gpu() -> None:
    check("nvlink", "cuda:0", "cuda:0")
