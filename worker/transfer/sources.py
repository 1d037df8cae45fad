"""Where one rank pulls KV from: the ranks of a prefill worker, dialled, measured and pulled as one.

Every rank of a decode worker pulls its own heads, over connections of its own transport (ADR 0030).
Page ids are the same on all ranks of a worker. So the same (local page, remote page) pairs name
the KV for every rank, and only this file asks which bytes of which remote rank that means.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

import msgspec

from worker.api import Member, PeerId
from worker.cache.layout import Identity, ModelLayout
from worker.errors import Incompatible, TransferError, Unreachable
from worker.observe.paths import PullPath
from worker.transfer.base import POLL_BUDGET_S, Endpoint, KVTransport, Peer, Pull, PullState, Run
from worker.transfer.layout import Pages, RankPair, num_pool_pages, rank_plan

NUM_READS = 3  # to measure; the fastest counts
SMALL_BYTES, NUM_SMALL = 64, 20
# Page 0 is repeated in one pull until so many runs, or bytes, of `measure` or while dialling.
MEASURED_BYTES, DIALLED_BYTES, MAX_MEASURED_RUNS = 64 << 20, 4 << 20, 512
SPIN_S = 1e-3  # a read is polled without sleeping for this long, then once in every such interval
SINK = [(0, 0)]  # page 0 of both sides: no KV, padded and inactive rows write there
# Of pulls that have landed, those of the last seconds count; without any for as long as FORGET_S
# the link is as fast as it was when it was dialled.
RECENT_S, FORGET_S = 3.0, 10.0

# Made on import: threads dial at one time, and two that decode a type first crash msgspec 0.22.
READER = msgspec.msgpack.Decoder(Endpoint)

Parts = TypeVar("Parts", bound=Sized)


def never() -> bool:
    """Reads go on to their end."""
    return False


class PageSource(Protocol):
    """A prefill worker as pages are pulled from it, whatever ranks and bytes that means."""

    transport: str  # name and kind of the transport, of one rank

    def pull(self, pairs: Pages, groups: range, states: Pages = ()) -> Pull:
        """Begin to pull layer groups of pages: (local page, remote page), a local page once.

        states: slots, in the same way.
        """
        ...

    def close(self) -> None:
        """Let go of the peer, as Peer.close; a second call does nothing."""


class LinkRate:
    """How fast pulls over a link have been lately, a pull weighted by its seconds. So short pulls,
    which take as long as their calls, do not speak for long ones."""

    def __init__(self) -> None:
        self._num_bytes = self._took_s = self._at = 0.0

    def landed(self, num_bytes: int, took_s: float, now: float) -> None:
        """Count a pull."""
        kept = math.exp((self._at - now) / RECENT_S)
        self._num_bytes = self._num_bytes * kept + num_bytes
        self._took_s = self._took_s * kept + max(took_s, 1e-6)
        self._at = now

    def bytes_per_s(self, now: float) -> float:
        """0: none has landed lately."""
        is_known = self._took_s and now - self._at < FORGET_S
        return self._num_bytes / self._took_s if is_known else 0.0


@dataclass(slots=True, frozen=True)
class Link:
    """A prefill worker that can be pulled from; also the event by which that is known."""

    peer: PeerId
    source: PageSource
    bytes_per_s: float  # of the whole model's KV, by a few reads while dialling
    rate: LinkRate = field(default_factory=LinkRate, compare=False)

    def bytes_per_s_at(self, now: float) -> float:
        """Of pulls lately, else as it was dialled; `now`: of time.monotonic."""
        return self.rate.bytes_per_s(now) or self.bytes_per_s


@dataclass(slots=True, frozen=True)
class DialFailed:
    """Event: a prefill worker cannot be pulled from."""

    peer: PeerId
    error: TransferError


class Sources(PageSource):
    """Connections to all remote ranks that hold heads of one local rank."""

    def __init__(self, sources: Sequence[tuple[Peer, RankPair]]) -> None:
        self._sources = sources
        self.transport = sources[0][0].transport if sources else ""
        self.closed = False

    def pull(self, pairs: Pages, groups: range | None = None, states: Pages = ()) -> Pull:
        if not all(pair.has(pairs, states) for _, pair in self._sources):
            return JoinedPull((), "the peer has no such page or slot")
        pulls = [
            connection.pull(runs)
            for connection, pair in self._sources
            if (runs := pair.runs(pairs, groups) + pair.state_runs(states))
        ]
        return pulls[0] if len(pulls) == 1 else JoinedPull(pulls)

    def page_s(self, ends: Callable[[], bool] = never) -> float:
        """Seconds a page, of this rank's share of page 0; Unreachable if a pull failed."""
        fastest_pull_s(lambda: self.pull(SINK), 1, ends)  # warms the way
        times, _, _ = self._measured(DIALLED_BYTES)
        return fastest_pull_s(lambda: self.pull(SINK * times), NUM_READS, ends) / times

    def measure(self, ends: Callable[[], bool] = never) -> tuple[float, int, int, float, float]:
        """PullPath's bytes_per_s, num_bytes, num_ranges, small_pull_s, pages_per_s, into page 0."""
        times, num_bytes, num_runs = self._measured(MEASURED_BYTES)
        took_s = fastest_pull_s(lambda: self.pull(SINK * times), NUM_READS, ends)
        first, _ = self._sources[0]
        small_s = fastest_pull_s(lambda: first.pull([Run(0, 0, 0, SMALL_BYTES)]), NUM_SMALL, ends)
        return num_bytes / took_s, num_bytes, num_runs, small_s, times / took_s

    def _measured(self, wanted_bytes: int) -> tuple[int, int, int]:
        """How often page 0 is pulled to measure, and how many bytes and runs that makes."""
        once = [run for _, pair in self._sources for run in pair.runs(SINK)]
        page_bytes, page_runs = sum(run.num_bytes for run in once), len(once)
        times = min(-(-wanted_bytes // page_bytes), -(-MAX_MEASURED_RUNS // page_runs))
        return times, times * page_bytes, times * page_runs

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            for connection, _ in self._sources:
                connection.close()


class _Dialled:
    """Sources that threads of a rank read from and have dialled, until it ends. For any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_reading = 0
        self._made: list[Sources] = []
        self._ends = False

    def ends(self) -> bool:
        return self._ends

    @contextmanager
    def reading(self, sources: Sources, *, to_keep: bool) -> Iterator[None]:
        """Meanwhile pulls of `sources` write to page 0. Closes them in the end unless they are
        to_keep and no error was raised. Raises Unreachable if the rank ends."""
        with self._changed:
            self._num_reading += 1
        kept: list[Sources] = []
        try:
            if self._ends:
                raise Unreachable("this worker ends")
            yield
            kept = [sources] if to_keep else []
        finally:
            if not kept:
                sources.close()
            with self._changed:
                self._made = [*(made for made in self._made if not made.closed), *kept]
                self._num_reading -= 1
                self._changed.notify_all()

    def end(self) -> None:
        """Cancel reads, wait for their end, and close all that is still open."""
        with self._changed:
            self._ends = True
            self._changed.wait_for(lambda: not self._num_reading)
        for made in self._made:
            made.close()


@dataclass(frozen=True, slots=True)
class LocalRank:
    """One rank of this worker, as the destination of pulls."""

    transport: KVTransport
    model: ModelLayout  # KV of the whole model
    identity: Identity  # of that KV
    num_pages: int  # of this rank's pool, page 0 included
    timeout_s: float  # to reach one remote rank
    tp_size: int = 1
    rank: int = 0
    _dialled: _Dialled = field(default_factory=_Dialled, init=False, repr=False, compare=False)

    def connect(self, member: Member) -> Sources:
        """Connect to the ranks of `member` that hold heads of this rank; may block.

        Raises Incompatible for KV of another model, heads that so many ranks cannot share, and
        another transport or other regions; TransferError if one of those ranks cannot be reached;
        OSError if no descriptor or memory is left.
        """
        identity = Identity(member.model, member.digest, member.layout_hash)
        if identity.layout_hash != self.identity.layout_hash:
            raise Incompatible(self.identity.explain(identity))
        if not (remote_tp := len(member.endpoints)):
            raise Incompatible(f"{member.peer} does not say how to reach it")
        num_kv_heads = [region.num_kv_heads for region in self.model.regions]
        if self.model.state is not None:
            num_kv_heads.append(self.model.state.key_heads)
        try:
            plan = rank_plan(num_kv_heads, self.tp_size, self.rank, remote_tp)
        except ValueError as error:
            raise Incompatible(f"{member.peer} has {remote_tp} ranks: {error}") from error
        layout = self.model.share(self.tp_size, self.rank)
        peers: list[tuple[Endpoint, RankPair]] = []  # all checked before the first is contacted
        for rank, heads in plan.items():
            remote = self.model.share(remote_tp, rank)
            endpoint = _endpoint(member, rank)
            num_pages = num_pool_pages(remote, endpoint)
            pair = RankPair(layout, remote, self.num_pages, num_pages, heads)
            if remote.state is not None:
                slots = endpoint.regions[-1].num_bytes // remote.state.slot_bytes
                pair = replace(pair, remote_slots=slots)
            peers.append((endpoint, pair))
        sources: list[tuple[Peer, RankPair]] = []
        try:
            for endpoint, pair in peers:
                if self._dialled.ends():
                    raise Unreachable("this worker ends")
                sources.append((self.transport.connect(endpoint, self.timeout_s), pair))
        except BaseException:
            Sources(sources).close()
            raise
        return Sources(sources)

    def dial(self, member: Member, answer: Callable[[Link | DialFailed], None]) -> None:
        """Connect and measure in a thread of its own, which ends with a call of `answer`."""
        threading.Thread(
            target=lambda: answer(self._dial(member)), name=f"dial {member.peer}", daemon=True
        ).start()

    def end(self) -> None:
        """End all dials and measurements, and close all that was dialled.

        Returns once no pull of theirs writes to our memory. For the thread that closes the loop.
        """
        self._dialled.end()

    def measure(self, member: Member) -> PullPath:
        """Measure the way from `member`, over connections opened for this."""
        transport = f"{self.transport.name}/{self.transport.kind}"
        try:
            sources = self.connect(member)
            with self._dialled.reading(sources, to_keep=False):
                figures = sources.measure(self._dialled.ends)
        except (TransferError, OSError) as error:
            return PullPath(member.peer, transport, error=str(error))
        return PullPath(member.peer, sources.transport, *figures, self.model.page_size)

    def _dial(self, member: Member) -> Link | DialFailed:
        try:
            sources = self.connect(member)
            with self._dialled.reading(sources, to_keep=True):
                page_s = sources.page_s(self._dialled.ends)
        except TransferError as error:
            return DialFailed(member.peer, error)
        except OSError as error:  # out of descriptors or memory: dial again later
            return DialFailed(member.peer, Unreachable(f"cannot dial {member.peer}: {error}"))
        return Link(member.peer, sources, self.model.page_bytes / page_s)


class PartedPull(Pull, Generic[Parts]):
    """Several pulls as one: OK when all are. When one fails, those that run are cancelled.

    FAILED only once none of them runs any more: until then they may write to our pages.
    """

    def __init__(self, running: Parts, num_bytes: int, cancel_parts: Callable[[], None]) -> None:
        self.num_bytes = num_bytes
        self.error: str | None = None
        self._running = running
        self._cancel_parts = cancel_parts
        self._failure = ""  # the first one; it is the error once no part runs

    def cancel(self) -> None:
        if self._running:
            self._fail("cancelled")

    def _fail(self, why: str) -> None:
        if not self._failure:
            self._failure = why
            self._cancel_parts()

    def _state(self) -> PullState:
        if self._running:
            return PullState.RUNNING
        self.error = self._failure or None
        return PullState.FAILED if self._failure else PullState.OK


class JoinedPull(PartedPull[deque[Pull]]):
    """Pulls over several connections, polled one after another.

    failure: why it fails although none of them has.
    """

    def __init__(self, parts: Sequence[Pull], failure: str = "") -> None:
        super().__init__(deque(parts), sum(part.num_bytes for part in parts), self._cancel_running)
        self._failure = failure

    def poll(self) -> PullState:
        deadline = time.perf_counter() + POLL_BUDGET_S
        for _ in range(len(self._running)):
            part = self._running.popleft()
            state = part.poll()
            if state is PullState.RUNNING:
                self._running.append(part)
            elif state is PullState.FAILED:
                self._fail(part.error or "pull failed")
            if time.perf_counter() >= deadline:
                break
        return self._state()

    def _cancel_running(self) -> None:
        for part in self._running:
            part.cancel()


def fastest_pull_s(
    begin: Callable[[], Pull], num_reads: int, ends: Callable[[], bool] = never
) -> float:
    """The least seconds of `num_reads` pulls, one after another; Unreachable: one failed.

    ends: whether to cancel the one that runs.
    """
    fastest_s = float("inf")
    for _ in range(num_reads):
        began_at = time.perf_counter()
        pull = begin()
        while (state := pull.poll()) is PullState.RUNNING:
            if ends():
                pull.cancel()
            if time.perf_counter() - began_at > SPIN_S:
                time.sleep(SPIN_S)
        if state is PullState.FAILED:
            raise Unreachable(f"a first read failed: {pull.error}")
        fastest_s = min(fastest_s, time.perf_counter() - began_at)
    return fastest_s


def _endpoint(member: Member, rank: int) -> Endpoint:
    try:
        return READER.decode(member.endpoints[rank])
    except msgspec.DecodeError as error:
        raise Incompatible(f"the endpoint of rank {rank} of {member.peer}: {error}") from error
