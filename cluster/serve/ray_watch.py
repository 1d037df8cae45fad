"""Looks after Ray's own processes: says which one has died and what follows.

What Ray lets one start again is started again: of a Ray of our own the GCS, whose tables are on
disk, and the log monitor; `sites.agent` starts agents. With a raylet the processes of its node end.
"""

import contextlib
import errno
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ray.exceptions import RayError

from cluster.serve.progress import Screen
from cluster.sites.ray_private import GCS, RAYLET, ended_processes, hear_again, start_again
from worker.errors import WorldError

LOOK_S = 0.2
ASK_S = 1.0
AGAIN_S = 5.0  # between two starts of a process
NOBODY = errno.ECONNREFUSED, errno.ENOENT
END_S = 10.0  # for calls of Ray to return once it is gone
Say = Callable[[str], None]


class RayGone(WorldError):
    """Nothing can be served on this Ray any more."""


class Watched(Protocol):
    """A Ray."""

    def look(self, say: Say) -> str:
        """Say what has died, and start it again if that can be; why all ends, or ""."""
        ...


@dataclass(slots=True)
class Gcs:
    """The address of one, and whether it answers there."""

    address: str
    silent_since: float = 0.0  # 0: it answers
    asked_at: float = 0.0  # for the last time

    def is_due(self) -> bool:
        """Whether to ask once more."""
        if time.monotonic() - self.asked_at < ASK_S:
            return False
        self.asked_at = time.monotonic()
        return True

    def ask(self, say: Say, follows: str) -> None:
        """Say what follows from its silence, or that it is back, if either is new."""
        now = time.monotonic()
        host, _, port = self.address.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        if _connected(family, (host.strip("[]"), int(port))):
            if not self.silent_since:
                self.silent_since = now
                say(follows)
        elif self.silent_since:
            with contextlib.suppress(RayError):  # not yet
                hear_again()
                say(f"Ray's GCS answers again, after {now - self.silent_since:.1f} s")
                self.silent_since = 0.0


@dataclass(slots=True)
class OwnRay:
    """One that this process has started. notes: of agents that have died."""

    gcs: Gcs
    notes: Path
    _num_noted: int = 0
    _started_at: dict[str, float] = field(default_factory=dict[str, float])

    def look(self, say: Say) -> str:
        """As of Watched."""
        noted = self.notes.read_text(encoding="utf-8").splitlines() if self.notes.exists() else []
        for how in noted[self._num_noted :]:
            say(f"an agent of Ray has died ({how}); it is started again, nothing else ends")
        self._num_noted = len(noted)
        ended = ended_processes()
        if RAYLET in ended:
            how = _told(ended[RAYLET])
            return f"Ray's raylet has died ({how}), and with it all workers and routers"
        if self.gcs.silent_since and self.gcs.is_due():
            self.gcs.ask(say, "")
        now = time.monotonic()
        for kind, code in ended.items():
            if now - self._started_at.get(kind, -math.inf) < AGAIN_S:
                continue
            self._started_at[kind] = now
            follows = "nothing else ends"
            if kind == GCS:
                self.gcs.silent_since = self.gcs.silent_since or now
                follows = "workers and routers go on, who dies is replaced once it answers"
            say(f"Ray's {kind} has died ({_told(code)}); it is started again, {follows}")
            try:
                start_again(kind)
            except OSError as error:
                say(f"Ray's {kind} does not start: {error}")
        return ""


@dataclass(slots=True)
class JoinedRay:
    """One that others have started. raylet: the path of the socket of this node's."""

    gcs: Gcs
    raylet: str

    def look(self, say: Say) -> str:
        """As of Watched."""
        if not self.gcs.is_due():
            return ""
        if _connected(socket.AF_UNIX, self.raylet) in NOBODY:  # a slow one is none
            return "this node's raylet has died, and with it all that `serve` has started"
        self.gcs.ask(
            say,
            f"Ray's GCS at {self.gcs.address} does not answer: workers and routers go on, who dies "
            "is replaced once it answers. Without it Ray ends them all after 60 s "
            "(RAY_gcs_rpc_server_reconnect_timeout_s), at once if it is back without its tables",
        )
        return ""


class RayWatch:
    """Looks at a Ray in a thread of its own, which lives until this process ends.

    A child of Ray's is killed when the thread that has started it ends.
    """

    def __init__(self, ray: Watched, screen: Screen) -> None:
        self.cause = ""  # why all ends
        self._ray, self._screen = ray, screen
        self._is_over, self._looks = False, threading.Lock()
        threading.Thread(target=self._run, name="watch of Ray", daemon=True).start()

    def check(self) -> None:
        """Raises RayGone."""
        if self.cause:
            raise RayGone(self.cause)

    def close(self) -> None:
        """Ray may end from now on."""
        with self._looks:
            self._is_over = True

    def _run(self) -> None:
        while not self._is_over and not self.cause:
            with self._looks:
                if not self._is_over:
                    self.cause = self._ray.look(self._screen.line)
            time.sleep(LOOK_S)
        time.sleep(END_S)
        if self.cause:  # a call of Ray does not return
            self._screen.line(f"error: {self.cause}")
            os._exit(1)
        threading.Event().wait()


def _told(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _connected(family: socket.AddressFamily, address: str | tuple[str, int]) -> int:
    """0, or why not, as of errno."""
    with socket.socket(family) as asked:
        asked.settimeout(ASK_S)
        return asked.connect_ex(address)
