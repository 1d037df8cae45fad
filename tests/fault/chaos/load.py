"""Requests of all kinds in flight at a cluster, and how those that have ended went."""

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from benchmarks.output import parser, shown, write
from tests.e2e.harness import Serve
from tests.fault.chaos.asks import Answer, ask, difference, draw_manner, make_asks
from tests.fault.chaos.faults import Cluster

IDLE_S = 15.0


def command_line(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The flags of every program here."""
    made = parser(description)
    add = made.add_argument
    add("--rate", type=float, default=2.0, help="requests a second")
    add("--num", type=int, default=2, help="different requests of each kind")
    add("--timeout-s", type=float, default=120, help="of a request")
    add("--seed", type=int, default=0)
    add("--routers", type=int, default=2)
    add("--prefill", type=int, default=2)
    add("--decode", type=int, default=2)
    add("--model", default="tiny")
    add("--port", type=int, default=8000)
    add("--out", type=Path, required=True, help="folder of the result and the cluster's log")
    made.set_defaults(**defaults)
    return made


def workers(options: argparse.Namespace) -> list[str]:
    """Arguments of `serve`: how many there are of each role."""
    roles = {"router": options.routers, "prefill": options.prefill, "decode": options.decode}
    return [word for role, num in roles.items() for word in (f"--{role}", str(num))]


async def told(root: Path, drain_s: float, *words: str) -> int:
    """Run a command of `kvlane` that drains, on the cluster below `root`; its exit code."""
    command = "-m", "cluster", *words, "--timeout", str(drain_s)
    running = await asyncio.create_subprocess_exec(
        sys.executable, *command, env=Serve(root).environment(), stdout=asyncio.subprocess.DEVNULL
    )
    return await running.wait()


class Ended(NamedTuple):
    """A request that has its answer."""

    what: str  # for people
    number: int  # of what was asked
    answer: Answer
    is_whole: bool


class Clients:
    """Who asks a cluster; `right` are the answers that it gives undisturbed."""

    def __init__(self, http: aiohttp.ClientSession, url: str, options: argparse.Namespace) -> None:
        self.http, self.url = http, url
        self.cluster, self.rng = Cluster(http, url), random.Random(options.seed)
        self.asks = make_asks(options.model, options.num, options.seed)
        self.right: dict[int, Answer] = {}

    async def undisturbed(self) -> dict[int, Answer]:
        """The answer to each request; raises SystemExit where there is none."""
        right = {}
        for number, asked in enumerate(self.asks):
            right[number] = await ask(self.http, self.url, asked)
            if right[number].error:
                raise SystemExit(f"{asked.kind} without faults: {right[number].error}")
        return right

    @contextlib.asynccontextmanager
    async def asking(self, rate: float, keys: float = 0.0) -> AsyncIterator["Load"]:
        """So many requests a second arrive during the body; behind it all have ended."""
        load, over = Load(self, keys), asyncio.Event()
        loading = asyncio.create_task(load.open_loop(rate, over))
        try:
            yield load
        finally:
            over.set()
            await loading


@contextlib.asynccontextmanager
async def clients_of(url: str, options: argparse.Namespace) -> AsyncIterator[Clients]:
    """Clients of a cluster that is not disturbed yet."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # each its own connection
    timeout = aiohttp.ClientTimeout(total=options.timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        clients = Clients(http, url, options)
        clients.right = await clients.undisturbed()
        yield clients


class Load:
    """Requests in flight; keys: the share that has an idempotency key."""

    def __init__(self, clients: Clients, keys: float = 0.0) -> None:
        self.num, self.num_again, self.kinds = 0, 0, Counter[str]()
        self.waits: list[float] = []  # the longest of each whole stream
        self.failed: list[str] = []
        self._ended: list[Ended] = []
        self._clients, self._keys = clients, keys

    def wrong(self, *right: dict[int, Answer]) -> list[str]:
        """Answers that are of none of these."""
        differ = [
            (each, [difference(each.answer, of[each.number], whole=each.is_whole) for of in right])
            for each in self._ended
        ]
        return [f"{each.what}: {' / '.join(found)}" for each, found in differ if all(found)]

    async def one(self) -> None:
        """Ask one of the requests in some manner."""
        clients = self._clients
        number = clients.rng.randrange(len(clients.asks))
        manner = draw_manner(clients.rng)
        asked, began = clients.asks[number], time.strftime("%H:%M:%S")
        key = uuid.uuid4().hex if clients.rng.random() < self._keys else ""
        answer = await ask(clients.http, clients.url, asked, **manner, key=key)
        self.num_again += answer.num_asked - 1
        self.num += 1
        self.kinds[asked.kind] += 1
        what = f"{began} to {time.strftime('%H:%M:%S')} {asked.kind} {number} {manner}"
        if answer.error:
            self.failed.append(f"{what}: {answer.error}")
            return
        self._ended.append(Ended(what, number, answer, "leave_after" not in manner))
        if not manner:
            self.waits.append(answer.longest_s)

    async def open_loop(self, rate: float, over: asyncio.Event) -> None:
        """As they arrive until it is over; returns once all have ended."""
        async with asyncio.TaskGroup() as group:
            at = time.monotonic()
            while not over.is_set():
                at += self._clients.rng.expovariate(rate)
                await asyncio.sleep(max(0.0, at - time.monotonic()))
                group.create_task(self.one())

    async def figures(self) -> dict[str, Any]:
        """What is told of every load, once it is over."""
        idle_s, left = await self._clients.cluster.wait_idle(IDLE_S)
        waits = statistics.quantiles(self.waits, n=100) if len(self.waits) > 1 else [0.0] * 99
        return {
            "num": self.num, "num_asked_again": self.num_again, "kinds": dict(self.kinds),
            "failed": self.failed, "wrong": self.wrong(self._clients.right),
            "wait_s": {"p50": waits[49], "p99": waits[98], "most": max(self.waits, default=0.0)},
            "idle_s": idle_s, "left": left,
        }  # fmt: skip


def ended(figures: dict[str, Any], options: argparse.Namespace, name: str) -> int:
    """Print and write figures; the exit code: 0 if nothing failed, was wrong or is left."""
    for title in ("failed", "wrong"):
        for line in figures[title][:20]:
            print(f"{title}: {line}")
    for title, value in figures.items():
        if title not in ("faults", "sizes"):
            print(f"{title}: {len(value) if title in ('failed', 'wrong') else value}")
    write(options.json or options.out / name, {"options": shown(options), **figures})
    return int(bool(figures["failed"] or figures["wrong"] or figures["left"]))
