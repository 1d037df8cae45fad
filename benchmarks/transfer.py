"""Throughput and latency of pulling KV between two processes of this machine.

    python -m benchmarks.transfer --transport shm --transport mooncake --run-bytes 65536 1048576

On a CPU machine both ends, the copy and the network stack share a few cores, so only ratios count
(one transport, or one run size, against another); no number here says what a GPU host or a real
network does. The data is random, not zero. A pull is polled in a closed loop, as an idle engine
would; `first run` is the time of a pull of a single run, which is what a short prompt sees.

    python -m benchmarks.transfer exposed --kind tcp,nvlink --groups 1,4 --throttle-gb-s 0,25

How long decode still waits for KV after the prefill worker has computed all of it: see
`benchmarks.exposed`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from worker.cache.layout import MemoryRegion
from worker.registry import resolve
from worker.transfer.base import TRANSPORTS, Endpoint, KVTransport, Peer, PullState, Run

HOST = "127.0.0.1"
KINDS = {"shm": "shm", "mooncake": "tcp"}
CONNECT_S = 10.0
NUM_SINGLE_RUNS = 50


def memfd_region(num_bytes: int) -> tuple[np.ndarray, MemoryRegion]:
    """Memory as the CPU pool makes it: (its bytes, the region)."""
    fd = os.memfd_create("benchmark", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    array = np.frombuffer(mmap.mmap(fd, num_bytes), np.uint8)
    return array, MemoryRegion("target", array.ctypes.data, num_bytes, fd)


def open_transport(name: str, region: MemoryRegion) -> KVTransport:
    """The transport `name` with `region` registered."""
    transport = resolve("transport", name, TRANSPORTS)(HOST, KINDS[name])
    transport.register([region])
    return transport


def serve(name: str, num_bytes: int, conn: Connection) -> None:
    """Main function of the source process; ends with its parent."""
    array, region = memfd_region(num_bytes)
    array[:] = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    transport = open_transport(name, region)
    conn.send_bytes(msgspec.msgpack.encode(transport.endpoint()))
    with contextlib.suppress(EOFError):
        conn.recv_bytes()
    os._exit(0)


def pull_s(peer: Peer, runs: Sequence[Run]) -> float:
    """Seconds from the start of a pull to its end."""
    began = time.perf_counter()
    pull = peer.pull(runs)
    while (state := pull.poll()) is PullState.RUNNING:
        pass
    took_s = time.perf_counter() - began
    if state is not PullState.OK:
        raise RuntimeError(pull.error)
    return took_s


def measure(peer: Peer, name: str, run_bytes: int, total_bytes: int, repeat: int) -> dict[str, Any]:
    """One row: `total_bytes` in scattered runs `repeat` times, then single runs."""
    num_runs = max(1, total_bytes // run_bytes)
    rng = random.Random(0)
    here, there = (rng.sample(range(num_runs), num_runs) for _ in range(2))
    runs = [
        Run(0, a * run_bytes, b * run_bytes, run_bytes) for a, b in zip(here, there, strict=True)
    ]
    pull_s(peer, runs)  # faults the pages in
    whole_s = [pull_s(peer, runs) for _ in range(repeat)]
    single_s = [pull_s(peer, [rng.choice(runs)]) for _ in range(NUM_SINGLE_RUNS)]
    rates = [num_runs * run_bytes / took_s / (1 << 30) for took_s in whole_s]
    return {
        "transport": f"{name}/{KINDS[name]}",
        "run_bytes": run_bytes,
        "num_runs": num_runs,
        "gib_per_s_median": statistics.median(rates),
        "gib_per_s_min": min(rates),
        "gib_per_s_max": max(rates),
        "us_per_run": statistics.median(whole_s) / num_runs * 1e6,
        "first_run_us_p50": statistics.median(single_s) * 1e6,
        "first_run_us_max": max(single_s) * 1e6,
    }


def bench(name: str, run_sizes: Sequence[int], total_bytes: int, repeat: int) -> list[dict]:
    """All rows of one transport; source process and transport are gone afterwards."""
    num_bytes = max(total_bytes, *run_sizes)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    source = context.Process(target=serve, args=(name, num_bytes, theirs), daemon=True)
    source.start()
    theirs.close()
    array, region = memfd_region(num_bytes)
    transport = open_transport(name, region)
    try:
        endpoint = msgspec.msgpack.decode(ours.recv_bytes(), type=Endpoint)
        peer = transport.connect(endpoint, CONNECT_S)
        rows = [measure(peer, name, size, total_bytes, repeat) for size in run_sizes]
        expected = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
        peer_all = [Run(0, 0, 0, num_bytes)]
        pull_s(peer, peer_all)
        assert np.array_equal(array, expected), "pulled bytes differ"
        return rows
    finally:
        transport.close()
        ours.close()
        source.join()


def main() -> None:
    """Parse, measure, print."""
    if sys.argv[1:2] == ["exposed"]:
        from benchmarks import exposed  # has torch, which processes that only copy do without

        exposed.main(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description="Pull throughput and latency; see the module.")
    parser.add_argument("--transport", action="append", choices=sorted(TRANSPORTS))
    parser.add_argument(
        "--run-bytes", type=int, nargs="+", default=[4096, 16384, 65536, 1 << 20, 16 << 20]
    )
    parser.add_argument("--total-mb", type=int, default=128, help="MiB per pull")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="rows as JSON instead of a table")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.transport or sorted(TRANSPORTS):
        rows += bench(name, args.run_bytes, args.total_mb << 20, args.repeat)
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    print(
        f"{'transport':14} {'run bytes':>10} {'runs':>6} {'GiB/s (min..max)':>20} "
        f"{'us/run':>9} {'first run us':>13} {'max':>9}"
    )
    for row in rows:
        rate = "{gib_per_s_median:.2f} ({gib_per_s_min:.2f}..{gib_per_s_max:.2f})".format(**row)
        print(
            f"{row['transport']:14} {row['run_bytes']:>10} {row['num_runs']:>6} {rate:>20} "
            f"{row['us_per_run']:>9.1f} {row['first_run_us_p50']:>13.1f} "
            f"{row['first_run_us_max']:>9.1f}"
        )


if __name__ == "__main__":
    main()
