"""Real clusters for tests: a namespace to run them in, `serve` as a process, and what it left.

Ray runs the code of whoever reaches it, so the whole pytest process moves into fresh namespaces
with a loopback interface only and a /dev/shm of their own (`enter_namespace`); each process of
pytest-xdist starts in some (`part_processes`). Clients and servers are then in the same ones, and
everything dies with their first process.
"""

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

from cluster.cli import RAY_SETTINGS
from cluster.serve.lifetime import find_running
from tests.e2e.watch import Watch
from tests.support.patience import HANG_S

REPOSITORY = Path(__file__).resolve().parents[2]
INSIDE = "KVLANE_TEST_NAMESPACE"
APART = "KVLANE_TESTS_APART"  # each process of pytest-xdist has namespaces of its own
APART_BY = REPOSITORY / "tests" / "support" / "apart.sh"
UNSHARE = ("unshare", "-n", "-p", "-f", "--mount-proc", "--kill-child")
LOOPBACK_UP = ("ip", "link", "set", "lo", "up")
OWN_SHM = ["mount", "-t", "tmpfs", "kvlane", "/dev/shm"]  # an empty one
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Rows = dict[str, dict[str, Any]]  # of `status`, by name
READY_TIMEOUT_S = 600.0  # of a large model
READY = ("Ctrl-C stops it.", '"message": "ready"')  # for people, for machines


def can_enter() -> bool:
    """Whether a namespace can be made here, and its loopback brought up: by root, with iproute2."""
    try:
        return subprocess.call([*UNSHARE, *LOOPBACK_UP], stderr=subprocess.DEVNULL) == 0
    except FileNotFoundError:
        return False


def start_over(command: Sequence[str]) -> NoReturn:
    """Become `command` in a new namespace, with pids and an empty /dev/shm of its own."""
    setup = "; ".join(shlex.join(each) for each in (LOOPBACK_UP, OWN_SHM))
    script = f'{setup}; "$@"; exit $?'  # bash stays: the first process has to reap
    os.execvp(UNSHARE[0], [*UNSHARE, "bash", "-c", script, "bash", *command])


def enter_namespace(config: pytest.Config) -> None:
    """Start this pytest over inside a namespace; returns only if it is inside or may not enter."""
    if os.environ.get(INSIDE) or config.option.collectonly:
        return
    if not can_enter():
        return  # not root, or no iproute2: `serve` keeps to 127.0.0.1 and cleans up by itself
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # gives back the real stdout
    os.environ[INSIDE] = "1"
    arguments = [str(a) for a in config.invocation_params.args]
    pytest_again = [sys.executable, "-m", "pytest", *arguments]
    os.chdir(config.invocation_params.dir)
    sys.stdout.flush()
    start_over(pytest_again)


def enter_namespace_of(module: str) -> None:
    """Start `python -m module` over inside a namespace, with its arguments; returns only there.

    Raises SystemExit where none can be made.
    """
    if not os.environ.get(INSIDE):
        if not can_enter():
            sys.exit(f"not root, or no `ip` for a namespace; {INSIDE}=1 runs without one")
        os.environ[INSIDE] = "1"
        start_over([sys.executable, "-m", module, *sys.argv[1:]])


def part_processes(config: pytest.Config) -> None:
    """Let each process of pytest-xdist start inside namespaces of its own, if it may enter any: so
    two can run clusters at a time."""
    if os.environ.get(INSIDE) or config.option.collectonly or not can_enter():
        return
    os.environ[INSIDE] = os.environ[APART] = "1"
    command = shlex.join([*UNSHARE, "bash", str(APART_BY), sys.executable])
    config.option.tx = [f"popen//python={command}" for _ in config.option.tx]


WITH_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}  # of a Ray to join


@dataclass(slots=True)
class Serve:
    """One `python -m cluster serve`, in a session of its own as under a terminal.

    Everything that it may leave behind goes below `root`: Ray's files, the state file, its output.
    """

    root: Path
    port: int = 8000  # of the routers
    ray: str = ""  # address of a Ray that it is to join; "": it starts one
    watch: Watch | None = None  # a process that is connected to that Ray
    program: tuple[str, ...] = (sys.executable, "-m", "cluster")
    directory: Path = REPOSITORY  # in which it is run
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def output(self) -> str:
        return (self.root / "output").read_text(encoding="utf-8", errors="replace")

    def environment(self) -> dict[str, str]:
        """For every command that belongs to this cluster."""
        for name in ("tmp", "run"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        own = {"TMPDIR": str(self.root / "tmp"), "XDG_RUNTIME_DIR": str(self.root / "run")}
        return {**plain_environment(), **own, **(WITH_TOKEN if self.ray else {})}

    def start(self, *arguments: str) -> "Serve":
        environment = self.environment()
        join = ("--address", self.ray) if self.ray else ()
        with (self.root / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [*self.program, "serve", "--port", str(self.port), *join, *arguments],
                cwd=self.directory, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_as_under_a_terminal,
            )  # fmt: skip
        return self

    def wait_ready(self, timeout_s: float = HANG_S) -> "Serve":
        """Returns once it has printed its URL; fails with its output if it does not."""
        assert self.process is not None
        deadline = time.monotonic() + timeout_s
        while not any(said in self.output for said in READY):
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"serve is not ready, exit code {self.process.poll()}:\n{self.output}")
            time.sleep(0.1)
        return self

    def wait(self, timeout_s: float = HANG_S) -> int:
        assert self.process is not None
        self._watch_no_more()
        return self.process.wait(timeout_s)

    def interrupt(self) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> None:
        """Whatever state it is in: nothing of it is left after this."""
        self._watch_no_more()
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # the second one is at once
            self.process.wait(HANG_S)

    def command(
        self, *arguments: str, timeout_s: float = HANG_S
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.program, *arguments], cwd=self.directory, env=self.environment(),
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip

    def status(self) -> Rows:
        if self.watch is None:
            running = find_running(self.root / "run" / "kvlane")
            token = {"RAY_AUTH_MODE": running.auth_mode, "RAY_AUTH_TOKEN_PATH": running.token_path}
            environment = self.environment() | RAY_SETTINGS | token
            self.watch = Watch(running.address, local=True, environment=environment)
        rows = self.watch.rows()
        assert rows is not None, f"no cluster runs:\n{self.output}"
        return {row["name"]: row for row in rows}

    def wait_status(self, name: str, timeout_s: float = HANG_S, **wanted: object) -> dict[str, Any]:
        """The row of this name, once it says so."""

        def says_so(rows: Rows) -> bool:
            return name in rows and wanted.items() <= rows[name].items()

        return self._rows_once(says_so, f"{name} is not {wanted}", timeout_s)[name]

    def wait_idle(self, timeout_s: float = HANG_S) -> Rows:
        """The rows once every process is ready and every counter of every one is zero."""

        def is_idle(rows: Rows) -> bool:  # a busy process may be late with its counters
            counters = [row["counters"] for row in rows.values() if row["state"] == "ready"]
            known = len(counters) == len(rows) and None not in counters
            return known and not any(n for each in counters for n in each.values())

        return self._rows_once(is_idle, "counters are not at their baseline", timeout_s)

    def _rows_once(self, is_so: Callable[[Rows], bool], what: str, timeout_s: float) -> Rows:
        deadline = time.monotonic() + timeout_s
        while not is_so(rows := self.status()):
            if time.monotonic() > deadline:
                pytest.fail(f"{what}: {rows}\n{self.output}")
            time.sleep(0.3)
        return rows

    def _watch_no_more(self) -> None:
        """Of a Ray of its own; a joined one is watched for others."""
        if self.watch is not None and not self.ray:
            self.watch.close()
            self.watch = None

    def leftovers(self) -> list[str]:
        places = (self.root / "tmp", self.root / "run" / "kvlane")
        return [str(path) for place in places if place.exists() for path in place.iterdir()]


@contextlib.contextmanager
def serving(
    arguments: Sequence[str], port: int, *, keep: Path, root: Path | None = None
) -> Iterator[str]:
    """A cluster that is ready; its URL. Ended after the body, its output is `keep`/cluster.log.

    root: a folder for all its files, with a short path, which is removed; None: one of its own.
    """
    root = root or Path(tempfile.mkdtemp(prefix="jd"))  # short: Ray's sockets lie below it
    cluster = Serve(root, port).start(*arguments)
    try:
        yield cluster.wait_ready(READY_TIMEOUT_S).url
    finally:
        cluster.end()
        keep.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / "output", keep / "cluster.log")
        shutil.rmtree(root, ignore_errors=True)


def _as_under_a_terminal() -> None:
    for number in SIGNALS:  # nohup and a shell's `&` let what they start ignore some of them
        signal.signal(number, signal.SIG_DFL)


def plain_environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return {**kept, "PYTHONUNBUFFERED": "1"}


def processes() -> dict[int, str]:
    """Pid -> command line of what a cluster consists of; outside a namespace others' as well."""
    lines: dict[int, str] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                continue
            line = line.removeprefix(sys.executable)  # which may lie in a directory kvlane
            if any(word in line for word in ("ray", "gcs_server", "cluster", "kvlane")):
                lines[int(path.name)] = line
    return lines


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}
