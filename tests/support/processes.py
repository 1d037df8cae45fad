"""Processes for tests that are ready at once: forked from one that has imported what they need.

A spawned process imports torch and the worker anew, which takes seconds of a core.
"""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.support.preloaded"])


def fork(target: Callable[..., None], *args: Any) -> ForkServerProcess:
    """A process that runs the target, and ends with this one."""
    process = FORKED.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def run_ranks(target: Callable[..., None], *args: Any, num_ranks: int) -> None:
    """`target(rank, *args)` in as many processes, to their end; raises what one of them raised."""
    from torch import multiprocessing as torch_processes

    torch_processes.start_processes(target, args, num_ranks, start_method="forkserver")


def on_ranks(num_ranks: int, place: Path, run: Callable[[Any], T]) -> list[T]:
    """What `run` gives for the collective of each of so many ranks, which are threads.

    place: an empty directory, where they meet.
    """
    import torch

    from worker.peers.gloo import GlooCollective

    def rank(number: int) -> T:
        group = GlooCollective(number, num_ranks, torch.device("cpu"), f"file://{place}/rendezvous")
        found = run(group)
        group.close()
        return found

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(rank, range(num_ranks)))


def ensure_servers() -> None:
    """What all processes share is there: a test that counts descriptors begins with it."""
    forkserver.ensure_running()
    resource_tracker.ensure_running()
