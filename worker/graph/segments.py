"""A forward captured as CUDA graphs, with host code between them where the forward asks for it.

    capture = Capture(memory)
    hidden = capture.record(forward)  # forward(capture): the same device work at every call
    capture.replay()                  # segment, break, segment, ..., break, segment

A forward that asks for no break is one graph. A break's body is called anew at every replay, within
the caller's forward context, and reads whatever differs from batch to batch from there; the tensors
that it is given are fixed memory. Kernels that stand in a segment see the tensors of the capture:
their addresses, never a value of the host.

Tensors of a capture live in a memory pool that all captures share. A capture keeps none of them
alive, not even what its breaks read and write: within one replay the order of use is the order of
the capture, for which the pool gave the memory, and between two replays nothing is kept. So results
are to be read before anything else is replayed, and largest captures come first.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

NUM_WARMUPS = 2  # libraries allocate workspaces and choose kernels in the first calls

Made = TypeVar("Made")
Body = Callable[[Tensor, Tensor], object]


class Graph(Protocol):
    """One segment."""

    def replay(self) -> None:
        """Enqueue it on the current stream."""
        ...


class GraphMemory:
    """The memory pool and the stream of an engine's captures, on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._collected = False  # Python's garbage

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """What is launched within runs on the capture stream, after all that came before."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.synchronize()

    def settle(self) -> None:
        """Wait for warm-ups and give back what they leave: a capture has a pool of its own."""
        torch.cuda.synchronize()
        if not self._collected:  # what a start leaves behind; a tenth of a second each time
            self._collected = True
            gc.collect()
        torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """Device memory that nobody uses."""
        self.settle()
        return torch.cuda.mem_get_info()[0]

    def begin(self) -> torch.cuda.CUDAGraph:
        """Capture from now on."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool)
        return graph

    def end(self, graph: torch.cuda.CUDAGraph) -> None:
        """Capture no longer."""
        graph.capture_end()

    def alias(self, tensor: Tensor) -> Tensor:
        """The same memory and shape, which the result does not keep alive."""
        storage = torch._C._construct_storage_from_data_pointer(  # pyright: ignore
            tensor.data_ptr(), tensor.device, tensor.nbytes
        )
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        assert tensor.is_contiguous()
        return empty.set_(storage, 0, tensor.shape, tensor.stride())


@dataclass(slots=True, frozen=True)
class Break:
    """Host code between two segments: `body(x, out)` fills `out`."""

    body: Body
    x: Tensor  # memory of the segment before; not kept alive
    out: Tensor  # memory that the segment after reads; not kept alive


class Capture:
    """One forward; replayed on any one stream, in the shapes and addresses of its capture."""

    def __init__(self, memory: GraphMemory) -> None:
        self._memory = memory
        self._open: torch.cuda.CUDAGraph | None = None
        self._broken: list[tuple[Graph, Break | None]] = []
        self._last: Graph | None = None

    @property
    def num_segments(self) -> int:
        """Graphs of which it is made."""
        return len(self._broken) + (self._last is not None)

    def record(self, forward: Callable[[Capture | None], Made]) -> Made:
        """Call `forward` a few times to warm up, with None, and once to capture it.

        Returns what that last call returned: tensors that every replay overwrites.
        """
        memory, collecting = self._memory, gc.isenabled()
        with memory.capturing():
            for _ in range(NUM_WARMUPS):
                forward(None)
            memory.settle()
            gc.disable()  # a collection may free things of CUDA, which fails within a capture
            try:
                self._open = memory.begin()
                made = forward(self)
                self._last = self._end()
            except BaseException:
                if self._open is not None:
                    with suppress(RuntimeError):  # the capture may be what failed
                        memory.end(self._open)
                raise
            finally:
                self._open = None
                if collecting:
                    gc.enable()
        return made

    def at(self, body: Body, x: Tensor, out: Tensor) -> Tensor:
        """See Breaks.at. The body is not called now: nothing that it could read was computed.

        x: contiguous, made by this forward; out: contiguous, allocated just now.
        """
        segment = self._end()
        here = Break(body, self._memory.alias(x), self._memory.alias(out))
        self._go_on(segment, here)
        return out

    def cut(self) -> None:
        """End a segment; no host code follows it."""
        self._go_on(self._end(), None)

    def _end(self) -> torch.cuda.CUDAGraph:
        assert self._open is not None, "breaks are made while the forward is captured"
        self._memory.end(self._open)
        return self._open

    def _go_on(self, segment: torch.cuda.CUDAGraph, here: Break | None) -> None:
        self._broken.append((segment, here))
        self._open = self._memory.begin()

    def replay(self) -> None:
        """Enqueue everything on the current stream; breaks run now, within the current context."""
        assert self._last is not None, "record() first"
        for segment, here in self._broken:
            segment.replay()
            if here is not None:
                here.body(here.x, here.out)
        self._last.replay()


class Cuts:
    """Breaks that are captured themselves; after some of them a segment ends.

    Launching a graph takes the host as long as the graph is, and the device begins when it is all
    there. So the first segment is short, and the device is busy with it while the next is launched.

    Args:
        capture: under way.
        after: numbers of breaks, counted from 1.
    """

    def __init__(self, capture: Capture, after: Collection[int]) -> None:
        self._capture, self._after = capture, after
        self._num_breaks = 0

    def at(self, body: Body, x: Tensor, out: Tensor) -> Tensor:
        """See Breaks.at."""
        body(x, out)
        self._num_breaks += 1
        if self._num_breaks in self._after:
            self._capture.cut()
        return out
