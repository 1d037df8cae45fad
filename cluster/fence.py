"""The fence: a process that is given up is gone before another gets its device."""

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

from cluster.ray_private import RAY, reason_of
from worker.transfer.host import process_stat

log = logging.getLogger("kvlane.fence")

TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Identity:
    """Names one process for ever: a pid is used again, a pid with its start time is not."""

    node_id: str
    node_address: str
    pid: int
    start_ticks: int


def own_identity() -> Identity:
    """Of this process."""
    return Identity(
        node_id=RAY.get_runtime_context().get_node_id(),
        node_address=RAY.util.get_node_ip_address(),
        pid=os.getpid(),
        start_ticks=process_stat(os.getpid()).start_ticks,
    )


async def fence(actor: Any, who: Identity) -> None:
    """Kill an actor's process and make sure, on its own node, that it is gone.

    ray.kill asks the process to end, which a stopped or hung one never does. So a task on its node
    sends SIGKILL to the pid, if that still is the same process, and waits until it is gone. On a
    lost node no task can run. What may be left there uses no device that a new process gets, and
    its messages carry an old incarnation.
    """
    RAY.kill(actor)
    if who.node_id == RAY.get_runtime_context().get_node_id():
        await asyncio.to_thread(kill_for_certain, who.pid, who.start_ticks)
        return
    alive = {row["NodeID"] for row in RAY.nodes() if row["Alive"]}
    if who.node_id not in alive:
        log.warning("pid %d on %s: its node is lost, not fenced", who.pid, who.node_address)
        return
    task = RAY.remote(kill_for_certain).options(
        num_cpus=0,
        max_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(who.node_id, soft=False),
    )
    try:
        gone = await asyncio.wait_for(task.remote(who.pid, who.start_ticks), TIMEOUT_S)
        if not gone:
            log.error("pid %d on %s survives SIGKILL", who.pid, who.node_address)
    except (RayError, TimeoutError) as error:
        log.warning("pid %d on %s not fenced: %s", who.pid, who.node_address, reason_of(error))


def kill_for_certain(pid: int, start_ticks: int) -> bool:
    """SIGKILL the process, on its node, and wait for up to half of TIMEOUT_S.

    Returns whether it is gone.
    """
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
