"""Faults under load: every answer has to be the one of an undisturbed cluster.

    python -m benchmarks.chaos --minutes 20 --out results
    python -m benchmarks.chaos --minutes 2 --roles router --signals stop --stop-s 5 --out results
    python -m benchmarks.chaos --minutes 2 --roles router,decode --keys 1 --out results
    python -m benchmarks.chaos --minutes 2 --roles controller,decode --stop-s 60 --out results
    python -m benchmarks.chaos --minutes 20 --spec chain --out results
    python -m benchmarks.chaos --minutes 20 --set decode.tp=2 --out results

First every request is asked alone, which is what its answer has to be. Then requests of all kinds
arrive at random, and every so often a worker is killed, or stopped for a while. A request fails if
it ends with an error or without its end, and is wrong if its answer is another one. The rate is
--share of what the same clients got through in a closed loop under the same faults, or --rate.

Exits with 1 if a request failed or was wrong, or if anything is left of one. Runs in a network
namespace of its own (root), unless KVLANE_JUDGES_NAMESPACE is set.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from benchmarks.chaos.asks import Answer, Ask, ask, difference, draw_manner, make_asks
from benchmarks.chaos.faults import Cluster, Faults, sizes, told
from benchmarks.judges.served import enter_namespace, serving
from benchmarks.output import parser, shown, write

COUNTED = (
    "kvlane_resumed_total", "kvlane_retries_total", "kvlane_worker_deaths_total",
    "kvlane_preemptions_total", "kvlane_lease_expired_total",
)  # fmt: skip
IDLE_S = 15.0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, or these."""
    made = parser(__doc__)
    add = made.add_argument
    add("--minutes", type=float, default=20, help="of load with faults")
    add("--every", type=float, default=10, help="seconds between two faults")
    add("--roles", default="prefill,decode", help="who is hit: prefill, decode, router, controller")
    add("--signals", default="kill,stop")
    add("--stop-s", type=float, default=5, help="for so long a process is stopped")
    add("--keys", type=float, default=0, help="share of requests with an idempotency key")
    add("--rate", type=float, help="requests a second; default: --share of what is got through")
    add("--share", type=float, default=0.7)
    add("--calibrate-s", type=float, default=60, help="of a closed loop, to find that")
    add("--concurrency", type=int, default=24, help="of the closed loop")
    add("--num", type=int, default=6, help="different requests of each kind")
    add("--timeout-s", type=float, default=120, help="of a request")
    add("--seed", type=int, default=0)
    add("--routers", type=int, default=2)
    add("--prefill", type=int, default=2)
    add("--decode", type=int, default=3)
    add("--model", default="tiny")
    add("--spec", default="none")
    add("--set", action="append", default=[], metavar="A.B=C", help="of the cluster")
    add("--port", type=int, default=8000)
    add("--out", type=Path, required=True, help="folder of the result and the cluster's log")
    return made.parse_args(arguments)


class Ended(NamedTuple):
    """A request that has its answer."""

    what: str  # for people
    number: int  # of what was asked
    answer: Answer
    is_whole: bool


class Load:
    """Requests in flight, and how those that have ended went."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        asks: list[Ask],
        rng: random.Random,
        keys: float = 0.0,
    ) -> None:
        self.num, self.num_again, self.kinds = 0, 0, Counter[str]()
        self._keys = keys  # share of the requests with an idempotency key
        self.waits: list[float] = []  # the longest of each whole stream
        self.failed: list[str] = []
        self._ended: list[Ended] = []
        self._http, self._url = http, url
        self._asks, self._rng = asks, rng

    def wrong(self, *right: dict[int, Answer]) -> list[str]:
        """Answers that are of none of these."""
        differ = [
            (each, [difference(each.answer, of[each.number], whole=each.is_whole) for of in right])
            for each in self._ended
        ]
        return [f"{each.what}: {' / '.join(found)}" for each, found in differ if all(found)]

    async def one(self) -> None:
        """Ask one of the requests in some manner."""
        number, manner = self._rng.randrange(len(self._asks)), draw_manner(self._rng)
        asked, began = self._asks[number], time.strftime("%H:%M:%S")
        key = uuid.uuid4().hex if self._rng.random() < self._keys else ""
        answer = await ask(self._http, self._url, asked, **manner, key=key)
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
                at += self._rng.expovariate(rate)
                await asyncio.sleep(max(0.0, at - time.monotonic()))
                group.create_task(self.one())

    async def closed_loop(self, concurrency: int, until: float) -> float:
        """Requests a second that so many clients get through."""

        async def client() -> None:
            while time.monotonic() < until:
                await self.one()

        began = time.monotonic()
        await asyncio.gather(*(client() for _ in range(concurrency)))
        return self.num / (time.monotonic() - began)


async def undisturbed(http: aiohttp.ClientSession, url: str, asks: list[Ask]) -> dict[int, Answer]:
    """The right answer of each; raises SystemExit where there is none."""
    right = {}
    for number, asked in enumerate(asks):
        right[number] = await ask(http, url, asked)
        if right[number].error:
            raise SystemExit(f"{asked.kind} without faults: {right[number].error}")
    return right


async def processes(cluster: Cluster) -> dict[str, int]:
    """Pids of workers and routers, by name."""
    workers = {row["name"]: row["pid"] for row in await cluster.workers()}
    return workers | await cluster.pids("router")


async def soak(options: argparse.Namespace, url: str) -> dict[str, Any]:
    """Everything from the first request on; returns the figures."""
    rng = random.Random(options.seed)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # each its own connection
    timeout = aiohttp.ClientTimeout(total=options.timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        cluster, asks = Cluster(http, url), make_asks(options.model, options.num, options.seed)
        right = await undisturbed(http, url, asks)
        roles, signals = options.roles.split(","), options.signals.split(",")
        faults = Faults(cluster, roles, signals, options.stop_s, rng)

        async def disturbed(load: Callable[[], Awaitable[Any]]) -> Any:
            hitting = asyncio.create_task(faults.run(options.every, time.monotonic()))
            try:
                return await load()
            finally:
                hitting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await hitting

        rate = options.rate
        first = Load(http, url, asks, rng, options.keys)
        if rate is None:
            until = time.monotonic() + options.calibrate_s
            most = await disturbed(lambda: first.closed_loop(options.concurrency, until))
            rate = options.share * most
            print(f"{most:.2f} requests/s in a closed loop; at {rate:.2f} from now on", flush=True)
            await cluster.wait_idle(60)
        load = Load(http, url, asks, rng, options.keys)
        before, num_before = await cluster.metrics(), len(faults.sent)
        pids = await processes(cluster)
        begun = {pid: sizes(pid) for pid in pids.values()}
        over = asyncio.Event()
        asyncio.get_running_loop().call_later(60 * options.minutes, over.set)
        await disturbed(lambda: load.open_loop(rate, over))
        idle_s, left = await cluster.wait_idle(IDLE_S)
        after = await cluster.metrics()
        pids = await processes(cluster)
    grown = {  # of who lived through it
        name: (begun[pid], sizes(pid)) for name, pid in pids.items() if pid in begun
    }
    sent = faults.sent[num_before:]
    counted = {name: after.get(name, 0) - before.get(name, 0) for name in COUNTED}
    # Each router counts them all; who is stopped for longer than the pings last is dead, too.
    deaths = counted["kvlane_worker_deaths_total"] / options.routers
    hit = sum(fault.name.startswith(("prefill", "decode")) for fault in sent)
    waits = statistics.quantiles(load.waits, n=100) if len(load.waits) > 1 else [0.0] * 99
    return {
        "rate": rate, "num": load.num, "num_asked_again": load.num_again, "kinds": dict(load.kinds),
        "failed": first.failed + load.failed, "wrong": first.wrong(right) + load.wrong(right),
        "wait_s": {"p50": waits[49], "p99": waits[98], "most": max(load.waits, default=0.0)},
        "counters": counted, "deaths_beyond_faults": deaths - hit,
        "num_faults": len(sent), "faults_by_kind": told(sent),
        "faults": [fault._asdict() for fault in sent], "idle_s": idle_s, "left": left,
        "sizes": {
            name: [each and each._asdict() for each in pair] for name, pair in grown.items()
        },
    }  # fmt: skip


def ended(figures: dict[str, Any], options: argparse.Namespace, path: Path) -> int:
    """Print and write figures; the exit code: 0 if nothing failed, was wrong or is left."""
    for title in ("failed", "wrong"):
        for line in figures[title][:20]:
            print(f"{title}: {line}")
    for name, value in figures.items():
        if name not in ("faults", "sizes"):
            print(f"{name}: {len(value) if name in ('failed', 'wrong') else value}")
    write(options.json or path, {"options": shown(options), **figures})
    return int(bool(figures["failed"] or figures["wrong"] or figures["left"]))


def main() -> int:
    """0 if nothing failed, nothing was wrong and nothing is left."""
    options = parse()
    enter_namespace("benchmarks.chaos")
    out = options.out.resolve()
    arguments = [
        "--model", options.model, "--spec", options.spec, "--router", str(options.routers),
        "--prefill", str(options.prefill), "--decode", str(options.decode),
    ]  # fmt: skip
    arguments += [word for each in options.set for word in ("--set", each)]
    with serving(arguments, options.port, keep=out) as url:
        figures = asyncio.run(soak(options, url))
    for name, pair in figures["sizes"].items():
        print(f"{name}, before and after: {pair}")
    return ended(figures, options, out / "chaos.json")


if __name__ == "__main__":
    sys.exit(main())
