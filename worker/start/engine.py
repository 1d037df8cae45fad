"""Engine: the parts of one worker, the same for both roles."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from worker.api import Member
from worker.cache.book import PageBook
from worker.cache.layout import Identity, KVLayout, ModelLayout
from worker.cache.pool import KVPool
from worker.config import WorkerConfig
from worker.config.checkpoint.shape import ModelShape
from worker.observe.meter import StepMeter
from worker.observe.metrics import WorkerMetrics
from worker.peers.rank_group import RankGroup
from worker.plan import Ended
from worker.run.base import BucketCheck, Weights
from worker.run.layer_groups import LayerGroups
from worker.run.runner import ModelRunner
from worker.transfer.base import KVTransport
from worker.transfer.ranked import RankOrder
from worker.transfer.sources import LocalRank
from worker.transfer.tier.ranks import TierOrder
from worker.transfer.tier.rows import Row
from worker.transfer.tier.tier import Tier

if TYPE_CHECKING:
    from worker.observe.spans import Tracer


class Kept(NamedTuple):
    """Parts that a worker leaves to one of the other role in its process: `Worker.retire`."""

    config: WorkerConfig  # as it was given
    weights: Weights
    pool: KVPool
    transport: KVTransport
    read_until: float  # monotonic; peers may read its pages before


class Addresses(NamedTuple):
    """Where a worker listens."""

    wire: str
    wire_key: str
    metrics: str


@dataclass(slots=True)
class Engine:
    """The parts of one worker. Filled by `build_engine`."""

    config: WorkerConfig  # resolved
    shape: ModelShape
    model_layout: ModelLayout
    layout: KVLayout  # of this rank
    identity: Identity
    weights: Weights
    pool: KVPool
    book: PageBook
    runner: ModelRunner
    transport: KVTransport
    metrics: WorkerMetrics
    meter: StepMeter
    checks: Sequence[BucketCheck]  # of the start-up check: kinds and buckets that were compared
    tracer: "Tracer | None"
    rank_group: RankGroup
    rows: Sequence[Row] = ()  # of the tier below this rank's pool
    tier: Tier[Any] | None = None  # over these, at the leader

    def layer_groups(self, while_launching: Callable[[], None]) -> LayerGroups:
        """Make a layer hook for `launch`; it records when layer groups of the KV are final."""
        return LayerGroups(self.layout, self.runner.stream, while_launching, self.rank_group.size)

    @property
    def step_s(self) -> dict[tuple[int, int], float]:
        """Seconds of a greedy decode step by (rows, width); empty without decode graphs."""
        checks = (check for check in self.checks if check.kind == "decode")
        return {(check.bucket, check.width): check.graph_ms / 1e3 for check in checks}

    @property
    def simulated_accept_len(self) -> float:
        """Mean tokens that a row keeps of a step if acceptance is simulated; 0: it is not."""
        return self.config.spec.simulated_len if self.config.role == "decode" else 0.0

    def tell_ranks(self, message: Ended | RankOrder | TierOrder) -> None:
        """Send to the other ranks, if there are any."""
        if self.runner.followers is not None:
            self.runner.followers.tell(message)

    def forget_prefixes(self) -> None:
        """Drop what no request uses, and all that a tier keeps."""
        self.book.forget()
        if self.tier is not None:
            self.tier.forget()

    def local_rank(self) -> LocalRank:
        """This rank, as the destination of its pulls."""
        return LocalRank(
            self.transport, self.model_layout, self.identity, self.pool.num_pages,
            self.config.transport.connect_timeout_s, self.rank_group.size, self.rank_group.rank,
        )  # fmt: skip

    def endpoint(self) -> bytes:
        """Where this rank's pages can be pulled from, as `Member` has it."""
        return msgspec.msgpack.encode(self.transport.endpoint())

    def member(
        self, name: str, incarnation: str, at: Addresses, endpoints: tuple[bytes, ...]
    ) -> Member:
        """Build the record by which other processes know this worker; endpoints: of its ranks."""
        return Member(
            name=name,
            role=self.config.role,
            incarnation=incarnation,
            address=at.wire,
            metrics_address=at.metrics,
            wire_key=at.wire_key,
            model=self.identity.model,
            max_model_len=int(self.config.model.max_model_len),
            layout_hash=self.identity.layout_hash,
            transport=f"{self.transport.name}/{self.transport.kind}",
            endpoints=endpoints,
            node=os.uname().nodename,
            pid=os.getpid(),
            digest=self.identity.digest,
            simulated_accept_len=self.simulated_accept_len,
            drafter="" if self.config.spec.drafter == "none" else self.config.spec.drafter,
        )

    def retire(self) -> None:
        """Free the role's parts; `weights`, `pool` and `transport` are left."""
        if self.tier is not None:
            self.tier.close()
        self.runner.close()
        self.metrics.close()
        if self.tracer is not None:
            self.tracer.close()

    def close(self) -> None:
        """Free everything; the transport before the pool, whose memory it has registered."""
        self.retire()
        self.transport.close()
        self.pool.close()
        self.weights.model.collective.close()
        self.rank_group.close()
