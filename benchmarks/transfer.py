"""Pulls of KV from another process: by themselves, and beside decode steps.

    python -m benchmarks.transfer --transport shm --transport mooncake --run-bytes 65536 1048576
    python -m benchmarks.transfer steps --model-config benchmarks/models/qwen3-8b.json --cached \\
        --transport sockets/tcp --batch 32 --rates 0,1,2,inf

Without a word: throughput and latency of one transport. Both ends and the copy share this machine's
cores, so only ratios count. A pull is polled in a closed loop, as an idle engine would; `first run`
is a pull of a single run, which is what a short prompt sees.

`steps`: decode steps of one engine while KV is pulled beside them from another process on its GPU.
--rates: GB/s asked of the road; 0: nothing is pulled; inf: the next pull starts when one ends. They
take turns, since a GPU at the limit of its power slows down. One transport a run: mooncake is
configured once a process.
"""

import argparse
import contextlib
import itertools
import mmap
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from benchmarks.engine import Case
from benchmarks.instruments import Bench, add_engine_options, build
from benchmarks.load.report import aligned
from benchmarks.output import parser, shown, write
from benchmarks.timing import DEVICE
from tests.support import kv_sources
from worker.cache.layout import MemoryRegion
from worker.transfer.base import Peer, PullState, Run

KINDS = {"shm": "shm", "mooncake": "tcp", "sockets": "tcp"}
NUM_SINGLE_RUNS = 50
POLL_S = 2e-5  # between two polls; others of this process have their turn then
FIRST_STEPS = 8  # which are counted with the prompts


def memory_of(num_bytes: int, device: str, *, filled: bool) -> tuple[Tensor, MemoryRegion]:
    """Memory [num_bytes] u8 as a pool makes it, of random bytes if they are to be pulled."""
    fd = None
    if device == "cpu":
        fd = os.memfd_create("benchmark", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        made = torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
    else:
        made = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    if filled:
        drawn = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
        made.copy_(torch.from_numpy(drawn))
    return made, MemoryRegion("target", made.data_ptr(), num_bytes, fd)


def served(num_bytes: int, device: str) -> kv_sources.Serves:
    """What the other process serves."""
    memory, region = memory_of(num_bytes, device, filled=True)
    return [region], memory


@contextlib.contextmanager
def source(transport: str, num_bytes: int, device: str) -> Iterator[tuple[Peer, Tensor, int]]:
    """Another process's memory, by NAME/KIND, ours that it is pulled into, and that one's pid."""
    name, kind = transport.split("/")
    there = kv_sources.source((name, kind), served, num_bytes, device)
    memory, region = memory_of(num_bytes, device, filled=False)
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


def links() -> None:
    """Throughput and latency: a row for each transport and size of a run."""
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
        with source(transport, num_bytes, "cpu") as (peer, memory, pid):
            for size in options.run_bytes:
                rows.append({"transport": transport} | measure(peer, size, options, pid))
            pull_s(peer, [Run(0, 0, 0, num_bytes)])
            wanted, _ = memory_of(num_bytes, "cpu", filled=True)
            assert torch.equal(memory, wanted), "pulled bytes differ"
    cells = [
        [f"{each:.4g}" if isinstance(each, float) else str(each) for each in row.values()]
        for row in rows
    ]
    print("\n".join(aligned([list(rows[0]), *cells])))
    write(options.json, {"options": shown(options), "rows": rows})


@contextlib.contextmanager
def pulling(peer: Peer, runs: Sequence[Run], rate: float) -> Iterator[list[float]]:
    """A thread pulls again and again, at `rate` GB/s, while the body runs; then the list has what
    was moved, in GB/s."""
    gb, ends, moved = sum(run.num_bytes for run in runs) / 1e9, threading.Event(), list[float]()

    def work() -> None:
        began, num = time.perf_counter(), 0
        while rate and not ends.is_set():
            pull_s(peer, runs)
            num += 1
            ends.wait(max(0.0, began + num * gb / rate - time.perf_counter()))
        moved.append(num * gb / (time.perf_counter() - began))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield moved
    finally:
        ends.set()
        thread.join()


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


def steps() -> None:
    """Decode steps beside pulls at each rate."""
    made = parser(__doc__)
    add_engine_options(made)
    add = made.add_argument
    add("--batch", type=int, default=32, help="rows")
    add("--rates", default="0,1,2,inf", help="GB/s, by commas")
    add("--pull-mb", type=int, default=256, help="MiB of a pull")
    add("--page-kb", type=int, default=256, help="KiB of a page's group, the least that moves")
    add("--repeat", type=int, default=5)
    made.set_defaults(phase="decode")
    options = made.parse_args()
    assert options.transport, "--transport NAME/KIND"
    bench = Bench(build(options, options.batch))
    case = Case(options.batch, options.prompt_len, "greedy")
    rates = [float(rate) for rate in options.rates.split(",")]
    rows = {rate: {"gb_s": [], "mean_ms": [], "worst_ms": [], "start_ms": []} for rate in rates}
    runs = scattered((options.pull_mb << 10) // options.page_kb, options.page_kb << 10)
    with source(options.transport, options.pull_mb << 20, DEVICE) as (peer, *_):
        pull_s(peer, runs)  # connects
        step_times(bench, case, options.output_len)  # its prompts are in the cache from now on
        for _, rate in itertools.product(range(options.repeat), rates):
            with pulling(peer, runs, rate) as moved:
                times, start_ms = step_times(bench, case, options.output_len)
            figures = *moved, statistics.mean(times), max(times), start_ms
            for of, figure in zip(rows[rate].values(), figures, strict=True):
                of.append(figure)
    print(f"{options.transport}, {options.batch} rows, medians of {options.repeat}")
    table = [["GB/s asked", "moved", "ms a step", "least", "most", "x first", "worst", "start"]]
    base = statistics.median(rows[rates[0]]["mean_ms"])
    for rate, of in rows.items():
        gb_s, step, worst, start = map(statistics.median, of.values())
        figures = gb_s, step, min(of["mean_ms"]), max(of["mean_ms"]), step / base, worst, start
        table.append([f"{rate:.3g}", *(f"{figure:.3f}" for figure in figures)])
    print("\n".join(aligned(table)))
    write(options.json, {"options": shown(options), "rows": rows})
    bench.engine.close()


def main() -> None:
    """Measure, print a table, write the figures."""
    if sys.argv[1:2] == ["steps"]:
        del sys.argv[1]
        steps()
    else:
        links()


if __name__ == "__main__":
    main()
