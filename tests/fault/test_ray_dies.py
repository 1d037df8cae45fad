"""Ray's own processes die under load: what is served, said and lost.

The GCS and the agents of a Ray of our own die in tests/e2e/test_lifecycle.py as well.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.serve.ray_watch import Gcs, JoinedRay
from tests.e2e.harness import Serve, processes, shared_memory
from tests.fault.chaos.faults import TITLES, pids_of
from tests.support.kills import Steady
from tests.support.patience import HANG_S, until

OUTLIVED = ("gcs", "agent", "environments", "controller", "gcs")
SAID = {
    "gcs": "Ray's GCS answers again",
    "agent": "an agent of Ray has died (signal 9)",
    "environments": "an agent of Ray has died (signal 9)",
    "controller": "a new controller keeps",
}
GONE = """
import time
from cluster.serve import ray_watch
from cluster.serve.progress import Screen
import sys
ray_watch.END_S = 0.1
class Dead:
    def look(self, say):
        say("a line")
        return "its raylet has died"
ray_watch.RayWatch(Dead(), Screen(sys.stdout))
time.sleep(600)  # as a call of Ray that never returns
"""


def kill(name: str) -> None:
    (pid,) = pids_of(TITLES[name])
    os.kill(pid, signal.SIGKILL)


def kill_and_wait_said(serve: Serve, name: str) -> None:
    said = SAID[name]
    num = serve.output.count(said)
    kill(name)
    until(lambda: serve.output.count(said) > num, f"{said}:\n{serve.output}")


@pytest.mark.whole
def test_a_gcs_and_agents_are_outlived_and_a_raylet_ends_serve_with_its_cause(serve: Serve) -> None:
    before, shm_before = processes(), shared_memory()
    serve.start("--prefill", "1", "--decode", "2").wait_ready()

    async def killed_under_load() -> None:
        running = asyncio.create_task(load.run(serve.url))
        for name in OUTLIVED:
            await asyncio.to_thread(kill_and_wait_said, serve, name)
        os.kill(serve.status()["decode-1"]["pid"], signal.SIGKILL)
        await asyncio.to_thread(serve.wait_status, "decode-1", restarts=1, state="ready")
        load.stopped = True
        await running

    load = Steady(num_problems=4, max_tokens=60, num_at_once=2)
    asyncio.run(killed_under_load())
    load.check()  # no request was cut, and each text is right
    restarts = {name: row["restarts"] for name, row in serve.status().items()}
    assert restarts == {"prefill-0": 0, "decode-0": 0, "decode-1": 1, "router-0": 0}
    kill("raylet")
    assert serve.wait() == 1, serve.output
    last = serve.output.strip().splitlines()[-1]
    assert last == "error: Ray's raylet has died (signal 9), and with it all workers and routers"
    assert "Traceback" not in serve.output
    assert set(processes()) <= set(before)
    assert shared_memory() == shm_before
    assert serve.leftovers() == []


def test_a_joined_gcs_that_is_gone_and_back_is_said_once_and_a_raylet_is_the_end(
    tmp_path: Path,
) -> None:
    path, said = str(tmp_path / "raylet"), list[str]()

    def look_twice() -> None:
        for _ in range(2):
            ray.gcs.asked_at = 0.0
            assert ray.look(said.append) == ""

    with socket.socket(socket.AF_UNIX) as raylet:
        raylet.bind(path)
        raylet.listen()
        with socket.create_server(("127.0.0.1", 0)) as head:
            host, port = head.getsockname()
            ray = JoinedRay(Gcs(f"{host}:{port}"), path)
            look_twice()
            assert not said
        look_twice()
        (line,) = said
        assert f"GCS at {host}:{port} does not answer" in line
        assert "RAY_gcs_rpc_server_reconnect_timeout_s" in line
        with socket.create_server((host, port)):
            look_twice()
        assert len(said) == 2
        assert "answers again" in said[1]
    ray.gcs.asked_at = 0.0
    assert "raylet has died" in ray.look(said.append)


def test_a_call_of_ray_that_never_returns_does_not_keep_serve_from_its_end() -> None:
    began_at = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", GONE], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert time.monotonic() - began_at < HANG_S
    assert done.returncode == 1
    first, last = done.stdout.splitlines()
    assert "a line" in first
    assert last.endswith("error: its raylet has died")
