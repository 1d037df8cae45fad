"""Worker: one engine, its thread and its role, as the control plane sees them."""

from __future__ import annotations

from collections.abc import Sequence

from worker.api import Member, PullPath
from worker.config import WorkerConfig
from worker.engine.engine import build_engine
from worker.loop import DrainAsked, EngineThread, MembersChanged
from worker.metrics import Progress, untold
from worker.registry import resolve

ROLES = {"prefill": "worker.prefill:PrefillLoop", "decode": "worker.decode:DecodeLoop"}


class Worker:
    """The worker of this process. Control-plane threads call its methods.

    The constructor loads the model and raises:
        UserError: the configuration, the model directory or a library is at fault.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        name: str,
        incarnation: str,
        host: str,
        metrics_port: int = 0,
        progress: Progress = untold,
    ) -> None:
        self._name, self._incarnation, self._host = name, incarnation, host
        self._metrics_port = metrics_port
        self.engine = build_engine(config, name=name, host=host, progress=progress)
        self._thread = EngineThread(f"{name}/{incarnation}", self.engine.config.ping)
        role = resolve("role", config.role, ROLES)
        self._loop = role(self.engine, self._thread, incarnation)

    def start(self) -> Member:
        """Begin to serve; returns the record under which other processes know this worker."""
        metrics_address = self.engine.metrics.serve(
            self._host, self._metrics_port, self._thread.stalled
        )
        address = self._thread.start(self._host, self._loop.turn)
        return self.engine.member(self._name, self._incarnation, address, metrics_address)

    def update_members(self, members: Sequence[Member]) -> None:
        """Hand the loop the control plane's whole list of live members."""
        self._thread.post(MembersChanged(tuple(members)))

    def drain(self) -> None:
        """Refuse new requests; those that are here are served to their end."""
        self._thread.post(DrainAsked())

    def idle(self) -> bool:
        """Whether no request, page or lease is held."""
        return not any(self.counters().values())

    def counters(self) -> dict[str, int]:
        """Number of resources held, by kind; all zero when idle."""
        book = self.engine.book
        return {
            "holds": book.num_holds,
            "reserved_pages": book.num_reserved,
            "private_pages": book.num_private,
            **self._loop.counters(),
        }

    def num_peers(self) -> int:
        """Number of workers that this one can pull KV from."""
        return self._loop.num_peers()

    def measured_paths(self) -> list[PullPath]:
        """Measure the ways from all prefill workers to this decode worker, while it serves."""
        return self._loop.measured_paths()

    def stop(self) -> None:
        """End the loop and free everything."""
        self._thread.stop()
        self._loop.close()
        self.engine.close()

    def join(self) -> None:
        """Wait until the loop has ended."""
        self._thread.join()
