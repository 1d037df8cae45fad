"""EngineThread: the one thread of a worker, its inbox and its sockets.

Everything that changes a worker's state happens inside `turn`. Other threads (sockets, control
plane, connecting helpers) only put events into the inbox.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from worker.api import AnyMessage, Lost, Member, PeerId, WorkerStats
from worker.config import PingConfig
from worker.wire import Wire

log = logging.getLogger("kvlane.loop")

LOCAL: PeerId = ""  # the sender of events that come from this process itself
MAX_IDLE_S = 0.5


@dataclass(slots=True, frozen=True)
class MembersChanged:
    """The control plane's list of live members, whole."""

    members: tuple[Member, ...]


@dataclass(slots=True, frozen=True)
class DrainAsked:
    """Refuse new work; finish what is here."""


LocalEvent = MembersChanged | DrainAsked | object
Incoming = tuple[PeerId, AnyMessage | Lost | LocalEvent]


class EngineThread:
    """Runs `turn(events) -> idle_s` until stopped.

    `turn` handles events, does at most one step, and says how long to wait for an event before the
    next turn (0 = not at all). It leaves in `stats` what Pongs are to carry.

    Args:
        me: this worker's PeerId.
        ping: liveness settings of the sockets.
    """

    def __init__(self, me: PeerId, ping: PingConfig) -> None:
        self.me = me
        self.stats = WorkerStats()
        self._inbox: SimpleQueue[Sequence[Incoming]] = SimpleQueue()
        self._wire = Wire(me, ping, self._inbox.put, lambda: self.stats)
        self.send = self._wire.send
        self.connect = self._wire.connect
        self.disconnect = self._wire.disconnect
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self, host: str, turn: Callable[[list[Incoming]], float]) -> str:
        """Open the sockets, start the thread; the address that peers connect to."""
        address = self._wire.start(host)
        self._thread = threading.Thread(
            target=self._run, args=(turn,), name="kvlane-engine", daemon=True
        )
        self._thread.start()
        return address

    def post(self, event: LocalEvent) -> None:
        """Hand an event to the loop, from any thread."""
        self._inbox.put([(LOCAL, event)])

    def stop(self) -> None:
        """End the thread after its current turn, then close the sockets."""
        self._stopping = True
        self._inbox.put([])
        self.join()
        self._wire.close()

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, turn: Callable[[list[Incoming]], float]) -> None:
        idle_s = 0.0
        try:
            while not self._stopping:
                events = self._receive(idle_s)
                self._wire.beat()
                idle_s = turn(events)
        except BaseException:
            # A bug of ours: the process must not linger half alive. The controller makes a new one.
            log.critical("engine of %s failed", self.me, exc_info=True)
            logging.shutdown()
            os._exit(1)

    def _receive(self, idle_s: float) -> list[Incoming]:
        events: list[Incoming] = []
        try:
            if idle_s > 0:
                events.extend(self._inbox.get(timeout=min(idle_s, MAX_IDLE_S)))
            while True:
                events.extend(self._inbox.get_nowait())
        except Empty:
            return events
