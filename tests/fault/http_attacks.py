"""Floods of large things at a router: what each is told and when, and how others fare meanwhile."""

import asyncio
import contextlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from urllib.request import urlopen

from tests.e2e.raw import Connection
from tests.support.bystander import MAX_TOKENS, Stretch
from tests.support.disturbed import Watched
from tests.support.heads import KEY, head, post
from tests.support.patience import HANG_S

PATH = "/v1/completions"
MIB = 1 << 20
ELSEWHERE = "127.0.0.2"  # another client's address
NUM_HONEST = 64  # connections: as many as a worker has rows
LIMITED = b"limited"  # a key that may have few requests at a time, where there are keys
Told = tuple[int, float]  # a status (0: cut off without one), and after how many ms it came


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    num_loris: int = 1000
    loris_s: float = 10.0
    num_large: int = 4  # at a time, of bodies and of heads
    body_mib: int = 100
    head_bytes: int = MIB
    num_levels: int = 100_000
    num_streams: int = 10_000
    stream_tokens: int = 16
    least_s: float = 3.0  # for which what is quick is done again and again
    num_bodies: int = 80  # that are long
    wait_s: float = 20.0  # for an answer to what never ends
    values_mib: int = 31
    num_grammars: int = 4
    num_background: int = 600
    num_keyed: int = 64
    keyed_tokens: int = 300


BRIEF = Sizes(
    num_loris=100,
    loris_s=1.0,
    num_large=2,
    num_streams=200,
    stream_tokens=4,
    least_s=0.3,
    num_bodies=4,
    wait_s=1.0,
    values_mib=1,
    num_grammars=1,
    num_background=40,
    num_keyed=4,
    keyed_tokens=20,
)


@dataclass(frozen=True, slots=True)
class Attack:
    """How one went."""

    name: str
    told: list[Told]
    beside: Stretch
    alone: Stretch
    sizes: str  # of processes
    expected: tuple[int, ...]  # statuses that are right
    honest: Stretch | None = None  # beside another who asks for as much, in small requests

    @property
    def breaches(self) -> list[str]:
        """Answers that are not as they should be."""
        odd = Counter(status for status, _ in self.told if status not in self.expected)
        return [f"{self.name}: {num} times {status}" for status, num in odd.items()]

    def __str__(self) -> str:
        parts = []
        for status, num in sorted(Counter(status for status, _ in self.told).items()):
            took = sorted(ms for each, ms in self.told if each == status)
            p99 = took[min(len(took) - 1, int(0.99 * len(took)))]
            span = f"{took[0]:.0f} to {took[-1]:.0f} ms, p99 {p99:.0f}"
            parts.append(f"{num} times {status or 'cut off'} after {span}")
        lines = [f"client, beside: {self.beside}", f"p99 {self._over(self.alone)} alone"]
        if self.honest is not None:
            lines[-1] += f", {self._over(self.honest)} beside honest work: {self.honest}"
        lines.append(self.sizes)
        return "\n  ".join([f"{self.name}: {'; '.join(parts)}", *lines])

    def _over(self, other: Stretch) -> str:
        return f"{self.beside.percentile(0.99) / (other.percentile(0.99) or 1):.2f} x"


async def told(connection: Connection, *parts: bytes) -> Told:
    """What comes when these are sent, one after another; it ends sooner if that comes sooner."""
    began = time.monotonic()

    async def send() -> None:
        for part in parts:
            await connection.send_raw(part)

    await connection.send_raw(b"")  # it is connected
    sending = asyncio.create_task(send())
    try:
        status = await asyncio.wait_for(connection.head(), HANG_S)
    except (OSError, asyncio.IncompleteReadError):
        status = 0
    took_ms = 1e3 * (time.monotonic() - began)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    connection.drop(reset=True)
    return status, took_ms


async def at_once(
    num: int,
    one: Callable[[Connection], Awaitable[Told]],
    port: int,
    limit: int = 500,
    *,
    source: str = "",
) -> list[Told]:
    """So many clients, of which `limit` connect at a time, from an address."""
    slots = asyncio.Semaphore(limit)

    async def client() -> Told:
        connection = Connection(port, source)
        async with slots:
            await connection.send_raw(b"")
        return await one(connection)

    return list(await asyncio.gather(*(client() for _ in range(num))))


async def loris(port: int, sizes: Sizes) -> list[Told]:
    """Heads that come byte by byte; meanwhile one request after another is answered as always."""
    over = asyncio.Event()

    async def slow(connection: Connection) -> Told:
        with contextlib.suppress(OSError):  # cut off: on a slow machine its head took too long
            await connection.send_raw(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx: ")
            while not over.is_set():
                await connection.send_raw(b"a")
                await asyncio.sleep(0.5)
        connection.drop(reset=True)
        return 200, 0.0

    async def ask(connection: Connection) -> Told:
        return await told(connection, head("GET", "/v1/models"))

    slow_ones = asyncio.create_task(at_once(sizes.num_loris, slow, port))
    found: list[Told] = []
    began = time.monotonic()
    while time.monotonic() - began < sizes.loris_s:
        found += await at_once(1, ask, port)
        await asyncio.sleep(0.05)
    over.set()
    await slow_ones
    return found


async def large_bodies(port: int, sizes: Sizes) -> list[Told]:
    """Each says how large it is."""
    size = sizes.body_mib * MIB
    begun = head("POST", PATH, b"content-length: %d" % size)
    parts = [begun, *[bytes(MIB)] * sizes.body_mib]
    return await at_once(sizes.num_large, lambda each: told(each, *parts), port)


async def large_chunked_bodies(port: int, sizes: Sizes) -> list[Told]:
    """None says how large it is."""
    begun = head("POST", PATH, b"transfer-encoding: chunked")
    chunk = b"%x\r\n%b\r\n" % (MIB, bytes(MIB))
    parts = [begun, *[chunk] * sizes.body_mib, b"0\r\n\r\n"]
    return await at_once(sizes.num_large, lambda each: told(each, *parts), port)


async def large_heads(port: int, sizes: Sizes) -> list[Told]:
    """Many fields."""
    fields = [b"x-%d: %b" % (i, b"a" * 1000) for i in range(sizes.head_bytes // 1000)]
    return await at_once(
        sizes.num_large, lambda each: told(each, head("POST", PATH, *fields)), port
    )


async def deep_bodies(port: int, sizes: Sizes) -> list[Told]:
    """Lists in lists."""
    num = sizes.num_levels
    body = b'{"model": "tiny", "prompt": ' + b"[" * num + b"]" * num + b"}"
    return await at_once(sizes.num_large, lambda each: told(each, post(PATH, body)), port)


async def streams(port: int, sizes: Sizes, key: bytes = KEY) -> list[Told]:
    """All at once, each for little; who is not refused gets its first token and leaves."""
    body = {"model": "tiny", "prompt": "hello", "stream": True, "max_tokens": sizes.stream_tokens}
    raw = post(PATH, json.dumps(body | {"ignore_eos": True}).encode(), key=key)
    return await at_once(sizes.num_streams, lambda each: told(each, raw), port)


Made = Callable[[int, Sizes], Awaitable[list[Told]]]
Row = tuple[str, Made, tuple[int, ...]]  # of the last one each status is right
Rows = Sequence[Row]
ATTACKS: Rows = (
    ("slow heads, others' requests", loris, (200,)),
    ("large bodies", large_bodies, (413,)),
    ("large bodies in chunks", large_chunked_bodies, (413, 429)),
    ("large heads", large_heads, (400, 431, 0)),
    ("deep bodies", deep_bodies, (400,)),
    ("streams", streams, (200, 429, 503)),
    ("streams of a limited key", partial(streams, key=LIMITED), (200, 429, 503)),
)


async def honest(port: int, num: int, num_tokens: int, seconds: float) -> None:
    """One client asks for so many tokens in as many requests, evenly over a time or later."""
    body = {"model": "tiny", "prompt": "a", "max_tokens": max(1, num_tokens // max(1, num))}
    raw = post(PATH, json.dumps(body | {"ignore_eos": True}).encode())
    began, numbers = time.monotonic(), iter(range(num))

    async def client() -> None:
        connection = Connection(port, ELSEWHERE)
        for i in numbers:
            await asyncio.sleep(began + i * seconds / num - time.monotonic())
            await connection.send_raw(raw)
            await connection.head()
            await connection.body()
        connection.drop()

    await asyncio.gather(*(client() for _ in range(NUM_HONEST)))


def _ended(url: str) -> tuple[int, int]:
    """Choices that have ended, and their tokens."""
    page = urlopen(f"{url}/metrics", timeout=HANG_S).read().decode()
    patterns = r"requests_total\{.*(?:length|stop).*", r"generation_tokens_total\b.*"
    rows = (re.findall(rf"^kvlane_{each} (\S+)$", page, re.MULTILINE) for each in patterns)
    choices, tokens = (round(sum(map(float, values))) for values in rows)
    return choices, tokens


def attack(
    watched: Watched,
    sizes: Sizes = Sizes(),
    attacks: Rows = ATTACKS,
    *,
    twin: bool = False,
    port: int | None = None,
) -> Iterator[Attack]:
    """All of them, one after another. On few cores their own work must not slow others down.

    twin: afterwards somebody honest asks for what each was served, as fast. port: of another
    cluster, where attacks go to; None: to the one that is watched.
    """
    for name, made, expected in attacks:
        watched.rest()

        async def run(made: Made = made) -> list[Told]:
            looking = asyncio.create_task(_look(watched))
            found, began = list[Told](), time.monotonic()
            while not found or time.monotonic() - began < sizes.least_s:
                found += await made(watched.serve.port if port is None else port, sizes)
            looking.cancel()
            return found

        num_stretches = len(watched.beside)
        before = _ended(watched.serve.url) if twin else (0, 0)
        with giving_way():
            found = asyncio.run(run())
        beside, grown, company = watched.noted(), watched.grown(), None
        if twin:
            watched.rest()  # what nobody waits for ends, too
            own = sum(stretch.num for stretch in watched.beside[num_stretches:])
            num, tokens = (b - a for a, b in zip(before, _ended(watched.serve.url), strict=True))
            num, tokens = max(1, num - own), tokens - MAX_TOKENS * own
            with giving_way():
                asyncio.run(honest(watched.serve.port, num, tokens, beside.seconds))
            company = watched.noted()
        yield Attack(name, found, beside, watched.undisturbed, grown, expected, company)


@contextlib.contextmanager
def giving_way() -> Iterator[None]:
    """During the body; only root comes back from it. Clusters that are started later inherit it."""
    before = os.nice(0)
    os.nice(10)
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, before)


async def _look(watched: Watched) -> None:
    while True:
        watched.look()
        await asyncio.sleep(0.2)
