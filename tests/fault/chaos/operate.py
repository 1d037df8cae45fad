"""What an operator does under load: workers are restarted and change roles, nothing is lost.

    python -m tests.fault.chaos.operate --out results

Restarts all workers with another setting, then with other weights, then with the first ones again,
while requests of all kinds arrive; then a decode worker becomes a prefill worker and turns back,
again and again. Each answer has to be wholly of one model: the one that a
cluster gives that nobody touches. Exits with 1 if a request failed or was wrong.
"""

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from pathlib import Path
from shutil import copytree
from typing import Any

from safetensors.torch import load_file, save_file

from tests.e2e.harness import enter_namespace_of, serving
from tests.fault.chaos.load import clients_of, command_line, ended, told, workers
from tests.support.prompts import TINY

SCALE = 1.3  # of a weight of each layer: another model, which speaks as well


def parse() -> argparse.Namespace:
    """The command line."""
    made = command_line(__doc__)
    add = made.add_argument
    add("--pause-s", type=float, default=10, help="of load before, between and after restarts")
    add("--turns", type=int, default=20, help="of the role of a worker")
    add("--drain-s", type=float, default=5, help="after which a worker hands over what it has")
    return made.parse_args()


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


async def operate(options: argparse.Namespace, url: str, root: Path) -> dict[str, Any]:
    """Everything from the first request on; returns the figures."""
    other, done = other_weights(root / "other"), []

    async def took(*words: str) -> dict[str, Any]:
        began = time.monotonic()
        if await told(root, options.drain_s, *words):
            raise SystemExit(f"{' '.join(words)} has failed")
        return {"command": " ".join(words), "took_s": time.monotonic() - began}

    async with clients_of(url, options) as clients:
        async with clients.asking(options.rate) as load:
            for leaf in (
                "decode.engine.max_num_reqs=24",
                f"model.path={other}",
                f"model.path={TINY}",
            ):
                await asyncio.sleep(options.pause_s)
                done.append(await took("restart", "--set", leaf))
            roles = itertools.cycle(("prefill", "decode"))
            for role in itertools.islice(roles, options.turns):
                await asyncio.sleep(1)
                done.append(await took("role", "decode-1", role))
            await asyncio.sleep(options.pause_s)
        figures = await load.figures()
        resumed = (await clients.cluster.metrics()).get("kvlane_resumed_total", 0)
        await told(root, 0.0, "restart", "--set", f"model.path={other}")
        of_other = await clients.undisturbed()
    return figures | {
        "wrong": load.wrong(clients.right, of_other), "done": done, "resumed": resumed,
        "of_first": load.num - len(load.wrong(clients.right)),
        "of_other": load.num - len(load.wrong(of_other)),
    }  # fmt: skip


def main() -> int:
    """0 if nothing failed, nothing was wrong and nothing is left."""
    options = parse()
    enter_namespace_of("tests.fault.chaos.operate")
    options.out = options.out.resolve()
    root = Path(tempfile.mkdtemp(prefix="op"))
    with serving(workers(options), options.port, keep=options.out, root=root) as url:
        figures = asyncio.run(operate(options, url, root))
    return ended(figures, options, "operate.json")


if __name__ == "__main__":
    sys.exit(main())
