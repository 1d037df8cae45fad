"""Faults under load: every answer has to be the one of an undisturbed cluster.

    python -m tests.fault.chaos --minutes 20 --out results
    python -m tests.fault.chaos --minutes 2 --roles router --signals stop --stop-s 5 --out results
    python -m tests.fault.chaos --minutes 2 --roles router,decode --keys 1 --out results
    python -m tests.fault.chaos --minutes 2 --roles controller,decode --stop-s 60 --out results
    python -m tests.fault.chaos --minutes 20 --spec chain --out results
    python -m tests.fault.chaos --minutes 20 --set decode.tp=2 --out results
    python -m tests.fault.chaos --minutes 20 --schedule all --keys 1 --out results

First every request is asked alone, which is what its answer has to be. Then requests of all kinds
arrive at random, and every so often a worker is killed, or stopped for a while, or a step of a
schedule is done: schedules.yaml has them. A request fails if it ends with an error or without its
end, and is wrong if its answer is another one.

Exits with 1 if a request failed or was wrong, or if anything is left of one. Runs in a network
namespace of its own (root), unless KVLANE_TEST_NAMESPACE is set.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.harness import enter_namespace_of, serving
from tests.fault.chaos.faults import Cluster, Faults, kinds, sizes
from tests.fault.chaos.load import clients_of, command_line, ended, told, workers
from tests.fault.chaos.schedules import schedules, small_root, steps_of

COUNTED = (
    "kvlane_resumed_total", "kvlane_retries_total", "kvlane_worker_deaths_total",
    "kvlane_preemptions_total", "kvlane_lease_expired_total",
)  # fmt: skip


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, or these."""
    made = command_line(__doc__, rate=3.0, num=6, decode=3)
    add = made.add_argument
    add("--minutes", type=float, default=20, help="of load with faults")
    add("--every", type=float, default=10, help="seconds between two faults")
    add("--roles", default="prefill,decode", help="who is hit: prefill, decode, router, controller")
    add("--signals", default="kill,stop")
    add("--schedule", help=f"instead of roles and signals: {', '.join(schedules())}, or all")
    add("--stop-s", type=float, default=5, help="for so long a process is stopped")
    add("--keys", type=float, default=0, help="share of requests with an idempotency key")
    add("--spec", default="none")
    add("--set", action="append", default=[], metavar="A.B=C", help="of the cluster")
    return made.parse_args(arguments)


async def processes(cluster: Cluster) -> dict[str, int]:
    """Pids of workers and routers, by name."""
    workers = {row["name"]: row["pid"] for row in await cluster.workers()}
    return workers | await cluster.pids("router")


async def soak(options: argparse.Namespace, url: str, root: Path) -> dict[str, Any]:
    """Everything from the first request on; returns the figures. root: of the cluster's Serve."""
    async with clients_of(url, options) as clients:
        cluster = clients.cluster
        steps = steps_of(options.schedule, options.roles.split(","), options.signals.split(","))
        tell = partial(told, root, options.stop_s)
        faults = Faults(cluster, steps, options.stop_s, clients.rng, tell)

        before = await cluster.metrics()
        begun = {pid: sizes(pid) for pid in (await processes(cluster)).values()}
        async with clients.asking(options.rate, options.keys) as load:
            hitting = asyncio.create_task(faults.run(options.every, time.monotonic()))
            await asyncio.sleep(60 * options.minutes)
        hitting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await hitting
        figures = await load.figures()
        after, pids = await cluster.metrics(), await processes(cluster)
    counted = {name: after.get(name, 0) - before.get(name, 0) for name in COUNTED}
    # Each router counts them all; who is stopped for longer than the pings last is dead, too.
    deaths = counted["kvlane_worker_deaths_total"] / options.routers
    hit = sum(fault.name.startswith(("prefill", "decode")) for fault in faults.sent)
    return figures | {
        "counters": counted, "deaths_beyond_faults": deaths - hit,
        "num_faults": len(faults.sent), "faults_by_kind": kinds(faults.sent),
        "commands": faults.commands,
        "faults": [fault._asdict() for fault in faults.sent],
        "sizes": {  # of who lived through it
            name: [begun[pid], sizes(pid)] for name, pid in pids.items() if pid in begun
        },
    }  # fmt: skip


def main() -> int:
    """0 if nothing failed, nothing was wrong and nothing is left."""
    options = parse()
    enter_namespace_of("tests.fault.chaos")
    options.out = options.out.resolve()
    arguments = ["--model", options.model, "--spec", options.spec, *workers(options)]
    arguments += [word for each in options.set for word in ("--set", each)]
    root = small_root() if options.schedule else Path(tempfile.mkdtemp(prefix="jd"))
    with serving(arguments, options.port, keep=options.out, root=root) as url:
        figures = asyncio.run(soak(options, url, root))
    for name, pair in figures["sizes"].items():
        print(f"{name}, before and after: {pair}")
    return ended(figures, options, "chaos.json")


if __name__ == "__main__":
    sys.exit(main())
