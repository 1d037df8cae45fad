"""One Ray for many clusters, and one cluster for many tests.

A cluster is ready after ten seconds, six of which start Ray. So one Ray stays, and clusters join
it, one after the other, as they join a user's. Where there is no network namespace each cluster
starts a Ray of its own: one that can be joined would listen on the machine's address.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest

from cluster.cli import RAY_SETTINGS
from tests.e2e.harness import INSIDE, WITH_TOKEN, Serve, plain_environment, shared_memory
from tests.e2e.watch import Watch
from tests.support.patience import HANG_S

HOST, PORT = "127.0.0.1", 6379
USUAL = (
    "--router", "2", "--prefill", "2", "--decode", "2",
    "--set", "transport.name=mooncake",
    "--set", "disaggregation.mode=always",
)  # fmt: skip
BRIEF = (
    "--prefill", "1", "--decode", "1",
    "--set", "disaggregation.mode=always",
    "--set", "model.max_model_len=64",  # a mutated or drawn body may have no limit of tokens
)  # fmt: skip
# With ports of its agents given, a node does not wait for them: late ones would end it.
AGENT_PORTS = (
    "--dashboard-agent-grpc-port=52366",
    "--dashboard-agent-listen-port=52365",
    "--runtime-env-agent-port=52367",
)
WITHOUT = ("--include-dashboard=false", "--no-monitor")  # nothing here scales
NUM_CPUS = 8  # Ray only counts them: room for the largest cluster
SAME = ("pid", "incarnation", "restarts")  # of a process that nobody has disturbed


class Ray:
    """A head that clusters join with a token; whole: with dashboard, jobs and autoscaler, as users
    start it, and without one."""

    def __init__(self, *, whole: bool = False) -> None:
        token = {"RAY_AUTH_MODE": "disabled"} if whole else WITH_TOKEN
        environment = plain_environment() | RAY_SETTINGS | token
        # A node that has not registered after 30 s gives up, and a busy machine may take longer.
        self._parts = () if whole else WITHOUT
        deadline = time.monotonic() + HANG_S
        for port in itertools.count(PORT):
            self.address = f"{HOST}:{port}"
            self._directory = Path(tempfile.mkdtemp(prefix="kvl-ray-", dir="/tmp"))  # short
            with (self._directory / "output").open("wb") as output:
                self._process = self._start(environment, output, port)
            if self._has_started():
                break
            print(f"Ray does not start at port {port}:\n{self.output}\n{self._logs()}")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its session is its own
            if time.monotonic() > deadline:
                pytest.fail(f"Ray does not start:\n{self.output}")
        self.watch = Watch(self.address, local=False, environment=environment)

    def _has_started(self) -> bool:
        deadline = time.monotonic() + HANG_S
        while "Ray runtime started" not in self.output:
            if self._process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def _start(
        self, environment: dict[str, str], output: IO[bytes], port: int
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                str(Path(sys.executable).with_name("ray")), "start", "--head", "--block",
                f"--node-ip-address={HOST}", f"--port={port}", f"--temp-dir={self._directory}/ray",
                f"--num-cpus={NUM_CPUS}", "--num-gpus=0", "--object-store-memory=100000000",
                "--disable-usage-stats", *AGENT_PORTS, *self._parts,
            ],
            env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    @property
    def output(self) -> str:
        return (self._directory / "output").read_text(errors="replace")

    def _logs(self) -> str:
        """What Ray's own processes wrote last."""
        logs = (self._directory / "ray/session_latest/logs").glob("*.out")
        return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-2000:]}" for log in logs)

    def check(self) -> None:
        """Fail with what Ray printed if it has ended: clusters on it are gone then, too."""
        if self._process.poll() is not None:
            pytest.fail(f"Ray has ended with exit code {self._process.returncode}:\n{self.output}")

    def end(self) -> None:
        self.watch.close()
        self._process.terminate()
        self._process.wait(HANG_S)
        shutil.rmtree(self._directory, ignore_errors=True)


@dataclass
class Clusters:
    """Starts clusters, one at a time, and lends one out for as long as the same is asked for."""

    root: Path
    shm_before: set[str] = field(default_factory=set[str], init=False)  # the present one's start
    _ray: Ray | None = field(default=None, init=False)
    _serve: Serve | None = field(default=None, init=False)
    _arguments: tuple[str, ...] | None = field(default=None, init=False)  # None: not to be lent
    _identity: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]], init=False)
    _num: int = field(default=0, init=False)

    def lend(self, *arguments: str) -> Serve:
        """A cluster at rest, to be left as it is: the last one, if it was started so."""
        self._check_ray()
        if self._serve is not None and self._arguments == arguments and self._is_undisturbed():
            return self._serve
        serve = self.fresh(*arguments)
        self._arguments, self._identity = arguments, identity(serve.status())
        return serve

    def take(self, *arguments: str) -> Serve:
        """One as `lend` gives, with which a test may do what it likes: nobody gets it after it."""
        serve = self.lend(*arguments)
        self._arguments = None
        return serve

    def fresh(self, *arguments: str) -> Serve:
        """A new one, with which a test may do what it likes."""
        return self.made().start(*arguments).wait_ready()

    def made(self) -> Serve:
        """A new one that is not started yet."""
        self.end()
        self._check_ray()
        self._num += 1
        root = self.root / f"{self._num}"
        root.mkdir()
        self._serve = Serve(root)
        if os.environ.get(INSIDE):
            self._ray = self._ray or Ray()
            self._serve = Serve(root, ray=self._ray.address, watch=self._ray.watch)
        self.shm_before = shared_memory()
        return self._serve

    def end(self) -> None:
        self._arguments = None
        if self._serve is not None:
            self._serve.end()

    def end_all(self) -> None:
        self.end()
        if self._ray is not None:
            self._ray.end()
            self._ray = None

    def _check_ray(self) -> None:
        if self._ray is not None:
            self._ray.check()

    def _is_undisturbed(self) -> bool:
        assert self._serve is not None
        assert self._serve.process is not None
        if self._serve.process.poll() is not None:
            return False
        return identity(self._serve.wait_idle()) == self._identity


def identity(rows: dict[str, dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[key] for key in SAME] for name, row in rows.items()}


LENT = pytest.StashKey[Clusters]()


@pytest.fixture(scope="session")
def clusters(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Clusters]:
    """Clusters on one Ray, which all tests share."""
    made = pytestconfig.stash[LENT] = Clusters(tmp_path_factory.mktemp("clusters"))
    yield made
    made.end_all()


@pytest.fixture
def serve(tmp_path: Path, clusters: Clusters) -> Iterator[Serve]:
    """A cluster with a Ray of its own, while no other runs; not started yet."""
    clusters.end_all()
    cluster = Serve(tmp_path)
    yield cluster
    cluster.end()
