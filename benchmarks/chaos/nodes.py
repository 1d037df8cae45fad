"""Two nodes: one is cut off for a while, or dies; the other one's streams go on.

    python -m benchmarks.chaos.nodes --out results

Two Ray nodes on this machine (tests/e2e/two_nodes.sh; root), a decode worker on each. Requests of
all kinds arrive; the cable is unplugged for 5 s and for 60 s, and the second node dies. After each
of these that node is started again. Exits with 1 if a request failed or was wrong.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.chaos.__main__ import Load, ended, undisturbed
from benchmarks.chaos.asks import make_asks
from benchmarks.chaos.faults import Cluster
from benchmarks.output import parser

SCRIPT = Path(__file__).resolve().parents[2] / "tests" / "e2e" / "two_nodes.sh"
SERVE = (
    "--prefill", "2", "--decode", "2", "--router", "1", "--set", "decode.num_cpus=3",
    "--set", "prefill.num_cpus=0.25", "--set", "routers.num_cpus=0.25",
    "--set", "disaggregation.mode=always",
)  # fmt: skip
URL = "http://127.0.0.1:8000"
READY_S = 120.0
POLL_S = 0.2


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, or these."""
    made = parser(__doc__)
    add = made.add_argument
    add("--rate", type=float, default=2.0, help="requests a second")
    add("--num", type=int, default=2, help="different requests of each kind")
    add("--cuts", default="5,60", help="seconds for which the nodes are cut off")
    add("--pause-s", type=float, default=15, help="of load before, between and after")
    add("--timeout-s", type=float, default=180, help="of a request")
    add("--seed", type=int, default=0)
    add("--inside", action="store_true", help="(used by itself)")
    add("--out", type=Path, required=True, help="folder of the result and of what `serve` says")
    return made.parse_args(arguments)


async def script(*words: str) -> None:
    """Run a command of the script; raises SystemExit if it fails."""
    running = await asyncio.create_subprocess_exec(
        "bash", str(SCRIPT), *words, stdout=asyncio.subprocess.DEVNULL
    )
    if await running.wait():
        raise SystemExit(f"{SCRIPT.name} {words[0]} has failed")


async def wait_ready(cluster: Cluster) -> float:
    """Seconds until both decode workers are ready."""
    began = time.monotonic()
    while time.monotonic() - began < READY_S:
        ready = [
            r for r in await cluster.workers() if (r["role"], r["state"]) == ("decode", "ready")
        ]
        if len(ready) == 2:
            break
        await asyncio.sleep(POLL_S)
    return time.monotonic() - began


async def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Everything from the first request on; returns the figures."""
    rng = random.Random(options.seed)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=options.timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        cluster, asks = Cluster(http, URL), make_asks("tiny", options.num, options.seed)
        right = await undisturbed(http, URL, asks)
        load, over = Load(http, URL, asks, rng), asyncio.Event()
        loading = asyncio.create_task(load.open_loop(options.rate, over))
        done: list[dict[str, Any]] = []

        async def during(what: str, fault: Any) -> None:
            await asyncio.sleep(options.pause_s)
            load.waits.clear()
            await fault
            await asyncio.sleep(options.pause_s)
            waits = sorted(load.waits) or [0.0]
            await script("again")
            whole_s = await wait_ready(cluster)
            row = {"what": what, "num": len(waits), "p50_s": statistics.median(waits)}
            done.append(row | {"longest_s": waits[-1], "whole_after_s": whole_s})
            print(row, flush=True)

        async def cut(seconds: float) -> None:
            await script("cut")
            await asyncio.sleep(seconds)
            await script("mend")

        for seconds in map(float, options.cuts.split(",")):
            await during(f"cut for {seconds:g} s", cut(seconds))
        await during("crash", script("crash"))
        over.set()
        await loading
        idle_s, left = await cluster.wait_idle(15)
        metrics = await cluster.metrics()
    return {
        "num": load.num, "failed": load.failed, "wrong": load.wrong(right), "done": done,
        "resumed": metrics.get("kvlane_resumed_total", 0), "idle_s": idle_s, "left": left,
    }  # fmt: skip


def serving(options: argparse.Namespace) -> int:
    """Start the nodes and `serve`, and this program once more, beside them; its exit code."""
    bash = ["bash", str(SCRIPT)]
    environment = os.environ | {"PYTHON_BIN": str(Path(sys.executable).parent)}
    subprocess.run([*bash, "up"], env=environment, check=True)
    options.out.mkdir(parents=True, exist_ok=True)
    output = options.out / "nodes.log"
    try:
        with output.open("wb") as log:
            served = subprocess.Popen(
                [*bash, "run", sys.executable, "-m", "cluster", "serve", *SERVE],
                env=environment, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        deadline = time.monotonic() + READY_S
        while "kvlane serves" not in output.read_text():
            if served.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(output.read_text())
            time.sleep(POLL_S)
        words = [sys.executable, "-m", "benchmarks.chaos.nodes", "--inside", *sys.argv[1:]]
        return subprocess.run([*bash, "run", *words], env=environment, check=False).returncode
    finally:
        served.send_signal(signal.SIGTERM)
        subprocess.run([*bash, "down"], env=environment, check=False)


def main() -> int:
    """0 if nothing failed, nothing was wrong and nothing is left."""
    options = parse()
    options.out = options.out.resolve()
    if not options.inside:
        return serving(options)
    figures = asyncio.run(measured(options))
    return ended(figures, options, options.out / "nodes.json")


if __name__ == "__main__":
    sys.exit(main())
