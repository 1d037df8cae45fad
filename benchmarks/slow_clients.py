"""Half-open and trickling connections against a server: are they cut in time, do others suffer?

    python -m benchmarks.slow_clients --url http://127.0.0.1:8000 --num 500 --seconds 300

Usual clients ask before, during and after; the slow ones come back as soon as they are cut. The
limits are read from the server's /config (`router.header_timeout_s`, `router.body_timeout_s`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

BODY = b'{"model": "", "prompt": "hello", "max_tokens": 1, "ignore_eos": true, "stream": true}'
LINE = b"POST /v1/completions HTTP/1.1\r\nhost: slow\r\n"
HEAD = LINE + b"content-type: application/json\r\ncontent-length: 100000\r\n\r\n"
# What a connection sends at once, and then again and again; and which limit should end it.
KINDS: dict[str, tuple[bytes, bytes, str]] = {
    "silent": (b"", b"", "header"),
    "half head": (LINE, b"", "header"),
    "trickled head": (LINE + b"x-slow: ", b"a", "header"),
    "half body": (HEAD + BODY[:20], b"", "body"),
    "trickled body": (HEAD, b" ", "body"),
}
GRACE_S = 5.0  # beyond a limit: the server's own second, and a busy machine
USUAL_PER_S = 5.0


@dataclass(slots=True)
class Slow:
    """What became of the slow connections."""

    lived_s: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    num_open: int = 0
    num_refused: int = 0


async def slow_client(
    kind: str, host: str, port: int, every_s: float, until: float, slow: Slow
) -> None:
    """One connection after the other until `until`; the last one is waited for."""
    first, again, _ = KINDS[kind]
    while time.monotonic() < until:
        began = time.monotonic()
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except OSError:
            slow.num_refused += 1
            await asyncio.sleep(every_s)
            continue
        slow.num_open += 1
        trickle = asyncio.create_task(_trickle(writer, first, again, every_s))
        try:
            while await reader.read(4096):
                pass
        except OSError:  # cut while a byte of ours was on its way
            pass
        trickle.cancel()
        writer.close()
        slow.num_open -= 1
        slow.lived_s[kind].append(time.monotonic() - began)


async def _trickle(writer: asyncio.StreamWriter, first: bytes, again: bytes, each_s: float) -> None:
    try:
        writer.write(first)
        while again:
            await asyncio.sleep(each_s)
            writer.write(again)
            await writer.drain()
    except OSError:
        return


async def usual(url: str, seconds: float) -> dict[str, Any]:
    """Ask at a steady pace, each time over a new connection.

    Returns:
        Milliseconds to the first byte and to the last one.
    """
    times: list[tuple[float, float]] = []
    failed: list[str] = []

    async def ask(session: aiohttp.ClientSession) -> None:
        began = time.monotonic()
        try:
            async with session.post(f"{url}/v1/completions", data=BODY) as response:
                response.raise_for_status()
                await response.content.readany()
                first = time.monotonic()
                await response.read()
            times.append((1e3 * (first - began), 1e3 * (time.monotonic() - began)))
        except (aiohttp.ClientError, TimeoutError) as error:
            failed.append(repr(error))

    connector = aiohttp.TCPConnector(force_close=True)
    headers = {"content-type": "application/json"}
    async with (
        aiohttp.ClientSession(connector=connector, headers=headers) as session,
        asyncio.TaskGroup() as group,
    ):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            group.create_task(ask(session))
            await asyncio.sleep(1 / USUAL_PER_S)
    figures = {"requests": len(times), "failed": failed}
    for name, values in zip(("first_ms", "total_ms"), zip(*times, strict=True), strict=False):
        figures |= {name: _percentiles(values)}
    return figures


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    points = statistics.quantiles(values, n=100) if len(values) > 1 else [*values] * 99
    return {f"p{point}": round(points[point - 1], 1) for point in (50, 90, 99)}


async def measure(
    url: str, num: int, seconds: float, *, beside_s: float, every_s: float
) -> dict[str, Any]:
    """Run it.

    Args:
        url: of the server.
        num: slow connections at any time.
        seconds: for how long they come.
        beside_s: how long usual clients ask alone, before and again after.
        every_s: between two bytes of a trickling connection.
    """
    async with aiohttp.ClientSession() as session, session.get(f"{url}/config") as response:
        config = (await response.json())["config"]["router"]
    host, _, port = url.removeprefix("http://").rpartition(":")
    figures: dict[str, Any] = {"before": await usual(url, beside_s)}
    slow, names = Slow(), list(KINDS)
    until = time.monotonic() + seconds
    tasks = [
        asyncio.create_task(
            slow_client(names[i % len(names)], host, int(port), every_s, until, slow)
        )
        for i in range(num)
    ]
    figures["during"] = await usual(url, seconds)
    limits = {name: float(config[f"{name}_timeout_s"]) for name in ("header", "body")}
    _, late = await asyncio.wait(tasks, timeout=max(limits.values()) + GRACE_S)
    figures["after"] = await usual(url, beside_s)
    figures["slow"] = {
        kind: {
            "limit_s": limits[KINDS[kind][2]],
            "cut": len(lived),
            "lived_s": {"min": round(min(lived), 2), "max": round(max(lived), 2)} if lived else {},
        }
        for kind, lived in slow.lived_s.items()
    }
    figures["refused"], figures["never_cut"] = slow.num_refused, slow.num_open
    for task in late:
        task.cancel()
    return figures


def main() -> int:
    """See the module; the exit code is 1 if a connection was cut late or never."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--num", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--beside", type=float, default=60, help="seconds before and after")
    parser.add_argument("--every", type=float, default=1, help="seconds between two bytes")
    asked = parser.parse_args()
    measured = measure(
        asked.url, asked.num, asked.seconds, beside_s=asked.beside, every_s=asked.every
    )
    figures = asyncio.run(measured)
    print(json.dumps(figures, indent=1))
    kinds = figures["slow"].values()
    in_time = all(k["cut"] and k["lived_s"]["max"] <= k["limit_s"] + GRACE_S for k in kinds)
    return 0 if in_time and not figures["never_cut"] else 1


if __name__ == "__main__":
    sys.exit(main())
