"""Decode steps of one engine while KV is pulled beside them from another process on its GPU.

    python -m benchmarks.pulls --model-config benchmarks/models/qwen3-8b.json --cached \\
        --transport sockets/tcp --batch 32 --rates 0,1,2,inf

--rates: GB/s asked of the road; 0: nothing is pulled; inf: the next pull starts when one ends. They
take turns, since a GPU at the limit of its power slows down. A pull is of pages, which lie in
another order at the peer. One transport a run: mooncake is configured once a process. On a CPU it
checks that everything runs.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import msgspec
import torch

from benchmarks.engine import Case
from benchmarks.instruments import Bench, add_engine_options, build
from benchmarks.output import parser, shown, write
from benchmarks.timing import DEVICE
from benchmarks.transfer import CONNECT_S, memfd_region, open_transport, pull_s
from worker.cache.layout import MemoryRegion
from worker.transfer.base import Endpoint, Peer, Run

FIRST_STEPS = 8  # which are counted with the prompts


def region_of(num_bytes: int, device: str) -> tuple[object, MemoryRegion]:
    """Memory of random bytes as a pool has it: (its owner, the region)."""
    if device == "cpu":
        return memfd_region(num_bytes)
    memory = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=device)
    return memory, MemoryRegion("target", memory.data_ptr(), num_bytes, None)


def serve(transport: str, num_bytes: int, device: str, conn: Connection) -> None:
    """Main function of the source; ends with its parent."""
    _owner, region = region_of(num_bytes, device)
    name, kind = transport.split("/")
    made = open_transport(name, region, kind=kind)
    conn.send_bytes(msgspec.msgpack.encode(made.endpoint()))
    with contextlib.suppress(EOFError):
        conn.recv_bytes()
    os._exit(0)


@contextlib.contextmanager
def source(options: argparse.Namespace) -> Iterator[Peer]:
    """Another process's memory, to be pulled into memory of this one."""
    num_bytes = options.pull_mb << 20
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = options.transport, num_bytes, DEVICE, theirs
    process = context.Process(target=serve, args=arguments, daemon=True)
    process.start()
    theirs.close()
    _owner, region = region_of(num_bytes, DEVICE)
    name, kind = options.transport.split("/")
    transport = open_transport(name, region, kind=kind)
    try:
        endpoint = msgspec.msgpack.decode(ours.recv_bytes(), type=Endpoint)
        yield transport.connect(endpoint, CONNECT_S)
    finally:
        transport.close()
        ours.close()
        process.join()


class Puller:
    """A thread that pulls again and again within a block; `rate` in GB/s."""

    def __init__(self, peer: Peer, runs: list[Run], rate: float) -> None:
        self._peer, self._runs, self._rate = peer, runs, rate
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.num_bytes, self.took_s = 0, 0.0

    def __enter__(self) -> "Puller":
        if self._rate > 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        if self._rate > 0:
            self._thread.join()

    def _run(self) -> None:
        size = sum(run.num_bytes for run in self._runs)
        began = time.perf_counter()
        while not self._ends.is_set():
            pull_s(self._peer, self._runs)
            self.num_bytes += size
            due = began + self.num_bytes / 1e9 / self._rate
            self._ends.wait(max(0.0, due - time.perf_counter()))
        self.took_s = time.perf_counter() - began


def step_times(bench: Bench, case: Case, num_tokens: int) -> tuple[list[float], float]:
    """Milliseconds between the ends of decode steps, and those until the first of them."""
    ends = [time.perf_counter()]

    def watch(_plan: object, _drawn: object, _num_tokens: int, all_run: bool) -> None:
        if all_run:
            ends.append(time.perf_counter())

    bench.generate(case.batch, case.prompt_len, case.draws(num_tokens), 0, watch)
    first = FIRST_STEPS + 1
    times = [1e3 * (end - begin) for begin, end in itertools.pairwise(ends[first:])]
    return times, 1e3 * (ends[first] - ends[0])


def main() -> None:
    """Measure, print a table, write the figures."""
    made = parser(__doc__)
    add_engine_options(made)
    add = made.add_argument
    add("--batch", type=int, default=32, help="rows")
    add("--rates", default="0,1,2,inf", help="GB/s, by commas")
    add("--pull-mb", type=int, default=256, help="MiB of a pull")
    add("--page-kb", type=int, default=256, help="KiB of a page's group, the least that moves")
    add("--repeat", type=int, default=5)
    options = made.parse_args()
    options.phase = "decode"
    assert options.transport, "--transport NAME/KIND"
    bench = Bench(build(options, options.batch))
    case = Case(options.batch, options.prompt_len, "greedy")
    rates = [float(rate) for rate in options.rates.split(",")]
    rows = {rate: {"gb_s": [], "mean_ms": [], "worst_ms": [], "start_ms": []} for rate in rates}
    page, num = options.page_kb << 10, (options.pull_mb << 10) // options.page_kb
    order = random.Random(0).sample(range(num), num)
    with source(options) as peer:
        runs = [Run(0, here * page, there * page, page) for here, there in enumerate(order)]
        pull_s(peer, runs)  # connects
        step_times(bench, case, options.output_len)  # its prompts are in the cache from now on
        for _, rate in itertools.product(range(options.repeat), rates):
            with Puller(peer, runs, rate) as puller:
                times, start_ms = step_times(bench, case, options.output_len)
            moved = puller.num_bytes / 1e9 / puller.took_s if puller.took_s else 0.0
            for name, figure in zip(
                rows[rate], (moved, statistics.mean(times), max(times), start_ms), strict=True
            ):
                rows[rate][name].append(figure)
    print(f"{options.transport}, {options.batch} rows, medians of {options.repeat}")
    print("GB/s asked   moved  ms a step    least     most  x first   worst   start")
    base = statistics.median(rows[rates[0]]["mean_ms"])
    for rate, of in rows.items():
        gb_s, step, worst, start = map(statistics.median, of.values())
        print(
            f"{rate:10.3g}{gb_s:8.2f}{step:11.3f}{min(of['mean_ms']):9.3f}{max(of['mean_ms']):9.3f}"
            f"{step / base:9.3f}{worst:8.2f}{start:8.1f}"
        )
    write(options.json, {"options": shown(options), "rows": rows})
    bench.engine.close()


if __name__ == "__main__":
    main()
