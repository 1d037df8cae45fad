"""What NVIDIA's driver says, asked through NVML: in milliseconds, where torch takes seconds."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import Any, TypeVar

T = TypeVar("T")

CAN_READ = 0  # NVML_P2P_CAPS_INDEX_READ, which pynvml makes a tuple


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver and its GPUs, those hidden by CUDA_VISIBLE_DEVICES included."""

    version: str = ""  # "": there is none
    cuda: str = ""  # the newest CUDA that it runs, as "13.0"; "": it does not tell
    gpus: tuple[str, ...] = ()  # names, by index
    unreachable: tuple[tuple[int, int], ...] = ()  # (i, j): GPU i cannot read GPU j's memory


def read_driver() -> Driver:
    """Ask the driver of this machine; what it cannot tell is left empty."""
    import pynvml  # pyright: ignore[reportMissingTypeStubs]

    nvml: Any = pynvml

    def ask(default: T, function: Callable[..., T], *args: object) -> T:
        try:
            return function(*args)
        except nvml.NVMLError:
            return default

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
