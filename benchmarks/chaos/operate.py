"""What an operator does under load: workers are restarted and change roles, nothing is lost.

    python -m benchmarks.chaos.operate --out results

Restarts all workers with another setting, then with other weights, then with the first ones again,
while requests of all kinds arrive; then a decode worker becomes a prefill worker and turns back,
again and again. Each answer has to be wholly of one model: the one that a
cluster gives that nobody touches. Exits with 1 if a request failed or was wrong.
"""

import argparse
import asyncio
import itertools
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import aiohttp
from safetensors.torch import load_file, save_file

from benchmarks.chaos.__main__ import Load, ended, undisturbed
from benchmarks.chaos.asks import make_asks
from benchmarks.chaos.faults import Cluster
from benchmarks.judges.served import TINY, enter_namespace, environment, serving
from benchmarks.output import parser

IDLE_S = 15.0
EVENT = re.compile(r"\[ *([\d.]+) s\] (\S+): (draining|turning|ready)")  # a line of `serve`
SCALE = 1.3  # of a weight of each layer: another model, which speaks as well


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, or these."""
    made = parser(__doc__)
    add = made.add_argument
    add("--rate", type=float, default=2.0, help="requests a second")
    add("--num", type=int, default=2, help="different requests of each kind")
    add("--pause-s", type=float, default=10, help="of load before, between and after restarts")
    add("--timeout-s", type=float, default=120, help="of a request")
    add("--turns", type=int, default=20, help="of the role of a worker")
    add("--drain-s", type=float, default=5, help="after which a worker hands over what it has")
    add("--seed", type=int, default=0)
    add("--routers", type=int, default=2)
    add("--prefill", type=int, default=2)
    add("--decode", type=int, default=2)
    add("--port", type=int, default=8000)
    add("--out", type=Path, required=True, help="folder of the result and the cluster's log")
    return made.parse_args(arguments)


def other_weights(place: Path) -> Path:
    """A copy of the bundled model that gives other answers."""
    copytree(TINY, place)
    file = place / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith("mlp.down_proj.weight"):
            weights[name] = weight * SCALE
    save_file(weights, file)
    return place


async def told(root: Path, drain_s: float, *words: str) -> dict[str, Any]:
    """Run a command of `kvlane`, and how long it took; raises SystemExit if it fails."""
    began = time.monotonic()
    command = "-m", "cluster", *words, "--timeout", str(drain_s)
    running = await asyncio.create_subprocess_exec(
        sys.executable, *command, env=environment(root), stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, error = await running.communicate()
    if running.returncode:
        raise SystemExit(f"{' '.join(words)}: {error.decode()}")
    return {"command": " ".join(words), "took_s": time.monotonic() - began}


async def operate(options: argparse.Namespace, url: str, root: Path) -> dict[str, Any]:
    """Everything from the first request on; returns the figures."""
    rng = random.Random(options.seed)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=options.timeout_s)
    other = other_weights(root / "other")
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        cluster, asks = Cluster(http, url), make_asks("tiny", options.num, options.seed)
        right = await undisturbed(http, url, asks)
        load = Load(http, url, asks, rng)
        over = asyncio.Event()
        loading = asyncio.create_task(load.open_loop(options.rate, over))
        done = []
        for leaf in ("decode.engine.max_num_reqs=24", f"model.path={other}", f"model.path={TINY}"):
            await asyncio.sleep(options.pause_s)
            done.append(await told(root, options.drain_s, "restart", "--set", leaf))
        turns = itertools.cycle(("prefill", "decode"))
        for role in itertools.islice(turns, options.turns):
            await asyncio.sleep(1)
            done.append(await told(root, options.drain_s, "role", "decode-1", role))
        await asyncio.sleep(options.pause_s)
        over.set()
        await loading
        idle_s, left = await cluster.wait_idle(IDLE_S)
        metrics = await cluster.metrics()
        await told(root, 0.0, "restart", "--set", f"model.path={other}")
        of_other = await undisturbed(http, url, asks)
    waits = statistics.quantiles(load.waits, n=100) if len(load.waits) > 1 else [0.0] * 99
    return {
        "num": load.num, "kinds": dict(load.kinds), "failed": load.failed,
        "wrong": load.wrong(right, of_other), "of_first": load.num - len(load.wrong(right)),
        "of_other": load.num - len(load.wrong(of_other)), "done": done,
        "wait_s": {"p50": waits[49], "p99": waits[98], "most": max(load.waits, default=0.0)},
        "resumed": metrics.get("kvlane_resumed_total", 0), "idle_s": idle_s, "left": left,
    }  # fmt: skip


def turned_s(log: str) -> list[float]:
    """Seconds of each change of a role in its process, from the drain on, by the cluster's log."""
    drained: dict[str, float] = {}
    turning: set[str] = set()
    took_s: list[float] = []
    for at, name, what in EVENT.findall(log):
        if what == "draining":
            drained[name] = float(at)
        elif what == "turning":
            turning.add(name)
        elif name in turning:
            turning.remove(name)
            took_s.append(round(float(at) - drained[name], 1))
    return took_s


def main() -> int:
    """0 if nothing failed, nothing was wrong and nothing is left."""
    options = parse()
    enter_namespace("benchmarks.chaos.operate")
    arguments = [
        "--router", str(options.routers), "--prefill", str(options.prefill),
        "--decode", str(options.decode),
    ]  # fmt: skip
    root = Path(tempfile.mkdtemp(prefix="op"))
    with serving(arguments, options.port, keep=options.out.resolve(), root=root) as url:
        figures = asyncio.run(operate(options, url, root))
    figures["turned_s"] = turned_s((options.out / "cluster.log").read_text())
    return ended(figures, options, options.out / "operate.json")


if __name__ == "__main__":
    sys.exit(main())
