"""Signals to processes of a cluster, and what its processes say of themselves."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

# Gauges that are zero when nobody asks anything.
IDLE = (
    "kvlane_requests_running", "kvlane_requests_waiting", "kvlane_leases",
    "kvlane_kv_pages.reserved", "kvlane_kv_pages.private", "kvlane_state_slots.used",
)  # fmt: skip
STATED = "kvlane_kv_pages", "kvlane_state_slots"
CONTROLLER = "ray::Controller"  # as Ray calls its process


class Fault(NamedTuple):
    """A signal that was sent. at_s: since the load began; stopped_s: 0 for a kill."""

    at_s: float
    name: str
    pid: int
    stopped_s: float


class Cluster:
    """A cluster as its routers tell of it; all its processes are on this machine."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self._url = http, url

    async def workers(self) -> list[dict[str, Any]]:
        """Rows of the dashboard."""
        async with self._http.get(f"{self._url}/dashboard/data") as response:
            return (await response.json())["workers"]

    async def pids(self, role: str) -> dict[str, int]:
        """Of those of a role that are ready and may be hit: nobody is the last of its role."""
        if role == "controller":
            found = {f"controller of pid {pid}": pid for pid in pids_of(CONTROLLER)}
        elif role == "router":  # one that starts takes no connections yet
            listen = listening(int(self._url.rpartition(":")[2]))
            found = {f"router of pid {pid}": pid for pid in listen}
        else:
            rows = await self.workers()
            ready = [row for row in rows if (row["state"], row["role"]) == ("ready", role)]
            found = {row["name"]: row["pid"] for row in ready}
        # There is one controller, and no request is with it.
        return found if len(found) > 1 or role == "controller" else {}

    async def metrics(self) -> dict[str, float]:
        """Sums over all processes, by name and, of pages and slots, state."""
        async with self._http.get(f"{self._url}/metrics/targets") as response:
            groups = await response.json()
        sums: dict[str, float] = {}
        for target in {target for group in groups for target in group["targets"]}:
            async with self._http.get(f"http://{target}/metrics") as response:
                text = await response.text()
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    state = f".{sample.labels['state']}" if sample.name in STATED else ""
                    name = f"{sample.name}{state}"
                    sums[name] = sums.get(name, 0.0) + sample.value
        return sums

    async def wait_idle(self, timeout_s: float) -> tuple[float, dict[str, float]]:
        """(Seconds until all are ready and nothing is left of any request, what is left then)."""
        began = time.monotonic()
        while True:
            left: dict[str, float] = {"unreachable": 1}
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                sums, rows = await self.metrics(), await self.workers()
                left = {name: sums[name] for name in IDLE if sums.get(name)}
                left |= {row["name"]: 1 for row in rows if row["state"] != "ready"}
            took_s = time.monotonic() - began
            if not left or took_s > timeout_s:
                return took_s, left
            await asyncio.sleep(0.5)


class Faults:
    """Hits one process after another, so long as `run` is not cancelled."""

    def __init__(
        self, cluster: Cluster, roles: Sequence[str], signals: Sequence[str], stop_s: float,
        rng: random.Random,
    ) -> None:  # fmt: skip
        self.sent: list[Fault] = []
        self._cluster, self._roles, self._signals = cluster, roles, signals
        self._stop_s, self._rng = stop_s, rng
        self._stopped: set[int] = set()

    async def run(self, every_s: float, began: float) -> None:
        """One fault every so often, of one role after another."""
        waking: set[asyncio.Task[None]] = set()
        try:
            for role in itertools.cycle(self._roles):
                await asyncio.sleep(every_s)
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    pids = await self._cluster.pids(role)
                    pids = {name: pid for name, pid in pids.items() if pid not in self._stopped}
                    if pids:
                        name = self._rng.choice(sorted(pids))
                        waking.add(asyncio.create_task(self._hit(name, pids[name], began)))
        finally:
            for task in waking:
                await task

    async def _hit(self, name: str, pid: int, began: float) -> None:
        stops = self._rng.choice(self._signals) == "stop"
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if stops else signal.SIGKILL)
            at_s = time.monotonic() - began
            self.sent.append(Fault(at_s, name, pid, self._stop_s if stops else 0.0))
            if stops:
                self._stopped.add(pid)
                try:
                    await asyncio.sleep(self._stop_s)
                finally:
                    self._stopped.discard(pid)
                    os.kill(pid, signal.SIGCONT)


def pids_of(title: str) -> list[int]:
    """Of the processes whose command line begins so."""
    every = psutil.process_iter(["cmdline"])
    return [one.pid for one in every if " ".join(one.info["cmdline"] or ()).startswith(title)]


def listening(port: int) -> list[int]:
    """Processes that listen on a TCP port of this network namespace."""
    open_ones = [each for each in psutil.net_connections("tcp") if each.status == "LISTEN"]
    return [each.pid for each in open_ones if each.laddr.port == port and each.pid]


def sizes(pid: int) -> dict[str, float] | None:
    """MiB in memory, descriptors and threads of a process; None: it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        one = psutil.Process(pid)
        rss_mib = round(one.memory_info().rss / 2**20, 1)
        return {"rss_mib": rss_mib, "num_fds": one.num_fds(), "num_threads": one.num_threads()}
    return None


def told(faults: Sequence[Fault]) -> str:
    """How many of what."""
    counts = Counter(
        ("stop " if fault.stopped_s else "kill ") + fault.name.split(" of ")[0].split("-")[0]
        for fault in faults
    )
    return json.dumps(dict(counts))
