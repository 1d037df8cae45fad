"""A row of a tier: a store, and the threads that copy between it and the pool.

The store's calls may hang, and what they bring may be wrong. So a page of the pool is written only
after its object has been read and verified, and never once its load was cancelled. Pages that are
copied out may be freed meanwhile: then what was copied is torn, and is not kept.

Parts of a load are brought by all threads at once, as reading, checking and copying take as long as
each other; a thread takes a run of them, checks all, and waits once for the device. Nothing else is
done while an object is kept, or all are forgotten.
"""

import itertools
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from worker.cache.pool import KVPool
from worker.observe.metrics import WorkerMetrics
from worker.seldom import Seldom
from worker.transfer.tier.base import PageStore
from worker.transfer.tier.objects import Corrupt, Form, Source

log = logging.getLogger("kvlane.tier")

MOST_COPIES = 4096  # that wait; later ones are left out
MAX_FAILURES, PAUSE_S = 3, 20.0  # so many in a row, and a row is asked nothing for so long
CLOSE_S = 1.0  # for calls of the store's to return; then their threads are left behind
NUM_THREADS = 4


class Copy(NamedTuple):
    """A settled page, or part of a snapshot, that is to be kept, for all rows."""

    source: Source
    watched: Mapping[int, object]  # marks by page or slot; whoever frees one takes its mark out
    mark: object

    @property
    def is_torn(self) -> bool:
        """Whether its page was freed since."""
        return self.watched.get(self.source.place) is not self.mark


@dataclass(slots=True, eq=False)
class Load:
    """Pages on their way into the pool, from the rows that have them; only those in front count."""

    parts: Sequence[tuple["Row", Source]] = ()  # none yet: its pages still cool
    allowed_s: float = math.inf  # for it to come
    since: float = field(default_factory=time.monotonic)  # it was asked for; a row began with it
    cause: str = ""  # why it ended early
    row: str = ""  # which row was asked last; "": none has begun
    is_over: bool = False  # nothing is written any more
    num_taken: int = 0  # parts that threads of their rows have taken, and
    num_done: int = 0  # are done with
    limit: int = sys.maxsize  # no part from this one on is written any more
    _written: set[int] = field(default_factory=set[int])  # verified before
    _num_writing: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_loaded(self) -> int:
        """Parts in front that are here and verified."""
        return next(number for number in itertools.count() if number not in self._written)

    def is_late(self, now: float) -> bool:
        """Whether it is to be cut off. While its row moves for others, its time does not count."""
        waits = self.parts and not self.row
        since = max(self.since, self.parts[0][0].moved_at) if waits else self.since
        return now - since > self.allowed_s

    def cut(self, cause: str, number: int = 0) -> None:
        """Let no part be written from this one on; if none may be, it is over once none is."""
        with self._lock:
            if number < self.limit and not self.is_over:
                self.limit, self.cause = number, cause
            self._settle()

    def take(self, row: "Row", most: int) -> range:
        """The next parts that nobody has taken and this row has: so many at most."""
        first = self.num_taken
        parts = self.parts[first : first + most]
        self.num_taken += sum(1 for _ in itertools.takewhile(lambda part: part[0] is row, parts))
        return range(first, self.num_taken)

    def write(self, numbers: range, write: Callable[[int], None]) -> None:
        """Have these parts written but those cut off; write: gets how many, of the first."""
        with self._lock:
            numbers = range(numbers.start, min(numbers.stop, self.limit))
            if not numbers:
                return
            self._num_writing += 1
        try:
            write(len(numbers))
            self._written.update(numbers)
        finally:
            with self._lock:
                self._num_writing -= 1
                self._settle()

    def done(self, num: int) -> "Row | None":
        """So many parts have come or not; which row is asked next, None: the load is over."""
        with self._lock:
            self.num_done += num
            if self.num_done < min(len(self.parts), self.limit):
                return self.parts[self.num_done][0]
            self.is_over = self.is_over or self.num_done == self.num_taken
        return None

    def _settle(self) -> None:
        self.is_over = self.is_over or not (self.limit or self._num_writing)


class Mover:
    """Copies between pages of the pool and bytes of the host, on a stream of its own."""

    def __init__(self, pool: KVPool) -> None:
        self._pool, on_gpu = pool, pool.device.type == "cuda"
        self._stream = torch.cuda.Stream(pool.device) if on_gpu else None

    def copy(self, copies: Sequence[tuple[Source, memoryview]], *, outwards: bool) -> None:
        """Copy pages and parts to these bytes, or overwrite them from there."""
        with torch.cuda.stream(self._stream):
            for source, body in copies:
                if source.part < 0:
                    pieces = [*self._pool.pieces(source.place)]
                else:
                    pieces = [self._pool.slot(source.place).split(len(body))[source.part]]
                sizes = [piece.numel() for piece in pieces]
                flat = torch.frombuffer(body, dtype=torch.uint8)[: sum(sizes)]
                for piece, host in zip(pieces, flat.split(sizes), strict=True):
                    to, of = (host, piece) if outwards else (piece, host)
                    to.copy_(of, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()


@dataclass(eq=False)
class Row:
    """A store with its threads. Methods are the engine's, but for those of the threads."""

    name: str
    make: Callable[[], PageStore]  # in a thread
    bytes_per_s: float  # of copies out of the pool, at most
    pool: KVPool
    form: Form
    metrics: WorkerMetrics

    def __post_init__(self) -> None:
        """Start the first thread."""
        self.wake: Callable[[], None] = lambda: None  # called at the end of a load
        self._store: PageStore | None = None  # until it is made
        self._changed = threading.Condition()
        self._copies: deque[Copy] = deque()
        self._loads: deque[Load] = deque()
        self._is_closed = self._is_alone = self._forgets = False
        self._num_busy = 1  # threads; the first makes the store
        self.moved_at = 0.0  # when a call of the store's has returned, monotonic
        self._num_failures, self._paused_until = 0, 0.0
        self._log, series = Seldom(), self.metrics.tier_bytes(self.name)
        series.set_function(lambda: self._store.num_bytes if self._store else 0)
        self._thread = threading.Thread(target=self._run, name=f"kvlane-{self.name}", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether nothing is copied or waits for it."""
        return not (self._copies or self._loads or self._num_busy or self._forgets)

    def has(self, key: bytes) -> bool:
        """Whether an object seems to be there, and can be asked for."""
        store = self._store
        if store is None or self._forgets or time.monotonic() < self._paused_until:
            return False
        return store.exists(key)

    def offer(self, copy: Copy) -> None:
        """Keep a page soon, unless too many wait."""
        if len(self._copies) >= MOST_COPIES:
            self.metrics.tier_pages(self.name, "behind").inc()
            return
        with self._changed:
            self._copies.append(copy)
            if not self._num_busy:  # whoever is goes on with it
                self._changed.notify()

    def load(self, load: Load) -> None:
        """Bring the pages of `load` that are here and follow those that it has."""
        with self._changed:
            self._loads.append(load)
            self._changed.notify_all()

    def worked(self) -> None:
        """A load has come whole."""
        self._num_failures = 0

    def failed(self, cause: str, why: str, *, pauses: bool = True) -> None:
        """Count a failure; some in a row that pause it do so."""
        self.metrics.tier_failures(self.name, cause).inc()
        if self._log.news(self.name, cause):
            log.warning("tier %s: %s: %s; what it should have brought is computed", self.name,
                        cause, why)  # fmt: skip
        self._num_failures += pauses
        if self._num_failures >= MAX_FAILURES:
            self._num_failures, self._paused_until = 0, time.monotonic() + PAUSE_S
            log.warning("tier %s is asked nothing for %.0f s", self.name, PAUSE_S)

    def forget(self) -> None:
        """Delete all objects soon; none of them is there any more."""
        with self._changed:
            self._copies.clear()
            self._forgets = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads; the pool is not touched afterwards, though a store may hang."""
        with self._changed:
            self._is_closed = True
            self._copies.clear()
            for load in self._loads:
                load.cut("closed")
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            self._store = self.make()
        except OSError as error:
            self.failed("failed", str(error))
            self._paused_until = math.inf
            return
        finally:
            self._num_busy = 0
        others = [
            threading.Thread(target=self._work, name=self._thread.name, daemon=True)
            for _ in range(NUM_THREADS - 1)
        ]
        for thread in others:
            thread.start()
        self._work()
        for thread in others:
            thread.join()
        self._store.close()

    def _work(self) -> None:
        mover = Mover(self.pool)
        while (work := self._next()) is not None:
            try:
                work(mover)
            except Exception:  # our own bug, or a store's: loads that wait are late
                log.exception("tier %s has failed and is asked nothing any more", self.name)
                self._paused_until = math.inf
            with self._changed:
                self._num_busy -= 1
                self._is_alone, self.moved_at = False, time.monotonic()
                if self._loads:  # else this thread goes on by itself
                    self._changed.notify_all()

    def _next(self) -> Callable[[Mover], None] | None:
        """What is to be done, once there is something; None: no more."""

        def is_due() -> bool:
            if self._num_busy and (self._is_alone or not self._loads):
                return self._is_closed
            return bool(self._is_closed or self._loads or self._forgets or self._copies)

        with self._changed:
            self._changed.wait_for(is_due)
            if self._is_closed:
                return None
            store = self._store
            assert store is not None
            self._num_busy += 1
            if self._loads:
                load = self._loads[0]
                load.since = load.since if load.row else time.monotonic()
                load.row, numbers = self.name, load.take(self, store.run)
                if all(row is not self for row, _ in load.parts[numbers.stop : numbers.stop + 1]):
                    self._loads.popleft()
                return partial(self._bring, store, load, numbers)
            self._is_alone = True
            if self._forgets:
                return partial(self._forget, store)
            return partial(self._keep, store, self._copies.popleft())

    def _forget(self, store: PageStore, _: Mover) -> None:
        store.forget()
        self._forgets = False

    def _keep(self, store: PageStore, copy: Copy, mover: Mover) -> None:
        source, form = copy.source, self.form
        began_at, kept = time.monotonic(), "torn"

        def fill(view: memoryview) -> bool:
            if self._is_closed:
                return False
            mover.copy([(source, view[form.header_bytes :])], outwards=True)
            form.seal(view, source.key, source.tokens, store.every)
            return not copy.is_torn

        try:
            if not copy.is_torn and store.put(source.key, fill):
                kept = "kept"
        except OSError as error:
            kept = "failed"
            self.failed("full", str(error), pauses=False)
        self.metrics.tier_pages(self.name, kept).inc()
        paced_s = (kept != "torn") * form.object_bytes / self.bytes_per_s
        left_s = paced_s - (time.monotonic() - began_at)
        with self._changed:
            self._changed.wait_for(lambda: self._loads or self._is_closed or self._forgets, left_s)

    def _bring(self, store: PageStore, load: Load, numbers: range, mover: Mover) -> None:
        parts = load.parts[numbers.start : min(numbers.stop, load.limit)]
        sources, checked = [source for _, source in parts], list[tuple[Source, memoryview]]()

        def take(view: memoryview) -> None:
            source = sources[len(checked)]
            checked.append((source, self.form.body(view, source.key, source.tokens)))
            if len(checked) == len(sources):
                load.write(numbers, copy)

        def copy(num: int) -> None:
            mover.copy(checked[:num], outwards=False)

        cause = "failed"
        try:
            for source in sources:
                store.get(source.key, take)
            cause = ""
        except KeyError:
            cause = "absent"
        except Corrupt as error:
            store.forget(sources[len(checked)].key)
            cause = "corrupt"
            log.debug("tier %s: %s", self.name, error)
        except OSError as error:
            log.debug("tier %s: %s", self.name, error)
        finally:
            if cause:  # where all were checked, copying them has failed
                load.cut(cause, numbers.start + len(checked) % len(sources))
                load.write(numbers, copy)
            row = load.done(len(numbers))
            if row is None:
                self.wake()
            elif row is not self:
                row.load(load)
