"""What is left of a `serve` that got SIGKILL: `python watchdog.py DIRECTORY`, a script of its own.

Ray's own processes end with `serve`, but its two agents of a node go on for a minute, because they
wait for a GCS that is gone (measured: 60 s, a constant in Ray). This process waits for the end of
its stdin, which `serve` holds open for as long as it lives; then it kills whoever still writes into
Ray's directory and removes that. When `serve` ends in order, it ends this process first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

GRACE_S = 2.0  # what Ray ends by itself has ended by then
TIMEOUT_S = 10.0


def writers(directory: str) -> list[int]:
    """Pids of processes that have a file below `directory` open for writing."""
    found: list[int] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # gone, or somebody else's
            for entry in os.scandir(f"/proc/{pid}/fd"):
                writes = os.lstat(entry.path).st_mode & 0o200
                if writes and os.readlink(entry.path).startswith(directory + "/"):
                    found.append(int(pid))
                    break
    return found


def main(directory: str) -> None:
    """Wait for the end of stdin, then leave nothing."""
    sys.stdin.buffer.read()
    time.sleep(GRACE_S)
    deadline = time.monotonic() + TIMEOUT_S
    while (pids := writers(directory)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
