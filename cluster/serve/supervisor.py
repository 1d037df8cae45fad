"""The process that the user starts and signals. A child of it runs Ray and the cluster.

A start of Ray is native code with threads of its own: a signal in the middle of it may be
swallowed, hang or end in a segmentation fault. So signals meet this process, which only waits. It
imports no Ray, owns all files, and is the subreaper of all that the child starts: a process whose
parent has died becomes its child. In whatever state the child is, all below it can be killed.
"""

import contextlib
import ctypes
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cluster.serve.lifetime import RayDirectory, StateFile

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# The path of a socket has 107 characters at most. Below this root our directory takes 21 of them,
# and Ray's names up to 64.
MAX_ROOT_PATH = 22
SHORT_ROOT = Path("/tmp")
KILL_TIMEOUT_S = 5.0
LOOK_S = 1.0  # how often to look at the child, should a SIGCHLD be missed
PRCTL = ctypes.CDLL(None, use_errno=True).prctl


@dataclass(frozen=True, slots=True)
class Limits:
    """How long the child may take to end by itself after a signal; then it is killed."""

    starting_s: float  # 0: it is killed at once
    ready_s: float


@dataclass(frozen=True, slots=True)
class Lent:
    """What the child uses; this process owns it."""

    directory: Path | None  # for Ray's files; None: it joins a Ray
    state: StateFile
    ready_pipe: int

    def ready(self) -> None:
        """From now on a signal is passed on to the child, which drains."""
        os.write(self.ready_pipe, b"\n")


def supervise(
    run: Callable[[Lent], int], temp_root: Path | None, runtime_dir: Path, limits: Limits
) -> int:
    """Call `run` in a child process, until it ends or SIGINT, SIGTERM or SIGHUP ask for the end.

    The first signal is passed on to the child as SIGTERM if it has time left, the second one kills.
    Afterwards nothing is left, and these signals stay blocked: nothing may interrupt that. Returns
    what `run` did, or 128 + signal if it was killed.

    temp_root: where to make a directory for Ray's files; None: `run` joins a Ray.
    runtime_dir: for the state file.
    """
    asking = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
        asking.discard(signal.SIGHUP)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in asking:
        signal.signal(number, _keep_for_main)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*asking, signal.SIGCHLD})
    PRCTL(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    directory, state = None, None
    try:
        if temp_root is not None:
            is_short = len(str(temp_root)) <= MAX_ROOT_PATH
            directory = RayDirectory(temp_root if is_short else SHORT_ROOT)
        state = StateFile(runtime_dir)
        reads, writes = os.pipe()
        lent = Lent(directory.path if directory else None, state, writes)
        child = _fork(lambda: run(lent), before)
        if directory is not None:
            start_watchdog(directory.path)
        return _wait(child, reads, asking, limits)
    finally:
        kill_descendants()
        if state is not None:
            state.remove()
        if directory is not None:
            directory.remove()


def _keep_for_main(number: int, _: object) -> None:
    """Hand the main thread, where `sigtimedwait` finds it, a signal that a library's thread got.

    Threads that checks and downloads leave behind do not block signals, as ours does.
    """
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def _wait(child: int, ready: int, asking: set[signal.Signals], limits: Limits) -> int:
    """The exit code, once the child has ended or is to be killed.

    `ready` is readable once the child is ready. All signals are blocked, so none comes in between.
    """
    asked, interrupts, deadline = 0, False, math.inf  # the first signal; it came before `ready`
    while True:
        got = signal.sigtimedwait({*asking, signal.SIGCHLD}, LOOK_S)
        code = _reaped(child)
        if code is not None and code >= 0 and not interrupts:
            return code
        if code is not None and (asked or -code in asking):  # maybe sent to both of us
            return _interrupted(asked or -code)
        if code is not None:
            name = signal.Signals(-code).name
            print(f"error: the process that runs the cluster was ended by {name}", file=sys.stderr)
            return 1
        if got is not None and got.si_signo in asking:
            interrupts = not asked and not select.select([ready], [], [], 0)[0]
            limit_s = limits.starting_s if interrupts else limits.ready_s
            if asked or limit_s == 0:
                return _interrupted(got.si_signo)
            asked, deadline = got.si_signo, time.monotonic() + limit_s
            os.kill(child, signal.SIGTERM)
        if time.monotonic() > deadline:
            return _interrupted(asked)


def _reaped(child: int) -> int | None:
    """Reap all that have ended; the child's exit code if it is among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _interrupted(number: int) -> int:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")  # the child's last line may be half done
    print("interrupted", file=sys.stderr)
    return 128 + number


def _fork(run: Callable[[], int], mask: Iterable[int]) -> int:
    """The pid of a child that calls `run`, exits with its result, and is killed if we die.

    Its session is its own: Ctrl-C in a terminal does not reach what it starts. No thread of ours
    runs beside the fork, only idle ones of libraries that the child does not use again.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)  # drops what has come before setsid
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            code = run()
            sys.stdout.flush()
    except SystemExit:  # Ray's own answer to SIGTERM
        pass
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(code)  # nothing of the parent's may be cleaned up twice


def start_watchdog(directory: Path) -> None:
    """Start `watchdog.py`, which cleans up if this process gets SIGKILL."""
    script = Path(__file__).with_name("watchdog.py")
    stdin, _held = os.pipe()  # the second one stays open: its end is that of this process
    subprocess.Popen(
        [sys.executable, "-I", "-S", str(script), str(directory)],
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in a terminal must not reach it
    )
    os.close(stdin)


def kill_descendants() -> None:
    """SIGKILL all processes below this one, and reap them. This process started all of them."""
    import psutil  # a start need not wait for it

    deadline, this = time.monotonic() + KILL_TIMEOUT_S, psutil.Process()
    while (below := this.children(recursive=True)) and time.monotonic() < deadline:
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)
