"""Is the harness itself true? It measures a stub whose delays are known: `selfcheck`.

Two runs against a stub on this machine, in a process of its own: one at a steady rate with delays
that differ from request to request, one in which the stub stands still for a while. The truth is
computed from the schedule and the stub's delays alone.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from benchmarks.load.arrivals import starts
from benchmarks.load.client import Target
from benchmarks.load.fleet import run
from benchmarks.load.measure import samples
from benchmarks.load.records import Run, Session, Turn, Workload
from benchmarks.load.report import aligned
from benchmarks.load.stub import StubOptions, delays

PERCENTILES = (50, 90, 99)
WARMUP = 64
NUM_TOKENS = 8
Figures = dict[str, np.ndarray]  # of the names below: seconds of each request, or pair of pieces
NAMES = ("ttft_s", "gaps_s", "e2e_s")


@contextmanager
def running_stub(options: StubOptions) -> Iterator[str]:
    """A stub in a process of its own; its URL."""
    flags: list[str] = []
    for name in options.__struct_fields__:
        flag = "--" + name.removesuffix("_s").replace("_", "-")
        flags += [flag, str(getattr(options, name))]
    command = [sys.executable, "-m", "benchmarks.load", "stub", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def truth(options: StubOptions, schedule: Sequence[float]) -> Figures:
    """What a perfect client would see of requests due at `schedule`, ascending, after a warm-up."""
    due = np.asarray(schedule)[:, None]
    each = np.array([delays(options, _prompt(i)) for i in range(len(schedule))])
    pieces = due + each[:, :1] + each[:, 1:] * np.arange(NUM_TOKENS)
    if options.stall_s:
        begin = schedule[options.stall_after - WARMUP]
        end = begin + options.stall_s
        pieces[(begin <= pieces) & (pieces < end)] = end
    seen = pieces - due
    return dict(zip(NAMES, (seen[:, 0], np.diff(pieces).ravel(), seen[:, -1]), strict=True))


def _prompt(index: int) -> str:
    """Of the index-th request: its delays follow from it."""
    return f"request {index}"


def check(
    options: StubOptions, rate: float, num: int, *, num_processes: int = 1
) -> tuple[Figures, Run]:
    """Run `num` requests at `rate`; the truth, and what was measured."""
    schedule = starts(f"poisson:{rate}", np.random.default_rng(0), num, None)
    sessions = tuple(
        Session((Turn(_prompt(i), NUM_TOKENS),), start) for i, start in enumerate(schedule)
    )
    warmup = [Session((Turn("hello", NUM_TOKENS),))] * WARMUP
    with running_stub(options) as url:
        target = Target((url,), "stub")
        got = run(Workload(sessions), target, warmup=warmup, num_processes=num_processes)
    return truth(options, schedule), got


def main(argv: Sequence[str]) -> int:
    """Print both tables; 1 if a percentile of the steady run is further off than allowed."""
    parser = argparse.ArgumentParser(
        prog="kvlane bench selfcheck", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second")
    parser.add_argument("--num", type=int, default=4000, help="requests of the steady run")
    parser.add_argument("--stall", type=float, default=2.0, help="of the second run, seconds")
    parser.add_argument("--limit-ms", type=float, default=1.0, help="largest error (%(default)g)")
    parser.add_argument("--processes", type=int, default=1, help="client processes")
    args = parser.parse_args(argv)
    stall = {"stalled": (WARMUP + args.num // 4, args.stall), "steady": (0, 0.0)}
    worst = 0.0
    for title, (after, stall_s) in stall.items():
        worst = 0.0  # that of the last, the steady one, counts
        options = StubOptions(0.05, 0.01, spread=0.5, stall_after=after, stall_s=stall_s)
        true, got = check(options, args.rate, args.num, num_processes=args.processes)
        errors = {each.error: each.message for each in got.outcomes if each.error}
        assert not errors, errors
        rows = [[f"{title}, ms", *(f"p{p}" for p in PERCENTILES)]]
        seen = samples(got.outcomes)
        for name, values in true.items():
            expected, found = (1e3 * np.percentile(of, PERCENTILES) for of in (values, seen[name]))
            worst = float(max(worst, *np.abs(found - expected)))
            for label, row in (("true", expected), ("seen", found), ("error", found - expected)):
                rows.append([f"{name[:-2]} {label}", *(f"{value:.3f}" for value in row)])
        lag = 1e3 * np.percentile([each.lag_s for each in got.outcomes], PERCENTILES)
        rows.append(["own lag", *(f"{value:.3f}" for value in lag)])
        share = ", ".join(f"{each.cpu_s / each.wall_s:.0%}" for each in got.lags)
        print("\n".join(aligned(rows)), f"\nCPU {share}\n")
    print(f"largest error of the steady run: {worst:.3f} ms (allowed: {args.limit_ms:g})")
    return int(worst > args.limit_ms)
