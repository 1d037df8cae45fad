"""A directory on a disk of the node, as a store: a file an object, below one folder an owner.

Workers of a node share it, and it outlives them. A thread looks what others have written; what it
says is a hint: a file that is gone is no object, and one that is wrong fails its checks. A ledger
that all lock has how much they take together, so it never is more than the budget. A file is whole
when it gets its name, but for a machine that loses power; the checksum is for that.
"""

import contextlib
import errno
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from worker.transfer.tier.base import Fill, PageStore, Take
from worker.transfer.tier.ledger import Ledger
from worker.transfer.tier.objects import Corrupt, Form

log = logging.getLogger("kvlane.tier")

SUFFIX, BEGUN, LEDGER = ".kv", ".begun", "bytes"
BLOCK = 4096  # of a file system
LOOK_S, LOOK_SHARE = 0.5, 20  # between two looks; and so many times as long as the last one took
STALE_S = 600.0  # after which a file that was begun is nobody's


class Found(NamedTuple):
    """An object's file."""

    used_at: float  # seconds since 1970, by its file's time
    path: Path
    num_bytes: int  # of its blocks on the disk


def in_blocks(num_bytes: int) -> int:
    """What a file of this length takes; not as told by the disk, which allocates late."""
    return -(-num_bytes // BLOCK) * BLOCK


def objects_below(root: Path) -> Iterator[Found]:
    """All objects of all owners, and what is begun; raises OSError if the root cannot be read."""
    for folder in list(os.scandir(root)):
        if not folder.is_dir(follow_symlinks=False):
            continue
        for entry in os.scandir(folder.path):
            try:
                stat = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # evicted meanwhile
            if entry.name.startswith(BEGUN) and time.time() - stat.st_mtime > STALE_S:
                Path(entry.path).unlink(missing_ok=True)
            elif entry.name.endswith(SUFFIX) or entry.name.startswith(BEGUN):
                yield Found(stat.st_mtime, Path(entry.path), in_blocks(stat.st_size))


class Directory(PageStore):
    """num_bytes of files below `root`, those of other owners among them; see `Arena`.

    Raises OSError if it cannot be made, is another user's, or is open to others.
    """

    name, every, run = "disk", 1, 1

    def __init__(self, root: Path, form: Form, num_bytes: int, *, pinned: bool = False) -> None:
        """pinned: of memory by way of which objects are read and written."""
        self._root, self._own = root, root / form.owner
        self._most_bytes, self._object_bytes = num_bytes, form.object_bytes
        self._file_bytes = in_blocks(form.object_bytes)
        self._pinned, self._buffers = pinned, threading.local()
        for folder in (root, self._own):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            stat = folder.stat()
            if stat.st_uid != os.geteuid() or stat.st_mode & 0o077:
                raise PermissionError(f"{folder} is not ours alone: chmod 700, or take another")
        self._lock = threading.Lock()
        self._ledger = Ledger(root / LEDGER)
        self._files: OrderedDict[Path, int] = OrderedDict()  # sizes; least recently used first
        self._own_keys: set[bytes] = set()
        self._put_meanwhile: dict[Path, int] = {}
        self.num_bytes = 0
        self._ends = threading.Event()
        self._look()
        threading.Thread(target=self._keep_looking, name="kvlane-disk-look", daemon=True).start()

    @property
    def _staged(self) -> memoryview:
        """[object_bytes], of this thread."""
        if not hasattr(self._buffers, "staged"):
            made = torch.empty(self._object_bytes, dtype=torch.uint8, pin_memory=self._pinned)
            self._buffers.staged = memoryview(made.numpy().data).cast("B")
        return self._buffers.staged

    def exists(self, key: bytes) -> bool:
        return key in self._own_keys

    def put(self, key: bytes, fill: Fill) -> bool:
        path = self._path(key)
        if not path.exists():
            if not fill(left := self._staged):
                return False
            self._make_room()
            begun = self._own / f"{BEGUN}-{os.urandom(16).hex()}"  # pods have the same pids
            try:
                fd = os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                with open(fd, "wb", buffering=0) as file:
                    file.truncate(self._object_bytes)  # who looks counts it whole
                    while left:
                        left = left[file.write(left) :]
                begun.rename(path)
            except OSError:
                begun.unlink(missing_ok=True)
                with self._lock:
                    self._ledger.give_back(self._file_bytes)
                raise
        self._note(path, self._file_bytes)
        return True

    def get(self, key: bytes, take: Take) -> None:
        path = self._path(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            self._leave_out(path)
            raise KeyError(key) from None
        at, staged = 0, self._staged
        with open(fd, "rb", buffering=0) as file:
            while count := file.readinto(staged[at:]):
                at += count
            if at < self._object_bytes or file.read(1):
                raise Corrupt("its file has another length")
            os.utime(fd)
        self._note(path, self._file_bytes)
        take(staged)

    def forget(self, key: bytes = b"") -> None:
        for path in map(self._path, [key] if key else list(self._own_keys)):
            self._remove(path)

    def close(self) -> None:
        self._ends.set()

    def _path(self, key: bytes) -> Path:
        return self._own / (key.hex() + SUFFIX)

    def _note(self, path: Path, num_bytes: int) -> None:
        """A file is there, and was used last."""
        with self._lock:
            self._put_meanwhile[path] = num_bytes
            self.num_bytes += num_bytes - self._files.pop(path, 0)
            self._files[path] = num_bytes
            self._own_keys.add(bytes.fromhex(path.stem))

    def _leave_out(self, path: Path) -> int:
        """A file is gone, or shall go; its size, if it was known."""
        with self._lock:
            num_bytes = self._files.pop(path, 0)
            self.num_bytes -= num_bytes
            if path.parent == self._own:
                self._own_keys.discard(bytes.fromhex(path.stem))
        return num_bytes

    def _remove(self, path: Path) -> None:
        num_bytes = self._leave_out(path)
        with contextlib.suppress(FileNotFoundError):  # another has removed it, and given it back
            path.unlink()
            with self._lock:
                self._ledger.give_back(num_bytes)

    def _make_room(self) -> None:
        """Take the bytes of a file, for which others go; raises OSError if none is left to go."""
        has_looked = False
        while True:
            with self._lock:
                if self._ledger.take(self._file_bytes, self._most_bytes):
                    return
                path = next(iter(self._files), None)
            if path is not None:
                self._remove(path)
            elif has_looked:
                raise OSError(errno.ENOSPC, f"no object fits into {self._most_bytes} bytes")
            else:  # all is of others, of which we do not know yet
                has_looked = True
                self._look()

    def _keep_looking(self) -> None:
        pause_s = LOOK_S
        seen = self._times()
        while not self._ends.wait(pause_s):
            began_at = time.monotonic()
            try:
                if (now := self._times()) != seen:
                    seen = now
                    self._look()
            except OSError as error:  # the row's own calls fail too, and say so
                log.debug("%s: %s", self._root, error)
            pause_s = max(LOOK_S, LOOK_SHARE * (time.monotonic() - began_at))

    def _times(self) -> list[int]:
        """What changes with the files there."""
        return [entry.stat().st_mtime_ns for entry in os.scandir(self._root) if entry.is_dir()]

    def _look(self) -> None:
        with self._lock:
            self._put_meanwhile.clear()
            _, num = self._ledger.read()
        there = list(objects_below(self._root))
        found = sorted(x for x in there if _is_named(x.path))
        num_begun = sum(x.num_bytes for x in there if x.path.name.startswith(BEGUN))
        with self._lock:
            files = {x.path: x.num_bytes for x in found} | self._put_meanwhile
            self._files = OrderedDict(files)
            self.num_bytes = sum(files.values())
            self._ledger.set(self.num_bytes + num_begun, num)
            own = (path.stem for path in files if path.parent == self._own)
            self._own_keys = set(map(bytes.fromhex, own))


def _is_named(path: Path) -> bool:
    """Whether a file's name is a key."""
    return len(path.stem) == 64 and set(path.stem) <= set("0123456789abcdef")
