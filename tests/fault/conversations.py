"""Agents' conversations, of a dense model and of one with recurrent layers: what each prefills.

    python -m tests.fault.conversations --out results
    python -m tests.fault.conversations --tiers --prefill 0 --decode 1 --pause-s 2 --out results
    python -m tests.fault.conversations --scale 0.25 --set disaggregation.mode=always --out results

One cluster after another serves the same trace: sessions with a system prompt in common, of which
each turn adds the model's own answer and what a tool has returned. Prompts are random tokens, so
lengths alone tell: the dense model computes what is new and no whole page. Exits with 1 if the
second model prefills more than 1.1 times as many tokens as the first. With --tiers: the first model
alone, with no tier, with host memory and with a directory, over a pool that holds a third of all
conversations; 1 if a tier saves less than two thirds of the tokens. Runs as tests.fault.chaos.
"""

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
from pathlib import Path
from shutil import copytree
from typing import Any

import aiohttp

from benchmarks.output import shown, write
from tests.e2e.harness import enter_namespace_of, serving
from tests.fault.chaos.faults import Cluster
from tests.fault.chaos.load import command_line, workers
from tests.support.prompts import TINY

MOST, LEAST_SAVED = 1.1, 3.0
POOL, PAGE = 3, 16  # conversations are so many times as large as the pool; tokens of a page
SYSTEM, ASKED, ANSWER, RESULT = 4096, 90, (40, 120), (100, 1500)  # tokens
# With --tiers (median, sigma) of a lognormal: what TraceLab's agents send, by a sixteenth: the
# system prompt is 2,048 tokens.
FILES, APPENDED, SAID, MOST_DRAWN = (312, 1.48), (50, 1.43), (19, 1.0), 3125
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
    add("--tiers", action="store_true", help="compare tiers, not models")
    add("--pause-s", type=float, default=0.0, help="of a tool, the mean of an exponential")
    add("--set", action="append", default=[], metavar="A.B=C", help="of the cluster")
    return made.parse_args()


def lengthened(name: str, place: Path) -> Path:
    """A copy of a bundled model that takes longer prompts than it was trained on."""
    copytree(TINY.with_name(name), place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_LEN}))
    return place


async def converse(http: aiohttp.ClientSession, url: str, options: Any, number: int) -> int:
    """One session, one turn after the other; tokens of its prompts."""
    own, num_asked = random.Random(f"{options.seed} {number}"), 0

    def text(of: random.Random, *between: int) -> list[int]:
        return of.choices(range(5, 1000), k=max(1, int(of.randint(*between) * options.scale)))

    def drawn(median: float, sigma: float) -> list[int]:
        num = min(MOST_DRAWN, int(own.lognormvariate(math.log(median), sigma)))
        return text(own, num, num)

    tokens = text(random.Random(options.seed), SYSTEM, SYSTEM) + text(own, ASKED, ASKED)
    if options.tiers:
        tokens = tokens[: int(SYSTEM // 2 * options.scale)] + drawn(*FILES)
    for _ in range(options.turns):
        if options.pause_s:
            await asyncio.sleep(own.expovariate(1 / options.pause_s))
        said = drawn(*SAID) if options.tiers else text(own, *ANSWER)
        body = {"prompt": tokens, "max_tokens": len(said), "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        async with http.post(f"{url}/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        num_asked += len(tokens)
        tokens += answer["choices"][0]["token_ids"]
        tokens += drawn(*APPENDED) if options.tiers else text(own, *RESULT)
    return num_asked


async def measured(url: str, options: argparse.Namespace) -> dict[str, float]:
    """All sessions at a time; what the workers counted meanwhile."""
    timeout = aiohttp.ClientTimeout(total=options.timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        cluster = Cluster(http, url)
        before = await cluster.metrics()
        sessions = (converse(http, url, options, num) for num in range(options.sessions))
        asked = sum(await asyncio.gather(*sessions))
        await cluster.wait_idle(options.timeout_s)
        after = await cluster.metrics()
    names = {name: f"kvlane_prompt_tokens_{name}_total" for name in COUNTED}
    names |= {
        name: name for name in after if name.startswith(("kvlane_kv_tier", "kvlane_kv_pages_ev"))
    }
    counted = {key: after.get(name, 0) - before.get(name, 0) for key, name in names.items()}
    return {"asked": asked, **counted, "snapshots": after.get("kvlane_state_slots.snapshot", 0)}


def pool_pages(options: argparse.Namespace) -> int:
    """Pages that hold a POOL-th of what all sessions are in the end."""
    files, appended, said = (m * math.exp(s * s / 2) for m, s in (FILES, APPENDED, SAID))
    mean = files + options.turns * (appended + said)
    return int(options.scale * (SYSTEM // 2 + options.sessions * mean) / PAGE / POOL)


def compare_tiers(options: argparse.Namespace) -> int:
    """0 if either tier saves enough."""
    figures, name = dict[str, dict[str, float]](), options.models.partition(",")[0]
    sets = [*options.set, f"kv.page_size={PAGE}"]
    sets += [f"{role}.engine.num_pages={pool_pages(options)}" for role in ("prefill", "decode")]
    for kind in ("none", "host", "disk"):
        root = Path(tempfile.mkdtemp(prefix="cv"))
        tier = {"none": [], "host": [f"kv.tier.host_bytes={2 << 30}"],
                "disk": [f"kv.tier.directory={root / 'tier'}"]}[kind]  # fmt: skip
        words = [word for each in (*sets, *tier) for word in ("--set", each)]
        arguments = ["--model", str(lengthened(name, root / name)), *workers(options), *words]
        with serving(arguments, options.port, keep=options.out / kind, root=root) as url:
            figures[kind] = asyncio.run(measured(url, options))
        print(f"{kind}: {figures[kind]}", flush=True)
    saved = {
        kind: figures["none"]["computed"] / figures[kind]["computed"] for kind in ("host", "disk")
    }
    print(f"prefilled tokens without a tier, times those with one: {saved}")
    about = {"options": shown(options), "pages": pool_pages(options), "figures": figures}
    write(options.json or options.out / "tiers.json", about | {"saved": saved})
    return int(min(saved.values()) < LEAST_SAVED)


def main() -> int:
    """0 if the second model prefills at most MOST times what the first one does."""
    options = parse()
    enter_namespace_of("tests.fault.conversations")
    options.out, figures = options.out.resolve(), dict[str, dict[str, float]]()
    if options.tiers:
        return compare_tiers(options)
    sets = [word for each in options.set for word in ("--set", each)]
    for name in options.models.split(","):
        root = Path(tempfile.mkdtemp(prefix="cv"))
        arguments = ["--model", str(lengthened(name, root / name)), *workers(options), *sets]
        with serving(arguments, options.port, keep=options.out / name, root=root) as url:
            figures[name] = asyncio.run(measured(url, options))
        print(f"{name}: {figures[name]}", flush=True)
    dense, other = (each["computed"] for each in figures.values())
    print(f"prefilled tokens: {other / dense:.3f} times those of the dense model")
    about = {"options": shown(options), "figures": figures, "ratio": other / dense}
    write(options.json or options.out / "conversations.json", about)
    return int(other > MOST * dense)


if __name__ == "__main__":
    sys.exit(main())
