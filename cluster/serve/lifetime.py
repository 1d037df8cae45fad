"""Files that show whether their `serve` lives: it holds a lock on them, which ends with it.

Not a pid: containers and pid namespaces that share a directory do not share pids.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from worker.errors import UserError

log = logging.getLogger("kvlane.lifetime")

PREFIX = "kvlane-ray"  # NUM_RANDOM characters of mkdtemp follow
NUM_RANDOM = 8


class NothingRuns(UserError):
    """There is no kvlane to talk to."""


@dataclass(frozen=True, slots=True)
class Running:
    """What `serve` tells other commands about itself."""

    pid: int
    address: str  # of the Ray cluster
    local: bool  # started by this serve, on 127.0.0.1
    auth_mode: str  # RAY_AUTH_MODE of it
    token_path: str  # of the file that Ray's processes know each other by; "": no file of ours
    urls: tuple[str, ...]


class RayDirectory:
    """A fresh directory for Ray's files, locked from its first moment to its last.

    After a kill the next start below the same `root` removes it.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        for path in root.glob(PREFIX + "?" * NUM_RANDOM):
            if (lock := _lock(path)) is not None:
                if os.fstat(lock).st_uid == os.getuid():
                    log.info("removing %s: its serve was killed", path)
                    shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
            lock = _lock(self.path, waits=True)
            if lock is not None:
                self.lock = lock
                if self.path.exists():
                    return
                os.close(lock)  # another start has removed it before it was locked

    def remove(self) -> None:
        """Delete it with all that is in it; a second call does nothing."""
        if self.lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock)
            self.lock = -1


def made_token(directory: Path) -> str:
    """A file, for this user alone, with a word that nobody can guess; its path."""
    path = directory / "ray-token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32), encoding="ascii")
    return str(path)


class StateFile:
    """Where `status` and `drain` find a running `serve` of this user."""

    def __init__(self, runtime_dir: Path) -> None:
        runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file, name = tempfile.mkstemp(prefix="serve-", suffix=".json", dir=runtime_dir)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self.path = Path(name)

    def write(self, running: Running) -> None:
        """Let other commands know what runs."""
        self.path.write_text(msgspec.json.encode(running).decode(), encoding="utf-8")

    def remove(self) -> None:
        """Nothing runs any more; a second call does nothing."""
        if self._file >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1


def find_running(runtime_dir: Path, address: str = "") -> Running:
    """The one `serve` that runs here, or the one on the Ray cluster at `address`.

    Raises NothingRuns if there is none, UserError if there are several.
    """
    fitting = [r for r in all_running(runtime_dir) if address in ("", r.address)]
    if not fitting:
        raise NothingRuns("no kvlane runs here; give the Ray cluster with --address HOST:PORT")
    if len(fitting) > 1:
        rows = "\n".join(f"  --address {r.address}  ({' '.join(r.urls)})" for r in fitting)
        raise UserError(f"more than one kvlane runs here, choose one:\n{rows}")
    return fitting[0]


def all_running(runtime_dir: Path) -> list[Running]:
    """Every `serve` of this user; the files of dead ones are removed."""
    running: list[Running] = []
    for path in sorted(runtime_dir.glob("serve-*.json")):
        if (lock := _lock(path)) is not None:
            path.unlink(missing_ok=True)
            os.close(lock)
            continue
        with contextlib.suppress(FileNotFoundError):
            if text := path.read_text(encoding="utf-8"):
                running.append(msgspec.json.decode(text, type=Running))
    return running


def _lock(path: Path, *, waits: bool = False) -> int | None:
    """A descriptor that holds the lock; None: a live process does, or it is not ours to open."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file
