"""Runs an agent of a Ray node, again whenever it has died: `python agent.py NOTES COMMAND…`.

A script of its own, which `ray_private.keep_agents` puts between a raylet and its agents: a raylet
ends with either of them, and all workers of its node with it. Each death is a line in NOTES. The
next agent has the ports of the last one, as COMMAND says them.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PRCTL = ctypes.CDLL(None).prctl
RAYLET = "RAY_RAYLET_PID"  # an agent ends where its parent is another one
DELAY_S, MAX_DELAY_S = 0.2, 10.0
LIVED_S = 30.0  # then it did not die of how it was started


def run(command: list[str]) -> str:
    """Until the agent ends; how it has ended."""
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.environ[RAYLET] = str(keeper)
        os.execv(command[0], command)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def main(notes: str, command: list[str]) -> None:
    """Never returns: it ends with its raylet."""
    raylet = int(os.environ[RAYLET])
    PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    delay_s = DELAY_S
    while os.getppid() == raylet:
        began_at = time.monotonic()
        how = run(command)
        with (
            contextlib.suppress(OSError),
            open(notes, "a", encoding="utf-8") as file,
        ):  # a full disk
            file.write(how + "\n")
        lived = time.monotonic() - began_at > LIVED_S
        delay_s = DELAY_S if lived else min(2 * delay_s, MAX_DELAY_S)
        time.sleep(delay_s)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
