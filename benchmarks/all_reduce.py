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
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.synchronize import Barrier
from typing import Any, NamedTuple

import torch
from torch import Tensor, multiprocessing
from torch.multiprocessing.spawn import spawn

from benchmarks.output import ints, parser, shown, write
from benchmarks.timing import DEVICE, told
from worker.ops.norms import add_rms_norm
from worker.peers.custom import NCCL, ONE_SHOT, TWO_SHOT, CustomCollective
from worker.peers.gloo import GlooCollective
from worker.peers.rendezvous import free_rendezvous

Way = Callable[[Tensor], Tensor]  # sums its input, in place or not
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

    def noise(self, seed: int, *shape: int) -> Tensor:
        """The same bf16 values at every rank."""
        generator = torch.Generator(self.device).manual_seed(seed)
        drawn = torch.randn(shape, generator=generator, device=self.device)
        return (drawn * SCALE).bfloat16()

    def measure_size(self, num_bytes: int) -> dict[str, Any]:
        """Every way that can sum bf16 of so many bytes."""
        ours = self.collective
        parts = [self.noise(rank, num_bytes // 2) for rank in range(self.options.ranks)]
        ways: dict[str, Way] = {"chosen": ours.all_reduce}
        if isinstance(ours, CustomCollective):
            names = [NCCL, TWO_SHOT]
            names += [ONE_SHOT] * ours.memory.layout.fits_one_shot(num_bytes)
            ways |= {name: partial(ours.all_reduce_by, name) for name in names}
        return self.measure(num_bytes, ways, parts[self.rank], torch.stack(parts).float().sum(0))

    def measure_norm(self, num_rows: int) -> dict[str, Any]:
        """Every way to sum rows, add a residual and normalize; `parts` says what is right."""
        ours, hidden = self.collective, self.options.hidden
        start = self.noise(self.rank, num_rows, hidden) / SCALE
        residual = self.noise(100, num_rows, hidden) / SCALE
        weight = self.noise(101, hidden) / SCALE

        def by(all_reduce: Way, x: Tensor) -> Tensor:
            return add_rms_norm(all_reduce(x), residual, weight, EPS)[0]

        ways: dict[str, Way] = {"parts": partial(by, ours.all_reduce)}
        ways["chosen"] = lambda x: ours.all_reduce_rms_norm(x, residual, weight, EPS)[0]
        if isinstance(ours, CustomCollective):
            ways[NCCL] = partial(by, partial(ours.all_reduce_by, NCCL))
        return self.measure(num_rows, ways, start, None)

    def measure(
        self, case: int, ways: dict[str, Way], start: Tensor, wanted: Tensor | None
    ) -> dict[str, Any]:
        """Times and errors of each way, whose input is `start`; None: the first one is right."""
        row: dict[str, Any] = {"case": case, "ways": {}, "errors": {}}
        for name, way in ways.items():
            x = self.collective.buffer(tuple(start.shape), torch.bfloat16)
            renew, run = partial(x.copy_, start), partial(way, x)
            renew()
            got = run().float()
            wanted = got.clone() if wanted is None else wanted
            row["errors"][name] = float((got - wanted).abs().max() / wanted.abs().max())
            row["ways"][name] = self.times_us(run, renew)
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


def run_rank(rank: int, options: argparse.Namespace, address: str, shared: Shared) -> None:
    """The whole life of a rank's process; rank 0 prints and writes."""
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    ours = Rank(rank, options, address, shared)
    report: dict[str, Any] = {"options": shown(options), "sizes": [], "norms": []}
    report["table"] = getattr(ours.collective, "table", None)
    for kind, unit, measure, cases in (
        ("sizes", "bytes", ours.measure_size, options.sizes),
        ("norms", "rows", ours.measure_norm, options.rows),
    ):
        for case in cases:
            row = measure(case)
            report[kind].append(row)
            if rank == 0:  # what there is, should a later row hang
                write(options.json, report)
                for name, times in row["ways"].items():
                    wrong = " WRONG" * (row["errors"][name] > ROUNDING)
                    told(f"{case} {unit}, {name}{wrong}", times, "us")
    ours.collective.check()
    shared.barrier.wait()
    ours.collective.close()


def main() -> None:
    """Start a process a rank."""
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
    times = torch.zeros(options.ranks, options.replays, dtype=torch.float64).share_memory_()
    barrier = multiprocessing.get_context("spawn").Barrier(options.ranks)
    shared = Shared(times, barrier)
    spawn(run_rank, (options, free_rendezvous("127.0.0.1"), shared), options.ranks)


if __name__ == "__main__":
    main()
