"""How much of a disk the stores of all processes take, in a file that they lock."""

import fcntl
import os
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FIELDS = struct.Struct("<QQ")  # bytes taken, and how often that was changed


class Ledger:
    """One process's hold of the file; not for several threads at once."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._fd)

    def take(self, num_bytes: int, most_bytes: int) -> bool:
        """Whether so many more fit, which are taken then."""
        with self._locked():
            taken, num = self.read()
            if fits := taken + num_bytes <= most_bytes:
                self._write(taken + num_bytes, num + 1)
        return fits

    def give_back(self, num_bytes: int) -> None:
        """Bytes that were taken are free."""
        with self._locked():
            taken, num = self.read()
            self._write(max(0, taken - num_bytes), num + 1)

    def set(self, num_bytes: int, num: int) -> None:
        """So many are there as they were counted, unless somebody has changed `num` meanwhile."""
        with self._locked():
            if self.read()[1] == num:
                self._write(num_bytes, num)

    def read(self) -> tuple[int, int]:
        """Bytes taken, and how often that was changed."""
        found = os.pread(self._fd, FIELDS.size, 0)
        return FIELDS.unpack(found) if len(found) == FIELDS.size else (0, 0)

    def _write(self, taken: int, num: int) -> None:
        os.pwrite(self._fd, FIELDS.pack(taken, num), 0)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
