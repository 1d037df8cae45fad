"""EngineThread: the thread that runs a worker's loop, with its inbox and the wire to its peers.

Only `turn` changes a worker's state. Other threads (the wire's I/O thread, control-plane calls,
threads that dial a peer) put events into the inbox and read counters.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NoReturn, Protocol

from msgspec.structs import replace

from worker.api import Card, Member, PeerId, WorkerStats
from worker.config import PingConfig
from worker.errors import PeerLost
from worker.keyring import Keyring
from worker.observe.paths import PullPath
from worker.wire import Wire

log = logging.getLogger("kvlane.loop")

LOCAL: PeerId = ""  # the sender of events that come from this process itself
MAX_IDLE_S = 0.5


@dataclass(slots=True, frozen=True)
class MembersChanged:
    """Event: the control plane's whole list of live members."""

    members: tuple[Member, ...]


@dataclass(slots=True, frozen=True)
class DrainAsked:
    """Event: refuse new requests and finish those that are here."""


Incoming = tuple[PeerId, object]  # the sender and its message, or LOCAL and an event


class Role(Protocol):
    """The loop of a prefill or a decode worker, which an engine thread runs."""

    def turn(self, events: list[Incoming]) -> float:
        """Handle events, launch and settle one step at most; returns how long it can idle, in s.

        The next turn starts when an event arrives, or after that time (MAX_IDLE_S at most). It sets
        EngineThread.stats, which every Pong carries.
        """
        ...

    def counters(self) -> dict[str, int]:
        """Resources held, by kind; all zero when idle. Threads of the control plane read it."""
        ...

    def measured_paths(self) -> list[PullPath]:
        """Measure the ways from all prefill workers that it pulls from, while it serves."""
        return []

    def close(self) -> None:
        """Close all that the engine does not."""


class EngineThread:
    """Runs the turns of a `Role` until stopped.

    Liveness. A turn is a beat of the wire if there was no work (`stats.has_work`), or if a step has
    settled since the last beat. So an engine that turns and gets nowhere is lost like one
    that hangs or is dead, and a saturated one, whose steps settle, is not.
    """

    def __init__(self, me: PeerId, ping: PingConfig, keyring: Keyring | None = None) -> None:
        self.me = me
        self.stats = WorkerStats()
        self._card: Card | None = None
        self._inbox: SimpleQueue[Sequence[Incoming]] = SimpleQueue()
        self._wire = Wire(me, ping, self._inbox.put, self._told, keyring)
        self.key, self.refusals = self._wire.key, self._wire.refusals
        self.admit = self._wire.admit
        self.send = self._wire.send
        self.connect = self._wire.connect
        self.disconnect = self._wire.disconnect
        self._num_steps = 0  # settled at the last beat
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self, host: str, turn: Callable[[list[Incoming]], float]) -> str:
        """Open the sockets and start the thread; returns the address that peers connect to."""
        address = self._wire.start(host)
        self._thread = threading.Thread(
            target=self._run, args=(turn,), name="kvlane-engine", daemon=True
        )
        self._thread.start()
        return address

    def note_card(self, card: Card) -> bool:
        """Tell it in Pongs from now on, from any thread; False once the thread is to end."""
        self._card = card
        return not self._stopping

    def _told(self) -> WorkerStats:
        return self.stats if self._card is None else replace(self.stats, card=self._card)

    def post(self, event: object) -> None:
        """Hand an event to the loop, from any thread."""
        self._inbox.put([(LOCAL, event)])

    def wake(self) -> None:
        """Begin a turn at once, from any thread."""
        self._inbox.put([])

    def stop(self) -> None:
        """End the thread after its current turn, then close the sockets."""
        self._stopping = True
        self.wake()
        self.join()
        self._wire.close()

    def stalled(self) -> str:
        """Say why this worker is not live; "" if it is. For any thread."""
        stalled_s = self._wire.stalled_s
        return f"no step has settled for {stalled_s:.0f} s while work waits" if stalled_s else ""

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the thread has ended; whether it has."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, turn: Callable[[list[Incoming]], float]) -> None:
        idle_s = 0.0
        try:
            while not self._stopping:
                events = self._receive(idle_s)
                self._beat()
                idle_s = turn(events)
        except PeerLost as error:
            log.critical("%s ends, for another rank of it has: %s", self.me, error)
            self._die()
        except BaseException:
            log.critical("engine of %s failed", self.me, exc_info=True)
            self._die()

    def _die(self) -> NoReturn:
        """A half-alive process must not stay. The controller starts a new one."""
        logging.shutdown()
        os._exit(1)

    def _beat(self) -> None:
        if not self.stats.has_work or self.stats.num_steps != self._num_steps:
            self._num_steps = self.stats.num_steps
            self._wire.beat()

    def _receive(self, idle_s: float) -> list[Incoming]:
        events: list[Incoming] = []
        try:
            if idle_s > 0:
                events.extend(self._inbox.get(timeout=min(idle_s, MAX_IDLE_S)))
            while True:
                events.extend(self._inbox.get_nowait())
        except Empty:
            return events
