"""Two nodes: one is cut off for a while, or dies; the other one's streams go on.

    python -m tests.fault.chaos.nodes --out results
    python -m tests.fault.chaos.nodes --redis-port 6390 --out results

Two Ray nodes on this machine (tests/e2e/two_nodes.sh; root), a decode worker on each. Requests of
all kinds arrive; the cable is unplugged for 5 s and for 60 s, and the second node dies. After each
of these that node is started again. With a port for a Redis, all is on the second node, and
Ray's head, the first one, dies twice. Exits with 1 if a request failed or was wrong.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable
from typing import Any

from tests.fault.chaos.faults import Cluster
from tests.fault.chaos.load import clients_of, command_line, ended, workers
from tests.fault.chaos.two_hosts import SCRIPT, URL, script, serving_on

SETS = (
    "decode.num_cpus=3", "prefill.num_cpus=0.25", "routers.num_cpus=0.25",
    "disaggregation.mode=always",
)  # fmt: skip
ON_B = "decode.resources={b: 1}", "prefill.resources={b: 1}"
READY_S = 120.0
POLL_S = 0.2


def parse() -> argparse.Namespace:
    """The command line."""
    made = command_line(__doc__, timeout_s=180.0, routers=1)
    add = made.add_argument
    add("--cuts", default="5,60", help="seconds for which the nodes are cut off")
    add("--pause-s", type=float, default=15, help="of load before, between and after")
    add("--redis-port", type=int, default=0, help="for the state of Ray, whose head dies")
    add("--inside", action="store_true", help="(used by itself)")
    return made.parse_args()


async def wait_ready(cluster: Cluster) -> float:
    """Seconds until both decode workers are ready."""
    began = time.monotonic()
    while time.monotonic() - began < READY_S:
        rows = [(row["role"], row["state"]) for row in await cluster.workers()]
        if rows.count(("decode", "ready")) == 2:
            break
        await asyncio.sleep(POLL_S)
    return time.monotonic() - began


async def told(*words: str) -> None:
    """Run a command of the script while requests arrive; raises SystemExit if it fails."""
    running = await asyncio.create_subprocess_exec(
        "bash", str(SCRIPT), *words, stdout=asyncio.subprocess.DEVNULL
    )
    if await running.wait():
        raise SystemExit(f"{SCRIPT.name} {words[0]} has failed")


async def cut(seconds: float) -> None:
    """The nodes do not reach each other for so long."""
    await told("cut")
    await asyncio.sleep(seconds)
    await told("mend")


async def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Everything from the first request on; returns the figures."""
    faults: list[tuple[str, Awaitable[None]]]
    if options.redis_port:
        faults = [("head", told("head")), ("head", told("head"))]
    else:
        cuts = map(float, options.cuts.split(","))
        faults = [(f"cut for {seconds:g} s", cut(seconds)) for seconds in cuts]
        faults.append(("crash", told("crash")))
    done: list[dict[str, Any]] = []
    async with clients_of(URL, options) as clients:
        async with clients.asking(options.rate) as load:
            for what, fault in faults:
                await asyncio.sleep(options.pause_s)
                load.waits.clear()
                await fault
                await asyncio.sleep(options.pause_s)
                waits = sorted(load.waits) or [0.0]
                if not options.redis_port:
                    await told("again")
                row = {"what": what, "num": len(waits), "p50_s": statistics.median(waits)}
                row |= {"longest_s": waits[-1], "whole_after_s": await wait_ready(clients.cluster)}
                done.append(row)
                print(row, flush=True)
        figures = await load.figures()
        resumed = (await clients.cluster.metrics()).get("kvlane_resumed_total", 0)
    return figures | {"done": done, "resumed": resumed}


def main() -> int:
    """0 if nothing failed, nothing was wrong and nothing is left."""
    options = parse()
    options.out = options.out.resolve()
    if options.inside:
        return ended(asyncio.run(measured(options)), options, "nodes.json")
    options.out.mkdir(parents=True, exist_ok=True)
    sets, host = SETS, "a"
    if options.redis_port:
        sets, host = ON_B, "b"
        os.environ |= {"REDIS_PORT": str(options.redis_port), "ON": host}
    sets = [word for each in sets for word in ("--set", each)]
    script("up")
    try:
        with serving_on(host, [*workers(options), *sets], options.out / "nodes.log"):
            inside = [sys.executable, "-m", "tests.fault.chaos.nodes", "--inside", *sys.argv[1:]]
            return script("run", *inside, check=False).returncode
    finally:
        script("down", check=False)


if __name__ == "__main__":
    sys.exit(main())
