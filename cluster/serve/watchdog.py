"""Cleans up after a `serve` that got SIGKILL. A script of its own: `python watchdog.py DIRECTORY`.

Ray's processes end with `serve`, except the two agents of a node: they wait 60 s for a GCS that is
gone (measured; a constant in Ray). `serve` holds the stdin of this process open for as long as it
lives. When stdin ends, this process kills every process that still writes into Ray's directory,
and removes the directory. A `serve` that ends by itself kills this process with all others.
"""

import contextlib
import os
import shutil
import signal
import sys
import time

GRACE_S = 2.0  # by then, what ends with Ray has ended
TIMEOUT_S = 10.0


def writers(directory: str) -> list[int]:
    """Pids of processes that have a file below `directory` open for writing."""
    pids: list[int] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # gone, or another user's
            for entry in os.scandir(f"/proc/{pid}/fd"):
                writes = os.lstat(entry.path).st_mode & 0o200
                if writes and os.readlink(entry.path).startswith(directory + "/"):
                    pids.append(int(pid))
                    break
    return pids


def main(directory: str) -> None:
    """Wait for the end of stdin, then kill and remove what is left."""
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
