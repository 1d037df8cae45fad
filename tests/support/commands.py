"""The command line in processes forked from one that has imported it, which costs half a second.

Of third-party libraries only those are there before the fork that read no environment.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.support.patience import HANG_S

REPOSITORY = Path(__file__).parents[2]
IMPORTED = (
    "cluster.cli", "cluster.diagnose.checks", "cluster.clients.chat",
    "benchmarks.load.fleet", "benchmarks.load.report", "router.show.status",
    "numpy", "httpx", "httpx2", "tqdm.auto", "filelock",
)  # fmt: skip
KVLANE = ""  # the program that `python -m cluster` is
MAX_BYTES = 1 << 17


def run(
    arguments: Sequence[str],
    *,
    program: str = KVLANE,
    env: Mapping[str, str] | None = None,
    cwd: Path = REPOSITORY,
    input: str = "",
    stdout: int | IO[str] | None = None,
    timeout_s: float = HANG_S,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of this Python: `program` is its `-c`; `stdout`: where it is not kept."""
    job = {
        "arguments": list(arguments),
        "program": program,
        "env": dict(os.environ if env is None else env),
        "cwd": str(cwd),
    }
    server = _server()
    with contextlib.ExitStack() as stack:
        given, told, said = (
            stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in range(3)
        )
        given.write(input)
        given.seek(0)
        out = told if stdout is None else stdout
        fds = [given.fileno(), out if isinstance(out, int) else out.fileno(), said.fileno()]
        server.settimeout(timeout_s)
        socket.send_fds(server, [json.dumps(job).encode()], fds)
        pid = int(server.recv(MAX_BYTES))
        try:
            code = int(server.recv(MAX_BYTES))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise
        for file in (told, said):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, code, told.read(), said.read())


@functools.cache
def _server() -> socket.socket:
    """The end of a socket that tells the forking process what to run, one after the other."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.commands", str(theirs.fileno())],
        cwd=REPOSITORY,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _serve(orders: socket.socket) -> None:
    """Fork for each order, until the other end is closed; in a forked process, run the program."""
    for name in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):  # what another version of a library needs
            importlib.import_module(name)
    gc.freeze()  # no collection of a forked process touches these pages
    while True:
        data, fds, *_ = socket.recv_fds(orders, MAX_BYTES, 3)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            break
        for fd in fds:
            os.close(fd)
        orders.send(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        orders.send(str(os.waitstatus_to_exitcode(status)).encode())
    orders.close()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    job = json.loads(data)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    sys.argv = ["kvlane", *job["arguments"]]
    if job["program"] == KVLANE:
        runpy.run_module("cluster", run_name="__main__", alter_sys=True)
    else:
        exec(job["program"], {"__name__": "__main__"})


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
