"""A small cluster under load, and what goes wrong with it, for every panel to have data."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx

from tests.e2e.harness import REPOSITORY, Serve
from tests.fault.router_doubles import metric

ARGUMENTS = (
    "--router", "2", "--prefill", "2", "--decode", "2",
    "--set", "transport.name=mooncake",
    "--set", "disaggregation.mode=always",
    # Drafts, and ranks that sum.
    "--spec", "chain", "--set", "decode.tp=2",
    # So little room that a burst fills it: refusals, preemptions, and errors after a short wait.
    "--set", "decode.engine.num_pages=160",
    "--set", "decode.engine.max_num_reqs=32",
    "--set", "decode.engine.growth_tokens=16",
    "--set", "decode.engine.max_waiting=8",
    "--set", "router.queue_timeout_s=4",
    "--set", "router.max_inflight=150",
)  # fmt: skip
STEADY = (("--source", "problems", "--rate", "3"),
          ("--source", "shared-prefix:4,96,48,32", "--rate", "1"))  # fmt: skip
LONG_S = 600
NUM_FLOWS = 40  # requests, after which the load has begun
NUM_BURST, BURST_TOKENS = 320, 120  # two bursts of them, at two routers of max_inflight
NUM_GONE = 12  # clients that go away
PAUSE_S = 5.0  # longer than a worker may be silent
TIMEOUT_S = 120.0


@contextmanager
def steady(url: str, *sources: tuple[str, ...]) -> Iterator[None]:
    """While the body runs, loads with these arguments of `bench`; by default STEADY's."""
    usual = (
        "--duration", str(LONG_S), "--max-len", "240", "--processes", "1", "--quiet",
        "--tokenizer", "tiny",
    )  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.load", "run", "--url", url, *usual, *source],
            cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )
        for source in sources or STEADY
    ]  # fmt: skip
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while metric(url, "time_to_first_token_seconds_count{") < NUM_FLOWS:
            assert time.monotonic() < deadline, "the load does not start"
            assert all(each.poll() is None for each in started), "a load ended by itself"
            time.sleep(0.5)
        yield
        assert all(each.poll() is None for each in started), "a load ended by itself"
    finally:
        for each in started:
            each.send_signal(signal.SIGINT)
        for each in started:
            each.wait(TIMEOUT_S)


async def mistakes(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as http:
        for body in ({"model": "other", "prompt": "x"}, {"prompt": "x", "temperature": -1},
                     {"prompt": "x", "max_tokens": 10**6}):  # fmt: skip
            answer = await http.post("/v1/completions", json=body)
            assert 400 <= answer.status_code < 500, answer.text

        async def leave(number: int) -> None:
            body = {"prompt": [9 + number] * 24, "max_tokens": 180, "ignore_eos": True}
            async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as got:
                async for _ in got.aiter_lines():
                    break

        await asyncio.gather(*map(leave, range(NUM_GONE)))


async def burst(url: str) -> Counter[int]:
    """More requests at a time than there is room for: status -> how many."""
    limits = httpx.Limits(max_connections=None)
    made = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False, limits=limits)
    async with made as http:

        async def ask(number: int) -> int:
            body = {"prompt": [7 + number % 900] * 40, "max_tokens": BURST_TOKENS}
            answer = await http.post("/v1/completions", json=body | {"ignore_eos": True})
            return answer.status_code

        return Counter(await asyncio.gather(*map(ask, range(NUM_BURST))))


def pause(serve: Serve, name: str) -> None:
    """Stop a worker for longer than it may be silent, then let it go on."""
    pid = serve.status()[name]["pid"]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(PAUSE_S)
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        print(f"  {name} has been replaced meanwhile", flush=True)


def kill(serve: Serve, name: str) -> None:
    row = serve.status()[name]
    os.kill(row["pid"], signal.SIGKILL)
    serve.wait_status(name, TIMEOUT_S, restarts=row["restarts"] + 1, state="ready")


def disturb(serve: Serve) -> None:
    deeds: tuple[tuple[str, Callable[[], object], float], ...] = (  # the latter: seconds after it
        ("load", lambda: None, 30),
        ("mistakes, clients that go away", lambda: asyncio.run(mistakes(serve.url)), 0),
        ("prefill-0 is silent for a while", lambda: pause(serve, "prefill-0"), 8),
        ("prefill-1 is killed", lambda: kill(serve, "prefill-1"), 8),
        ("decode-0 is killed", lambda: kill(serve, "decode-0"), 8),
        ("decode-1 is silent for a while", lambda: pause(serve, "decode-1"), 8),
        ("a burst", lambda: print("answered with", asyncio.run(burst(serve.url))), 20),
    )
    for text, act, rest_s in deeds:
        print(f"{time.strftime('%X')} {text}", flush=True)
        act()
        time.sleep(rest_s)
