"""Sources: the ranks of a prefill worker from which one local rank pulls its heads.

Every rank of a decode worker pulls for itself, over connections of its own transport (ADR 0030).
Page ids are the same on all ranks of a worker. So the same (local page, remote page) pairs tell
every rank what to pull, and only this file knows which bytes of which remote rank that means.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from worker.api import Member
from worker.cache.layout import KVLayout, ModelLayout
from worker.errors import Incompatible, TransferError, Unreachable
from worker.transfer.base import POLL_BUDGET_S, Endpoint, KVTransport, Peer, Pull, PullState, Run
from worker.transfer.layout import (
    HeadRange,
    Pages,
    PoolPages,
    num_pool_pages,
    plan_runs,
    rank_plan,
)

NUM_READS = 3  # to measure sources; the fastest counts
SMALL_BYTES, NUM_SMALL = 64, 20
SPIN_S = 1e-3  # a read is polled without sleeping for this long, then once in every such interval
SINK = [(0, 0)]  # page 0 of both sides: no KV, padded and inactive rows write there
_decode_endpoint = msgspec.msgpack.Decoder(Endpoint).decode
_What = TypeVar("_What", contravariant=True)


class PullsFrom(Protocol[_What]):
    """What can be measured by pulls: a `Peer`, which pulls runs, or `Sources`, which pull pages."""

    def pull(self, what: _What, /) -> Pull:
        """Begin to pull."""
        ...

    def close(self) -> None:
        """Let go of the peer."""
        ...


@dataclass(frozen=True, slots=True)
class LocalRank:
    """One rank of this worker, as the destination of pulls."""

    transport: KVTransport
    model: ModelLayout  # KV of the whole model
    num_pages: int  # of this rank's pool, page 0 included
    timeout_s: float  # to reach one remote rank
    tp_size: int = 1
    rank: int = 0

    def connect(self, member: Member) -> Sources:
        """Connect to the ranks of `member` that hold heads of this rank; may block.

        The caller has checked that it holds KV of our model.

        Raises:
            Incompatible: heads cannot be shared by so many ranks, or the member's transport or
                regions differ from ours.
            TransferError: one of those ranks cannot be reached.
            OSError: no descriptor or memory is left.
        """
        layout, plan = self.model.share(self.tp_size, self.rank), self._plan(member)
        shares = {rank: self.model.share(len(member.endpoints), rank) for rank in plan}
        endpoints = {rank: _endpoint(member, rank) for rank in plan}
        num_pages = {rank: num_pool_pages(shares[rank], endpoints[rank]) for rank in plan}
        sources: list[_Source] = []
        try:
            for rank, heads in plan.items():
                pool_pages = PoolPages(self.num_pages, num_pages[rank])
                connection = self.transport.connect(endpoints[rank], self.timeout_s)
                sources.append(_Source(connection, layout, shares[rank], pool_pages, heads))
        except BaseException:
            for each in sources:
                each.connection.close()
            raise
        return Sources(sources)

    def _plan(self, member: Member) -> dict[int, tuple[HeadRange | None, ...]]:
        """See `rank_plan`; raises Incompatible."""
        remote_tp = len(member.endpoints)
        if not remote_tp:
            raise Incompatible(f"{member.peer} does not say how to reach it")
        num_kv_heads = [region.num_kv_heads for region in self.model.regions]
        try:
            return rank_plan(num_kv_heads, self.tp_size, self.rank, remote_tp)
        except ValueError as error:
            raise Incompatible(f"{member.peer} has {remote_tp} ranks: {error}") from error

    def dial(
        self, member: Member, answer: Callable[[Sources | TransferError, float], None]
    ) -> None:
        """Connect and measure in a thread of its own, which ends with a call of `answer`.

        answer: called with the sources and their `page_s`, or with the error and 0.
        """
        threading.Thread(
            target=self._dial, args=(member, answer), name=f"dial {member.peer}", daemon=True
        ).start()

    def _dial(
        self, member: Member, answer: Callable[[Sources | TransferError, float], None]
    ) -> None:
        try:
            sources = self.connect(member)
            page_s = sources.page_s()
        except TransferError as error:
            answer(error, 0.0)
        except OSError as error:  # out of descriptors or memory: dial again later
            answer(Unreachable(f"cannot dial {member.peer}: {error}"), 0.0)
        else:
            answer(sources, page_s)


@dataclass(frozen=True, slots=True)
class _Source:
    """One remote rank that holds heads of ours."""

    connection: Peer
    layout: KVLayout  # ours
    remote: KVLayout
    pool_pages: PoolPages
    heads: tuple[HeadRange | None, ...]  # of each region, as `plan_runs` takes them

    def runs(self, pairs: Pages, groups: range | None) -> list[Run]:
        """What is to be pulled from this rank."""
        return plan_runs(
            self.layout, pairs, self.pool_pages, groups, remote=self.remote, heads=self.heads
        )


class Sources:
    """Connections to all remote ranks that hold heads of one local rank."""

    def __init__(self, sources: Sequence[_Source]) -> None:
        self._sources = tuple(sources)

    def runs(self, pairs: Pages, groups: range | None = None) -> list[list[Run]]:
        """What `pull` pulls: of each source its runs."""
        return [each.runs(pairs, groups) for each in self._sources]

    def pull(self, pairs: Pages, groups: range | None = None) -> Pull:
        """Begin to pull this rank's heads of pages, as one pull.

        Args:
            pairs: (local page, remote page), each local page once, but for page 0.
            groups: layer groups of the target's region, None for all; see `plan_runs`.
        """
        pulls = [
            source.connection.pull(runs)
            for source, runs in zip(self._sources, self.runs(pairs, groups), strict=True)
            if runs
        ]
        return pulls[0] if len(pulls) == 1 else JoinedPull(pulls)

    def page_s(self) -> float:
        """Measure the seconds in which this rank's share of one page arrives.

        Overwrites page 0, which holds no KV.

        Raises:
            Unreachable: a pull failed; the connections are closed.
        """
        return fastest_pull_s(self, SINK, NUM_READS)

    def small_pull_s(self) -> float:
        """Measure the seconds of a pull of SMALL_BYTES from one source; errors as `page_s`."""
        return fastest_pull_s(self._sources[0].connection, [Run(0, 0, 0, SMALL_BYTES)], NUM_SMALL)

    def close(self) -> None:
        """See Peer.close."""
        for each in self._sources:
            each.connection.close()


class JoinedPull:
    """Several pulls as one (see Pull): OK when all are. When one fails, the others are cancelled.

    FAILED only once none of them runs any more: until then they may write to our pages.
    """

    def __init__(self, pulls: Sequence[Pull]) -> None:
        self.num_bytes = sum(pull.num_bytes for pull in pulls)
        self.error: str | None = None
        self._running = deque(pulls)
        self._why: str | None = None  # the first failure's reason

    def poll(self) -> PullState:
        """Poll those that run, in turn, for about POLL_BUDGET_S in all."""
        deadline = time.perf_counter() + POLL_BUDGET_S
        for _ in range(len(self._running)):
            pull = self._running.popleft()
            state = pull.poll()
            if state is PullState.RUNNING:
                self._running.append(pull)
            elif state is PullState.FAILED and self._why is None:
                self._why = pull.error or "pull failed"
                self.cancel()
            if time.perf_counter() >= deadline:
                break
        if self._running:
            return PullState.RUNNING
        self.error = self._why
        return PullState.OK if self.error is None else PullState.FAILED

    def cancel(self) -> None:
        """Cancel those that run."""
        for pull in self._running:
            pull.cancel()


def measured_rate(connection: Peer, runs: Sequence[Run]) -> float:
    """Measure the bytes per second of pulls of `runs`, the best of NUM_READS.

    Overwrites the local pages of `runs`, so they must hold no KV that is needed.

    Raises:
        Unreachable: a pull failed; the connection is closed.
    """
    return sum(run.num_bytes for run in runs) / fastest_pull_s(connection, runs, NUM_READS)


def fastest_pull_s(source: PullsFrom[_What], what: _What, num_reads: int) -> float:
    """Measure the least seconds of `num_reads` pulls of `what`; errors as `measured_rate`."""
    best = float("inf")
    for _ in range(num_reads):
        began_at = time.perf_counter()
        pull = source.pull(what)
        while (state := pull.poll()) is PullState.RUNNING:
            if time.perf_counter() - began_at > SPIN_S:
                time.sleep(SPIN_S)
        if state is PullState.FAILED:
            source.close()
            raise Unreachable(f"a first read failed: {pull.error}")
        best = min(best, time.perf_counter() - began_at)
    return best


def _endpoint(member: Member, rank: int) -> Endpoint:
    try:
        return _decode_endpoint(member.endpoints[rank])
    except msgspec.DecodeError as error:
        raise Incompatible(f"the endpoint of rank {rank} of {member.peer}: {error}") from error
