"""The same cluster with its workers on two Ray nodes, submitted as a Ray job."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.check import MAX_TOKENS, NUM
from tests.e2e.harness import INSIDE, REPOSITORY
from tests.support import pairwise
from tests.support.patience import HANG_S
from tests.support.reference import reference_texts

SCRIPT = REPOSITORY / "tests" / "e2e" / "two_nodes.sh"
SUBMIT = (
    "--prefill", "1", "--decode", "1",
    "--set", "prefill.resources={a: 1}",
    "--set", "decode.resources={b: 1}",
    "--set", "disaggregation.mode=always",
)  # fmt: skip
READY = re.compile(r"^\[ *[\d.]+ s\] ready$", re.MULTILINE)
NUM_PROBLEMS = str(NUM if pairwise.whole else 16)
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def two_nodes() -> Iterator[Run]:
    """Runs the script's commands; both nodes are up."""
    if os.environ.get(INSIDE) is None or shutil.which("ip") is None:
        pytest.skip("needs root, unshare and iproute2 for network namespaces")
    environment = {**os.environ, "PYTHON_BIN": str(Path(sys.executable).parent)}

    def run(*arguments: str, timeout_s: float = HANG_S) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(SCRIPT), *arguments],
            env=environment, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip

    try:
        done = run("up")
        assert done.returncode == 0, done.stdout + done.stderr
        yield run
    finally:
        run("down")


def test_prefill_on_one_node_decode_on_the_other(two_nodes: Run, tmp_path: Path) -> None:
    reference_texts(NUM, MAX_TOKENS)  # for the check as well, which is another process
    output = tmp_path / "job"
    with output.open("wb") as log:
        job = subprocess.Popen(
            ["bash", str(SCRIPT), "submit", *SUBMIT],
            env={**os.environ, "PYTHON_BIN": str(Path(sys.executable).parent)},
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        url = "http://127.0.0.1:8000"
        deadline = time.monotonic() + HANG_S
        while not READY.search(output.read_text()):  # /ready asks for a decode worker only
            assert job.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.5)
        done = two_nodes("run", sys.executable, "-m", "tests.e2e.check", url, NUM_PROBLEMS)
        assert done.returncode == 0, done.stdout + done.stderr + output.read_text()
        status = two_nodes("run", sys.executable, "-m", "cluster", "status")
        for line in status.stdout.splitlines():
            if line.startswith("prefill"):
                assert "10.78.0.1" in line, status.stdout
            if line.startswith("decode"):
                assert "10.78.0.2" in line, status.stdout
        print(done.stdout)

        serve = ("run", sys.executable, "-m", "cluster", "serve", *SUBMIT)
        again = two_nodes(*serve)  # as a second job would
        assert again.returncode == 0, again.stderr
        assert "it runs already, with this configuration, at http://" in again.stderr
        other = two_nodes(*serve, "--set", "kv.page_size=32")
        assert other.returncode == 2, other.stderr
        assert "with another value of kv.page_size; end it first: kvlane down" in other.stderr
        assert two_nodes("get", f"{url}/ready").returncode == 0
        down = two_nodes("run", sys.executable, "-m", "cluster", "down")
        assert down.stdout == "kvlane is down\n", down.stderr
        assert job.wait(HANG_S) == 0, output.read_text()
    finally:
        job.kill()
        job.wait()
