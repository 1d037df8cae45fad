"""Judges a machine by its facts, for what a configuration asks of it. Reads nothing itself."""

from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.version import Version

from cluster.config import Config
from cluster.diagnose.facts import MOONCAKE, Facts
from cluster.diagnose.finding import Finding, failure, ok, warning
from cluster.resolve import ROLES
from worker.config import EngineConfig
from worker.errors import MissingLibrary, UserError

EXACT = ("ray",)  # of which we use the private interface
FILES_BESIDE_CLIENTS = 1024
INSTALL = {"cpu": "pip install 'kvlane[cpu]'", "cuda": "pip install 'kvlane[cuda]'"}
NO_START = "workers that move KV with it cannot start"
NO_KV = "decode workers cannot pull KV, and compute every prompt themselves"


def examine(config: Config, facts: Facts) -> Iterator[Finding]:
    """All findings about one machine; `config`: with devices and transport decided."""
    name, kind = config.transport.name, config.transport.kind
    kind = name if name in ("shm", "mixed") else kind  # mixed takes TCP where nothing else works
    yield _gpus(facts, on_gpus=any(config.role(role).num_gpus for role in ROLES))
    yield from of_transport(kind, config.decode.engine, facts)
    yield _mooncake(facts, name, kind)
    yield _shared_memory(facts, config.cluster.local_ray.object_store_bytes)
    yield _files(facts, config.router.max_inflight)
    yield from versions(facts)


def of_transport(kind: str, engine: EngineConfig, facts: Facts) -> Iterator[Finding]:
    """What a kind of transport asks of a machine, on which an engine runs like this."""
    if len(facts.driver.gpus) > 1:
        yield _peer_access(facts, kind)
    yield _rdma(facts, kind, on_gpu=engine.device != "cpu")
    yield _memlock(facts, kind, engine)


def _cannot(subject: str, kind: str, lack: str, remedy: str) -> Finding:
    """Workers that shall move KV in this way would end at their start."""
    error = UserError(f"transport.kind: {kind} cannot be used: {lack}; {remedy}", "transport.kind")
    return failure(subject, lack, NO_START, remedy, error=error)


def _gpus(facts: Facts, *, on_gpus: bool) -> Finding:
    driver, built = facts.driver, facts.torch_cuda
    if not driver.gpus and not facts.num_pci_gpus:
        return ok("gpus", "none; workers run on the CPU")
    if not driver.gpus:
        return warning(
            "gpus",
            f"{facts.num_pci_gpus} NVIDIA GPUs on the PCI bus, and no driver that shows them",
            "workers run on the CPU",
            "install NVIDIA's driver; in a container ask for GPUs (docker run --gpus all, "
            "nvidia.com/gpu)",
        )
    names = ", ".join(f"{driver.gpus.count(n)} x {n}" for n in dict.fromkeys(driver.gpus))
    text = f"{names}, driver {driver.version} for CUDA {driver.cuda or '?'}, torch for "
    if built and driver.cuda and int(built.split(".")[0]) > int(driver.cuda.split(".")[0]):
        return failure(
            "gpus",
            f"{text}CUDA {built}",
            "torch cannot use the GPUs: a driver runs no CUDA of a later major version",
            f"a newer driver, or a torch for CUDA {driver.cuda.split('.')[0]}",
        )
    if on_gpus and not built:
        lack = f"{text}the CPU" if built == "" else f"{names}, and no torch"
        return failure("gpus", lack, "GPUs are asked for and cannot be used", INSTALL["cuda"])
    return ok("gpus", f"{text}{f'CUDA {built}' if built else 'the CPU'}")


def _peer_access(facts: Facts, kind: str) -> Finding:
    num_gpus, apart = len(facts.driver.gpus), facts.driver.unreachable
    if not apart:
        return ok("peers", f"each of {num_gpus} GPUs reads the memory of all others")
    pairs = ", ".join(f"{i} from {j}" for i, j in apart[:6]) + ("…" if len(apart) > 6 else "")
    lack = f"GPUs that cannot read each other's memory: {pairs} (nvidia-smi topo -p2p r)"
    remedy = (
        "--set transport.kind=tcp; on bare metal switch IOMMU and ACS off, in a virtual machine "
        "give it GPUs of one NVLink group"
    )
    if kind == "nvlink" and len(apart) == num_gpus * (num_gpus - 1):
        return _cannot("peers", kind, lack, remedy)
    why = f"transport.kind=nvlink does not work between them: {NO_KV}"
    return warning("peers", lack, why, remedy)  # workers may be where it works


def _rdma(facts: Facts, kind: str, *, on_gpu: bool) -> Finding:
    ports = facts.rdma_ports
    active = any(port.state == "ACTIVE" for port in ports)
    said = ", ".join(f"{port.name} {port.state} at {port.rate}" for port in ports)
    if kind == "tcp" and active:
        return warning(
            "rdma",
            f"{said}; and KV goes over TCP",
            "TCP moves 3 GB/s at 25 Gbit/s, an RDMA card tens",
            "--set transport.name=mooncake --set transport.kind=rdma",
        )
    if kind != "rdma":
        return ok("rdma", f"{said or 'no card'}; {kind} needs none")
    if not active:
        return _cannot(
            "rdma",
            kind,
            f"no port is active ({said})" if ports else "no card in /sys/class/infiniband",
            "load the card's driver and bring a port up (ibstat), in Kubernetes ask for rdma/ib; "
            "or --set transport.kind=tcp",
        )
    if not facts.can_open_rdma:
        lack = f"{said}; and no file in /dev/infiniband can be opened"
        remedy = "give the container the devices (docker run --device /dev/infiniband, rdma/ib)"
        return _cannot("rdma", kind, lack, remedy)
    if on_gpu and not facts.gpu_direct:
        return warning(
            "rdma",
            f"{said}; neither nvidia_peermem nor the driver's open kernel modules are loaded",
            "a card reads GPU memory by one of them; without, a worker cannot register its KV pool",
            "modprobe nvidia_peermem on the host, or install the open kernel modules",
        )
    return ok("rdma", f"{said}; GPU memory by {' or '.join(facts.gpu_direct)}" if on_gpu else said)


def _memlock(facts: Facts, kind: str, engine: EngineConfig) -> Finding:
    limit = facts.memlock_bytes
    said = "no limit" if limit is None else f"at most {_bytes(limit)}"
    if kind != "rdma":
        return ok("memlock", f"{said}; {kind} locks none")
    if limit is None or limit >= engine.cpu_pool_bytes:
        return ok("memlock", said)
    remedy = (
        "ulimit -l unlimited, systemd: LimitMEMLOCK=infinity, docker: --ulimit memlock=-1, "
        "Kubernetes: IPC_LOCK"
    )
    if engine.device == "cpu":
        lack = f"{said} may be locked, and the KV pool has {_bytes(engine.cpu_pool_bytes)}"
        return _cannot("memlock", kind, lack, remedy)
    # How much a driver locks for GPU memory, we do not know.
    why = "an RDMA card needs the KV pool locked in memory; a worker may not be able to register it"
    return failure("memlock", said, why, remedy)


def _mooncake(facts: Facts, name: str, kind: str) -> Finding:
    wheels = {n: v for n, v in facts.versions.items() if n.startswith(MOONCAKE)}
    said = ", ".join(f"{n} {v}" for n, v in wheels.items())
    if name != "mooncake":
        return ok("mooncake", f"not used; {facts.mooncake or said}")
    if facts.mooncake:
        lack, _, remedy = facts.mooncake.partition(": ")
        error = MissingLibrary(f"transport.name: {facts.mooncake}", "transport.name")
        return failure("mooncake", lack, NO_START, remedy, error=error)
    if len(wheels) > 1:
        return failure(
            "mooncake",
            f"several wheels of it: {said}",
            "they overwrite each other's files; which transports are left is chance",
            f"pip uninstall {' '.join(wheels)}, then {INSTALL[facts.extra]}",
        )
    if kind == "nvlink" and f"{MOONCAKE}-non-cuda" in wheels:
        why = f"transport.kind=nvlink is asked for: {NO_KV}"
        remedy = f"pip uninstall {MOONCAKE}-non-cuda, then {INSTALL['cuda']}"
        return failure("mooncake", f"{said} has no NVLink", why, remedy)
    return ok("mooncake", f"{said}, and its system libraries")


def _shared_memory(facts: Facts, needed: int) -> Finding:
    said = f"{_bytes(facts.shm_bytes)} free in /dev/shm"
    if facts.shm_bytes >= needed:
        return ok("shm", said)
    return warning(
        "shm",
        said,
        f"Ray's object store takes {_bytes(needed)} there, else it goes to the disk of /tmp",
        "docker: --shm-size 1g, Kubernetes: an emptyDir with medium Memory at /dev/shm",
    )


def _files(facts: Facts, max_inflight: int) -> Finding:
    said = f"a process may have {facts.num_files} open"
    if facts.num_files >= max_inflight + FILES_BESIDE_CLIENTS:
        return ok("files", said)
    why = f"a client of a router is one, and router.max_inflight is {max_inflight}"
    remedy = "ulimit -n 65536, systemd: LimitNOFILE=65536; or a lower router.max_inflight"
    return warning("files", said, why, remedy)


def versions(facts: Facts) -> Iterator[Finding]:
    """What is installed against what pyproject.toml wants."""
    num_fine = 0
    for text in (*facts.needed, *facts.optional):
        wanted = Requirement(text)
        installed = facts.versions.get(wanted.name)
        if installed is None:
            if text in facts.needed:
                why = "kvlane imports it"
                yield failure("versions", f"{text} is not installed", why, f"pip install '{text}'")
            continue  # settings and the finding about mooncake say where an optional one is missed
        if wanted.specifier.contains(installed, prereleases=True):
            num_fine += 1
            continue
        lowest = [Version(s.version) for s in wanted.specifier if s.operator in (">=", "==")]
        is_old = any(Version(installed) < version for version in lowest)
        make = failure if is_old or wanted.name in EXACT else warning
        yield make(
            "versions",
            f"{wanted.name} {installed} is installed, and {wanted.specifier} is wanted",
            "it lacks what kvlane uses" if is_old else "kvlane was not tried with it",
            f"pip install '{text}'",
        )
    kvlane = facts.versions.get("kvlane", "from source")
    yield ok("versions", f"{num_fine} packages are as wanted by kvlane {kvlane}")


def _bytes(number: int) -> str:
    return f"{number / 2**30:.3g} GiB" if number >= 2**30 else f"{number / 2**20:.3g} MiB"
