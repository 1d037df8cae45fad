"""LayerGroups: which layer groups of a running prefill step are final, and may be pulled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from worker.cache.layout import KVLayout
from worker.run.stream import Stream


class LayerGroups:
    """The layer hook of one prefill step: records an event as a layer group becomes final.

    Pages of other regions (a drafter's) travel with the last group, whose event is recorded once
    these are written, too. With several ranks a layer's KV is final when all have stored theirs.
    The leader knows that after the layer's all-reduce: a group is final from the next layer on.

    If the stream launches in the engine thread, `while_launching` is called at all layers, once the
    store of its KV is enqueued. The callback announces the groups of the previous step.
    """

    def __init__(
        self,
        layout: KVLayout,
        stream: Stream,
        while_launching: Callable[[], None],
        num_ranks: int = 1,
    ) -> None:
        self._events = [stream.event() for _ in range(layout.num_groups)]
        self._layers_per_group = layout.target.layers_per_group
        self._late = num_ranks > 1
        # Groups that `on_layer` records; the last may have to wait for `on_regions`.
        self._by_layers = layout.num_groups - (len(layout.regions) > 1 or self._late)
        self._while_launching = while_launching if stream.launches_here else None
        self._failed = False

    @property
    def num_groups(self) -> int:
        """Number of layer groups of the KV layout."""
        return len(self._events)

    @property
    def num_final(self) -> int:
        """How many groups, counted from the first, are final; 0 if the step failed. Never waits."""
        pending = (i for i, event in enumerate(self._events) if not event.query())
        return 0 if self._failed else next(pending, len(self._events))

    def wait(self, group: int) -> None:
        """Block until group number `group` is final, or the step has failed."""
        self._events[group].synchronize()

    def on_layer(self, layer_id: int) -> None:
        """See ForwardContext.on_layer."""
        num_final, rest = divmod(layer_id + (not self._late), self._layers_per_group)
        if not rest and 0 < num_final <= self._by_layers:
            self._events[num_final - 1].record()
        if self._while_launching is not None:
            self._while_launching()

    def on_regions(self) -> None:
        """Make the groups that are left final: the step has written all regions."""
        for event in self._events[self._by_layers :]:
            event.record()

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """If the step fails, record all events so that `wait` returns; the step raises."""
        try:
            yield
        except BaseException:
            self._failed = True
            for event in self._events:
                event.record()
            raise
