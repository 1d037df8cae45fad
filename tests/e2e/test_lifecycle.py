"""A cluster from `serve` to its end: it answers, heals, drains, and leaves nothing behind.

A cluster is costly to start, so each of its lives shows all that it can; CI has one.
"""

import asyncio
import json
import re
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.cli import RAY_SETTINGS
from cluster.serve.lifetime import find_running
from tests.e2e.check import KNOWN
from tests.e2e.harness import REPOSITORY, Serve, processes, shared_memory
from tests.e2e.shared import Clusters
from tests.fault.saturation import saturate, stop_engine
from tests.fault.test_ray_dies import kill_and_wait_said
from tests.support import pairwise
from tests.support.kills import Killing, Steady
from tests.support.patience import HANG_S

STALL_S = 2
IMPORTED = "was imported"
THEIRS = f"raise SystemExit(f'{{__file__}} {IMPORTED}')\n"
MODEL = "model"  # in the user's directory
# Far fewer than clients: beside other tests they are too slow to fill 64.
FEW_ROWS = ("--set", "decode.engine.max_num_reqs=16")
AT_ONCE_S = 5.0  # far less than the queue timeout, and time enough for a busy machine
OLD_S = 8.0  # the stall time, and three misses after it
# From a directory of the user's.
GIVEN = ("--model", MODEL, "--set", "model.served_name=tiny")
# Every prompt is computed by prefill, and pulled.
PULLED = (
    "--set", "transport.name=mooncake",
    "--set", "disaggregation.mode=always",
    "--set", "kv.num_groups=3",  # as on CUDA: KV leaves while its step computes
    "--set", "prefill.engine.prefix_cache=false",
    "--set", "decode.engine.prefix_cache=false",
)  # fmt: skip


def ask(serve: Serve, text: str = "Hi") -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    return httpx.post(f"{serve.url}/v1/chat/completions", json=body, timeout=HANG_S).json()


def run_kvlane_there(serve: Serve, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` becomes the script that `pip install` writes, beside packages of all our names."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["kvlane"].partition(":")
    script = root / "kvlane"
    script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    serve.program = (sys.executable, str(script))
    serve.directory = filled(root / "theirs", "cluster/__init__.py")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


def run_module_there(serve: Serve, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` stays `python -m cluster`: a package `cluster` of the user's is what that asks for,
    so there is none. An empty entry of PYTHONPATH is the current directory, too."""
    serve.directory = filled(root / "theirs")
    monkeypatch.setenv("PYTHONPATH", f":{REPOSITORY}")


def filled(directory: Path, *more: str) -> Path:
    """A directory of a user's, with files that are called as our packages are."""
    (directory / "cluster").mkdir(parents=True)
    theirs = "worker.py", "router.py", "ray.py", "cluster/config.py", "cluster/serve.py"
    for name in (*theirs, *more):
        (directory / name).write_text(THEIRS)
    (directory / MODEL).symlink_to(REPOSITORY / "worker" / "assets" / "tiny")
    return directory


def check_strangers(serve: Serve) -> None:
    """Whoever reaches Ray's port needs the token, which only this user can read, and other accounts
    enter no directory of Ray's, to which it lets all of them write."""
    running = find_running(serve.root / "run" / "kvlane")
    secret = Path(running.token_path)
    assert secret.stat().st_mode & 0o777 == 0o600
    assert secret.parent.stat().st_mode & 0o777 == 0o700
    assert list(secret.parent.glob("*/session_*/sockets/*")), "Ray's are below it"
    join = f"import ray; ray.init({running.address!r}); print(ray.util.list_named_actors(True))"
    for mode, token in (
        *pairwise.more(("disabled", {})),
        ("token", {"RAY_AUTH_TOKEN": "guess"}),
        ("token", {"RAY_AUTH_TOKEN_PATH": running.token_path}),
    ):
        environment = serve.environment() | RAY_SETTINGS | {"RAY_AUTH_MODE": mode} | token
        done = subprocess.run(
            [sys.executable, "-c", join], env=environment, capture_output=True, text=True
        )
        joined = "RAY_AUTH_TOKEN_PATH" in token
        assert (done.returncode == 0) == joined, done.stdout + done.stderr
        assert ("'controller'" in done.stdout or "kvlane" in done.stdout) == joined, done.stdout


def test_a_cluster_answers_replaces_dead_and_hung_workers_and_ctrl_c_leaves_nothing(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And imports nothing from the directory that it is started in."""
    run_kvlane_there(serve, tmp_path, monkeypatch)
    before, shm_before = processes(), shared_memory()
    serve.start(*GIVEN, *PULLED).wait_ready()
    assert ask(serve)["choices"][0]["message"]["content"]
    done = serve.command("status", "--json")
    assert done.returncode == 0, done.stderr
    first = {row["name"]: row for row in json.loads(done.stdout)}
    assert first == serve.status()
    assert sorted(first) == ["decode-0", "prefill-0", "router-0"]
    assert {row["state"] for row in first.values()} == {"ready"}
    assert {row["restarts"] for row in first.values()} == {0}
    assert "Traceback" not in serve.output
    check_strangers(serve)
    unused = ("/autoscaler/_private/monitor.py", "/dashboard/dashboard.py")
    lines = [line for pid, line in processes().items() if pid not in before]
    assert not [line for line in lines if any(each in line for each in unused)]
    logs = {found[1] for line in lines if (found := re.search(r"gcs_server --log_dir=(\S+)", line))}
    for each in logs:
        assert "Traceback" not in (Path(each) / "dashboard_agent.log").read_text()
    assert logs

    # Who dies from here on is replaced all the same, and what it logs is shown.
    for name in ("agent", *pairwise.more("environments", "gcs")):
        kill_and_wait_said(serve, name)
    num_printed = len(serve.output)
    # Under load: nobody notices, it comes back. tests/gpu/test_kills_on_cuda.py shows GPUs' memory.
    if pairwise.whole:  # else in tests/fault/test_chaos.py
        load = Steady(*KNOWN, num_at_once=2)
        killing = Killing(serve, load, "mooncake/tcp", tuple, timeout_s=HANG_S)
        asyncio.run(killing.repeat(2))
        load.check()
    second = serve.wait_idle()["prefill-0"]

    stop_engine(serve, "prefill-0")  # Ray never notices this one
    assert "(prefill-0 pid=" in serve.output[num_printed:]
    row = serve.status()["prefill-0"]
    assert row["pid"] != second["pid"]
    assert second["pid"] not in processes()
    assert ask(serve)["choices"]
    num_printed = len(serve.output)
    serve.interrupt()
    assert serve.wait() == 0, serve.output
    assert "Traceback" not in serve.output[num_printed:]
    assert set(processes()) <= set(before)
    assert shared_memory() == shm_before
    assert serve.leftovers() == []
    assert IMPORTED not in serve.output


@pytest.mark.whole
def test_a_serve_that_was_killed_leaves_nothing_after_a_while(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_module_there(serve, tmp_path, monkeypatch)
    before, shm_before = processes(), shared_memory()
    process = serve.start(*GIVEN, "--prefill", "0").wait_ready().process
    assert process is not None
    assert serve.command("status").returncode == 0
    assert IMPORTED not in serve.output
    process.kill()
    deadline = time.monotonic() + 50  # without the watchdog, Ray's agents would stay for a minute
    while set(processes()) - set(before) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert set(processes()) <= set(before)
    assert shared_memory() == shm_before
    assert serve.command("status").returncode == 2
    assert serve.leftovers() == []


@pytest.mark.whole
@pytest.mark.parametrize("joins", [True, False])
def test_a_placement_that_cannot_be_met_says_what_is_missing(
    joins: bool, clusters: Clusters, request: pytest.FixtureRequest
) -> None:
    """On a Ray that it joins, and on one of its own, which ends with it."""
    serve: Serve = clusters.made() if joins else request.getfixturevalue("serve")
    before = processes()
    least = "--set", "cluster.placement_timeout_s=3"
    serve.start("--set", "prefill.resources={rdma: 1}", *least)
    assert serve.wait() == 1
    assert "prefill-0 needs CPU 1, rdma 1: no node has any rdma" in serve.output
    assert "Traceback" not in serve.output
    assert joins or set(processes()) <= set(before)
    assert serve.leftovers() == []


@pytest.mark.whole
def test_drain_of_a_name_removes_it_nobody_is_lost_and_drain_of_all_ends_serve(
    clusters: Clusters,
) -> None:
    stall = "--set", f"ping.stall_s={STALL_S}"
    serve = clusters.fresh("--router", "2", "--decode", "2", *FEW_ROWS, *stall)
    ready_at = time.monotonic()
    with ThreadPoolExecutor() as pool:  # a command imports Ray for seconds
        drain = partial(serve.command, "drain")
        *drained, wrong = pool.map(drain, ("router-0", "decode-1", "decode-7"))
    for done in drained:
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr
    assert ask(serve)["choices"]
    assert sorted(serve.status()) == ["decode-0", "prefill-0", "router-1"]
    assert wrong.returncode == 2
    assert "no worker or router is called decode-7" in wrong.stderr

    seen = asyncio.run(saturate(serve.url, max(3.0, ready_at + OLD_S - time.monotonic())))
    assert seen.most_waiting > 0, "it was not saturated"
    assert not seen.not_live
    assert not seen.bad_answers
    assert {row["restarts"] for row in serve.status().values()} == {0}, serve.output
    assert " lost" not in serve.output

    last = serve.command("drain", "decode-0")
    assert last.returncode == 0
    assert "decode-0 is the last decode worker" in last.stderr
    began_at = time.monotonic()
    refused = ask(serve)["error"]
    assert refused["code"] == "no_worker", refused
    assert time.monotonic() - began_at < AT_ONCE_S
    with ThreadPoolExecutor() as pool:
        scaling = pool.submit(serve.command, "scale", "decode=1")
        serve.wait_status("decode-0")  # from here on requests wait for it
        assert ask(serve)["choices"]
    done = scaling.result()
    assert (done.returncode, done.stdout) == (0, "decode=1: decode-0 started\n"), done.stderr
    assert serve.command("drain").returncode == 0
    assert serve.wait() == 0, serve.output
    assert serve.leftovers() == []
