"""Worker: one engine, its thread and its role, as the control plane sees them."""

from __future__ import annotations

from collections.abc import Sequence

from worker.api import Member
from worker.config import WorkerConfig
from worker.engine.engine import build_engine
from worker.loop import DrainAsked, EngineThread, MembersChanged
from worker.registry import resolve

ROLES = {
    "prefill": "worker.prefill:PrefillLoop",
    "decode": "worker.decode:DecodeLoop",
}


class Worker:
    """One worker of one process. The methods are for the control plane's threads.

    Raises from the constructor, which loads everything that `config` names:
        UserError: the configuration, the model directory or a library is at fault.
    """

    def __init__(self, config: WorkerConfig, *, name: str, incarnation: str, host: str) -> None:
        self._name, self._incarnation, self._host = name, incarnation, host
        self.engine = build_engine(config, name=name, host=host)
        self._thread = EngineThread(f"{name}/{incarnation}", self.engine.config.ping)
        role = resolve("role", config.role, ROLES)
        self._loop = role(self.engine, self._thread, incarnation)

    def start(self) -> Member:
        """Begin to serve."""
        metrics_address = self.engine.metrics.serve(self._host)
        address = self._thread.start(self._host, self._loop.turn)
        return self.engine.member(self._name, self._incarnation, address, metrics_address)

    def update_members(self, members: Sequence[Member]) -> None:
        """The control plane's list of live members, whole."""
        self._thread.post(MembersChanged(tuple(members)))

    def drain(self) -> None:
        """Refuse new work; what is here is served to its end."""
        self._thread.post(DrainAsked())

    def idle(self) -> bool:
        """Nothing is held for anybody."""
        return not any(self.counters().values())

    def counters(self) -> dict[str, int]:
        """What is held now; all zero at rest."""
        book = self.engine.book
        return {
            "holds": book.num_holds,
            "reserved_pages": book.num_reserved,
            "private_pages": book.num_private,
            **self._loop.counters(),
        }

    def num_peers(self) -> int:
        """Workers that this one can pull KV from."""
        return self._loop.num_peers()

    def stop(self) -> None:
        """End the loop and give everything back."""
        self._thread.stop()
        self._loop.close()
        self.engine.close()

    def join(self) -> None:
        """Wait until the loop has ended."""
        self._thread.join()
