"""Streams: the device work of one engine, a piece after the other, launched without waiting.

`submit` takes a piece of work that enqueues on a CUDA device, or computes on a CPU, and returns at
once with a handle on what it makes. One class a side; nothing else asks which side it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from worker.registry import resolve

STREAMS = {
    "cpu": "worker.run.stream:CpuStream",
    "cuda": "worker.run.stream_cuda:CudaStream",
}


class OnDevice(Protocol):
    """What a piece of work makes for the host."""

    def to_host(self) -> Any:
        """Enqueue copies to pinned memory on the current stream; returns them."""
        ...


class Handle(Protocol):
    """What a submitted piece of work makes."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> Any:
        """Block until the work has ended; returns what it made, on the host. Raises its error."""
        ...

    def tells(self, wake: Callable[[], None]) -> bool:
        """Have another thread call `wake` at the end of the work; False: nothing will."""
        ...


class Event(Protocol):
    """A point of a stream's work; torch.cuda.Event is one."""

    def record(self) -> object:
        """Set it here."""
        ...

    def query(self) -> bool:
        """Whether the work before it has ended."""
        ...

    def synchronize(self) -> object:
        """Block until then."""
        ...


class Stream(Protocol):
    """Runs pieces of work in the order of their submission."""

    launches_here: bool  # `submit` runs the work's host code itself, in the caller's thread

    def submit(self, work: Callable[[], OnDevice | None]) -> Handle:
        """Enqueue a piece of work. On CUDA its errors are raised here, else by Handle.wait."""
        ...

    def event(self) -> Event:
        """Make an event that its work can record."""
        ...

    def close(self) -> None:
        """Wait for all of it."""
        ...


class CpuStream:
    """A thread, so launching, settling and pulling overlap with compute as on a GPU (ADR 0001).

    Work behind a piece that failed is not run: it fails in the same way.
    """

    launches_here = False

    def __init__(self, device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(1, "kvlane-stream")
        self._error: BaseException | None = None

    def submit(self, work: Callable[[], OnDevice | None]) -> Handle:
        return _CpuHandle(self._thread.submit(self._run, work))

    def event(self) -> Event:
        return HostEvent()

    def close(self) -> None:
        self._thread.shutdown()

    def _run(self, work: Callable[[], Any]) -> Any:
        if self._error is not None:
            raise self._error
        try:
            return work()
        except BaseException as error:
            self._error = error
            raise


class HostEvent(threading.Event):
    """Event on the CPU."""

    record, query, synchronize = threading.Event.set, threading.Event.is_set, threading.Event.wait


class _CpuHandle:
    def __init__(self, future: Future[Any]) -> None:
        self._future = future
        self._is_to_tell = False
        self.done, self.wait = future.done, future.result

    def tells(self, wake: Callable[[], None]) -> bool:
        if not self._is_to_tell:
            self._is_to_tell = True
            self._future.add_done_callback(lambda _: wake())
        return True


def stream_of(device: torch.device) -> Stream:
    """Make the stream for the steps of an engine on `device`."""
    name = "cpu" if device.type == "cpu" else "cuda"
    return resolve("stream", name, STREAMS)(device)
