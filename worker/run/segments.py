"""A forward captured as CUDA graphs, with host code between them where the forward asks for it.

    capture = Capture(memory)
    hidden = capture.record(forward)  # forward(capture): the same device work at every call
    capture.replay()                  # segment, break, segment, ..., break, segment

Kernels in a segment are replayed with the addresses and host values of the capture. The body of a
break runs on the host at every replay: its tensors are fixed memory, and the caller's forward
context says how the batch differs. A forward without a break is one graph, or a few (`Cuts`).

All captures of an engine share the memory of one pool: read a result before the next replay, and
capture the largest first.
"""

import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

NUM_WARMUPS = 1  # libraries allocate workspaces and choose kernels in the first call

Made = TypeVar("Made")
Body = Callable[[Tensor, Tensor], object]


class GraphMemory:
    """The memory pool and the stream of an engine's captures, on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._collected = False  # whether gc.collect() has run: once is enough

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Run the body on the capture stream, after all work launched before; synchronize."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.synchronize()

    def release_cache(self) -> None:
        """Synchronize and empty the allocator's cache: captures cannot use memory of warm-ups."""
        torch.cuda.synchronize()
        if not self._collected:  # takes a tenth of a second
            self._collected = True
            gc.collect()
        torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """Measure free device memory, after `release_cache`."""
        self.release_cache()
        return torch.cuda.mem_get_info()[0]

    def begin(self) -> torch.cuda.CUDAGraph:
        """Begin to capture a segment."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool)
        return graph

    def end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End the capture of a segment."""
        graph.capture_end()

    def alias(self, tensor: Tensor) -> Tensor:
        """Make a tensor over the same memory, which it does not keep alive."""
        storage = torch._C._construct_storage_from_data_pointer(  # pyright: ignore
            tensor.data_ptr(), tensor.device, tensor.nbytes
        )
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        assert tensor.is_contiguous()
        return empty.set_(storage, 0, tensor.shape, tensor.stride())


class Capture(Generic[Made]):
    """One captured forward: segments with breaks between them. Replay it on any stream."""

    made: Made  # what the captured call returned: tensors that every replay overwrites

    def __init__(self, memory: GraphMemory) -> None:
        self._memory = memory
        self._open: torch.cuda.CUDAGraph | None = None
        # Each segment, and the host code that follows it.
        self._parts: list[tuple[torch.cuda.CUDAGraph, Callable[[], object] | None]] = []

    @property
    def num_segments(self) -> int:
        """Number of graphs."""
        return len(self._parts)

    def record(self, forward: "Callable[[Capture[Made] | None], Made]") -> Made:
        """Call `forward` with None to warm up, then with `self` to capture it; returns `made`."""
        memory, collecting = self._memory, gc.isenabled()
        with memory.capturing():
            for _ in range(NUM_WARMUPS):
                forward(None)
            memory.release_cache()
            gc.disable()  # a collection may free CUDA objects, which fails within a capture
            try:
                self._open = memory.begin()
                self.made = forward(self)
                self._parts.append((self._end(), None))
            except BaseException:
                if self._open is not None:
                    with suppress(RuntimeError):  # the capture may be what failed
                        memory.end(self._open)
                self._parts.clear()
                raise
            finally:
                self._open = None
                if collecting:
                    gc.enable()
        return self.made

    def at(self, body: Body, x: Tensor, out: Tensor) -> Tensor:
        """See Breaks.at. The body is not called now, because x has not been computed.

        x: contiguous, made by this forward; out: contiguous, allocated just before.
        """
        segment = self._end()
        here = partial(body, self._memory.alias(x), self._memory.alias(out))
        self._parts.append((segment, here))
        self._open = self._memory.begin()
        return out

    def cut(self) -> None:
        """End the segment and begin the next, without host code between them."""
        self._parts.append((self._end(), None))
        self._open = self._memory.begin()

    def _end(self) -> torch.cuda.CUDAGraph:
        assert self._open is not None, "breaks are made while the forward is captured"
        self._memory.end(self._open)
        return self._open

    def replay(self) -> None:
        """Enqueue everything on the current stream; breaks run now, in the current context."""
        assert self._parts, "record() first"
        for segment, here in self._parts:
            segment.replay()
            if here is not None:
                here()


class Cuts:
    """Captures the bodies of breaks as well, and ends a segment after some of them.

    Launch time grows with the length of a graph, and the device starts only when the whole graph is
    submitted. So the first segment is short: the device works on it while the next is submitted.
    The breaks `after`, counted from 1, end a segment.
    """

    def __init__(self, capture: "Capture[Any]", after: Collection[int]) -> None:
        self._capture, self._after = capture, after
        self._num_breaks = 0

    def at(self, body: Body, x: Tensor, out: Tensor) -> Tensor:
        body(x, out)
        self._num_breaks += 1
        if self._num_breaks in self._after:
            self._capture.cut()
        return out
