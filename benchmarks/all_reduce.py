"""All-reduce among the GPUs of one host: each algorithm of worker.peers.custom, and its choice.

    python -m benchmarks.all_reduce --json out.json
    python -m benchmarks.all_reduce --device cpu --ranks 2   # gloo: that everything runs

One process a GPU. Each way is captured in one graph of `--calls` calls. Before each of `--replays`
replays the input is made anew of random values and all ranks meet on the device, so that a replay
measures neither the launch nor who came first. A figure is the median over replays of the slowest
rank, of one call.

`chosen` goes by the table that is measured at start-up. Of rows with residual and RMSNorm `nccl`
and `parts` sum first and then call the norm's kernel; `chosen` is one kernel where that is allowed.
All sums are compared with an f32 sum, all norms with those of `parts`.
"""

import argparse
import faulthandler
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.synchronize import Barrier
from typing import Any, NamedTuple

import torch
from torch import Tensor, multiprocessing
from torch.multiprocessing.spawn import spawn

from benchmarks.output import ints, parser, shown, write
from benchmarks.timing import DEVICE
from worker.ops.norms import add_rms_norm
from worker.peers.custom import NCCL, ONE_SHOT, TWO_SHOT, CustomCollective
from worker.peers.gloo import GlooCollective
from worker.peers.rendezvous import free_rendezvous

Way = tuple[Tensor, Callable[[], Any]]  # the input, and what sums it and returns the sum
SIZES = tuple(1 << power for power in range(13, 27))  # 8 KiB to 64 MiB
ROWS = (1, 4, 16, 64, 128, 256, 512)
SCALE = 2.0**-60  # of values: calls in place double them again and again
WARM_UP = 2
EPS = 1e-6
ROUNDING = 2.0**-6  # of the largest value: two roundings to bf16
# Cycles of the device before a replay: time for the host of each rank to launch all of it.
HEAD_START = 400_000


class Shared(NamedTuple):
    """Between the ranks' processes."""

    times_us: Tensor  # [ranks, replays] f64
    barrier: Barrier


class Rank:
    """One rank's calls and their times."""

    def __init__(
        self, rank: int, options: argparse.Namespace, address: str, shared: Shared
    ) -> None:
        self.rank, self.options, self.shared = rank, options, shared
        self.on_gpu = options.device == "cuda"
        self.device = torch.device(f"cuda:{rank}" if self.on_gpu else "cpu")
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        kind = CustomCollective if self.on_gpu else GlooCollective
        self.collective = kind(rank, options.ranks, self.device, address)
        self.collective.calibrate()
        self.token = torch.zeros(8, dtype=torch.bfloat16, device=self.device)

    def ways(self, num_bytes: int) -> dict[str, Way]:
        """name -> way to sum bf16 of so many bytes."""
        ours, size = self.collective, (num_bytes // 2,)
        calls: dict[str, Callable[[Tensor], Tensor]] = {"chosen": ours.all_reduce}
        if isinstance(ours, CustomCollective):
            names = [NCCL, TWO_SHOT]
            names += [ONE_SHOT] * ours.memory.layout.fits_one_shot(num_bytes)
            calls |= {name: partial(ours.all_reduce_by, name) for name in names}
        return self._on_buffers(calls, size)

    def _on_buffers(
        self, calls: dict[str, Callable[[Tensor], Tensor]], shape: tuple[int, ...]
    ) -> dict[str, Way]:
        inputs = {name: self.collective.buffer(shape, torch.bfloat16) for name in calls}
        return {name: (inputs[name], partial(call, inputs[name])) for name, call in calls.items()}

    def norms(self, num_rows: int) -> dict[str, Way]:
        """name -> way to sum rows, add a residual and normalize; `parts` first."""
        ours, hidden = self.collective, self.options.hidden
        residual = self.noise(100, num_rows, hidden) / SCALE
        weight = self.noise(101, hidden) / SCALE

        def by(all_reduce: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            return add_rms_norm(all_reduce(x), residual, weight, EPS)[0]

        calls: dict[str, Callable[[Tensor], Tensor]] = {"parts": partial(by, ours.all_reduce)}
        calls["chosen"] = lambda x: ours.all_reduce_rms_norm(x, residual, weight, EPS)[0]
        if isinstance(ours, CustomCollective):
            calls[NCCL] = partial(by, partial(ours.all_reduce_by, NCCL))
        return self._on_buffers(calls, (num_rows, hidden))

    def noise(self, seed: int, *shape: int) -> Tensor:
        """The same bf16 values at every rank."""
        generator = torch.Generator(self.device).manual_seed(seed)
        drawn = torch.randn(shape, generator=generator, device=self.device)
        return (drawn * SCALE).bfloat16()

    def measure_size(self, num_bytes: int) -> dict[str, Any]:
        """Every way that can sum so many bytes."""
        parts = [self.noise(rank, num_bytes // 2) for rank in range(self.options.ranks)]
        total = torch.stack(parts).float().sum(0)
        row = self.measure(self.ways(num_bytes), parts[self.rank], lambda _: total)
        return {"bytes": num_bytes, **row}

    def measure_norm(self, num_rows: int) -> dict[str, Any]:
        """All-reduce, residual and norm, every way."""
        start = self.noise(self.rank, num_rows, self.options.hidden) / SCALE
        row = self.measure(self.norms(num_rows), start, lambda first: first)
        return {"rows": num_rows, "hidden": self.options.hidden, **row}

    def measure(
        self, ways: dict[str, Way], start: Tensor, expected: Callable[[Tensor], Tensor]
    ) -> dict[str, Any]:
        """Times and errors of each; what is expected may follow from the first way's result."""
        row: dict[str, Any] = {"ways": {}, "errors": {}}
        wanted: Tensor | None = None
        for name, (x, run) in ways.items():
            x.copy_(start)
            got = run().float()
            wanted = expected(got.clone()) if wanted is None else wanted
            row["errors"][name] = float((got - wanted).abs().max() / wanted.abs().max())
            times = self.times_us(run, partial(x.copy_, start))
            least, most = min(times), max(times)
            spread = {"median_us": statistics.median(times), "min_us": least, "max_us": most}
            row["ways"][name] = {key: round(value, 3) for key, value in spread.items()}
        return row

    def times_us(self, run: Callable[[], object], renew: Callable[[], object]) -> list[float]:
        """Of one call, for each replay: the slowest rank's."""
        once = self._captured(run) if self.on_gpu else run
        took = [self._replay_us(once, renew) for _ in range(WARM_UP + self.options.replays)]
        self.shared.times_us[self.rank] = torch.tensor(took[WARM_UP:])
        self.shared.barrier.wait()
        slowest = self.shared.times_us.max(0).values.tolist()
        self.shared.barrier.wait()
        return slowest

    def _captured(self, run: Callable[[], object]) -> Callable[[], object]:
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(self.options.calls):
                run()
        return graph.replay

    def _replay_us(self, once: Callable[[], object], renew: Callable[[], object]) -> float:
        renew()
        if not self.on_gpu:
            began = time.perf_counter()
            once()
            return 1e6 * (time.perf_counter() - began)
        torch.cuda._sleep(HEAD_START)
        self.collective.all_reduce(self.token)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        once()
        end.record()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end) / self.options.calls


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    """One line a row, medians in microseconds."""
    names = list(dict.fromkeys(name for row in rows for name in row["ways"]))
    print(f"\n{title:>10} " + " ".join(f"{name:>14}" for name in names) + "   worst spread")
    for row in rows:
        ways = row["ways"]
        cells = [f"{ways[name]['median_us']:14.2f}" if name in ways else "" for name in names]
        widest = max((way["max_us"] - way["min_us"]) / way["median_us"] for way in ways.values())
        print(f"{row[title]:>10} {' '.join(f'{cell:>14}' for cell in cells)}   {widest:.0%}")


def run_rank(rank: int, options: argparse.Namespace, address: str, shared: Shared) -> None:
    """The whole life of a rank's process; rank 0 prints and writes."""
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    ours = Rank(rank, options, address, shared)
    report: dict[str, Any] = {"options": shown(options), "sizes": [], "norms": []}
    report["table"] = getattr(ours.collective, "table", None)
    for kind, measure, cases in (
        ("sizes", ours.measure_size, options.sizes), ("norms", ours.measure_norm, options.rows),
    ):  # fmt: skip
        for case in cases:
            report[kind].append(measure(case))
            if rank == 0:  # what there is, should a later row hang
                write(options.json, report)
    ours.collective.check()
    shared.barrier.wait()
    ours.collective.close()
    if rank == 0:
        print_table("bytes", report["sizes"])
        print_table("rows", report["norms"])
        errors = [row["errors"].items() for row in report["sizes"] + report["norms"]]
        worst = {name: error for row in errors for name, error in row if error > ROUNDING}
        print(f"errors beyond rounding: {worst or 'none'}", flush=True)


def parsed() -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__)
    add = made.add_argument
    add("--device", choices=("cuda", "cpu"), default=DEVICE)
    add("--ranks", type=int, default=torch.cuda.device_count(), help="a rank on each GPU")
    add("--sizes", type=ints, default=SIZES, help="bytes, by commas")
    add("--rows", type=ints, default=ROWS, help="of the form with a norm, by commas")
    add("--hidden", type=int, default=4096)
    add("--calls", type=int, default=50, help="of a graph")
    add("--replays", type=int, default=9)
    add("--limit-s", type=float, default=110.0, help="a rank that hangs then ends")
    options = made.parse_args()
    if options.ranks < 2:
        made.error("an all-reduce takes two ranks")
    return options


def main() -> None:
    """Start a process a rank."""
    options = parsed()
    times = torch.zeros(options.ranks, options.replays, dtype=torch.float64).share_memory_()
    barrier = multiprocessing.get_context("spawn").Barrier(options.ranks)
    shared = Shared(times, barrier)
    spawn(run_rank, (options, free_rendezvous("127.0.0.1"), shared), options.ranks)


if __name__ == "__main__":
    main()
