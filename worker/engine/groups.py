"""When the KV of each layer group of a step is final, so that it can leave before the step ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from worker.cache.layout import KVRegion


class HostEvent:
    """What torch.cuda.Event is on CUDA, for the thread that is the CPU's stream."""

    def __init__(self) -> None:
        self._passed = threading.Event()

    def record(self) -> None:
        """Called by the stream when it gets here."""
        self._passed.set()

    def query(self) -> bool:
        """Whether the stream has been here."""
        return self._passed.is_set()

    def synchronize(self) -> None:
        """Block until it has."""
        self._passed.wait()


class LayerGroups:
    """The layer hook of one step of chunks: records an event as each layer group becomes final.

    Args:
        region: whose groups they are.
        device: of the step.
        while_launching: called between layers while launching the step keeps the engine thread
            busy. On the CPU nobody calls it: the stream's thread runs the layers there.
    """

    def __init__(
        self, region: KVRegion, device: torch.device, while_launching: Callable[[], None]
    ) -> None:
        cpu = device.type == "cpu"
        make = HostEvent if cpu else torch.cuda.Event
        self._events = [make() for _ in range(region.num_groups)]
        self._layers_per_group = region.layers_per_group
        self._while_launching = None if cpu else while_launching
        self._failed = False

    @property
    def num_groups(self) -> int:
        """Layer groups of the KV layout."""
        return len(self._events)

    @property
    def num_final(self) -> int:
        """Layer groups, from the first on, that are final; never waits. 0 if the step failed."""
        pending = (i for i, event in enumerate(self._events) if not event.query())
        num_final = next(pending, len(self._events))
        return 0 if self._failed else num_final

    def wait(self, group: int) -> None:
        """Block until that group is final, or the step has failed."""
        self._events[group].synchronize()

    def on_layer(self, layer_id: int) -> None:
        """See ForwardContext.on_layer."""
        group, within = divmod(layer_id + 1, self._layers_per_group)
        if not within:
            self._events[group - 1].record()
        if self._while_launching is not None:
            self._while_launching()

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Let whoever waits for a group go on if the step fails; `Step.wait` raises why."""
        try:
            yield
        except BaseException:
            self._failed = True
            for event in self._events:
                event.record()
            raise
