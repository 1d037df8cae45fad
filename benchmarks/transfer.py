"""Pulls of KV from another process: throughput and latency of a transport.

    python -m benchmarks.transfer --transport shm --transport mooncake --run-bytes 65536 1048576

Both ends and the copy share this machine's cores, so only ratios count. A pull is polled in a
closed loop, as an idle engine would; `first run` is a pull of a single run, which is what a short
prompt sees.
"""

import argparse
import contextlib
import mmap
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from benchmarks.load.report import aligned
from benchmarks.output import parser, shown, write
from tests.support import kv_sources
from worker.cache.layout import MemoryRegion
from worker.transfer.base import Peer, PullState, Run

KINDS = {"shm": "shm", "mooncake": "tcp", "sockets": "tcp"}
NUM_SINGLE_RUNS = 50
POLL_S = 2e-5  # between two polls; others of this process have their turn then


def memory_of(num_bytes: int, *, filled: bool) -> tuple[Tensor, MemoryRegion]:
    """Memory [num_bytes] u8 as a pool makes it, of random bytes if they are to be pulled."""
    fd = os.memfd_create("benchmark", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    made = torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
    if filled:
        drawn = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
        made.copy_(torch.from_numpy(drawn))
    return made, MemoryRegion("target", made.data_ptr(), num_bytes, fd)


def served(num_bytes: int) -> kv_sources.Serves:
    """What the other process serves."""
    memory, region = memory_of(num_bytes, filled=True)
    return [region], memory


@contextlib.contextmanager
def source(transport: str, num_bytes: int) -> Iterator[tuple[Peer, Tensor, int]]:
    """Another process's memory, by NAME/KIND, ours that it is pulled into, and that one's pid."""
    name, kind = transport.split("/")
    there = kv_sources.source((name, kind), served, num_bytes)
    memory, region = memory_of(num_bytes, filled=False)
    made = kv_sources.registered((name, kind), [region])
    assert there.process.pid is not None
    try:
        yield made.connect(there.endpoint, kv_sources.CONNECT_S), memory, there.process.pid
    finally:
        made.close()
        there.kill()


def scattered(num: int, num_bytes: int) -> list[Run]:
    """So many runs, in another order at either end."""
    rng = random.Random(0)
    here, there = (rng.sample(range(num), num) for _ in range(2))
    return [
        Run(0, a * num_bytes, b * num_bytes, num_bytes) for a, b in zip(here, there, strict=True)
    ]


def pull_s(peer: Peer, runs: Sequence[Run]) -> float:
    """Seconds from the start of a pull to its end."""
    began = time.perf_counter()
    pull = peer.pull(runs)
    while (state := pull.poll()) is PullState.RUNNING:
        time.sleep(POLL_S)
    took_s = time.perf_counter() - began
    if state is not PullState.OK:
        raise RuntimeError(pull.error)
    return took_s


def measure(peer: Peer, run_bytes: int, options: argparse.Namespace, pid: int) -> dict[str, Any]:
    """One row: --total-mb in scattered runs, --repeat times, then single runs.

    pid: of the source.
    """
    runs = scattered(max(1, (options.total_mb << 20) // run_bytes), run_bytes)
    rng, num_bytes = random.Random(1), len(runs) * run_bytes
    both = psutil.Process(), psutil.Process(pid)

    def computed_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in both)

    pull_s(peer, runs)  # faults the pages in
    before_s = computed_s()
    whole_s = [pull_s(peer, runs) for _ in range(options.repeat)]
    cpu_s = computed_s() - before_s
    single_s = [pull_s(peer, [rng.choice(runs)]) for _ in range(NUM_SINGLE_RUNS)]
    rates = [num_bytes / took_s / (1 << 30) for took_s in whole_s]
    return {
        "run_bytes": run_bytes,
        "num_runs": len(runs),
        "gib_per_s_median": statistics.median(rates),
        "gib_per_s_min": min(rates),
        "gib_per_s_max": max(rates),
        "cpu_s_per_gb": cpu_s / (options.repeat * num_bytes / 1e9),
        "us_per_run": statistics.median(whole_s) / len(runs) * 1e6,
        "first_run_us_p50": statistics.median(single_s) * 1e6,
        "first_run_us_max": max(single_s) * 1e6,
    }


def main() -> None:
    """Measure, print a table and write the file: a row for each transport and size of a run."""
    made = parser(__doc__)
    add = made.add_argument
    add("--transport", action="append", choices=sorted(KINDS))
    add("--run-bytes", type=int, nargs="+", default=[4096, 16384, 65536, 1 << 20, 16 << 20])
    add("--total-mb", type=int, default=128, help="MiB per pull")
    add("--repeat", type=int, default=5)
    options = made.parse_args()
    num_bytes = max(options.total_mb << 20, *options.run_bytes)
    rows: list[dict[str, Any]] = []
    for name in options.transport or sorted(KINDS):
        transport = f"{name}/{KINDS[name]}"
        with source(transport, num_bytes) as (peer, memory, pid):
            for size in options.run_bytes:
                rows.append({"transport": transport} | measure(peer, size, options, pid))
            pull_s(peer, [Run(0, 0, 0, num_bytes)])
            wanted, _ = memory_of(num_bytes, filled=True)
            assert torch.equal(memory, wanted), "pulled bytes differ"
    cells = [
        [f"{each:.4g}" if isinstance(each, float) else str(each) for each in row.values()]
        for row in rows
    ]
    print("\n".join(aligned([list(rows[0]), *cells])))
    write(options.json, {"options": shown(options), "rows": rows})


if __name__ == "__main__":
    main()
