"""Two hosts in network namespaces of this machine (tests/e2e/two_nodes.sh; root), and `serve`."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.e2e.harness import READY, READY_TIMEOUT_S, REPOSITORY

SCRIPT = REPOSITORY / "tests" / "e2e" / "two_nodes.sh"
HEAD = "10.78.0.1:6379"
URL = "http://127.0.0.1:8000"


def script(*words: str, check: bool = True, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command of the script."""
    environment = os.environ | {"PYTHON_BIN": str(Path(sys.executable).parent)}
    command = ["bash", str(SCRIPT), *words]
    return subprocess.run(command, env=environment, check=check, text=True, **more)


def child_of(pid: int) -> int:
    """The process that it has begun."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def wait_ready(server: subprocess.Popen[bytes], output: Path) -> None:
    """Until it has printed its URL."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while READY[0] not in output.read_text(encoding="utf-8", errors="replace"):
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"serve is not ready:\n{output.read_text(errors='replace')}")
        time.sleep(0.1)


@contextlib.contextmanager
def serving_on(host: str, arguments: Sequence[str], output: Path) -> Iterator[None]:
    """`serve` on host a or b, over both, until the body ends; what it says is in `output`.

    Raises SystemExit, with its output, if it does not become ready.
    """
    environment = os.environ | {"RAY_ADDRESS": HEAD, "RAY_AUTH_MODE": "disabled"}
    serve = [sys.executable, "-m", "cluster", "serve", *arguments]
    begun = Path(os.environ.get("TWO_NODES_DIR", "/tmp/kvl2")) / f"{host}.pid"
    # Of the Ray nodes whose processes a driver sees, it joins the head.
    there = ["nsenter", "-t", str(child_of(int(begun.read_text()))), "--net", "--pid", "--mount"]
    with output.open("wb") as log:  # not by the script, whose shell passes no signal on
        served = subprocess.Popen(
            [*there, *serve], env=environment, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        wait_ready(served, output)
        yield
    finally:
        if served.poll() is None:
            os.kill(child_of(served.pid), signal.SIGTERM)
        served.wait(60)
