"""The same cluster with its workers on two Ray nodes, submitted as a Ray job."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.check import MAX_TOKENS, NUM
from tests.e2e.harness import INSIDE, processes
from tests.fault.chaos.two_hosts import SCRIPT, URL, script
from tests.support import pairwise
from tests.support.patience import HANG_S
from tests.support.reference import reference_texts

SUBMIT = (
    "--prefill", "1", "--decode", "1",
    "--set", "prefill.resources={a: 1}",
    "--set", "decode.resources={b: 1}",
    "--set", "disaggregation.mode=always",
)  # fmt: skip
BOTH = ("--set", "decode.tp=2", "--set", "decode.num_cpus=3")  # each node has 4
READY = re.compile(r"^\[ *[\d.]+ s\] ready$", re.MULTILINE)
NUM_PROBLEMS = str(NUM if pairwise.whole else 8)
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def two_nodes() -> Iterator[Run]:
    """Runs the script's commands; both nodes are up."""
    if os.environ.get(INSIDE) is None or shutil.which("ip") is None:
        pytest.skip("needs root, unshare and iproute2 for network namespaces")
    run = partial(script, check=False, capture_output=True, timeout=HANG_S)
    try:
        with ThreadPoolExecutor() as pool:
            made = pool.submit(reference_texts, NUM, MAX_TOKENS)  # for the checks, meanwhile
            done = run("up")
            made.result()
        assert done.returncode == 0, done.stdout + done.stderr
        yield run
    finally:
        run("down")


@contextlib.contextmanager
def submitted(output: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`serve` as a Ray job that prints into a file, once it is ready."""
    with output.open("wb") as log:
        job = subprocess.Popen(
            ["bash", str(SCRIPT), "submit", *arguments],
            env=os.environ | {"PYTHON_BIN": str(Path(sys.executable).parent)},
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        wait_for(READY, output, job)  # /ready asks for a decode worker only
        yield job
    finally:
        job.kill()
        job.wait()


def wait_for(line: re.Pattern[str], output: Path, job: subprocess.Popen[bytes]) -> re.Match[str]:
    deadline = time.monotonic() + HANG_S
    while not (found := line.search(output.read_text())):
        assert job.poll() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.5)
    return found


def end(two_nodes: Run, job: subprocess.Popen[bytes], output: Path) -> None:
    down = two_nodes("run", sys.executable, "-m", "cluster", "down")
    assert down.stdout == "kvlane is down\n", down.stderr
    assert job.wait(HANG_S) == 0, output.read_text()


@pytest.mark.whole
def test_prefill_on_one_node_decode_on_the_other(two_nodes: Run, tmp_path: Path) -> None:
    output = tmp_path / "job"
    with submitted(output, *SUBMIT) as job:
        done = two_nodes("run", sys.executable, "-m", "tests.e2e.check", URL, NUM_PROBLEMS)
        assert done.returncode == 0, done.stdout + done.stderr + output.read_text()
        status = two_nodes("run", sys.executable, "-m", "cluster", "status")
        places = re.findall(r"^(prefill|decode).*(10\.78\.0\.\d)", status.stdout, re.MULTILINE)
        assert dict(places) == {"prefill": "10.78.0.1", "decode": "10.78.0.2"}, status.stdout

        serve = ("run", sys.executable, "-m", "cluster", "serve", *SUBMIT)
        if pairwise.whole:  # as a second job would
            again = two_nodes(*serve)
            assert again.returncode == 0, again.stderr
            assert "it runs already, with this configuration, at http://" in again.stderr
        other = two_nodes(*serve, "--set", "kv.page_size=32")
        assert other.returncode == 2, other.stderr
        assert "with another value of kv.page_size; end it first: kvlane down" in other.stderr
        assert two_nodes("get", f"{URL}/ready").returncode == 0
        end(two_nodes, job, output)


@pytest.mark.whole
def test_ranks_of_one_worker_on_both_nodes(two_nodes: Run, tmp_path: Path) -> None:
    """Neither node has room for both; the one on the other node than its leader's is killed."""
    output = tmp_path / "job"
    with submitted(output, "--prefill", "0", *BOTH) as job:
        check = f"from tests.e2e.check import check_texts; check_texts({URL!r}, 8)"
        done = two_nodes("run", sys.executable, "-c", check)
        assert done.returncode == 0, done.stdout + done.stderr + output.read_text()
        before = ranks()
        assert len(before) == 2
        os.kill(next(pid for pid, name in before.items() if name == "RankActor"), signal.SIGKILL)
        wait_for(re.compile(r"decode-0: ready after"), output, job)
        dead = re.search(r"decode-0: rank 1 \(node 10\.78\.0\.(\d), pid", output.read_text())
        assert dead, output.read_text()
        place = r"loading \(node \S+\.(\d), pids \d+; node \S+\.(\d)"
        (places, *_) = re.findall(place, output.read_text())
        assert set(places) == {"1", "2"}
        assert places[1] == dead[1]
        assert sorted(ranks().values()) == ["RankActor", "WorkerActor"]
        assert not before.keys() & ranks().keys()
        done = two_nodes("run", sys.executable, "-c", check)
        assert done.returncode == 0, done.stdout + done.stderr + output.read_text()
        end(two_nodes, job, output)
        assert not ranks()


def ranks() -> dict[int, str]:
    """Pid here -> class of the actor, of all workers' processes on both nodes."""
    found = {
        pid: re.match(r"ray::(WorkerActor|RankActor)", line) for pid, line in processes().items()
    }
    return {pid: match[1] for pid, match in found.items() if match}
