"""The doctor on a machine as it is, on broken ones, and on what workers would tell."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.check import decided_here
from cluster.config import load
from cluster.doctor import running
from cluster.doctor.facts import MOONCAKE, Facts, Port, read_facts, requirements
from cluster.doctor.finding import Finding, Level, has_failure
from cluster.doctor.machine import examine
from cluster.doctor.running import Examination, Examined, Patient
from cluster.nvml import Driver
from tests.support.commands import run
from tests.support.patience import HANG_S
from worker.api import PullPath

REPOSITORY = Path(__file__).parents[2]
RDMA = ("transport.name=mooncake", "transport.kind=rdma")
NVLINK = ("transport.name=mooncake", "transport.kind=nvlink")
H200 = Driver("580.159.04", "13.0", ("NVIDIA H200",) * 2)
APART = replace(H200, unreachable=((0, 1), (1, 0)))
CARD = Port("mlx5_0/1", "ACTIVE", "400 Gb/sec (4X NDR)")

Row = dict[str, str]


@pytest.fixture(scope="module")
def facts() -> Facts:
    """Of this machine, less what others in the same place would differ in."""
    return replace(read_facts(), memlock_bytes=None, shm_bytes=1 << 30, num_files=65536)


@pytest.fixture(scope="module")
def gpu_host(facts: Facts) -> Facts:
    """A machine with two H200 and an RDMA card, all of it in order."""
    versions = {n: v for n, v in facts.versions.items() if not n.startswith(MOONCAKE)}
    return replace(
        facts,
        driver=H200,
        num_pci_gpus=2,
        torch_cuda="13.0",
        rdma_ports=(CARD,),
        can_open_rdma=True,
        mooncake="",
        versions=versions | {f"{MOONCAKE}-cuda13": "0.3.14"},
        extra="cuda",
    )


def doctor(*arguments: str, **more: Any) -> tuple[int, list[Row]]:
    """Run the command; exit code and findings."""
    command = ["doctor", "--json", *arguments]
    if more:  # a process that finds other libraries, or may less, from its beginning on
        done = subprocess.run(
            [sys.executable, "-m", "cluster", *command], cwd=REPOSITORY,
            capture_output=True, text=True, timeout=HANG_S, check=False, **more,
        )  # fmt: skip
    else:
        done = run(command)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def bad(rows: Sequence[Row]) -> dict[str, Row]:
    """The findings that are failures, by subject; each says why, and what to do."""
    found = {row["subject"]: row for row in rows if row["level"] == "failure"}
    assert all(row["why"] and row["remedy"] for row in found.values())
    return found


def judged(facts: Facts, *sets: str) -> list[Finding]:
    """Of a machine with these facts."""
    num_gpus = len(facts.driver.gpus)
    found = list(examine(decided_here(load(None, sets), num_gpus), facts))
    for each in found:
        assert each.what
        assert (each.level is Level.OK) == (not each.why) == (not each.remedy), each
    return found


def only(findings: Sequence[Finding]) -> Finding:
    """The one that is not ok."""
    (found,) = [each for each in findings if each.level is not Level.OK]
    return found


def with_path(*places: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*places, REPOSITORY)))}


def test_a_healthy_machine_is_healthy() -> None:
    code, rows = doctor("--port", "0", "--set", "transport.name=mooncake")
    assert (code, bad(rows)) == (0, {})
    subjects = {row["subject"] for row in rows}
    assert subjects >= {"ports", "model", "gpus", "rdma", "memlock", "mooncake", "shm", "files"}


def test_a_port_that_is_taken_is_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, rows = doctor("--port", str(port))
    assert code == 1
    found = bad(rows)["ports"]
    assert found["what"] == f"cluster.port: 127.0.0.1:{port}: Address already in use"
    assert "--port" in found["remedy"]


def test_memory_that_cannot_be_locked_is_a_failure_for_rdma() -> None:
    limit = 1 << 20
    code, rows = doctor(
        "--port", "0", "--set", RDMA[0], "--set", RDMA[1],
        preexec_fn=limited(resource.RLIMIT_MEMLOCK, limit), env=os.environ,
    )  # fmt: skip
    assert code == 1
    found = bad(rows)["memlock"]
    assert found["what"] == "at most 1 MiB"
    assert "ulimit -l unlimited" in found["remedy"]
    assert "rdma" in bad(rows) or Path("/sys/class/infiniband").exists()


def limited(kind: int, limit: int) -> Callable[[], None]:
    """For a child, which also loses the right to lock more than it may."""

    def limit_child() -> None:
        resource.setrlimit(kind, (limit, limit))
        if os.geteuid() == 0:
            drop_bounding(14)  # CAP_IPC_LOCK

    return limit_child


def drop_bounding(capability: int) -> None:
    """prctl(PR_CAPBSET_DROP): what is executed next does not get it, be it root."""
    assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0


def test_a_system_library_that_is_missing_is_a_failure(tmp_path: Path) -> None:
    """mooncake's own extension module, linked against a libibverbs that nobody has."""
    spec = find_spec("mooncake")
    assert spec is not None
    assert spec.submodule_search_locations
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    for folder in spec.submodule_search_locations:
        for engine in Path(folder).glob("engine*.so"):
            broken = engine.read_bytes().replace(b"libibverbs.so.1\0", b"libibverbs.so.9\0")
            (package / engine.name).write_bytes(broken)
            shutil.copymode(engine, package / engine.name)
    arguments = ("--port", "0", "--set", "transport.name=mooncake")
    code, rows = doctor(*arguments, env=with_path(tmp_path))
    assert code == 1
    found = bad(rows)["mooncake"]
    assert found["what"] == "mooncake needs the system libraries libibverbs.so.9"
    assert found["remedy"].endswith("libibverbs1")


@pytest.mark.parametrize(("name", "version"), [("ray", "2.59.0"), ("msgspec", "0.18.6")])
def test_another_version_than_is_wanted_is_a_failure(
    name: str, version: str, tmp_path: Path
) -> None:
    info = tmp_path / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    code, rows = doctor("--port", "0", env=with_path(tmp_path))
    assert code == 1
    found = bad(rows)["versions"]
    assert found["what"].startswith(f"{name} {version} is installed, and ")
    assert found["remedy"].startswith(f"pip install '{name}")


DRIVER = """
#include <string.h>
#define BASE 0x7f1200000000L  /* a handle is as wide as a pointer */
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *to, unsigned n) { strncpy(to, "580.159.04", n); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *to) { *to = 13010; return 0; }
int nvmlDeviceGetCount_v2(unsigned *to) { *to = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **to) { *to = (void *)(BASE + i); return 0; }
int nvmlDeviceGetName(void *gpu, char *to, unsigned n) {
    strncpy(to, gpu == (void *)BASE ? "first" : "second", n); return 0;
}
int nvmlDeviceGetP2PStatus(void *reader, void *owner, int what, int *to) {
    if (what || (long)reader < BASE || (long)owner < BASE) return 2;
    *to = reader > owner; return 0;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_driver_that_denies_peer_access_is_understood(tmp_path: Path) -> None:
    """A library in the place of the driver's."""
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    code, rows = doctor("--port", "0", env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)})
    assert code == 1
    (gpus,) = [row["what"] for row in rows if row["subject"] == "gpus"]
    assert gpus.startswith("1 x first, 1 x second, driver 580.159.04 for CUDA 13.1, torch for ")
    (peers,) = [row for row in rows if row["subject"] == "peers"]
    assert "memory: 1 from 0 (" in peers["what"], "GPU 1 cannot read GPU 0's, and else all can"
    assert peers["level"] == "warning"


def test_gpus_without_peer_access_are_a_failure_where_kv_goes_over_nvlink(gpu_host: Facts) -> None:
    broken = replace(gpu_host, driver=APART)
    found = only(judged(broken))  # `auto` is nvlink between GPUs of one machine
    assert (found.subject, found.level) == ("peers", Level.FAILURE)
    assert "0 from 1, 1 from 0" in found.what
    assert "transport.kind=tcp" in found.remedy
    assert only(judged(replace(broken, rdma_ports=()), "transport.kind=tcp")).level is Level.WARNING


def test_gpus_of_which_some_have_peer_access_are_a_warning(gpu_host: Facts) -> None:
    four = replace(H200, gpus=("NVIDIA L40S",) * 4, unreachable=((0, 2), (2, 0)))
    found = only(judged(replace(gpu_host, driver=four), *NVLINK))
    assert (found.subject, found.level) == ("peers", Level.WARNING)


def test_what_is_wanted_is_known_without_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the metadata of what pip has installed."""
    here = requirements("cpu")
    monkeypatch.setattr("cluster.doctor.facts.PROJECT", Path("/no/such/file"))
    ray = [text for text in requirements("") if text.startswith("ray")]
    assert ray == [text for text in here if text.startswith("ray")]
    assert any(text.startswith("torch") for text in requirements("cpu"))
    assert not any(text.startswith("torch") for text in requirements(""))


def test_a_gpu_host_in_order_is_healthy(gpu_host: Facts) -> None:
    for sets in ((), NVLINK, RDMA):
        assert {each.level for each in judged(gpu_host, *sets)} == {Level.OK}


@pytest.mark.parametrize(
    ("change", "sets", "subject", "level"),
    [
        ({"torch_cuda": "14.1"}, (), "gpus", Level.FAILURE),
        ({"torch_cuda": ""}, (), "gpus", Level.FAILURE),
        ({"rdma_ports": ()}, RDMA, "rdma", Level.FAILURE),
        ({"rdma_ports": (replace(CARD, state="DOWN"),)}, RDMA, "rdma", Level.FAILURE),
        ({"can_open_rdma": False}, RDMA, "rdma", Level.FAILURE),
        ({}, ("transport.name=mooncake", "transport.kind=tcp"), "rdma", Level.WARNING),
        ({"memlock_bytes": 8 << 20}, RDMA, "memlock", Level.FAILURE),
        ({"versions": {f"{MOONCAKE}-non-cuda": "0.3.13"}}, NVLINK, "mooncake", Level.FAILURE),
        (
            {"versions": {f"{MOONCAKE}-non-cuda": "1", f"{MOONCAKE}-cuda13": "1"}},
            (),
            "mooncake",
            Level.FAILURE,
        ),
        ({"shm_bytes": 64 << 20}, (), "shm", Level.WARNING),
        ({"num_files": 1024}, (), "files", Level.WARNING),
    ],
)
def test_what_is_wrong_with_a_gpu_host_is_named(
    gpu_host: Facts, change: dict[str, Any], sets: Sequence[str], subject: str, level: Level
) -> None:
    if "versions" in change:
        change = change | {"needed": (), "optional": ()}
    found = only(judged(replace(gpu_host, **change), *sets))
    assert (found.subject, found.level) == (subject, level)


def test_gpus_without_a_driver_are_told(facts: Facts) -> None:
    found = only(judged(replace(facts, driver=Driver(), num_pci_gpus=8)))
    assert (found.subject, found.level) == ("gpus", Level.WARNING)


def test_serve_is_told_what_costs_and_not_what_is_fine() -> None:
    """With too few descriptors: the hard limit, as Ray raises the soft one."""
    program = (
        "from cluster.cli import main; from cluster.config import Config; "
        "from cluster.doctor.command import warnings; print(*warnings(Config(), 0), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True,
        check=True, preexec_fn=limited(resource.RLIMIT_NOFILE, 500),
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if ": shm: " not in line]
    assert len(lines) == 1
    assert lines[0].startswith("warning: files: a process may have 500 open: ")
    assert "LimitNOFILE" in lines[0]


# What the workers of a cluster tell.


def cluster_of(
    facts: Facts, *paths: PullPath, other: Facts | None = None, **changes: Any
) -> Examined:
    """A prefill and a decode worker without GPUs. `changes`, `other`: of what decode's tells."""
    config = load(None, ["transport.name=mooncake", "transport.kind=tcp"])
    told = Examination(1000.5, 2.0, plain(facts), ())
    changes["facts"] = plain(other or facts)
    patients = (
        Patient("prefill-0", "prefill", 1000.0, 1003.0, told),
        Patient("decode-0", "decode", 1000.0, 1003.0, replace(told, paths=paths, **changes)),
    )
    return Examined(config, config, patients)


def plain(facts: Facts) -> Facts:
    return replace(facts, driver=Driver(), rdma_ports=(), mooncake="")


def of_cluster(cluster: Examined, *sets: str) -> list[Finding]:
    return list(running.of_cluster(load(None, sets).transport, cluster))


GOOD = PullPath("prefill-0/ab", "mooncake/tcp", 0.9e9, 64 << 20, 64, 60e-6)


def test_a_cluster_in_order_is_healthy(facts: Facts) -> None:
    found = of_cluster(cluster_of(facts, GOOD))
    assert {each.level for each in found} == {Level.OK}
    (path,) = [each for each in found if each.subject == "path"]
    assert path.where == "prefill-0 -> decode-0"
    assert path.what == "mooncake/tcp, 0.9 GB/s in ranges of 1024 KiB, 60 us for a small pull"
    assert path.figures == {"bytes_per_s": 0.9e9, "small_pull_s": 60e-6}
    memlock = [each for each in found if each.subject == "memlock"]
    assert [each.where for each in memlock] == ["prefill-0, decode-0"], "the same is said once"


@pytest.mark.parametrize("wanted", ["transport.kind=rdma", "transport.name=shm"])
def test_a_path_that_is_not_the_one_asked_for_is_a_failure(facts: Facts, wanted: str) -> None:
    found = only(of_cluster(cluster_of(facts, GOOD), wanted))
    assert found.level is Level.FAILURE
    assert f"asked for is {wanted}" in found.what
    cluster = cluster_of(facts, GOOD)
    written = cluster.written.model_copy(update={"transport": load(None, [wanted]).transport})
    assert only(of_cluster(replace(cluster, written=written))) == found, "as serve was told"


def test_a_path_over_which_nothing_comes_is_a_failure(facts: Facts) -> None:
    cut = PullPath("prefill-0/ab", "mooncake/tcp", error="no mooncake engine answers at 10.0.0.1:1")
    found = only(of_cluster(cluster_of(facts, cut)))
    assert (found.level, found.where) == (Level.FAILURE, "prefill-0 -> decode-0")
    assert "no mooncake engine answers at 10.0.0.1:1" in found.what
    assert has_failure([found])


def test_nvlink_that_carries_no_more_than_tcp_is_a_warning(gpu_host: Facts) -> None:
    slow = PullPath("prefill-0/ab", "mooncake/nvlink", 2e9, 64 << 20, 4, 60e-6)
    config = decided_here(load(None, NVLINK), 2)
    told = Examination(1000.5, 2.0, gpu_host, (slow,))
    patients = (Patient("decode-0", "decode", 1000.0, 1003.0, told),)
    found = only(of_cluster(Examined(config, config, patients)))
    assert (found.subject, found.level) == ("path", Level.WARNING)
    for fewer in ({"num_bytes": 1 << 20}, {"num_ranges": 1024}):  # as long as its calls take
        short = replace(told, paths=(msgspec.structs.replace(slow, **fewer),))
        patients = (replace(patients[0], told=short),)
        assert {e.level for e in of_cluster(Examined(config, config, patients))} == {Level.OK}


def test_versions_that_differ_between_workers_are_told(facts: Facts) -> None:
    for package, level in (("kvlane", Level.FAILURE), ("uvicorn", Level.WARNING)):
        other = replace(facts, versions=facts.versions | {package: "99"})
        found = only(of_cluster(cluster_of(facts, GOOD, other=other)))
        assert (found.subject, found.level) == ("versions", level)
        assert "99 at decode-0" in found.what


@pytest.mark.parametrize("began_at", [990.0, 1009.0])
def test_a_clock_that_is_off_is_a_warning(facts: Facts, began_at: float) -> None:
    found = only(of_cluster(cluster_of(facts, GOOD, began_at=began_at)))
    assert (found.subject, found.level, found.where) == ("clock", Level.WARNING, "decode-0")
    skew_s = 1000.0 - began_at if began_at < 1000 else began_at - 1001.0
    assert f"{skew_s:.1f} s" in found.what


def test_a_worker_that_tells_nothing_is_a_failure(facts: Facts) -> None:
    cluster = cluster_of(facts, GOOD)
    silent = Patient("decode-1", "decode", 0.0, 0.0, None, "it is lost")
    found = only(of_cluster(replace(cluster, patients=(*cluster.patients, silent))))
    assert (found.level, found.where) == (Level.FAILURE, "decode-1")
    assert "it is lost" in found.what
