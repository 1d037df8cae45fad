"""A steady load of requests whose texts are known, and a worker killed under it again and again."""

import asyncio
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest

from benchmarks.train.problems import held_out_problems
from tests.e2e.harness import Serve, processes
from tests.support.asking import Outcome, ask
from tests.support.reference import body_of, reference_texts
from tests.support.scrape import scrape

VICTIM, SURVIVOR = "prefill-0", "decode-0"
COMPUTED = "kvlane_prompt_tokens_computed_total", "prefill", ""
PULLED = "kvlane_kv_pulled_bytes_total"
PAUSE_S = 0.2
TIMEOUT_S = 150.0  # of a request
SLACK_MIB = 512  # what the same processes may hold more at one time than at another

Memory = tuple[int, ...]  # MiB in use, by GPU


def memory_used() -> Memory:
    """Of every GPU, by all processes; read without a CUDA context of our own."""
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return tuple(int(line) for line in done.stdout.split())


@dataclass
class Steady:
    """Streams `num_at_once` held-out problems at any time, over and over, until told to stop."""

    num_problems: int
    max_tokens: int
    num_at_once: int
    ended: list[tuple[int, Outcome]] = field(default_factory=list)  # (problem, how it ended)
    num_begun: int = 0
    stopped: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)  # another one has ended

    async def run(self, url: str) -> None:
        """Until `stopped`, and all that was begun has ended."""
        questions = [problem.question for problem in held_out_problems(self.num_problems)]
        numbers = itertools.cycle(range(self.num_problems))
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
        ) as client:

            async def slot() -> None:
                while not self.stopped:
                    number, outcome = next(numbers), Outcome()
                    self.num_begun += 1
                    body = body_of(number, self.max_tokens)
                    await ask(client, questions[number], body, stream=True, outcome=outcome)
                    self.ended.append((number, outcome))
                    self._news.set()

            await asyncio.gather(*(slot() for _ in range(self.num_at_once)))

    async def more(self, num: int) -> None:
        """Until `num` more have ended; raises TimeoutError if that takes too long."""
        wanted = len(self.ended) + num
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.ended) < wanted:
                self._news.clear()
                await self._news.wait()

    def check(self) -> None:
        """Every one ended, with the text that one process alone would have given."""
        assert self.num_begun == len(self.ended) > 0
        assert {outcome.error for _, outcome in self.ended} == {None}
        texts = reference_texts(self.num_problems, self.max_tokens)
        wrong = [n for n, each in self.ended if (each.text, each.finish_reason) != texts[n]]
        assert wrong == []


@dataclass(frozen=True)
class Killing:
    """A cluster with one prefill and one decode worker whose prefill worker is to be killed."""

    serve: Serve
    load: Steady
    transport: str  # as metrics show it
    memory: Callable[[], Memory]
    timeout_s: float  # of each step of a recovery

    async def repeat(self, num_kills: int) -> None:
        """SIGKILL its last rank under load, each time after all has recovered: its pids
        are gone, a new incarnation computes prompts and decode pulls them, and no GPU holds more
        memory than before the first kill. Prints how long that took."""
        running = asyncio.create_task(self.load.run(self.serve.url))
        try:
            await self.load.more(2 * self.load.num_at_once)
            before = await asyncio.to_thread(self.memory)
            survivor = await self._row(SURVIVOR)
            for _ in range(num_kills):
                print(await self._kill(before), flush=True)
                row = await self._row(SURVIVOR)
                same = ("pid", "incarnation", "restarts")
                assert [row[key] for key in same] == [survivor[key] for key in same]
                assert not running.done(), "the load ended by itself"
        finally:
            self.load.stopped = True
            await running

    async def _kill(self, before: Memory) -> str:
        row, num_ended = await self._row(VICTIM), len(self.load.ended)
        os.kill(row["pids"][-1], signal.SIGKILL)
        began_at = time.monotonic()
        lowest = before
        while True:
            successor, now = await self._row(VICTIM), await asyncio.to_thread(self.memory)
            lowest = tuple(map(min, lowest, now))
            is_new = successor.get("incarnation") != row["incarnation"]
            if is_new and successor.get("state") == "ready":
                break
            if time.monotonic() > began_at + self.timeout_s:
                told = f"MiB were {before}, are {now}; {successor}\n{self.serve.output}"
                pytest.fail(f"{VICTIM} does not come back: {told}")
            await asyncio.sleep(PAUSE_S)
        ready_s, num_served = time.monotonic() - began_at, len(self.load.ended) - num_ended
        assert not set(row["pids"]) & set(processes())
        assert num_served > 0, "decode serves on without a prefill worker"
        await self._used_again()
        used_s = time.monotonic() - began_at
        await self.load.more(2 * self.load.num_at_once)
        after = await self._memory_returned(before)
        num_starts = successor["restarts"] - row["restarts"]
        return (
            f"ready after {ready_s:.1f} s, {num_starts} starts, pulled from after {used_s:.1f} s,"
            f" {num_served} served by then; MiB before, lowest, after: {before}, {lowest}, {after}"
        )

    async def _row(self, name: str) -> dict[str, Any]:
        """Of `status`; empty while there is none."""
        return (await asyncio.to_thread(self.serve.status)).get(name, {})

    async def _used_again(self) -> None:
        """Until the present incarnation, whose counters began at zero, has computed a prompt, and
        decode has pulled more."""
        pulled = None
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                samples = await asyncio.to_thread(scrape, self.serve.url)
            except httpx.TransportError:
                samples = {}  # the router still lists a worker that is gone
            now = samples.get((PULLED, "decode", self.transport))
            pulled = now if pulled is None else pulled
            if samples.get(COMPUTED) and now is not None and pulled is not None and now > pulled:
                return
            assert time.monotonic() < deadline, "the new incarnation is not used"
            await asyncio.sleep(PAUSE_S)

    async def _memory_returned(self, before: Memory) -> Memory:
        """MiB in use once they are those of `before` again, but for SLACK_MIB."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            now = await asyncio.to_thread(self.memory)
            if all(a <= b + SLACK_MIB for a, b in zip(now, before, strict=True)):
                return now
            assert time.monotonic() < deadline, f"MiB in use were {before}, are {now}"
            await asyncio.sleep(PAUSE_S)
