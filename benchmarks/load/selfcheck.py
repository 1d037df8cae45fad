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
from benchmarks.load.records import Run, Session, Turn, Workload
from benchmarks.load.stub import StubOptions, delays

PERCENTILES = (50, 90, 99)
WARMUP = 64
NUM_TOKENS = 8


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


def truth(
    options: StubOptions, schedule: Sequence[float], num_tokens: int, num_before: int
) -> dict[str, np.ndarray]:
    """What a perfect client would see, in seconds: ttft and e2e a request, gap a pair of pieces.

    Of requests due at `schedule`, ascending, after `num_before` others; an answer has `num_tokens`
    pieces.
    """
    pieces = np.empty((len(schedule), num_tokens))
    for i, start in enumerate(schedule):
        each = delays(options, _prompt(i))
        pieces[i] = start + each.ttft_s + each.itl_s * np.arange(num_tokens)
    if options.stall_s:
        begin = schedule[options.stall_after - num_before]
        end = begin + options.stall_s
        pieces[(begin <= pieces) & (pieces < end)] = end
    return {
        "ttft": pieces[:, 0] - np.asarray(schedule),
        "gap": np.diff(pieces, axis=1).ravel(),
        "e2e": pieces[:, -1] - np.asarray(schedule),
    }


def measured(got: Run) -> dict[str, np.ndarray]:
    """The same as this harness saw it."""
    served = [each for each in got.outcomes if not each.error]
    return {
        "ttft": np.array([each.ttft_s for each in served], float),
        "gap": np.concatenate([each.gaps_s for each in served]),
        "e2e": np.array([each.e2e_s for each in served]),
    }


def _prompt(index: int) -> str:
    """Of the index-th request: its delays follow from it."""
    return f"request {index}"


def check(
    options: StubOptions, rate: float, num: int, *, num_processes: int = 1, seed: int = 0
) -> tuple[dict[str, np.ndarray], Run]:
    """Run `num` requests at `rate`; the truth, and what was measured."""
    schedule = starts(f"poisson:{rate}", np.random.default_rng(seed), num, None)
    sessions = tuple(
        Session((Turn(_prompt(i), NUM_TOKENS),), start) for i, start in enumerate(schedule)
    )
    warmup = [Session((Turn("hello", NUM_TOKENS),))] * WARMUP
    with running_stub(options) as url:
        target = Target((url,), "stub")
        got = run(Workload(sessions), target, warmup=warmup, num_processes=num_processes)
    return truth(options, schedule, NUM_TOKENS, WARMUP), got


def main(argv: Sequence[str]) -> int:
    """Print both tables; 1 if a percentile of the steady run is further off than allowed."""
    parser = argparse.ArgumentParser(prog="kvlane bench selfcheck", description=__doc__)
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second")
    parser.add_argument("--num", type=int, default=4000, help="requests of the steady run")
    parser.add_argument("--stall", type=float, default=2.0, help="of the second run, seconds")
    parser.add_argument("--limit-ms", type=float, default=1.0, help="largest error (%(default)g)")
    parser.add_argument("--processes", type=int, default=1, help="client processes")
    args = parser.parse_args(argv)
    steady = StubOptions(ttft_s=0.05, itl_s=0.01, spread=0.5)
    stalled = StubOptions(
        ttft_s=0.05, itl_s=0.01, spread=0.5, stall_after=WARMUP + args.num // 4, stall_s=args.stall
    )
    worst = 0.0
    for title, options in (("steady", steady), ("stalled", stalled)):
        true, got = check(options, args.rate, args.num, num_processes=args.processes)
        errors = {each.error: each.message for each in got.outcomes if each.error}
        assert not errors, errors
        print(f"{title}: {args.rate:g} requests/s, {args.num} requests; milliseconds")
        worst_here = _print(true, measured(got))
        worst = max(worst, worst_here if title == "steady" else 0.0)
        lag = np.percentile([each.lag_s for each in got.outcomes], PERCENTILES) * 1e3
        share = ", ".join(f"{100 * each.cpu_s / each.wall_s:.0f} %" for each in got.lags)
        print("  own lag       " + "".join(f"{value:10.3f}" for value in lag) + f"   CPU {share}\n")
    print(f"largest error of the steady run: {worst:.3f} ms (allowed: {args.limit_ms:g})")
    return int(worst > args.limit_ms)


def _print(true: dict[str, np.ndarray], seen: dict[str, np.ndarray]) -> float:
    """Truth, measurement and error a row; the largest error in milliseconds."""
    worst = 0.0
    print("                " + "".join(f"{f'p{p}':>10}" for p in PERCENTILES))
    for name, values in true.items():
        expected = np.percentile(values, PERCENTILES) * 1e3
        got = np.percentile(seen[name], PERCENTILES) * 1e3
        for label, row in (("true", expected), ("seen", got), ("error", got - expected)):
            print(f"  {name:5} {label:8}" + "".join(f"{value:10.3f}" for value in row))
        worst = max(worst, float(np.abs(got - expected).max()))
    return worst
