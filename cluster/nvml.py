"""What NVIDIA's driver says, asked through NVML: in milliseconds, where torch takes seconds."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Generator
from dataclasses import dataclass
from itertools import permutations

LIBRARY = "libnvidia-ml.so.1"
CAN_READ = 0  # NVML_P2P_CAPS_INDEX_READ
TEXT_BYTES = 96


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver and its GPUs, those hidden by CUDA_VISIBLE_DEVICES included."""

    version: str = ""  # "": there is none
    cuda: str = ""  # the newest CUDA that it runs, as "13.0"; "": it does not tell
    gpus: tuple[str, ...] = ()  # names, by index
    unreachable: tuple[tuple[int, int], ...] = ()  # (i, j): GPU i cannot read GPU j's memory


def read_driver() -> Driver:
    """Ask the driver of this machine."""
    with _opened() as nvml:
        if nvml is None:
            return Driver()
        version = ctypes.create_string_buffer(TEXT_BYTES)
        nvml.nvmlSystemGetDriverVersion(version, TEXT_BYTES)
        number = ctypes.c_int(0)
        nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number))
        devices = [_device(nvml, index) for index in range(_count(nvml))]
        return Driver(
            version.value.decode(),
            f"{number.value // 1000}.{number.value % 1000 // 10}" if number.value else "",
            tuple(_name(nvml, device) for device in devices),
            tuple(
                (i, j)
                for i, j in permutations(range(len(devices)), 2)
                if _cannot_read(nvml, devices[i], devices[j])
            ),
        )


def count_gpus(visible: str | None) -> int:
    """GPUs that Ray would find: those that the driver has and `visible` does not hide.

    visible: CUDA_VISIBLE_DEVICES; None: not set.
    """
    with _opened() as nvml:
        count = 0 if nvml is None else _count(nvml)
    if visible is None:
        return count
    ids = [] if visible in ("", "NoDevFiles") else visible.split(",")
    return min(count, len(ids))


@contextlib.contextmanager
def _opened() -> Generator[ctypes.CDLL | None]:
    """The library, ready; None without a driver."""
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError:
        yield None
        return
    if nvml.nvmlInit_v2():
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _count(nvml: ctypes.CDLL) -> int:
    count = ctypes.c_uint(0)
    return 0 if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) else count.value


def _device(nvml: ctypes.CDLL, index: int) -> ctypes.c_void_p:
    device = ctypes.c_void_p()
    nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
    return device


def _name(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> str:
    name = ctypes.create_string_buffer(TEXT_BYTES)
    nvml.nvmlDeviceGetName(device, name, TEXT_BYTES)
    return name.value.decode()


def _cannot_read(nvml: ctypes.CDLL, reader: ctypes.c_void_p, owner: ctypes.c_void_p) -> bool:
    """Whether the driver says so; one that cannot tell says nothing."""
    status = ctypes.c_int(0)
    failed = nvml.nvmlDeviceGetP2PStatus(reader, owner, CAN_READ, ctypes.byref(status))
    return not failed and status.value != 0
