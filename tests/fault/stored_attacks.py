"""Floods at stored responses: large ones shown, continued, referred to, and not read.

    python -m tests.fault.stored_attacks --routers 2
    python -m tests.fault.stored_attacks --steps

At routers in processes of their own, whose worker answers at once: how a well-behaved client and
`/live` fare beside each of them, and how large routers become. `tests.fault.fuzz_http` does the
same to a cluster.
"""

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import threading
import time
from asyncio.events import Handle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tests.e2e.raw import Connection
from tests.fault.http_attacks import MIB, Attack, Made, Row, Sizes, Told, at_once, told
from tests.fault.router_doubles import (
    DecodeDouble,
    connected,
    letter_ids,
    make_model,
    serving,
    speak,
)
from tests.support.bystander import Bystander, Stretch
from tests.support.disturbed import size_of
from tests.support.heads import head, post
from tests.support.routers import sharing
from worker.api import WorkerStats

PATH = "/v1/responses"
NUM_ASKING = 32  # at a time, for what is large
SLOW_S = 5.0  # for which nothing is read
LEAST_S = 3.0
SMALL = {"max_output_tokens": 2}


async def made(port: int, body: Any, tries: int = 5) -> tuple[str, Told]:
    """The name of a new response, "" if it was refused, and what was told."""
    connection = Connection(port)
    await connection.send_raw(post(PATH, json.dumps({**SMALL, **body}).encode()))
    status = await connection.head()
    answer = json.loads(await connection.body())
    connection.drop()
    if status in (429, 503) and tries:
        await asyncio.sleep(1.0)
        return await made(port, body, tries - 1)
    return answer.get("id", ""), (status, 0.0)


def large(num_bytes: int) -> dict[str, Any]:
    """A body whose prompt is short: most of it is what no template writes."""
    half = "x" * (num_bytes // 2)  # of what is shown, of what is not, and of no place in the API
    item = {"role": "user", "content": "a", "id": half, "junk": [[0, [], {}]] * (num_bytes // 60)}
    return {"input": [item], "metadata": {"x": half}}


async def asked(
    port: int, sizes: Sizes, raw: Callable[[str], bytes], body: Any = None, num: int = NUM_ASKING
) -> list[Told]:
    """Many ask at once for something of one large response."""
    name, first = await made(port, body or large(stored_bytes(sizes)))
    if not name:
        return [first]
    asks = await at_once(num, lambda each: told_whole(each, raw(name)), port)
    delete = head("DELETE", f"{PATH}/{name}")
    return [first, *asks, *await at_once(1, lambda each: told(each, delete), port)]


async def told_whole(connection: Connection, raw: bytes) -> Told:
    """As `told`; all of the answer is read."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        await connection.send_raw(raw)
        status = await connection.head()
        while await connection.piece():
            pass
    except (OSError, asyncio.IncompleteReadError):
        status = 0
    connection.drop(reset=True)
    return status, 1e3 * (loop.time() - began)


def stored_bytes(sizes: Sizes) -> int:
    return (sizes.num_large - 1) * MIB  # 3 and 1


def shown(name: str) -> bytes:
    return head("GET", f"{PATH}/{name}")


def listed(name: str) -> bytes:
    return head("GET", f"{PATH}/{name}/input_items")


def continued(name: str, **more: Any) -> bytes:
    body = {**SMALL, "input": "b", "previous_response_id": name, "stream": True, **more}
    return post(PATH, json.dumps(body).encode())


def counted(name: str) -> bytes:
    body = {"previous_response_id": name}
    return post(f"{PATH}/input_tokens", json.dumps(body).encode())


def referred(name: str) -> bytes:
    items = [{"type": "item_reference", "id": f"msg_{name.removeprefix('resp_')}-{i}"}
             for i in range(1000)]  # fmt: skip
    return post(PATH, json.dumps({**SMALL, "input": items}).encode())


async def flood(port: int, sizes: Sizes) -> list[Told]:
    """Bodies of 150 bytes, each of which goes on with what is large."""
    return await asked(port, sizes, continued, num=max(50, sizes.num_streams // 10))


async def many_items(port: int, sizes: Sizes) -> list[Told]:
    items = [{"role": "user", "content": ""}] * (stored_bytes(sizes) // 30)
    return await asked(port, sizes, continued, {"input": items}, num=4)


async def unread(port: int, sizes: Sizes) -> list[Told]:
    """Clients that ask for it, and read nothing."""
    name, first = await made(port, large(stored_bytes(sizes)))
    if not name:
        return [first]
    clients = [connected(f"http://127.0.0.1:{port}", 4096) for _ in range(sizes.num_loris // 5)]
    for client in clients:
        client.sendall(shown(name))
    await asyncio.sleep(min(SLOW_S, sizes.loris_s))
    found = list[Told]()
    for client in clients:
        head = await asyncio.to_thread(client.recv, 4096)
        found.append((int(head.split(b" ")[1]) if head else 0, 0.0))
        client.close()
    return [first, *found]


async def chain(port: int, sizes: Sizes) -> list[Told]:
    """Turn upon turn, each of which has 64 KiB that no template writes."""
    name, found = "", list[Told]()
    for _ in range(sizes.num_large * 25):
        turn = [{"role": "user", "content": "a", "id": "x" * (64 << 10)}]
        more = {"previous_response_id": name} if name else {}
        name, one = await made(port, {"input": turn, **more})
        found.append(one)
        if not name:
            break
    return found


RIGHT = (200, 400, 404, 429, 503)
ATTACKS: tuple[Row, ...] = (
    ("stored: shown", partial(asked, raw=shown), RIGHT),
    ("stored: input_items", partial(asked, raw=listed), RIGHT),
    ("stored: continued by small bodies", partial(asked, raw=continued), RIGHT),
    ("stored: the same, many at once", flood, RIGHT),
    ("stored: counted", partial(asked, raw=counted), RIGHT),
    ("stored: a thousand references", partial(asked, raw=referred, num=4), RIGHT),
    ("stored: many items", many_items, RIGHT),
    ("stored: shown to who does not read", unread, (*RIGHT, 0)),
    ("stored: a long chain", chain, RIGHT),
)


def row(made: Attack) -> str:
    """Of a table."""
    statuses = Counter(status for status, _ in made.told)
    p99, usual = made.beside.percentile(0.99), made.alone.percentile(0.99)
    live_ms = max(made.beside.live_ms, default=0)
    beside = f"p99 {p99:.0f} ms ({p99 / usual:.2f} x), /live {live_ms:.0f} ms"
    return f"{made.name:38} {beside}, {made.sizes}, {dict(sorted(statuses.items()))}"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--alone-s", type=float, default=10.0)
    parser.add_argument("--only", default="", help="of attacks whose names have this")
    parser.add_argument("--steps", action="store_true", help="the loop's CPU time, of one router")
    args = parser.parse_args(argv)
    if args.steps:
        longest_steps([each for each in ATTACKS if args.only in each[0]])
        return 0
    breaches = list[str]()
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        place = make_model(Path(root))
        stats = WorkerStats(max_num_reqs=256, num_free_pages=9999, num_pages=9999)
        double = DecodeDouble(script=speak(letter_ids(place)), stats=stats)
        routers = stack.enter_context(sharing(place, double, num=args.routers))
        bystander = Bystander(routers.url)
        stack.callback(bystander.close)
        bystander.stretch()
        time.sleep(args.alone_s)
        alone = bystander.stretch()
        print(f"alone: {alone}", flush=True)
        of = [each for each in ATTACKS if args.only in each[0]]
        pids = [process.pid for process in routers.processes.values()]
        for made in run_all(of, routers.url, bystander, alone, pids):
            print(row(made), flush=True)
            breaches += [*made.breaches, *made.beside.failed, *made.beside.wrong]
        ended = [name for name, each in routers.processes.items() if not each.is_alive()]
        breaches += [f"{name} has ended" for name in ended]
    print("\n".join(f"BREACH: {each}" for each in breaches))
    return int(bool(breaches))


def longest_steps(rows: Sequence[Row]) -> None:
    """CPU time of the longest step of a router's loop beside each attack, however busy we are."""
    step, longest = Handle._run, dict[str, float]()

    def timed(handle: Handle) -> None:
        began = time.thread_time()
        step(handle)
        name = threading.current_thread().name
        longest[name] = max(longest.get(name, 0.0), time.thread_time() - began)

    with tempfile.TemporaryDirectory() as root:
        place = make_model(Path(root))
        double = DecodeDouble(script=speak(letter_ids(place)))
        with serving(place, double) as (_, url), mock.patch.object(Handle, "_run", timed):
            gc.freeze()  # a router's own heap is small; that of the attacks is not
            for name, made, _ in rows:
                longest.clear()

                async def attack(made: Made = made) -> list[Told]:
                    return await made(int(url.rpartition(":")[2]), Sizes())

                told = asyncio.run(attack())
                statuses = dict(sorted(Counter(status for status, _ in told).items()))
                print(f"{name:38} {1e3 * longest['kvlane-router']:.0f} ms, {statuses}", flush=True)


def run_all(
    rows: Sequence[Row], url: str, bystander: Bystander, alone: Stretch, pids: Sequence[int | None]
) -> Iterator[Attack]:
    """One after another. alone: how the bystander fared."""
    port = int(url.rpartition(":")[2])
    for name, made, expected in rows:
        before, most = resident(pids), list[list[int]]()

        async def run(made: Made = made, most: list[list[int]] = most) -> list[Told]:
            async def look() -> None:
                while True:
                    most.append(resident(pids))
                    await asyncio.sleep(0.1)

            looking, found, began = asyncio.create_task(look()), list[Told](), time.monotonic()
            while not found or time.monotonic() - began < LEAST_S:
                found += await made(port, Sizes())
            looking.cancel()
            return found

        bystander.stretch()
        found = asyncio.run(run())
        peaks = [max(each) for each in zip(before, *most, strict=True)]
        memory = ", ".join(f"{b} to {m} MiB" for b, m in zip(before, peaks, strict=True))
        yield Attack(name, found, bystander.stretch(), alone, memory, expected)


def resident(pids: Sequence[int | None]) -> list[int]:
    """MiB of processes; 0: it has ended."""
    sizes = (size_of(pid or 0, "") for pid in pids)
    return [0 if size is None else size.num_bytes >> 20 for size in sizes]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
