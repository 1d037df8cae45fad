"""The GPU of a process, as its driver tells it."""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from worker.api import Card

EVERY_S = 2.0


def watch(uuid: str, tell: Callable[[Card], bool]) -> None:
    """Call `tell` from a thread of its own every EVERY_S until it returns False.

    uuid: of the GPU, as nvidia-smi lists it. Where the driver knows no such GPU (a slice of one)
    `tell` is not called; a figure that it cannot read is 0.
    """
    args = uuid, tell, threading.Event()  # which nobody sets
    threading.Thread(target=_run, args=args, name="kvlane-card", daemon=True).start()


def _run(uuid: str, tell: Callable[[Card], bool], pause: threading.Event) -> None:
    import pynvml  # pyright: ignore[reportMissingTypeStubs]

    nvml: Any = pynvml
    ask = partial(_asked, nvml.NVMLError)
    with suppress(nvml.NVMLError):
        nvml.nvmlInit()
        gpu, goes_on = nvml.nvmlDeviceGetHandleByUUID(uuid), True
        while goes_on:
            memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
            card = Card(
                used_bytes=int(memory.used),
                num_bytes=int(memory.total),
                watts=ask(nvml.nvmlDeviceGetPowerUsage, gpu) / 1000,
                max_watts=ask(nvml.nvmlDeviceGetEnforcedPowerLimit, gpu) / 1000,
                mhz=ask(nvml.nvmlDeviceGetClockInfo, gpu, nvml.NVML_CLOCK_SM),
            )
            goes_on = tell(card)
            pause.wait(EVERY_S)


def _asked(error: type[Exception], question: Callable[..., int], *about: object) -> int:
    try:
        return int(question(*about))
    except error:
        return 0
