"""The one place where the doctor reads a machine. Judging is `machine.py`'s.

Imports neither torch nor Ray. The driver is asked through NVML: in milliseconds, where torch takes
seconds.
"""

import ast
import contextlib
import json
import os
import re
import resource
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import Any, TypeVar

from packaging.requirements import Requirement

from worker.errors import MissingLibrary
from worker.transfer.mooncake_libraries import check_installed

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "pyproject.toml"
SHORT = 8  # digits of a commit
GIT_S = 2.0
CAP_IPC_LOCK = 14
NVIDIA, DISPLAY = "0x10de", "0x03"  # vendor, and beginning of the class, on the PCI bus
MOONCAKE = "mooncake-transfer-engine"
WHEELS = (MOONCAKE, f"{MOONCAKE}-non-cuda", f"{MOONCAKE}-cuda13")  # that bring it
CAN_READ = 0  # NVML_P2P_CAPS_INDEX_READ, which pynvml makes a tuple


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver and its GPUs, those hidden by CUDA_VISIBLE_DEVICES included."""

    version: str = ""  # "": there is none
    cuda: str = ""  # the newest CUDA that it runs, as "13.0"; "": it does not tell
    gpus: tuple[str, ...] = ()  # names, by index
    unreachable: tuple[tuple[int, int], ...] = ()  # (i, j): GPU i cannot read GPU j's memory
    memory: tuple[int, ...] = ()  # bytes of those that tell

    @property
    def peer_access(self) -> bool | None:
        """Whether each GPU reads the memory of all others; None: there are no others."""
        return not self.unreachable if len(self.gpus) > 1 else None


@dataclass(frozen=True, slots=True)
class Port:
    """A port of an RDMA card, as the kernel shows it."""

    name: str  # "mlx5_0/1"
    state: str  # "ACTIVE", "DOWN", …
    rate: str  # "400 Gb/sec (4X NDR)"


@dataclass(frozen=True, slots=True)
class Facts:
    """One machine, as one process on it sees it."""

    driver: Driver
    num_pci_gpus: int  # NVIDIA's on the PCI bus, whoever drives them
    torch_cuda: str | None  # that torch was built for; "": CPU only; None: there is no torch
    rdma_ports: tuple[Port, ...]
    can_open_rdma: bool  # a device file of a card
    gpu_direct: tuple[str, ...]  # ways for a card to read GPU memory: nvidia_peermem, dma-buf
    memlock_bytes: int | None  # that the process may lock; None: any number
    shm_bytes: int  # free in /dev/shm
    num_files: int  # that the process may open
    mooncake: str  # what it lacks, and what to install; "": it can be loaded
    versions: dict[str, str]  # of what is installed: kvlane, and what it wants
    needed: tuple[str, ...]  # requirements of pyproject.toml
    optional: tuple[str, ...]  # those of its extra
    extra: str  # cuda where there are GPUs, else cpu


def read_facts() -> Facts:
    """Look at this machine; takes about a tenth of a second."""
    driver = read_driver()
    extra = "cuda" if driver.gpus else "cpu"
    needed, optional = requirements(""), requirements(extra)
    names = [*(Requirement(text).name for text in (*needed, *optional)), *WHEELS]
    version_of = partial(_tried, metadata.PackageNotFoundError, "", metadata.version)
    return Facts(
        driver=driver,
        num_pci_gpus=_num_pci_gpus(),
        torch_cuda=_torch_cuda(),
        rdma_ports=_rdma_ports(),
        can_open_rdma=any(os.access(p, os.R_OK | os.W_OK) for p in _files("/dev/infiniband")),
        gpu_direct=_gpu_direct(),
        memlock_bytes=_memlock_bytes(),
        shm_bytes=_tried(OSError, 0, lambda: shutil.disk_usage("/dev/shm").free),
        num_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],  # Ray takes what it may
        mooncake=_mooncake(),
        versions={n: v for n in names if (v := version_of(n))} | {"kvlane": build()},
        needed=needed,
        optional=tuple(text for text in optional if text not in needed),
        extra=extra,
    )


def build(root: Path = ROOT) -> str:
    """Which kvlane this is: its version, and its commit where an installation or git knows it.

    root: of a checkout.
    """
    try:
        installed = metadata.distribution("kvlane")
        version, origin = installed.version, installed.read_text("direct_url.json") or "{}"
    except metadata.PackageNotFoundError:
        version, origin = "from source", "{}"
    commit: str = json.loads(origin).get("vcs_info", {}).get("commit_id", "")[:SHORT]
    if not commit and (root / ".git").exists():
        command = "git", "-C", str(root), "describe", "--always", "--dirty", f"--abbrev={SHORT}"
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            asked = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S)
            commit = asked.stdout.strip()
    return f"{version}, commit {commit}" if commit else version


def read_driver() -> Driver:
    """Ask the driver of this machine; what it cannot tell is left empty."""
    import pynvml  # pyright: ignore[reportMissingTypeStubs]

    nvml: Any = pynvml
    ask = partial(_tried, nvml.NVMLError)
    if ask(True, nvml.nvmlInit):  # it returns None
        return Driver()
    cuda = ask(0, nvml.nvmlSystemGetCudaDriverVersion_v2)
    count = range(ask(0, nvml.nvmlDeviceGetCount))
    gpus = [ask(None, nvml.nvmlDeviceGetHandleByIndex, i) for i in count]
    driver = Driver(
        ask("", nvml.nvmlSystemGetDriverVersion),
        f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
        tuple(ask("", nvml.nvmlDeviceGetName, gpu) for gpu in gpus),
        tuple(
            (i, j)
            for i, j in permutations(count, 2)
            if ask(0, nvml.nvmlDeviceGetP2PStatus, gpus[i], gpus[j], CAN_READ)
        ),
        tuple(
            int(found.total)
            for gpu in gpus
            if (found := ask(None, nvml.nvmlDeviceGetMemoryInfo, gpu))
        ),
    )
    ask(None, nvml.nvmlShutdown)
    return driver


def count_gpus(visible: str | None) -> int:
    """GPUs that Ray would find: those that the driver has and `visible` does not hide.

    visible: CUDA_VISIBLE_DEVICES; None: not set.
    """
    count = len(read_driver().gpus)
    if visible is None:
        return count
    return min(count, 0 if visible in ("", "NoDevFiles") else len(visible.split(",")))


def requirements(extra: str) -> tuple[str, ...]:
    """What this kvlane wants with `extra`: by its pyproject.toml or, installed, its metadata."""
    wanted: list[str] = []
    if PROJECT.is_file():
        project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
        extras = project["optional-dependencies"]
        wanted = [*project["dependencies"], *(extras[extra] if extra else ())]
    else:
        with contextlib.suppress(metadata.PackageNotFoundError):
            wanted = metadata.requires("kvlane") or []
    markers = ((text, Requirement(text).marker) for text in wanted)
    return tuple(text for text, m in markers if m is None or m.evaluate({"extra": extra}))


def _tried(error: type[Exception], default: T, function: Callable[..., T], *args: object) -> T:
    """What the function returns, or the default if it raises that error."""
    try:
        return function(*args)
    except error:
        return default


def _torch_cuda() -> str | None:
    """Read without importing torch."""
    spec = find_spec("torch")
    if spec is None or not spec.origin:
        return None
    path = Path(spec.origin).with_name("version.py")
    value = re.search(r"^cuda\b[^=]*=\s*(.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return str(ast.literal_eval(value[1]) or "") if value else ""


def _mooncake() -> str:
    try:
        check_installed()
    except MissingLibrary as error:
        return str(error)
    return ""


def _num_pci_gpus() -> int:
    devices = _files("/sys/bus/pci/devices")
    return sum(
        _text(device / "vendor") == NVIDIA and _text(device / "class").startswith(DISPLAY)
        for device in devices
    )


def _rdma_ports() -> tuple[Port, ...]:
    cards = _files("/sys/class/infiniband")
    ports = (port for card in cards for port in _files(card / "ports"))
    return tuple(
        Port(
            f"{port.parents[1].name}/{port.name}",
            _text(port / "state").rpartition(": ")[2],
            _text(port / "rate"),
        )
        for port in ports
    )


def _gpu_direct() -> tuple[str, ...]:
    """The host's kernel modules, which a container sees as well. Only open ones have dma-buf."""
    peermem = Path("/sys/module/nvidia_peermem").exists()
    is_open = "Open Kernel Module" in _text(Path("/proc/driver/nvidia/version"))
    return ("nvidia_peermem",) * peermem + ("dma-buf",) * is_open


def _memlock_bytes() -> int | None:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    capabilities = re.search(r"^CapEff:\s*(\w+)$", status, re.MULTILINE)
    if capabilities and int(capabilities[1], 16) >> CAP_IPC_LOCK & 1:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _files(directory: str | Path) -> list[Path]:
    return _tried(OSError, [], lambda: sorted(Path(directory).iterdir()))


def _text(path: Path) -> str:
    return _tried(OSError, "", lambda: path.read_text(encoding="utf-8").strip())
