"""Tells all processes who is a member, and what has happened."""

import logging
import time
from collections.abc import Mapping

from cluster.control.replicas import Changes, Replica
from cluster.control.tasks import Background
from cluster.sites.process import Membership, Surroundings
from worker.api import Role

log = logging.getLogger("kvlane.monitor")

PROGRESS_S = 1.0


class Herald:
    """Of one monitor."""

    def __init__(
        self, replicas: Mapping[str, Replica], background: Background, around: Surroundings
    ) -> None:
        self._replicas, self._background = replicas, background
        self._number, self._controller = around.number, around.controller
        self._num_told, self._told_at = 0, 0.0
        self._changes = Changes()

    def announce(self, replica: Replica, state: str, text: str) -> None:
        """A change of one, to all."""
        self._changes.add(replica, state, text)
        self.tell()

    def progress(self) -> None:
        """Routers, at most once in PROGRESS_S, of who starts: people look there."""
        if time.monotonic() - self._told_at >= PROGRESS_S:
            self.tell(only="router")

    def tell(self, only: Role | None = None) -> None:
        """Everybody, or all of one role, of everybody."""
        self._num_told, self._told_at = self._num_told + 1, time.monotonic()
        version = self._number, self._num_told
        # A draining one is a member: it still serves what it has begun.
        members = [r.member for r in self._replicas.values() if r.member is not None]
        starts = [r.start for r in self._replicas.values()]
        starting = [start for start in starts if start is not None]
        staying: set[Role] = {r.role for r in self._replicas.values() if not r.leaving}
        membership = Membership(
            version, members, self._changes.listed(), self._controller, starting, sorted(staying)
        )
        log.debug("members %d.%d: %s", *version, " ".join(m.peer for m in members) or "none")
        for receiver in self._replicas.values():
            process = receiver.reachable if only in (None, receiver.role) else None
            if process is not None and receiver.stopping is None:  # else it may be gone by then
                self._background.spawn(process.update(membership), f"members for {receiver.name}")
