"""Agents' conversations, of a dense model and of one with recurrent layers: what each prefills.

    python -m tests.fault.conversations --out results
    python -m tests.fault.conversations --scale 0.25 --set disaggregation.mode=always --out results
    python -m tests.fault.conversations --minutes 30 --pause-s 6 --tier-mib 32 --sessions 6 \\
        --turns 12 --scale 0.25 --prefill 1 --named --set decode.engine.num_pages=400 --out results

One cluster after another serves the same trace: sessions with a system prompt in common, of which
each turn adds the model's own answer and what a tool has returned. Prompts are random tokens, so
lengths alone tell: the dense model computes what is new and no whole page. Exits with 1 if the
second model prefills more than 1.1 times as many tokens as the first. Runs as tests.fault.chaos.

--minutes: instead, one session follows the other at the first model for so long, with pauses, and
neither router nor workers may grow in the second half (see growth.py), nor the tier's directory
be larger than its budget. The third command takes less than a core.
"""

import argparse
import asyncio
import itertools
import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path
from shutil import copytree
from typing import Any

import aiohttp

from benchmarks.output import shown, write
from tests.e2e.harness import enter_namespace_of, serving
from tests.fault.chaos.faults import Cluster
from tests.fault.chaos.load import command_line, workers
from tests.fault.growth import MIB, SHARE, Watched
from tests.support.prompts import TINY

MOST = 1.1
SYSTEM, ASKED, ANSWER, RESULT = 4096, 90, (40, 120), (100, 1500)  # tokens
MAX_LEN = 65_536
COUNTED = ("computed", "queried", "cached", "recomputed")


def parse() -> argparse.Namespace:
    """The command line."""
    made = command_line(__doc__, routers=1, timeout_s=600.0)
    add = made.add_argument
    add("--models", default="tiny,tiny-hybrid", help="bundled: the dense one, the other one")
    add("--sessions", type=int, default=16)
    add("--turns", type=int, default=20)
    add("--scale", type=float, default=1.0, help="of all lengths in tokens")
    add("--minutes", type=float, default=0.0, help="of sessions that follow each other")
    add("--pause-s", type=float, default=0.0, help="mean of those between turns")
    add("--tier-mib", type=int, default=0, help="of host memory and of a directory below the pool")
    add("--named", action="store_true", help="every request names its session")
    add("--set", action="append", default=[], metavar="A.B=C", help="of the cluster")
    return made.parse_args()


def lengthened(name: str, place: Path) -> Path:
    """A copy of a bundled model that takes longer prompts than it was trained on."""
    copytree(TINY.with_name(name), place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_LEN}))
    return place


async def converse(
    http: aiohttp.ClientSession, url: str, options: Any, number: int, until: float = math.inf
) -> int:
    """One session, one turn after the other, none behind `until`; tokens of its prompts."""
    own, num_asked = random.Random(f"{options.seed} {number}"), 0

    def text(of: random.Random, *between: int) -> list[int]:
        return of.choices(range(5, 1000), k=max(1, int(of.randint(*between) * options.scale)))

    tokens = text(random.Random(options.seed), SYSTEM, SYSTEM) + text(own, ASKED, ASKED)
    for _ in range(options.turns):
        if options.pause_s:
            await asyncio.sleep(own.expovariate(1 / options.pause_s))
        if time.monotonic() > until:
            break
        body = {"prompt": tokens, "max_tokens": len(text(own, *ANSWER)), "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        named = {"X-Session-ID": f"session {number}"} if options.named else None
        async with http.post(f"{url}/v1/completions", json=body, headers=named) as response:
            answer = await response.json()
            assert response.status == 200, answer
        num_asked += len(tokens)
        tokens += answer["choices"][0]["token_ids"] + text(own, *RESULT)
    return num_asked


def client(options: argparse.Namespace) -> aiohttp.ClientSession:
    """Of as many connections as there are sessions."""
    timeout = aiohttp.ClientTimeout(total=options.timeout_s)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def measured(url: str, options: argparse.Namespace) -> dict[str, float]:
    """All sessions at a time; what the workers counted meanwhile."""
    async with client(options) as http:
        cluster = Cluster(http, url)
        before = await cluster.metrics()
        sessions = (converse(http, url, options, num) for num in range(options.sessions))
        asked = sum(await asyncio.gather(*sessions))
        await cluster.wait_idle(options.timeout_s)
        after = await cluster.metrics()
    names = {name: f"kvlane_prompt_tokens_{name}_total" for name in COUNTED}
    counted = {key: after.get(name, 0) - before.get(name, 0) for key, name in names.items()}
    return {"asked": asked, **counted, "snapshots": after.get("kvlane_state_slots.snapshot", 0)}


async def lasting(
    url: str, options: argparse.Namespace, directory: Path
) -> tuple[dict[str, Any], bool]:
    """Figures of many sessions, so many at a time, and whether anything has grown."""
    until, numbers = time.monotonic() + 60 * options.minutes, itertools.count()

    async def follow(http: aiohttp.ClientSession) -> int:
        num_asked = 0
        while time.monotonic() < until:
            num_asked += await converse(http, url, options, next(numbers), until)
        return num_asked

    async with client(options) as http:
        watched = Watched(Cluster(http, url), directory)
        asking = asyncio.gather(*(follow(http) for _ in range(options.sessions)))
        await watched.watch(60 * options.minutes, asking.done)
        asked, metrics = sum(await asking), await Cluster(http, url).metrics()
    figures, is_wrong = watched.told()
    names = (f"kvlane_{name}_total" for name in ("kv_tier_tokens", "kv_tier_failures", "retries"))
    counted = {name: metrics.get(name, 0) for name in names}
    most_mib = watched.most_on_disk / MIB
    print(f"{next(numbers)} sessions, {asked:,} tokens asked; {counted}; files {most_mib:.1f} MiB")
    figures |= {"asked": asked, "counted": counted, "most on disk MiB": most_mib}
    return figures, is_wrong or most_mib > (1 + SHARE) * options.tier_mib


def tier(options: argparse.Namespace, directory: Path) -> list[str]:
    """Settings of the cluster."""
    size = options.tier_mib << 20
    set_to = {"host_bytes": size, "directory": directory, "directory_bytes": size}
    sets = [f"kv.tier.{name}={value}" for name, value in set_to.items() if size]
    return [word for each in sets for word in ("--set", each)]


def main() -> int:
    """0 if nothing has grown, or the second model prefills at most MOST times the first one's."""
    options = parse()
    enter_namespace_of("tests.fault.conversations")
    options.out, figures = options.out.resolve(), dict[str, dict[str, float]]()
    options.out.mkdir(parents=True, exist_ok=True)
    sets = [word for each in options.set for word in ("--set", each)]
    for name in options.models.split(","):
        root = Path(tempfile.mkdtemp(prefix="cv"))
        arguments = ["--model", str(lengthened(name, root / name)), *workers(options), *sets]
        arguments += tier(options, root / "tier")
        with serving(arguments, options.port, keep=options.out / name, root=root) as url:
            if options.minutes:
                found, is_wrong = asyncio.run(lasting(url, options, root / "tier"))
                about = {"options": shown(options), "figures": found}
                write(options.json or options.out / "growth.json", about)
                return int(is_wrong)
            figures[name] = asyncio.run(measured(url, options))
        print(f"{name}: {figures[name]}", flush=True)
    dense, other = (each["computed"] for each in figures.values())
    print(f"prefilled tokens: {other / dense:.3f} times those of the dense model")
    about = {"options": shown(options), "figures": figures, "ratio": other / dense}
    write(options.json or options.out / "conversations.json", about)
    return int(other > MOST * dense)


if __name__ == "__main__":
    sys.exit(main())
