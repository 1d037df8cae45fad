"""Files that show whether their owner lives: it holds a lock on them, which ends with it.

Not a pid: containers and pid namespaces that share a directory do not share pids.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from worker.errors import UserError

log = logging.getLogger("kvlane.owned")

PREFIX = "kvlane-ray"  # NUM_RANDOM characters of mkdtemp follow
NUM_RANDOM = 8


@dataclass(frozen=True, slots=True)
class Running:
    """What `serve` tells other commands about itself."""

    pid: int
    address: str  # of the Ray cluster
    local: bool  # started by this serve, on 127.0.0.1
    auth_mode: str  # RAY_AUTH_MODE of it
    urls: tuple[str, ...]


class OwnedDirectory:
    """A fresh directory for Ray's files, itself locked: it is owned from its first moment to its
    last. Removed by `remove`, or by the next start after a kill.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls, root: Path) -> OwnedDirectory:
        """A new one below `root`. Those that killed processes of this user left are removed."""
        root.mkdir(parents=True, exist_ok=True)
        for path in root.glob(PREFIX + "?" * NUM_RANDOM):
            _remove_unless_held(path)
        while True:
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
            lock = _open(path)
            if lock is None:  # another start has found it without a lock
                continue
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return cls(path, lock)
            os.close(lock)

    def remove(self) -> None:
        """Delete it with all that is in it; a second call does nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # gone, another user's, or a file
        return None


def _remove_unless_held(path: Path) -> None:
    lock = _open(path)
    if lock is None:
        return
    try:
        if os.fstat(lock).st_uid == os.getuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            log.info("removing %s: its serve was killed", path)
            shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        pass  # its owner lives
    finally:
        os.close(lock)


class NothingRuns(UserError):
    """There is no kvlane to talk to."""


class StateFile:
    """Where `status` and `drain` find a running `serve` of this user."""

    def __init__(self, runtime_dir: Path) -> None:
        runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix="serve-", suffix=".json", dir=runtime_dir)
        os.close(handle)
        self.path = Path(name)
        self._lock = _hold(self.path)

    def write(self, running: Running) -> None:
        """Say what runs."""
        self.path.write_text(msgspec.json.encode(running).decode(), encoding="utf-8")

    def remove(self) -> None:
        """Nothing runs any more; a second call does nothing."""
        if self._lock >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1


def find_running(runtime_dir: Path, address: str = "") -> Running:
    """The one `serve` that runs here, or the one on the Ray cluster at `address`.

    Raises:
        NothingRuns: there is none.
        UserError: there is more than one.
    """
    found = [r for r in all_running(runtime_dir) if address in ("", r.address)]
    if not found:
        raise NothingRuns("no kvlane runs here; give the Ray cluster with --address HOST:PORT")
    if len(found) > 1:
        rows = "\n".join(f"  --address {r.address}  ({' '.join(r.urls)})" for r in found)
        raise UserError(f"more than one kvlane runs here, choose one:\n{rows}")
    return found[0]


def all_running(runtime_dir: Path) -> list[Running]:
    """Every `serve` of this user; the files of dead ones are removed."""
    found: list[Running] = []
    for path in sorted(runtime_dir.glob("serve-*.json")):
        if not is_held(path):
            path.unlink(missing_ok=True)
        elif text := path.read_text(encoding="utf-8"):
            found.append(msgspec.json.decode(text, type=Running))
    return found


def is_held(path: Path) -> bool:
    """Whether a live process holds the lock of this file."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def _hold(path: Path) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle
