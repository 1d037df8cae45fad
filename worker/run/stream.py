"""Streams: the device work of one engine, one piece after the other, launched without waiting.

`submit` takes a piece of work and returns at once, with a handle on its result. A CUDA stream runs
the piece's host code in the caller's thread, which enqueues kernels; a CPU stream computes it in a
thread. Nothing else in an engine asks which of the two it has.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch


class OnDevice(Protocol):
    """A piece's result, which the host will read."""

    def to_host(self) -> Any:
        """Enqueue copies to pinned memory on the current stream; returns them."""
        ...


class Handle(Protocol):
    """A piece of work that was submitted."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> Any:
        """Block until the work has ended; returns its result on the host, or raises its error."""
        ...

    def tells(self, wake: Callable[[], None]) -> bool:
        """Have another thread call `wake` at the end of the work; False: nothing will."""
        ...


class HostEvent(threading.Event):
    """A torch.cuda.Event of the CPU."""

    record, query, synchronize = threading.Event.set, threading.Event.is_set, threading.Event.wait


Event = HostEvent | torch.cuda.Event


class Stream(Protocol):
    """Runs pieces of work in the order in which they were submitted."""

    launches_here: bool  # `submit` runs the work's host code itself, in the caller's thread

    def submit(self, work: Callable[[], OnDevice | None]) -> Handle:
        """Enqueue a piece of work. On CUDA its errors are raised here, on a CPU by Handle.wait."""
        ...

    def event(self) -> Event:
        """Make an event that its work can record."""
        ...

    def close(self) -> None:
        """Wait for all submitted work."""
        ...


class CpuStream:
    """A thread, so launching, settling and pulling overlap with compute as on a GPU (ADR 0001).

    Once a piece has failed, later pieces are not run: they fail with the same error.
    """

    launches_here = False

    def __init__(self) -> None:
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


class CudaStream:
    """The step stream of a device, made current in the thread that submits.

    It is not the default stream, for whose work the copies of KV pulls would wait.
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


def stream_of(device: torch.device) -> Stream:
    """Make the stream for the steps of an engine on `device`."""
    return CpuStream() if device.type == "cpu" else CudaStream(device)


@cache
def step_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of this process for all steps on a CUDA device."""
    return torch.cuda.Stream(device)


@contextmanager
def on_step_stream(device: torch.device) -> Iterator[None]:
    """On CUDA, run the body on the stream of later steps, then wait for the device.

    The caching allocator reuses freed memory only on the stream that allocated it.
    """
    if device.type == "cpu":
        yield
        return
    with torch.cuda.stream(step_stream(device)):
        yield
    torch.cuda.synchronize(device)
