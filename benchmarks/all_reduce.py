"""All-reduce among the GPUs of one host: ours, NCCL's, and those of torch's symmetric memory.

    python -m benchmarks.all_reduce --json out.json
    python -m benchmarks.all_reduce --tiles          # ours, with other numbers of programs
    python -m benchmarks.all_reduce --device cpu     # that everything runs; times mean nothing

One process a GPU. Each way is captured in one graph of `--calls` calls and replayed `--replays`
times. Before each replay the input is made anew of random values and all ranks meet on the device,
so that a replay measures neither the launch nor who came first. A figure is the median over replays
of the slowest rank, of one call.

`chosen` is CustomCollective.all_reduce by the table that it measured at start-up. `fused` is
all-reduce, residual and RMSNorm by one kernel, `parts` our all-reduce and the kernel of the norm,
`nccl` NCCL's and that kernel. All sums are compared with an f32 sum, all norms with NCCL's.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import platform
import socket
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.cuda import nccl
from torch.multiprocessing.spawn import spawn

from benchmarks.all_reduce_ways import SCALE, Ways, gpu_ways, interpreted_ways
from worker.ops.jit import INTERPRETED

SIZES = tuple(1 << power for power in range(13, 27))  # 8 KiB to 64 MiB
TINY = (1 << 13, 1 << 15)
ROWS = (1, 4, 16, 64, 128, 256, 512)
HIDDEN = 4096
WARM_UP = 2
ROUNDING = 2.0**-6  # of the largest value: two roundings to bf16
# Cycles of the device before a replay: time for the host of each rank to launch all of it.
HEAD_START = 400_000


class Timer:
    """Times of one rank's calls."""

    def __init__(self, ways: Ways, calls: int, replays: int) -> None:
        self.ways, self.calls, self.replays = ways, calls, replays

    def times_us(self, run: Callable[[], object], renew: Callable[[], object]) -> list[float]:
        """Of one call, for each replay: the slowest rank's."""
        on_gpu = self.ways.device.type == "cuda"
        once = self._captured(run) if on_gpu else run
        took = [self._replay_us(once, renew, on_gpu) for _ in range(WARM_UP + self.replays)]
        every = self.ways.gather(took[WARM_UP:])
        return [max(each) for each in zip(*every, strict=True)]

    def _captured(self, run: Callable[[], object]) -> Callable[[], object]:
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(self.calls):
                run()
        return graph.replay

    def _replay_us(
        self, once: Callable[[], object], renew: Callable[[], object], on_gpu: bool
    ) -> float:
        renew()
        if not on_gpu:
            began = time.perf_counter()
            once()
            return 1e6 * (time.perf_counter() - began)
        torch.cuda._sleep(HEAD_START)
        self.ways.meet()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        once()
        end.record()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end) / self.calls


def spread(times: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {
        "median_us": round(statistics.median(times), 3),
        "min_us": round(min(times), 3),
        "max_us": round(max(times), 3),
    }


def noise(rank: int, *shape: int, device: torch.device) -> Tensor:
    """This rank's bf16 values; small, as calls in place double them again and again."""
    generator = torch.Generator(device).manual_seed(rank)
    return (torch.randn(shape, generator=generator, device=device) * SCALE).bfloat16()


def measure_size(timer: Timer, num_bytes: int) -> dict[str, Any]:
    """Every way that can sum so many bytes."""
    ways, rank = timer.ways, timer.ways.rank
    start = noise(rank, num_bytes // 2, device=ways.device)
    parts = ways.gather_tensors(start)
    total = parts[0].float()
    for part in parts[1:]:
        total += part.float()
    row: dict[str, Any] = {"bytes": num_bytes, "ways": {}, "errors": {}}
    for name, way in ways.of_size(num_bytes).items():
        x, run = way
        x.copy_(start)
        found = run()
        found = x if found is None else found
        row["errors"][name] = float((found.float() - total).abs().max() / total.abs().max())
        row["ways"][name] = spread(timer.times_us(run, lambda x=x: x.copy_(start)))
    return row


def measure_norm(timer: Timer, num_rows: int, hidden: int) -> dict[str, Any]:
    """All-reduce, residual and norm, by one kernel and by parts."""
    ways, device = timer.ways, timer.ways.device
    start = noise(ways.rank, num_rows, hidden, device=device) / SCALE
    residual, weight = (
        noise(100 + i, *shape, device=device) / SCALE
        for i, shape in enumerate([(num_rows, hidden), (hidden,)])
    )
    row: dict[str, Any] = {"rows": num_rows, "hidden": hidden, "ways": {}, "errors": {}}
    first = None
    for name, (x, run) in ways.norms(num_rows, hidden, residual, weight).items():
        x.copy_(start)
        normed, _ = run()
        first = normed.float() if first is None else first
        row["errors"][name] = float((normed.float() - first).abs().max() / first.abs().max())
        row["ways"][name] = spread(timer.times_us(run, lambda x=x: x.copy_(start)))
    return row


def print_table(
    title: str, rows: list[dict[str, Any]], key: Callable[[dict[str, Any]], str]
) -> None:
    """One line a row, medians in microseconds."""
    names = list(dict.fromkeys(name for row in rows for name in row["ways"]))
    print(f"\n{title:>10} " + " ".join(f"{name:>14}" for name in names) + "   worst spread")
    for row in rows:
        found = [row["ways"].get(name) for name in names]
        cells = " ".join(f"{each['median_us']:14.2f}" if each else f"{'-':>14}" for each in found)
        widest = max((e["max_us"] - e["min_us"]) / e["median_us"] for e in found if e)
        print(f"{key(row):>10} {cells}   {100 * widest:.0f}%")


def print_best(rows: list[dict[str, Any]], count: int = 6) -> None:
    """The fastest tiles of each size: one or two shots, programs, chunks of a tile."""
    for row in rows:
        found = sorted((each["median_us"], name) for name, each in row["ways"].items())
        best = "  ".join(f"{name} {took:.2f}" for took, name in found[:count])
        print(f"{row['bytes'] >> 10:>8}K  {best}")


def about(ways: Ways) -> dict[str, Any]:
    """Machine and versions."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    on_gpu = ways.device.type == "cuda"
    return {
        "ranks": ways.size,
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl.version())) if on_gpu else None,
        "triton": __import__("triton").__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "environment": {
            n: v for n, v in os.environ.items() if n.startswith(("NCCL", "TORCH_SYMM"))
        },
    }


def run_rank(rank: int, args: argparse.Namespace, port: int, regions: list[Tensor]) -> None:
    """What each process does; rank 0 prints and writes."""
    faulthandler.dump_traceback_later(args.limit_s, exit=True)
    make = gpu_ways if args.device == "cuda" else interpreted_ways
    ways = make(rank, args.ranks, port, regions, args.tiles)
    timer = Timer(ways, args.calls, args.replays)
    report = about(ways) | {"calls": args.calls, "replays": args.replays, "notes": ways.notes}
    report |= {"table": ways.table, "tiles": args.tiles, "sizes": [], "norms": []}

    def keep(kind: str, row: dict[str, Any]) -> None:
        report[kind].append(row)
        if rank == 0 and args.json:  # what there is, should a later row hang
            args.json.write_text(json.dumps(report, indent=1) + "\n")

    for num_bytes in args.sizes:
        keep("sizes", measure_size(timer, num_bytes))
    for num_rows in () if args.tiles else args.rows:
        keep("norms", measure_norm(timer, num_rows, args.hidden))
    if rank == 0:
        print_report(report)
    ways.close()


def print_report(report: dict[str, Any]) -> None:
    """About the run, then two tables."""
    print(json.dumps({k: v for k, v in report.items() if k not in ("sizes", "norms")}))
    rows = report["sizes"] + report["norms"]
    worst = {
        name: error for row in rows for name, error in row["errors"].items() if error > ROUNDING
    }
    if report["tiles"]:
        print_best(report["sizes"])
    else:
        print_table("bytes", report["sizes"], lambda row: f"{row['bytes'] >> 10}K")
    if report["norms"]:
        print_table("rows", report["norms"], lambda row: str(row["rows"]))
    print(f"errors beyond rounding: {worst or 'none'}", flush=True)


def numbers(text: str) -> list[int]:
    """Those between the commas."""
    return [int(each) for each in text.split(",")]


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, help="default: a rank on each GPU")
    parser.add_argument("--sizes", type=numbers, help="bytes, by commas")
    parser.add_argument("--rows", type=numbers, help="of the fused form, by commas")
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--calls", type=int, default=50, help="of a graph")
    parser.add_argument("--replays", type=int, default=9)
    parser.add_argument("--tiles", action="store_true", help="ours alone, cut in other ways")
    parser.add_argument("--limit-s", type=float, default=110.0, help="a rank that hangs then ends")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    args.ranks = args.ranks or (torch.cuda.device_count() if on_gpu else 2)
    args.sizes = args.sizes or (SIZES if on_gpu else TINY)
    args.rows = args.rows or (ROWS if on_gpu else (3,))
    args.hidden = args.hidden or (HIDDEN if on_gpu else 256)
    if not on_gpu and not INTERPRETED:
        parser.error("--device cpu takes TRITON_INTERPRET=1 in the environment")
    if args.ranks < 2:
        parser.error("an all-reduce takes two ranks")
    return args


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as at:
        at.bind(("127.0.0.1", 0))
        return at.getsockname()[1]


def main() -> None:
    """Start a process a rank."""
    args = parsed()
    regions: list[Tensor] = []
    if args.device == "cpu":
        from worker.peers.peer_layout import PeerLayout

        layout = PeerLayout(args.ranks, 1 << 20)
        for _ in range(args.ranks):
            regions.append(torch.empty(layout.num_bytes, dtype=torch.uint8).share_memory_())
            layout.clear(regions[-1])
    spawn(run_rank, (args, free_port(), regions), args.ranks)


if __name__ == "__main__":
    main()
