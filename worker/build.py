"""A worker by its role."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from worker.api import Member
from worker.config import WorkerConfig
from worker.registry import resolve


class Worker(Protocol):
    """What the control plane sees of a worker; see PrefillWorker and DecodeWorker."""

    def start(self) -> Member: ...

    def update_members(self, members: Sequence[Member]) -> None: ...

    def drain(self) -> None: ...

    def idle(self) -> bool: ...

    def counters(self) -> dict[str, int]: ...

    def stop(self) -> None: ...

    def join(self) -> None: ...


WORKERS = {
    "prefill": "worker.prefill:PrefillWorker",
    "decode": "worker.decode:DecodeWorker",
}


def build_worker(config: WorkerConfig, *, name: str, incarnation: str, host: str) -> Worker:
    """Load everything that `config` names; `start` then begins to serve.

    Raises:
        UserError: the configuration, the model directory or a library is at fault.
    """
    worker = resolve("role", config.role, WORKERS)
    return worker(config, name=name, incarnation=incarnation, host=host)
