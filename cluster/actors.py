"""The Ray side of one process: a thin actor and an asyncio handle of it.

Ray never restarts an actor of ours (max_restarts=0). It reports a death after about 20 ms, and the
monitor decides what follows. `run` blocks one of the actor's threads until the process ends.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from cluster.config import Config
from cluster.doctor.running import Examination, examined_here
from cluster.door import Door
from cluster.fence import Identity, fence, own_identity
from cluster.logs import Logs
from cluster.placement import Group
from cluster.process import News, Report, Stage
from cluster.ray_private import RAY, reason_of
from worker.api import Member
from worker.config import WorkerConfig
from worker.errors import PeerLost, UserError, WorldError
from worker.observe.tracing import tracer_of
from worker.peers.rendezvous import free_rendezvous

log = logging.getLogger("kvlane.actors")

MAX_CONCURRENCY = 8  # run() and start() hold one thread each
LOCAL_HOST = "127.0.0.1"


@contextmanager
def no_collections() -> Generator[None]:
    """For imports of what stays: a fifth of their time is spent on looking for garbage in it.

    Nothing made until then is looked at afterwards, either: a collection of garbage walks through
    all libraries otherwise, and every stream waits.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class ProcessActor:
    """What the actors of workers and routers share. Each of them has a process of its own."""

    def __init__(self, name: str, incarnation: str, logs: Logs) -> None:
        logs.begin(name)
        self._name = name
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._version = -1  # of the members that were told last
        self._part: Any = None  # the Worker or RouterServer, from `start` on
        self._stage = Stage()

    def __repr__(self) -> str:
        return self._name  # Ray puts it before every line that the process prints

    def identify(self) -> Identity:
        """Which process this is. Asked first, because the fence needs it."""
        return own_identity()

    def stage(self) -> Stage:
        """How far `start` is."""
        return self._stage

    def _progress(self, stage: str, done: int, total: int) -> None:
        self._stage = Stage(stage, done / total)

    def tell(self, news: News) -> None:
        """The members from now on. Calls may overtake each other: an older list is ignored."""
        with self._lock:
            if news.version > self._version:
                self._version = news.version
                self._take(news)

    def _take(self, news: News) -> None:
        self._part.update_members(news.members)

    def drain(self, others: bool) -> None:
        """Take no new requests; `others`: processes at the same address do."""
        self._part.drain()


class WorkerActor(ProcessActor):
    """One prefill or decode worker; of several ranks the first, which speaks for all."""

    def __init__(
        self,
        config: WorkerConfig,
        name: str,
        incarnation: str,
        host: str,
        metrics_port: int,
        logs: Logs,
    ) -> None:
        super().__init__(name, incarnation, logs)
        self._config = config
        self._host = host
        self._metrics_port = metrics_port

    def rendezvous(self) -> str:
        """Where its ranks shall meet: at a port of this node."""
        return free_rendezvous(self._host)

    def start(self, rendezvous: str = "") -> Member:
        """Load the weights and listen; may take minutes.

        rendezvous: where its ranks meet, all of which start at the same time; "": it is alone.
        """
        with no_collections():
            from worker.start.build import Place  # torch: imported in this process only
            from worker.worker import Worker

        place = Place(self._name, self._incarnation, self._host, rendezvous, self._progress)
        self._part = Worker(self._config, place, self._metrics_port)
        member = cast("Member", self._part.start())
        gc.collect()
        gc.freeze()  # what is loaded now stays, too
        return member

    def run(self) -> None:
        """Returns once the engine has ended."""
        self._part.join()

    def report(self) -> Report:
        """Idle or not, and the counters."""
        return Report(idle=self._part.idle(), counters=dict(self._part.counters()))

    def examine(self) -> Examination:
        """Its machine and the ways of KV to it, for `doctor`; takes seconds."""
        return examined_here(self._part.measured_paths)

    def stop(self) -> None:
        """End threads and sockets."""
        self._part.stop()


class RouterActor(ProcessActor):
    """One router: the OpenAI API, on the port that all routers of its node share."""

    def __init__(self, config: Config, name: str, incarnation: str) -> None:
        super().__init__(name, incarnation, Logs.of(config.cluster))
        self._config = config
        self._stopped = threading.Event()

    def load(self) -> None:
        """Load tokenizer and template."""
        with no_collections():
            from router.app import RouterServer  # its libraries are needed in this process only

        logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for each of our scrapes
        node = RAY.util.get_node_ip_address()
        self._part = RouterServer(
            self._config.router,
            self._config.model,
            self._config.ping,
            name=self._name,
            incarnation=self._incarnation,
            host=self._config.cluster.host,
            port=self._config.cluster.port,
            shown=self._config.shown(),
            node="" if node == LOCAL_HOST else node,  # that is Ray's, where it is our own
            shared=self._config.routers.num > 1,
            tracer=tracer_of(self._config.tracing, "router", self._name),
        )

    def start(self, port: int, joins: bool) -> Member:
        """Listen; `joins`: others of this cluster do so there."""
        member = cast("Member", self._part.start(port, joins=joins))
        gc.collect()
        gc.freeze()
        return member

    def _take(self, news: News) -> None:
        self._part.update_members(news.members, news.changes)

    def drain(self, others: bool) -> None:
        """Take no new requests; leave the port if others stay there."""
        self._part.drain(others=others)

    def run(self) -> None:
        """Returns once it was stopped."""
        self._stopped.wait()

    def report(self) -> Report:
        """Idle when no request is in flight."""
        num_inflight = int(self._part.num_inflight())
        return Report(idle=num_inflight == 0, counters={"num_inflight": num_inflight})

    def stop(self) -> None:
        """Close the port and all connections."""
        try:
            self._part.stop()
        finally:
            self._stopped.set()


class RayProcess:
    """`process.Process` over an actor handle."""

    def __init__(self, actor: Any, identity: Identity) -> None:
        self.actor = actor
        self.identity = identity

    @property
    def place(self) -> str:
        """Node and pid."""
        return f"node {self.identity.node_address}, pid {self.identity.pid}"

    @property
    def pids(self) -> tuple[int, ...]:
        """See process.Process."""
        return (self.identity.pid,)

    async def start(self) -> Member:
        """See process.Process."""
        return cast("Member", await call(self.actor.start))

    async def stage(self) -> Stage:
        """See process.Process."""
        return cast("Stage", await call(self.actor.stage))

    async def run(self) -> None:
        """See process.Process."""
        await call(self.actor.run)

    async def tell(self, news: News) -> None:
        """See process.Process."""
        await call(self.actor.tell, news)

    async def drain(self, others: bool) -> None:
        """See process.Process."""
        await call(self.actor.drain, others)

    async def report(self) -> Report:
        """See process.Process."""
        return cast("Report", await call(self.actor.report))

    async def stop(self) -> None:
        """See process.Process."""
        await call(self.actor.stop)

    async def fence(self) -> None:
        """Returns when it is gone for certain, or its node is."""
        await fence(self.actor, self.identity)


class RouterProcess(RayProcess):
    """`process.Process` of a router.

    Args:
        door: of its node.
    """

    def __init__(self, actor: Any, identity: Identity, door: Door) -> None:
        super().__init__(actor, identity)
        self.door = door

    async def start(self) -> Member:
        """See process.Process."""
        await call(self.actor.load)
        return await self.door.enter(self, lambda port, joins: call(self.actor.start, port, joins))

    async def drain(self, others: bool) -> None:
        """See process.Process."""
        if others:
            self.door.leave(self)
        await super().drain(others)

    async def fence(self) -> None:
        """See RayProcess."""
        await super().fence()
        self.door.leave(self)


async def call(method: Any, *args: object) -> Any:
    """Call an actor's method.

    Raises:
        PeerLost: the process is dead or its node does not answer.
        UserError: raised by the method.
        WorldError: the method raised something else.
    """
    try:
        return await method.remote(*args)
    except RayActorError as error:
        raise PeerLost(reason_of(error)) from None
    except RayTaskError as error:
        cause = cast("BaseException", error.cause)  # pyright: ignore[reportUnknownMemberType]
        if isinstance(cause, UserError):
            raise cause from None
        log.error("%s", error)
        raise WorldError(f"{type(cause).__name__}: {cause}") from None


def create(
    kind: type[ProcessActor],
    args: Sequence[object],
    *,
    name: str,
    group: Group | None,
    rank: int,
    bundle: dict[str, float],
    home: str,
) -> Any:
    """An actor handle; Ray starts the process in the background.

    Args:
        kind: the actor's class.
        args: of its constructor.
        name: for the log.
        group: the placement group to start in; None: start on the node `home`.
        rank: number of its bundle in that group.
        bundle: the resources that it uses of its group.
        home: id of the node that `serve` runs on.
    """
    strategy: Any
    if group is None:
        strategy = NodeAffinitySchedulingStrategy(home, soft=False)
    else:
        strategy = PlacementGroupSchedulingStrategy(group.pg, placement_group_bundle_index=rank)
    rest = {key: amount for key, amount in bundle.items() if key not in ("CPU", "GPU")}
    remote = RAY.remote(kind)
    options = remote.options(
        max_restarts=0,
        max_concurrency=MAX_CONCURRENCY,
        num_cpus=bundle.get("CPU", 0),
        num_gpus=bundle.get("GPU", 0),
        resources=rest,
        scheduling_strategy=strategy,
    )
    log.debug("creating %s", name)
    return options.remote(*args)
