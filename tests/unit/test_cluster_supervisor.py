"""The supervisor with a child that stands for Ray: what a signal does in each state of it.

The supervisor is a process of its own, a script below: it forks, and signals are blocked in it.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import REPOSITORY

LIMIT_S = 30.0
# The child leaves an orphan in another session that ignores signals and writes into its directory,
# as Ray's agents do; then it does as it is told.
SCRIPT = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from cluster.serve.supervisor import Limits, supervise

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
root, how, starting_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])

def run(lent):
    stubborn = (
        "import signal, sys, time; signal.signal(15, signal.SIG_IGN);"
        "log = open(sys.argv[1], 'w'); time.sleep(600)"
    )
    log = lent.directory / "log"
    subprocess.run(["setsid", "-f", sys.executable, "-c", stubborn, log])
    while not log.exists():
        time.sleep(0.01)
    if how == "deaf":  # as Ray was in the midst of its start
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "obedient":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if how == "ready":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
        lent.ready()
    print("up", flush=True)
    if how == "ends":
        return 7
    time.sleep(600)

if how == "threads":  # as a library leaves one behind that has no signal blocked
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
sys.exit(supervise(run, root / "t", root / "r", Limits(starting_s, 60.0)))
"""


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as path:  # short, as Ray needs it
        yield Path(path)


class Supervised:
    def __init__(self, root: Path, how: str, starting_s: float = 0.0) -> None:
        self.root = root
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(root), how, str(starting_s)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert how == "crash" or self.process.stdout.readline() == "up\n"

    def over(self) -> tuple[int, str]:
        """Exit code and stderr; all of it is gone."""
        _, said = self.process.communicate(timeout=LIMIT_S)
        assert all(not list((self.root / name).iterdir()) for name in ("t", "r"))
        assert self.below() == []
        return self.process.returncode, said

    def below(self) -> list[str]:
        """Command lines of the script, its child, the orphan and the watchdog."""
        lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
        return [line for line in lines.stdout.splitlines() if str(self.root) in line]


@pytest.mark.parametrize("how", ["deaf", "obedient", "threads"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_start_whatever_the_child_does(root: Path, how, number) -> None:
    supervised = Supervised(root, how)
    os.killpg(supervised.process.pid, number)
    assert supervised.over() == (128 + number, "interrupted\n")


@pytest.mark.parametrize(("how", "starting_s"), [("obedient", LIMIT_S), ("deaf", 0.5)])
def test_a_start_with_time_left_may_end_by_itself_and_is_killed_afterwards(
    root: Path, how, starting_s
) -> None:
    supervised = Supervised(root, how, starting_s)
    supervised.process.send_signal(signal.SIGHUP)
    assert supervised.over() == (128 + signal.SIGHUP, "interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_once_the_child_is_ready(root: Path, number: signal.Signals) -> None:
    supervised = Supervised(root, "ready")
    supervised.process.send_signal(number)
    assert supervised.over() == (9, "")


def test_the_exit_code_is_the_childs(root: Path) -> None:
    assert Supervised(root, "ends").over() == (7, "")


def test_a_crash_of_the_child_is_told_and_cleaned_up(root: Path) -> None:
    code, said = Supervised(root, "crash").over()
    assert code == 1
    assert "was ended by SIGSEGV" in said


def test_all_ends_after_a_supervisor_that_was_killed(root: Path) -> None:
    supervised = Supervised(root, "ready")
    supervised.process.kill()
    supervised.process.communicate()
    deadline = time.monotonic() + LIMIT_S
    while (left := supervised.below()) or list((root / "t").iterdir()):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
