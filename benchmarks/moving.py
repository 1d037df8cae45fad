"""Pages that move between a pool and host memory, both ways, beside what is measured."""

import itertools
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from worker.start.engine import Engine
from worker.start.tier import HOST_BYTES_PER_S
from worker.transfer.tier.arena import Arena
from worker.transfer.tier.objects import Form, Source, first_key, next_key
from worker.transfer.tier.rows import Copy, Load, Row
from worker.wire import SWITCH_INTERVAL_S

SHARE_OUT = 4  # one page goes out for so many that come in
POLL_S = 2e-4


class Moving:
    """A row of a tier with pages of its own in an engine's pool, which no request gets."""

    def __init__(self, engine: Engine, num: int) -> None:
        """num: of the pages that a load brings; as many others are copied out."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in a worker
        book, pool, layout = engine.book, engine.pool, engine.pool.layout
        size = layout.page_size
        self._tokens, self._num = tuple(range(size)), num
        hold = book.open([0], 2 * num * size, max_matched=0)
        assert hold is not None, "the pool is made for this"
        book.bind(hold, 2 * num * size)
        self._into, self._outof = hold.pages[:num], hold.pages[num:]
        form = Form(engine.identity.layout_hash, 0, 1, size, layout.page_bytes, 0)
        make = partial(
            Arena, 3 * num * (form.object_bytes + 4096), form.object_bytes,
            registered=pool.device.type == "cuda",
        )  # fmt: skip
        self._row = Row("host", make, HOST_BYTES_PER_S, pool, form, engine.metrics)
        self._page_bytes, self._marks = layout.page_bytes, dict.fromkeys(hold.pages, self)
        keys = itertools.accumulate(
            itertools.repeat(self._tokens), next_key, initial=first_key("", "")
        )
        self._keys = iter(keys)
        self._kept = [next(self._keys) for _ in range(num)]
        for key, page in zip(self._kept, self._outof, strict=True):
            self._offer(key, page)
        self._rest()

    def _offer(self, key: bytes, page: int) -> None:
        self._row.offer(Copy(Source(key, self._tokens, page), self._marks, self))

    def _rest(self) -> None:
        while not self._row.idle:
            time.sleep(POLL_S)

    @contextmanager
    def both_ways(self) -> Iterator[list[float]]:
        """Pages move while the body runs; GB/s in and out, once it has ended."""
        ends, rates, moved = threading.Event(), list[float](), [0, 0]

        def move() -> None:
            while not ends.is_set():
                sources = zip(self._kept, self._into, strict=True)
                load = Load([(self._row, Source(k, self._tokens, page)) for k, page in sources])
                self._row.load(load)
                for page in self._outof[::SHARE_OUT]:
                    self._offer(next(self._keys), page)
                self._rest()
                assert load.num_loaded == self._num, load.cause
                moved[0] += self._num
                moved[1] += len(self._outof[::SHARE_OUT])

        thread, began_at = threading.Thread(target=move), time.monotonic()
        thread.start()
        try:
            yield rates
        finally:
            ends.set()
            thread.join()
            took_s = time.monotonic() - began_at
            rates += [num * self._page_bytes / took_s / 1e9 for num in moved]

    def close(self) -> None:
        """The row ends; its pages stay taken."""
        self._row.close()
