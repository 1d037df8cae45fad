"""A well-behaved client in a process of its own, which asks while others misbehave.

    python -m tests.support.bystander URL

First it asks everything once, which is what its answers have to be. For every line that it reads it
then tells how its requests went since the last one, and ends when nothing more comes. Where it is
told to come again later, as all are who have no key when others ask too much, it does as clients of
OpenAI do: how long it took counts from its first try.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from router.observe.stages import FIELDS

REPOSITORY = Path(__file__).resolve().parents[2]
END_S = 10.0
NUM_CLIENTS = 2  # at once
SLOW_SHARE = 0.05  # of requests, of which it is told where their time went
MAX_TOKENS = 6
TIMEOUT_S = 120.0
LIVE_S = 0.05  # between two questions whether the router's loop turns
KEY = "bystander"  # an API key, where there are any
PROMPTS = ("Tom has 3 apples.", "Two and two", "A", "There are 7 pears and 2 plums.")
ALWAYS = {"ignore_eos": True, "return_stages": True}
ASKS: tuple[dict[str, Any], ...] = tuple(
    {"prompt": prompt, "max_tokens": MAX_TOKENS, "seed": 7} | ALWAYS | how
    for prompt in PROMPTS
    for how in ({"temperature": 0}, {"temperature": 0.8, "stream": True})
)


@dataclass
class Stretch:
    """How requests of a stretch of time went."""

    seconds: float = 0.0
    num: int = 0
    num_told_later: int = 0  # 429 or 503 with Retry-After
    failed: list[str] = field(default_factory=list[str])
    wrong: list[str] = field(default_factory=list[str])
    took_ms: list[float] = field(default_factory=list[float])
    live_ms: list[float] = field(default_factory=list[float])  # of /live
    stages_ms: list[dict[str, float]] = field(default_factory=list[dict[str, float]])

    def percentile(self, share: float) -> float:
        """In milliseconds; 0: nothing was asked."""
        ordered = sorted(self.took_ms)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    def told(self, choices: Sequence[dict[str, Any]], began: float) -> str:
        """The text of an answer that has come; where its time went is noted."""
        stages = {name.removesuffix("_s"): 1e3 * choices[-1]["stages"][name] for name in FIELDS}
        outside = 1e3 * (time.monotonic() - began) - sum(stages.values())
        self.stages_ms.append(stages | {"outside": outside})
        return "".join(choice["text"] for choice in choices)

    def slow(self) -> str:
        """Where the time of the slowest went, on average; outside: of all that no stage has."""
        rows = sorted(self.stages_ms, key=lambda row: -sum(row.values()))
        rows, sums = rows[: max(1, round(SLOW_SHARE * len(rows)))], Counter[str]()
        for row in rows:
            sums.update(row)
        return ", ".join(f"{name} {ms / len(rows):.0f}" for name, ms in sums.most_common(5))

    def __str__(self) -> str:
        return (
            f"{self.num} requests in {self.seconds:.1f} s, {len(self.failed)} failed, "
            f"{len(self.wrong)} wrong, {self.num_told_later} times told to come later, "
            f"p50 {self.percentile(0.5):.0f} ms, "
            f"p99 {self.percentile(0.99):.0f} ms, most {self.percentile(1):.0f} ms, "
            f"/live at most {max(self.live_ms, default=0):.0f} ms; of the slowest: {self.slow()}"
        )


class Bystander:
    """The process. url: of a cluster that is ready."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.bystander", url],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()  # it knows what is right

    def stretch(self) -> Stretch:
        """How its requests went since the last call."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Stretch(**json.loads(self._read()))

    def close(self) -> None:
        """It has ended after this."""
        self._process.kill()
        self._process.wait(END_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the well-behaved client is gone"
        return line


async def text_of(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], stretch: Stretch
) -> str:
    """The text of one answer; raises if there is none. The stretch gets where its time went."""
    began = time.monotonic()
    until = time.monotonic() + TIMEOUT_S
    while True:
        async with http.post(f"{url}/v1/completions", json=body) as answer:
            raw = await answer.text()
            later = answer.headers.get("retry-after") if answer.status in (429, 503) else None
        if later is None or time.monotonic() > until:
            break
        stretch.num_told_later += 1
        await asyncio.sleep(float(later))
    if answer.status != 200:
        raise ValueError(f"{answer.status}: {raw[:300]}")
    if not body.get("stream"):
        return stretch.told(json.loads(raw)["choices"], began)
    events = [line[6:] for line in raw.split("\n") if line.startswith("data: ")]
    if events[-1:] != ["[DONE]"]:
        raise ValueError(f"cut off: {raw[-300:]}")
    made = [json.loads(each) for each in events[:-1]]
    if any("error" in each for each in made):
        raise ValueError(raw[-300:])
    return stretch.told([choice for each in made for choice in each["choices"]], began)


async def one(
    http: aiohttp.ClientSession, url: str, number: int, right: list[str], stretch: Stretch
) -> None:
    began = time.monotonic()
    try:
        found = await text_of(http, url, ASKS[number], stretch)
    except (ValueError, aiohttp.ClientError, TimeoutError) as error:
        stretch.failed.append(f"{number}: {type(error).__name__} {error}")
    else:
        if found != right[number]:
            stretch.wrong.append(f"{number}: {found!r} in place of {right[number]!r}")
    stretch.num += 1
    stretch.took_ms.append(1e3 * (time.monotonic() - began))


async def main(url: str) -> None:
    loop, over, stretches = asyncio.get_running_loop(), asyncio.Event(), [Stretch()]
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, headers={"x-api-key": KEY}) as http:
        right = [await text_of(http, url, body, stretches[-1]) for body in ASKS]
        print("ready", flush=True)

        async def client(number: int) -> None:
            while not over.is_set():
                await one(http, url, number % len(ASKS), right, stretches[-1])
                number += 1

        async def prober() -> None:
            while not over.is_set():
                began, stretch = time.monotonic(), stretches[-1]
                try:
                    async with http.get(f"{url}/live") as answer:
                        await answer.read()
                except (aiohttp.ClientError, TimeoutError) as error:
                    stretch.failed.append(f"/live: {type(error).__name__} {error}")
                stretch.live_ms.append(1e3 * (time.monotonic() - began))
                await asyncio.sleep(LIVE_S)

        clients = [asyncio.create_task(client(3 * i)) for i in range(NUM_CLIENTS)]
        clients.append(asyncio.create_task(prober()))
        began = time.monotonic()
        while await loop.run_in_executor(None, sys.stdin.readline):
            told, now = stretches[-1], time.monotonic()
            stretches[:] = [Stretch()]
            told.seconds, began = now - began, now
            print(json.dumps(asdict(told)), flush=True)
        over.set()
        await asyncio.gather(*clients)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
