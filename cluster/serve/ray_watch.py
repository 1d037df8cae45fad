"""Looks after Ray's own processes: says which one has died and what follows.

What Ray lets one start again is started again: of a Ray of our own the GCS, whose tables are on
disk, and the log monitor; `sites.agent` starts agents. With a raylet the processes of its node end.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from cluster.serve.progress import Screen
from cluster.sites.ray_private import GCS, RAYLET, ended_processes, start_again
from worker.errors import WorldError

LOOK_S = 0.2
ANSWER_S = 1.0  # for a connection
MAX_DELAY_S = 30.0  # between two starts of what does not last
LASTED_S = 60.0
END_S = 10.0  # for calls of Ray to return once it is gone


class RayGone(WorldError):
    """Nothing can be served on this Ray any more."""


class Watched(Protocol):
    """A Ray."""

    def look(self, say: Callable[[str], None]) -> str:
        """Say what has died, and start it again if that can be; why all ends, or ""."""
        ...


class OwnRay:
    """One that this process has started. notes: of agents that have died."""

    def __init__(self, notes: Path) -> None:
        self._notes, self._num_noted = notes, 0
        self._started_at: dict[str, float] = {}
        self._delays_s: dict[str, float] = {}

    def look(self, say: Callable[[str], None]) -> str:
        """As of Watched."""
        noted = self._notes.read_text(encoding="utf-8").splitlines() if self._notes.exists() else []
        for how in noted[self._num_noted :]:
            say(f"an agent of Ray has died ({how}); it is started again, nothing else ends")
        self._num_noted = len(noted)
        ended = ended_processes()
        if RAYLET in ended:
            how = _told(ended[RAYLET])
            return f"Ray's raylet has died ({how}), and with it all workers and routers"
        for kind, code in ended.items():
            now = time.monotonic()
            if now - self._started_at.get(kind, -LASTED_S) < self._delays_s.get(kind, 0.0):
                continue
            lasted = now - self._started_at.get(kind, -LASTED_S) >= LASTED_S
            delay_s = 1.0 if lasted else min(2 * self._delays_s[kind], MAX_DELAY_S)
            self._started_at[kind], self._delays_s[kind] = now, delay_s
            name = "GCS" if kind == GCS else kind.replace("_", " ")
            follows = "workers and routers go on, and who dies is replaced once it is back"
            say(
                f"Ray's {name} has died ({_told(code)}); it is started again"
                + (f", with what it knew: {follows}" if kind == GCS else ", nothing else ends")
            )
            try:
                start_again(kind)
            except OSError as error:
                say(f"Ray's {name} does not start: {error}")
        return ""


class JoinedRay:
    """One that others have started, by the address of its GCS and the socket of our raylet."""

    def __init__(self, address: str, raylet: str) -> None:
        self._address, self._raylet = address, raylet
        self._silent_since = 0.0
        self._asked_at = 0.0

    def look(self, say: Callable[[str], None]) -> str:
        """As of Watched."""
        now = time.monotonic()
        if now - self._asked_at < ANSWER_S:
            return ""
        self._asked_at = now
        if not _answers(socket.AF_UNIX, self._raylet):
            return "this node's raylet has died, and with it all of kvlane on this node"
        host, _, port = self._address.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        answers = _answers(family, (host.strip("[]"), int(port)))
        if answers and self._silent_since:
            say(f"Ray's GCS answers again, after {now - self._silent_since:.0f} s")
            self._silent_since = 0.0
        elif not answers and not self._silent_since:
            self._silent_since = now
            say(
                f"Ray's GCS at {self._address} does not answer. Workers and routers go on, and "
                "who dies is not replaced. If it is not back within 60 s "
                "(RAY_gcs_rpc_server_reconnect_timeout_s), or without its tables, Ray ends them all"
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


def _answers(family: socket.AddressFamily, address: str | tuple[str, int]) -> bool:
    with socket.socket(family) as asked:
        asked.settimeout(ANSWER_S)
        return asked.connect_ex(address) == 0
