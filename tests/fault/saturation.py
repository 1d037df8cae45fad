"""Hold a cluster saturated and ask for its liveness all the while; then stop one of its engines.

A saturated engine has to stay live. One that was stopped (SIGSTOP) has to be not live within
seconds, and is replaced.
"""

import asyncio
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx

from tests.e2e.harness import Serve
from tests.support.patience import HANG_S
from tests.support.patience import until as wait_until

NUM_CLIENTS = 72  # more than a decode worker on a CPU has rows
PROMPT = list(range(5, 37))
MAX_TOKENS = 24
PROBE_S = 0.25
WAITING = "kvlane_requests_waiting{"


@dataclass
class Record:
    num_answers: int = 0
    bad_answers: Counter[str] = field(default_factory=Counter[str])
    num_probes: int = 0
    not_live: Counter[str] = field(default_factory=Counter[str])
    most_waiting: float = 0.0  # requests without a row, at one worker

    def goes_on(self, until: float) -> bool:
        """Whether it is not over yet, or nobody has been seen to wait, which takes time."""
        now = time.monotonic()
        return now < until or (not self.most_waiting and now < until + HANG_S)


async def saturate(url: str, seconds: float) -> Record:
    """Ask more than the cluster at `url` can do, and probe the router and every worker."""
    record, until = Record(), time.monotonic() + seconds
    async with httpx.AsyncClient(timeout=HANG_S, limits=httpx.Limits(max_connections=None)) as http:
        clients = [_ask(http, url, i, until, record) for i in range(NUM_CLIENTS)]
        await asyncio.gather(_probe(http, url, until, record), *clients)
    return record


async def _ask(
    http: httpx.AsyncClient, url: str, number: int, until: float, record: Record
) -> None:
    while record.goes_on(until):
        number += NUM_CLIENTS
        prompt = [5 + number % 1000, *PROMPT]  # no two share a prefix
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True}
        answer = await http.post(f"{url}/v1/completions", json=body)
        record.num_answers += 1
        whole = answer.status_code == 200 and answer.json()["usage"]["completion_tokens"]
        if whole != MAX_TOKENS:
            record.bad_answers[f"{answer.status_code}: {answer.text[:80]}"] += 1


async def _probe(http: httpx.AsyncClient, url: str, until: float, record: Record) -> None:
    targets = (await http.get(f"{url}/metrics/targets")).json()
    workers = {
        each["labels"]["worker"]: f"http://{each['targets'][0]}"
        for each in targets
        if each["labels"]["role"] != "router"
    }
    while record.goes_on(until):
        said = (await http.get(f"{url}/live")).json()["workers"]
        for name, address in workers.items():
            own = await http.get(f"{address}/live")
            record.num_probes += 1
            if own.status_code != 200 or said.get(name) != "live":
                record.not_live[f"{name}: {said.get(name)}, {own.text}"] += 1
            page = (await http.get(f"{address}/metrics")).text
            lines = [line for line in page.splitlines() if line.startswith(WAITING)]
            waiting = max((float(line.split()[-1]) for line in lines), default=0.0)
            record.most_waiting = max(record.most_waiting, waiting)
        await asyncio.sleep(PROBE_S)


def stop_engine(serve: Serve, name: str) -> tuple[float, float]:
    """SIGSTOP a worker; seconds until /live does not call it live, and until another is ready."""
    row, began_at = serve.status()[name], time.monotonic()

    def is_live() -> bool:
        return httpx.get(f"{serve.url}/live").json()["workers"].get(name) == "live"

    os.kill(row["pid"], signal.SIGSTOP)
    wait_until(lambda: not is_live(), "it is called live")
    not_live_s = time.monotonic() - began_at
    serve.wait_status(name, restarts=row["restarts"] + 1, state="ready")
    replaced_s = time.monotonic() - began_at
    wait_until(is_live, "it is not called live")
    return not_live_s, replaced_s
