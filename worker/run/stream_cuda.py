"""The stream of a CUDA device; see `stream.py`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from worker.run.stream import Event, Handle, OnDevice


class CudaStream:
    """The step stream of a device, made current in the thread that submits.

    It is not the default stream: KV pulls are copies that wait for the default stream, so they
    would wait for the step in flight.
    """

    launches_here = True

    def __init__(self, device: torch.device) -> None:
        self._stream = step_stream(device)

    def submit(self, work: Callable[[], OnDevice | None]) -> Handle:
        current = torch.cuda.current_stream(self._stream.device)
        if current != self._stream:
            self._stream.wait_stream(current)
            torch.cuda.set_stream(self._stream)
        made = work()
        return _CudaHandle(None if made is None else made.to_host())

    def event(self) -> Event:
        return torch.cuda.Event()

    def close(self) -> None:
        self._stream.synchronize()


class _CudaHandle:
    def __init__(self, made: Any) -> None:
        self._made = made
        self._ended = torch.cuda.Event()  # behind the copies to the host
        self._ended.record()
        self.done = self._ended.query

    def wait(self) -> Any:
        self._ended.synchronize()
        return self._made

    def tells(self, wake: Callable[[], None]) -> bool:
        return False


@cache
def step_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of this process for all steps on a CUDA device."""
    return torch.cuda.Stream(device)


@contextmanager
def on_step_stream(device: torch.device) -> Iterator[None]:
    """On CUDA, run the body on the stream of later steps, then wait for the device.

    The caching allocator reuses freed memory only on the stream that allocated it. On the CPU, just
    run the body.
    """
    if device.type == "cpu":
        yield
        return
    with torch.cuda.stream(step_stream(device)):
        yield
    torch.cuda.synchronize(device)
