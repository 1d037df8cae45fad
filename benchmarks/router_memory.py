"""Whether a router's memory stays flat: `nice -n 5 python -m benchmarks.router_memory`.

The parties of `benchmarks.router`: a real router in a process of its own, a decode worker without
an engine, and clients. Streams of a few tokens pass through it, each with a prompt of its own. Its
resident memory is read at the first mark and at the last; more than MAX_GROWTH between the two is
a leak, and the exit code is 1. A million streams take 15 to 25 minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator

from benchmarks.router import Bench, parties

MAX_GROWTH = 0.05
NUM_PARTS = 10  # of what follows the first mark: the shape of a growth says what it is


def measure(
    bench: Bench, first: int, total: int, at_once: int, num_tokens: int
) -> Iterator[tuple[int, int]]:
    """Streams so far, and the router's resident bytes then; from the first mark to the last."""
    bench.ask_all(first, at_once, num_tokens)
    yield first, bench.rss_bytes()
    marks = [first + (total - first) * part // NUM_PARTS for part in range(NUM_PARTS + 1)]
    for before, mark in itertools.pairwise(marks):
        bench.ask_all(mark - before, at_once, num_tokens)
        yield mark, bench.rss_bytes()


def main() -> int:
    """See the module."""
    plain = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--first", type=int, default=100_000, help="streams until the first mark")
    parser.add_argument("--total", type=int, default=1_000_000)
    parser.add_argument("--at-once", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=3, help="of each answer")
    asked = parser.parse_args()
    found: list[int] = []
    with parties() as bench:
        began = time.monotonic()
        for num, rss in measure(bench, asked.first, asked.total, asked.at_once, asked.tokens):
            found.append(rss)
            rate = num / (time.monotonic() - began)
            print(f"{num:9d} streams {rss / 2**20:8.2f} MiB {rate:7.0f}/s", flush=True)
    growth = found[-1] / found[0] - 1
    print(f"growth from {asked.first} to {asked.total}: {100 * growth:+.2f} %")
    return int(growth > MAX_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
