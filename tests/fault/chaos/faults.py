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
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.fault.chaos.schedules import Step, filled

# Gauges that are zero when nobody asks anything.
IDLE = (
    "kvlane_requests_running", "kvlane_requests_waiting", "kvlane_leases",
    "kvlane_kv_pages.reserved", "kvlane_kv_pages.private", "kvlane_state_slots.used",
    "kvlane_state_slots.promised",
)  # fmt: skip
STATED = "kvlane_kv_pages", "kvlane_state_slots"
# Who has no row -> how its command line begins; of Ray's own programs, how their path ends.
TITLES = {
    "controller": "ray::Controller", "agent": "ray::DashboardAgent",
    "environments": "ray::RuntimeEnvAgent", "gcs": "gcs_server", "raylet": "raylet",
}  # fmt: skip
WORKER = "ray::WorkerActor"
POLL_S = 0.1
NEXT_S = 60.0  # for the next process of a name


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

    async def pids(self, role: str, *, every: bool = False) -> dict[str, int]:
        """Of those of a role that are ready and may be hit: unless `every` one is, nobody is the
        last of its role."""
        if role in TITLES:
            found = {f"{role} of pid {pid}": pid for pid in pids_of(TITLES[role])}
        elif role == "router":  # one that starts takes no connections yet
            listen = listening(int(self._url.rpartition(":")[2]))
            found = {f"router of pid {pid}": pid for pid in listen}
        else:
            rows = await self.workers()
            ready = [row for row in rows if (row["state"], row["role"]) == ("ready", role)]
            found = {row["name"]: row["pid"] for row in ready}
        # There is one controller, and no request is with it.
        return found if len(found) > 1 or every or role in TITLES else {}

    async def disturbed(self) -> bool:
        """Whether a worker is not ready."""
        return any(row["state"] != "ready" for row in await self.workers())

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
    """Does one step after another, so long as `run` is not cancelled.

    tell: runs a command of `kvlane`. stop_s: for so long a process is stopped.
    """

    def __init__(
        self, cluster: Cluster, steps: Sequence[Step], stop_s: float, rng: random.Random,
        tell: Callable[..., Coroutine[Any, Any, int]],
    ) -> None:  # fmt: skip
        self.sent: list[Fault] = []
        self.commands: list[tuple[str, int]] = []  # and their exit codes
        self._cluster, self._steps, self._tell = cluster, steps, tell
        self._stop_s, self._rng = stop_s, rng
        self._stopped: set[int] = set()
        self._waking: set[asyncio.Task[None]] = set()
        self._began = 0.0

    async def run(self, every_s: float, began: float) -> None:
        """One step every so often."""
        self._began = began
        try:
            for step in itertools.cycle(self._steps):
                await asyncio.sleep(every_s)
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    await self._do(step)
        finally:
            for task in self._waking:
                await task

    async def _do(self, step: Step) -> None:
        deadline = time.monotonic() + NEXT_S
        while True:
            is_late = time.monotonic() > deadline
            if not step.calm or is_late or not await self._cluster.disturbed():
                break
            await asyncio.sleep(POLL_S)
        with filled(step.fill):
            command = asyncio.create_task(self._tell(*step.run)) if step.run else None
            await asyncio.sleep(step.after_s)
            pids = await self._cluster.pids(step.hit, every=step.all)
            pids = {name: pid for name, pid in pids.items() if pid not in self._stopped}
            if pids:
                names = sorted(pids) if step.all else [self._rng.choice(sorted(pids))]
                before = {*pids.values(), *pids_of(WORKER)}
                for name in names:
                    self._hit(name, pids[name], self._rng.choice(step.how))
                for at in step.again:
                    await self._again(names[0], at, before)
            if step.fill:
                await asyncio.sleep(step.full_s)
        if command is not None:
            self.commands.append((" ".join(step.run), await command))

    async def _again(self, name: str, at: str, before: set[int]) -> None:
        """Kill the next process of a name once it is there."""
        deadline = time.monotonic() + NEXT_S
        while time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            if at == "ready":
                ready = await self._cluster.pids(name.split("-")[0], every=True)
                pids = {pid for each, pid in ready.items() if each == name} - before
            else:
                pids = {*pids_of(WORKER)} - before
            for pid in pids:
                before.add(pid)
                self._hit(name, pid, "kill")
            if pids:
                return

    def _hit(self, name: str, pid: int, how: str) -> None:
        stopped_s = self._stop_s if how == "stop" else 0.0
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if stopped_s else signal.SIGKILL)
            self.sent.append(Fault(time.monotonic() - self._began, name, pid, stopped_s))
            if stopped_s:
                self._waking.add(asyncio.create_task(self._wake(pid)))

    async def _wake(self, pid: int) -> None:
        self._stopped.add(pid)
        try:
            await asyncio.sleep(self._stop_s)
        finally:
            self._stopped.discard(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def pids_of(title: str) -> list[int]:
    """Of the processes whose command line begins so, or whose program is of this name."""
    found = []
    for one in psutil.process_iter(["cmdline"]):
        words = one.info["cmdline"] or [""]
        if words[0].endswith(f"/{title}") or " ".join(words).startswith(title):
            found.append(one.pid)
    return found


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


def kinds(faults: Sequence[Fault]) -> str:
    """How many of what."""
    counts = Counter(
        ("stop " if fault.stopped_s else "kill ") + fault.name.split(" of ")[0].split("-")[0]
        for fault in faults
    )
    return json.dumps(dict(counts))
