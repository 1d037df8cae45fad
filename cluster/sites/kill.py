"""A process that is given up is gone before another gets its device."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.sites.ray_private import RAY, reason_of
from worker.transfer.host import process_stat

log = logging.getLogger("kvlane.kill")

TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Identity:
    """Names one process for ever: a pid is used again, a pid with its start time is not."""

    node_id: str
    node_address: str
    pid: int
    start_ticks: int

    @classmethod
    def own(cls) -> Identity:
        """Of this process."""
        node_id, address = RAY.get_runtime_context().get_node_id(), RAY.util.get_node_ip_address()
        return cls(node_id, address, os.getpid(), process_stat(os.getpid()).start_ticks)


@dataclass(frozen=True, slots=True)
class Rank:
    """One process, by its actor."""

    actor: Any
    process: Identity

    async def kill(self) -> None:
        """Returns when it is gone for certain, or its node is.

        ray.kill asks it to end, which a stopped or hung one never does: so a task on its node sends
        SIGKILL. On a lost node no task runs; what may be left there uses no device that a new
        process gets, and its messages carry an old incarnation.
        """
        RAY.kill(self.actor)
        process = self.process
        where = f"pid {process.pid} on {process.node_address}"
        if process.node_id == RAY.get_runtime_context().get_node_id():
            await asyncio.to_thread(kill_for_certain, process.pid, process.start_ticks)
            return
        if process.node_id not in {row["NodeID"] for row in RAY.nodes() if row["Alive"]}:
            log.warning("%s: its node is lost, so it was not killed", where)
            return
        on_node = NodeAffinitySchedulingStrategy(process.node_id, soft=False)
        options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": on_node}
        task = RAY.remote(kill_for_certain).options(**options)
        try:
            asked = task.remote(process.pid, process.start_ticks)
            if not await asyncio.wait_for(asked, TIMEOUT_S):
                log.error("%s survives SIGKILL", where)
        except (RayError, TimeoutError) as error:
            log.warning("%s was not killed: %s", where, reason_of(error))


def kill_for_certain(pid: int, start_ticks: int) -> bool:
    """SIGKILL a process of this node; whether it is gone within half of TIMEOUT_S."""
    deadline = time.monotonic() + TIMEOUT_S / 2
    while _is_running(pid, start_ticks):
        if time.monotonic() > deadline:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return True


def _is_running(pid: int, start_ticks: int) -> bool:
    """Whether this very process runs; one that has ended and is not reaped yet does not."""
    try:
        stat = process_stat(pid)
    except OSError:
        return False
    return stat.state not in "ZX" and stat.start_ticks == start_ticks
