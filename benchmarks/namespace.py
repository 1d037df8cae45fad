"""A network namespace with a loopback interface and nothing else: for what starts Ray.

Ray binds the machine's real address; in here there is none. Needs root, `unshare` and iproute2.
"""

import os
import shlex
import subprocess
from collections.abc import Sequence
from typing import NoReturn

UNSHARE = ("unshare", "-n", "-p", "-f", "--mount-proc", "--kill-child")
LOOPBACK_UP = ("ip", "link", "set", "lo", "up")


def can_enter() -> bool:
    """Whether one can be made here, and its loopback brought up."""
    try:
        return subprocess.call([*UNSHARE, *LOOPBACK_UP], stderr=subprocess.DEVNULL) == 0
    except FileNotFoundError:
        return False


def start_over(command: Sequence[str], *first: Sequence[str]) -> NoReturn:
    """Become `command` in a new one, with pids of its own, once the commands `first` have run."""
    setup = "; ".join(shlex.join(each) for each in (LOOPBACK_UP, *first))
    script = f'{setup}; "$@"; exit $?'  # bash stays: the first process has to reap
    os.execvp(UNSHARE[0], [*UNSHARE, "bash", "-c", script, "bash", *command])
