"""Throughput and latency of pulling KV between two processes of this machine.

    python -m benchmarks.transfer --transport shm --transport mooncake --run-bytes 65536 1048576
    python -m benchmarks.transfer --two --rate 10gbit --transport sockets

With --two the source is in another network namespace, whose road `tc` may slow down, and `iperf3`
tells what the road carries (root, iproute2, iperf3).
Both ends, the copy and the network stack share this machine's cores, so only ratios count (one
transport, or one run size, against another). The data is random, not zero. A pull is polled in a
closed loop, as an idle engine would; `first run` is the time of a pull of a single run, which is
what a short prompt sees.
"""

import argparse
import contextlib
import ctypes
import json
import mmap
import multiprocessing
import os
import random
import statistics
import subprocess
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.load.report import aligned
from benchmarks.output import parser, shown, write
from tests.support import namespaces
from worker.cache.layout import MemoryRegion
from worker.registry import resolve
from worker.transfer.base import TRANSPORTS, Endpoint, KVTransport, Peer, PullState, Run

HOST = "127.0.0.1"
KINDS = {"shm": "shm", "mooncake": "tcp", "sockets": "tcp"}
CLONE_NEWNET = 0x40000000
FAR, QUEUE, STREAMS = "10.79.0.2", ("tc", "qdisc", "add", "dev"), (1, 4, 16)
SECOND, SECOND_ENDS = ("10.80.0.254", "10.80.0.2"), ("vsecond", "eth1")
CONNECT_S = 10.0
NUM_SINGLE_RUNS = 50
POLL_S = 2e-5  # between two polls; others of this process have their turn then
COLUMNS = {  # of the table
    "transport": "{transport}",
    "run bytes": "{run_bytes}",
    "runs": "{num_runs}",
    "GiB/s (min..max)": "{gib_per_s_median:.2f} ({gib_per_s_min:.2f}..{gib_per_s_max:.2f})",
    "cpu s/GB": "{cpu_s_per_gb:.2f}",
    "us/run": "{us_per_run:.1f}",
    "first run us": "{first_run_us_p50:.1f}",
    "max": "{first_run_us_max:.1f}",
}


def memfd_region(num_bytes: int) -> tuple[np.ndarray, MemoryRegion]:
    """Memory as the CPU pool makes it: (its bytes, the region)."""
    fd = os.memfd_create("benchmark", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    array = np.frombuffer(mmap.mmap(fd, num_bytes), np.uint8)
    return array, MemoryRegion("target", array.ctypes.data, num_bytes, fd)


def open_transport(
    name: str, region: MemoryRegion, host: str = HOST, kind: str = ""
) -> KVTransport:
    """The transport `name` with `region` registered; kind: if it is not that of KINDS."""
    transport = resolve("transport", name, TRANSPORTS)(host, kind or KINDS[name])
    transport.register([region])
    return transport


def serve(name: str, num_bytes: int, conn: Connection, netns: str, host: str) -> None:
    """Main function of the source process; ends with its parent."""
    if netns:
        with open(f"/run/netns/{netns}") as there:
            assert ctypes.CDLL(None).setns(there.fileno(), CLONE_NEWNET) == 0
    array, region = memfd_region(num_bytes)
    array[:] = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    transport = open_transport(name, region, host)
    conn.send_bytes(msgspec.msgpack.encode(transport.endpoint()))
    with contextlib.suppress(EOFError):
        conn.recv_bytes()
    os._exit(0)


def second_road(netns: str) -> None:
    """A cable of its own between the two namespaces."""
    (here, there), (ours, theirs) = SECOND_ENDS, SECOND
    for words in (
        f"link add {here} type veth peer name {there} netns {netns}",
        f"addr add {ours}/24 dev {here}",
        f"link set {here} up",
        f"-n {netns} addr add {theirs}/24 dev {there}",
        f"-n {netns} link set {there} up",
    ):
        namespaces.run("ip", *words.split())


def carried(netns: str, streams: int) -> str:
    """What iperf3 moves from there to here over so many connections, and its CPU."""
    server = subprocess.Popen(["ip", "netns", "exec", netns, "iperf3", "-s", "-1"], stdout=-3)
    words = ["iperf3", "-c", FAR, "-R", "-t", "2", "-l", "1M", "-J", "-P", str(streams)]
    try:
        for _ in range(50):  # until it listens
            time.sleep(0.1)
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                break
    finally:
        server.kill()
        server.wait()
    said = json.loads(done.stdout)
    if done.returncode:
        return f"iperf3, {streams} streams: {said['error']}"
    end = said["end"]
    gb_s = end["sum_received"]["bits_per_second"] / 8e9
    cpu = end["cpu_utilization_percent"]
    cpu_s = (cpu["host_total"] + cpu["remote_total"]) / 100 / gb_s
    return f"iperf3, {streams} streams: {gb_s / 1.073741824:.2f} GiB/s, {cpu_s:.2f} cpu s/GB"


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


def cpu_s(pid: int) -> float:
    """Seconds that a process has computed, the kernel for it included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    peer: Peer, name: str, run_bytes: int, total_bytes: int, repeat: int, source: int
) -> dict[str, Any]:
    """One row: `total_bytes` in scattered runs `repeat` times, then single runs.

    source: its pid.
    """
    num_runs = max(1, total_bytes // run_bytes)
    rng = random.Random(0)
    here, there = (rng.sample(range(num_runs), num_runs) for _ in range(2))
    runs = [
        Run(0, a * run_bytes, b * run_bytes, run_bytes) for a, b in zip(here, there, strict=True)
    ]
    pull_s(peer, runs)  # faults the pages in
    computed_s = sum(map(cpu_s, (os.getpid(), source)))
    whole_s = [pull_s(peer, runs) for _ in range(repeat)]
    computed_s = sum(map(cpu_s, (os.getpid(), source))) - computed_s
    single_s = [pull_s(peer, [rng.choice(runs)]) for _ in range(NUM_SINGLE_RUNS)]
    rates = [num_runs * run_bytes / took_s / (1 << 30) for took_s in whole_s]
    return {
        "transport": f"{name}/{KINDS[name]}",
        "run_bytes": run_bytes,
        "num_runs": num_runs,
        "gib_per_s_median": statistics.median(rates),
        "gib_per_s_min": min(rates),
        "gib_per_s_max": max(rates),
        "cpu_s_per_gb": computed_s / (repeat * num_runs * run_bytes / 1e9),
        "us_per_run": statistics.median(whole_s) / num_runs * 1e6,
        "first_run_us_p50": statistics.median(single_s) * 1e6,
        "first_run_us_max": max(single_s) * 1e6,
    }


def bench(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of one transport; source process and transport are gone afterwards."""
    run_sizes, total_bytes = options.run_bytes, options.total_mb << 20
    num_bytes = max(total_bytes, *run_sizes)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    source = context.Process(
        target=serve, args=(name, num_bytes, theirs, options.netns, options.far), daemon=True
    )
    source.start()
    theirs.close()
    array, region = memfd_region(num_bytes)
    transport = open_transport(name, region, options.host)
    assert source.pid is not None
    try:
        endpoint = msgspec.msgpack.decode(ours.recv_bytes(), type=Endpoint)
        peer = transport.connect(endpoint, CONNECT_S)
        rows = [
            measure(peer, name, size, total_bytes, options.repeat, source.pid) for size in run_sizes
        ]
        expected = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
        pull_s(peer, [Run(0, 0, 0, num_bytes)])
        assert np.array_equal(array, expected), "pulled bytes differ"
        return rows
    finally:
        transport.close()
        ours.close()
        source.join()


def main() -> None:
    """Parse, measure, print."""
    made = parser(__doc__)
    add = made.add_argument
    add("--transport", action="append", choices=sorted(KINDS))
    add("--run-bytes", type=int, nargs="+", default=[4096, 16384, 65536, 1 << 20, 16 << 20])
    add("--total-mb", type=int, default=128, help="MiB per pull")
    add("--repeat", type=int, default=5)
    add("--two", action="store_true", help="the source is in another network namespace")
    add("--rate", default="", help="of the road between the two, as tc writes it")
    add("--second", action="store_true", help="a second road; sockets take both")
    options = made.parse_args()
    options.host, options.far, options.netns = HOST, HOST, ""
    if options.two:
        namespaces.enter("benchmarks.transfer")
        options.host, options.far = namespaces.GATEWAY, FAR
        options.netns = namespaces.join("far", FAR)
        roads = [("vfar", "eth0")]
        if options.second:
            second_road(options.netns)
            options.far += f",{SECOND[1]}"
            roads.append(SECOND_ENDS)
        far = ("ip", "netns", "exec", options.netns)
        for here, there in roads if options.rate else ():
            for words in ([*far, *QUEUE, there], [*QUEUE, here]):
                limit = f"root tbf rate {options.rate} burst 4mb latency 50ms"
                namespaces.run(*words, *limit.split())
        for streams in STREAMS:
            print(carried(options.netns, streams), flush=True)
    rows: list[dict[str, Any]] = []
    for name in options.transport or sorted(KINDS):
        rows += bench(name, options)
    cells = [[text.format(**row) for text in COLUMNS.values()] for row in rows]
    print("\n".join(aligned([list(COLUMNS), *cells])))
    write(options.json, {"options": shown(options), "rows": rows})


if __name__ == "__main__":
    main()
