"""The doctor on a machine as it is, on broken ones, and on what workers would tell."""

import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file

from cluster.config import load
from cluster.diagnose import running
from cluster.diagnose.checks import Settings, of_start
from cluster.diagnose.eight_bits import eight_bits
from cluster.diagnose.facts import (
    MOONCAKE,
    Driver,
    Facts,
    Port,
    read_driver,
    read_facts,
    requirements,
)
from cluster.diagnose.finding import Finding, Level, has_failure, refuse
from cluster.diagnose.machine import examine, of_transport
from cluster.diagnose.running import ClusterExamination, Examination, WorkerAnswer
from tests.support.commands import REPOSITORY, run
from tests.support.pairwise import one_in
from tests.support.patience import HANG_S
from worker.errors import UserError
from worker.observe.paths import PullPath

RDMA = ("transport.name=mooncake", "transport.kind=rdma")
NVLINK = ("transport.name=mooncake", "transport.kind=nvlink")
H200 = Driver("580.159.04", "13.0", ("NVIDIA H200",) * 2)
APART = replace(H200, unreachable=((0, 1), (1, 0)))
SOME_APART = Driver("580.159.04", "13.0", ("NVIDIA L40S",) * 4, ((0, 2), (2, 0)))
TCP = ("transport.kind=tcp",)
PR_CAPBSET_DROP, CAP_IPC_LOCK = 24, 14
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
        gpu_direct=("nvidia_peermem",),
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


def failed(subject: str, *arguments: str, **more: Any) -> tuple[str, str]:
    """What the command says of a subject with which something is wrong, and its remedy."""
    code, rows = doctor(*arguments, **more)
    assert code == 1
    row = bad(rows)[subject]
    return row["what"], row["remedy"]


def judged(facts: Facts, *sets: str) -> list[Finding]:
    num_gpus = len(facts.driver.gpus)
    found = list(examine(Settings.here(load(None, sets), num_gpus, facts).decided, facts))
    for each in found:
        assert each.what
        assert (each.level is Level.OK) == (not each.why) == (not each.remedy), each
    return found


def only(findings: Sequence[Finding]) -> Finding:
    (found,) = [each for each in findings if each.level is not Level.OK]
    return found


def with_path(*places: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*places, REPOSITORY)))}


def test_a_healthy_machine_is_healthy() -> None:
    code, rows = doctor("--port", "0", "--set", "transport.name=mooncake")
    assert (code, bad(rows)) == (0, {})
    subjects = {row["subject"] for row in rows}
    assert subjects >= {"ports", "model", "gpus", "rdma", "memlock", "mooncake", "shm", "files"}


def test_memory_that_cannot_be_locked_is_a_failure_for_rdma() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
        if os.geteuid() == 0:  # what root executes next does not get CAP_IPC_LOCK, either
            assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0) == 0

    sets = [word for text in RDMA for word in ("--set", text)]
    arguments = ("--port", "0", *sets)
    what, remedy = failed("memlock", *arguments, preexec_fn=limit, env=os.environ)
    assert what.startswith("at most 1 MiB may be locked, and ")
    assert "ulimit -l unlimited" in remedy


def test_a_system_library_that_is_missing_is_a_failure(tmp_path: Path) -> None:
    """mooncake's own extension module, linked against a libibverbs that nobody has."""
    spec = find_spec("mooncake")
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
    what, remedy = failed("mooncake", *arguments, env=with_path(tmp_path))
    assert what == "mooncake needs the system libraries libibverbs.so.9"
    assert remedy.endswith("libibverbs1")


def test_serve_refuses_a_transport_whose_library_is_missing(facts: Facts) -> None:
    lacking = replace(facts, mooncake="mooncake needs x: apt-get install x")
    with pytest.raises(UserError, match=r"^transport\.name: mooncake needs x: apt-get install x$"):
        refuse(of_start(load(None, ["cluster.port=0", "transport.name=mooncake"]), 0, lacking))
    refuse(of_start(load(None, ["cluster.port=0"]), 0, lacking))


@pytest.mark.parametrize(
    ("sets", "change", "what"),
    [
        (RDMA, {"rdma_ports": ()}, "rdma .*no card in /sys/class/infiniband.*rdma/ib"),
        (RDMA, {"can_open_rdma": False}, "rdma .*no file in /dev/infiniband.*--device"),
        (NVLINK, {"driver": APART}, "nvlink .*0 from 1, 1 from 0.*--set transport.kind=tcp"),
    ],
)
def test_serve_and_each_worker_refuse_a_kind_that_the_machine_does_not_have(
    gpu_host: Facts, sets: Sequence[str], change: dict[str, Any], what: str
) -> None:
    """Before Ray, or, on the node of another, before the weights are read."""
    lacking, config = replace(gpu_host, **change), load(None, ["cluster.port=0", *sets])
    with pytest.raises(UserError, match=rf"^transport\.kind: {what}") as refused:
        refuse(examine(Settings.here(config, 2, lacking).decided, lacking))
    assert refused.value.param == "transport.kind"
    with pytest.raises(UserError, match=rf"^transport\.kind: {what}"):
        refuse(of_transport(config.transport.kind, config.decode.engine, lacking))


def test_memory_that_cannot_be_locked_is_refused_where_it_is_the_pool(gpu_host: Facts) -> None:
    lacking = replace(gpu_host, memlock_bytes=8 << 20)
    on_cpu = load(None, ["engine.device=cpu"]).decode.engine
    with pytest.raises(UserError, match=r"^transport\.kind: .*8 MiB.*ulimit -l unlimited"):
        refuse(of_transport("rdma", on_cpu, lacking))


@pytest.mark.parametrize(("name", "version"), one_in(2, [("ray", "2.59.0"), ("msgspec", "0.18.6")]))
def test_another_version_than_is_wanted_is_a_failure(name, version, tmp_path: Path) -> None:
    info = tmp_path / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    what, remedy = failed("versions", "--port", "0", env=with_path(tmp_path))
    assert what.startswith(f"{name} {version} is installed, and ")
    assert remedy.startswith(f"pip install '{name}")


def test_a_model_s_eight_bits_are_told() -> None:
    """Of tiny, whose numbers are counted by torch here."""
    config = load(None, ["model.path=tiny"])
    held = load_file(config.model.directory / "model.safetensors")
    layers = sum(x.numel() for name, x in held.items() if x.dim() == 2 and ".layers." in name)
    total = sum(x.numel() for x in held.values())
    (found,) = eight_bits(config, replace(H200, memory=(2 * 10**9, 10**9)))
    assert found.figures is not None
    assert found.figures["weights"] == 2 * total
    assert found.figures["fp8_weights"] == 2 * total - layers
    assert found.figures["fp8_kv_token"] < 0.55 * found.figures["kv_token"]
    rooms = found.figures["kv_tokens"], found.figures["fp8_kv_tokens"]
    assert rooms[0] == (int(0.85e9) - 2 * total) // int(found.figures["kv_token"])
    assert rooms[1] > 1.8 * rooms[0]
    assert f"{rooms[1] // 8192} rows of 8,192" in found.what


def test_a_driver_that_denies_peer_access_is_understood(facts, monkeypatch) -> None:
    """By a double of NVML, of which GPU 1 cannot read GPU 0's memory, and else all can."""
    nvml = SimpleNamespace(
        NVMLError=OSError, nvmlInit=lambda: None, nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.159.04", nvmlDeviceGetCount=lambda: 2,
        nvmlSystemGetCudaDriverVersion_v2=lambda: 13010, nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetName=("first", "second").__getitem__,
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(total=4 >> gpu),
        nvmlDeviceGetP2PStatus=lambda reader, owner, what: 2 if what else int(reader > owner),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    driver = read_driver()
    assert driver == Driver("580.159.04", "13.1", ("first", "second"), ((1, 0),), (4, 2))
    found = {each.subject: each for each in judged(replace(facts, driver=driver, rdma_ports=()))}
    assert found["gpus"].what.startswith("1 x first, 1 x second, driver 580.159.04 for CUDA 13.1, ")
    assert "memory: 1 from 0 (" in found["peers"].what
    assert found["peers"].level is Level.WARNING


def test_what_is_wanted_is_known_without_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the metadata of what pip has installed."""
    here = requirements("cpu")
    monkeypatch.setattr("cluster.diagnose.facts.PROJECT", Path("/no/such/file"))
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
        ({"driver": Driver(), "num_pci_gpus": 8}, (), "gpus", Level.WARNING),
        ({"driver": APART}, NVLINK, "peers", Level.FAILURE),
        ({"driver": APART, "rdma_ports": ()}, (), "peers", Level.WARNING),  # `auto` takes TCP
        ({"driver": APART, "rdma_ports": ()}, TCP, "peers", Level.WARNING),
        ({"driver": SOME_APART}, NVLINK, "peers", Level.WARNING),
        ({"torch_cuda": "14.1"}, (), "gpus", Level.FAILURE),
        ({"torch_cuda": ""}, (), "gpus", Level.FAILURE),
        ({"rdma_ports": ()}, RDMA, "rdma", Level.FAILURE),
        ({"rdma_ports": (replace(CARD, state="DOWN"),)}, RDMA, "rdma", Level.FAILURE),
        ({"can_open_rdma": False}, RDMA, "rdma", Level.FAILURE),
        ({"gpu_direct": ()}, RDMA, "rdma", Level.WARNING),
        ({}, ("transport.name=mooncake", *TCP), "rdma", Level.WARNING),
        ({"memlock_bytes": 8 << 20}, RDMA, "memlock", Level.FAILURE),
        ({"versions": {f"{MOONCAKE}-non-cuda": "0.3.13"}}, NVLINK, "mooncake", Level.FAILURE),
        ({"versions": {f"{MOONCAKE}-non-cuda": "1", f"{MOONCAKE}-cuda13": "1"}}, (), "mooncake",
         Level.FAILURE),
        ({"shm_bytes": 64 << 20}, (), "shm", Level.WARNING),
        ({"num_files": 1024}, (), "files", Level.WARNING),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_gpu_host_is_named(gpu_host, change, sets, subject, level) -> None:
    if "versions" in change:
        change = change | {"needed": (), "optional": ()}
    found = only(judged(replace(gpu_host, **change), *sets))
    assert (found.subject, found.level) == (subject, level)


# What the workers of a cluster tell.

GOOD = PullPath("prefill-0/ab", "mooncake/tcp", 0.9e9, 64 << 20, 64, 60e-6, 96.0, 64)


def plain(facts: Facts) -> Facts:
    return replace(facts, driver=Driver(), rdma_ports=(), mooncake="")


def cluster_of(of: Facts, **changes: Any) -> ClusterExamination:
    """A prefill and a decode worker without GPUs. `changes`: of what decode's tells."""
    config = load(None, ["transport.name=mooncake", "transport.kind=tcp"])
    told = Examination(1000.5, 2.0, plain(of), ())
    answers = (
        WorkerAnswer("prefill-0", 1000.0, 1003.0, told),
        WorkerAnswer("decode-0", 1000.0, 1003.0, replace(told, **{"paths": (GOOD,)} | changes)),
    )
    return ClusterExamination(config, config, answers)


def of_cluster(cluster: ClusterExamination, *sets: str) -> list[Finding]:
    return list(running.of_cluster(load(None, sets).transport, cluster))


def wrong(cluster: ClusterExamination, *sets: str) -> tuple[Finding, tuple[str, Level, str]]:
    """What is not ok, and its subject, level and place."""
    found = only(of_cluster(cluster, *sets))
    return found, (found.subject, found.level, found.where)


def test_a_cluster_in_order_is_healthy(facts: Facts) -> None:
    found = of_cluster(cluster_of(facts))
    assert {finding.level for finding in found} == {Level.OK}
    (path,) = [finding for finding in found if finding.subject == "path"]
    assert path.where == "prefill-0 -> decode-0"
    assert (
        path.what == "mooncake/tcp, 0.9 GB/s in ranges of 1024 KiB, 60 us for a small pull, "
        "6,144 tokens/s of this model"
    )
    assert path.figures == {"bytes_per_s": 0.9e9, "small_pull_s": 60e-6}
    memlock = [finding.where for finding in found if finding.subject == "memlock"]
    assert memlock == ["prefill-0, decode-0"], "the same is said once"


@pytest.mark.parametrize("wanted", ["transport.kind=rdma", "transport.name=shm"])
def test_a_path_that_is_not_the_one_asked_for_is_a_failure(facts: Facts, wanted: str) -> None:
    cluster = cluster_of(facts)
    found = only(of_cluster(cluster, wanted))
    assert found.level is Level.FAILURE
    assert f"asked for is {wanted}" in found.what
    written = cluster.written.model_copy(update={"transport": load(None, [wanted]).transport})
    assert only(of_cluster(replace(cluster, written=written))) == found, "as serve was told"


def test_nvlink_that_carries_no_more_than_tcp_is_a_warning(gpu_host: Facts) -> None:
    slow = PullPath("prefill-0/ab", "mooncake/nvlink", 2e9, 64 << 20, 4, 60e-6)
    config = Settings.here(load(None, NVLINK), 2, gpu_host).decided

    def levels(**changes: int) -> set[tuple[str, Level]]:
        path = msgspec.structs.replace(slow, **changes)
        told = Examination(1000.5, 2.0, gpu_host, (path,))
        answers = (WorkerAnswer("decode-0", 1000.0, 1003.0, told),)
        found = of_cluster(ClusterExamination(config, config, answers))
        return {(f.subject, f.level) for f in found if f.level is not Level.OK}

    assert levels() == {("path", Level.WARNING)}
    # As long as its calls take.
    assert levels(num_bytes=1 << 20) == levels(num_ranges=1024) == set()


CUT = PullPath("prefill-0/ab", "mooncake/tcp", error="no mooncake engine answers at 10.0.0.1:1")


@pytest.mark.parametrize(
    ("change", "place", "says"),
    [
        ({"paths": (CUT,)}, ("path", Level.FAILURE, "prefill-0 -> decode-0"), CUT.error),
        ({"versions": "kvlane"}, ("versions", Level.FAILURE, ""), "99 at decode-0"),
        ({"versions": "uvicorn"}, ("versions", Level.WARNING, ""), "99 at decode-0"),
        ({"began_at": 990.0}, ("clock", Level.WARNING, "decode-0"), "10.0 s"),
        ({"began_at": 1009.0}, ("clock", Level.WARNING, "decode-0"), "8.0 s"),
    ],
)
def test_what_is_wrong_with_a_worker_is_named(facts, change, place, says) -> None:
    if "versions" in change:
        other = facts.versions | {change["versions"]: "99"}
        change = {"facts": plain(replace(facts, versions=other))}
    found, found_at = wrong(cluster_of(facts, **change))
    assert found_at == place
    assert says in found.what
    assert has_failure([found]) is (place[1] is Level.FAILURE)


def test_a_worker_that_tells_nothing_is_a_failure(facts: Facts) -> None:
    cluster = cluster_of(facts)
    silent = WorkerAnswer("decode-1", 0.0, 0.0, None, "it is lost")
    found, place = wrong(replace(cluster, answers=(*cluster.answers, silent)))
    assert place == ("worker", Level.FAILURE, "decode-1")
    assert "it is lost" in found.what
