"""`process.Site` over Ray: room for each worker and router, and the actors in it."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from cluster.config import Config
from cluster.resolve import bundle_of, counts, with_collective, with_devices, with_transport
from cluster.sites.actors import LOCAL_HOST, Assignment, RankActor, RouterActor, WorkerActor
from cluster.sites.handles import Identity, Rank, RayProcess, RouterProcess, call
from cluster.sites.placement import SPANS, Ask, Group, Node, live_nodes, place
from cluster.sites.process import Site
from cluster.sites.ray_private import RAY
from cluster.sites.shared_port import SharedPort
from worker.api import Role
from worker.config import WorkerConfig
from worker.errors import WorldError

log = logging.getLogger("kvlane.site")

MAX_CONCURRENCY = 8  # run() and start() hold one thread of an actor each


@dataclass(frozen=True, slots=True)
class Home:
    """Where `serve` runs."""

    node_id: str
    address: str  # of the node
    local: bool  # `serve` started this Ray: no other node will join


class RaySite(Site):
    """Not thread-safe; lives in the controller's event loop."""

    def __init__(self, config: Config, home: Home) -> None:
        self.config = config
        self.waiting = ""
        self.closing = False
        self._home = home
        self._groups: dict[str, Group] = {}
        self._roles: dict[str, Role] = {}  # by name
        self._ports: dict[str, SharedPort] = {}  # by id of the node

    async def open(self) -> dict[str, Role]:
        """Reserve room for all processes, and decide what depends on where they are; their names.

        Raises Placement if something does not fit, WorldError if it was set to `closing` meanwhile;
        then nothing stays reserved.
        """
        nodes = await asyncio.to_thread(live_nodes)
        num_gpus = sum(node.total.get("GPU", 0) for node in nodes)
        local_gpus = num_gpus if self._home.local else None
        self.config = with_devices(self.config, has_gpus=num_gpus > 0, local_gpus=local_gpus)
        self._roles = {
            f"{role}-{i}": role for role, count in counts(self.config).items() for i in range(count)
        }
        self._groups = await self._place(list(self._roles))
        if self.closing:
            for name in list(self._groups):
                await self.release(name)
            raise WorldError("stopped before anything was started")
        self.config = with_transport(self.config, self._worker_nodes())
        return self._roles

    async def create(self, name: str, incarnation: str) -> RayProcess:
        await self._renew_group(name)
        role, group = self._roles[name], self._groups[name]
        hosts = [LOCAL_HOST if self._home.local else node.address for node in group.nodes]
        config: Config | WorkerConfig = self.config
        if role == "prefill" or role == "decode":
            config = with_collective(self.config.worker(role), hosts)
        actors = [
            self._actor_class(role, group, rank).remote(
                Assignment(name, incarnation, self.config.cluster, host, rank), config
            )
            for rank, host in enumerate(hosts)
        ]
        try:
            processes: list[Identity] = await asyncio.wait_for(
                asyncio.gather(*(call(actor.identify) for actor in actors)),
                self.config.cluster.start_timeout_s,
            )
        except BaseException:
            for actor in actors:
                RAY.kill(actor)
            raise
        ranks = [Rank(actor, who) for actor, who in zip(actors, processes, strict=True)]
        if role == "router":
            port = SharedPort(self.config.cluster.port)
            return RouterProcess(ranks[0], self._ports.setdefault(processes[0].node_id, port))
        return RayProcess(ranks)

    async def release(self, name: str) -> None:
        group = self._groups.pop(name, None)
        if group is not None and group.pg is not None:
            await asyncio.to_thread(remove_placement_group, group.pg)

    def _actor_class(self, role: Role, group: Group, rank: int) -> Any:
        """As Ray makes actors of it: in the bundle of that rank, or beside `serve`."""
        kind = RouterActor if role == "router" else RankActor if rank else WorkerActor
        strategy: Any
        if group.pg is None:
            strategy = NodeAffinitySchedulingStrategy(self._home.node_id, soft=False)
        else:
            strategy = PlacementGroupSchedulingStrategy(group.pg, placement_group_bundle_index=rank)
        rest = bundle_of(self.config, role)
        return RAY.remote(kind).options(
            max_restarts=0,
            max_concurrency=MAX_CONCURRENCY,
            num_cpus=rest.pop("CPU", 0),
            num_gpus=rest.pop("GPU", 0),
            resources=rest,
            scheduling_strategy=strategy,
        )

    async def _renew_group(self, name: str) -> None:
        group = self._groups.get(name)  # None: there was no room when it was placed anew
        if group is not None:
            if group.pg is None:
                return
            alive = {node.node_id for node in await asyncio.to_thread(live_nodes)}
            gone = {node.address for node in group.nodes if node.node_id not in alive}
            if not gone:
                return
            log.warning("%s: node %s is gone, placing it anew", name, ", ".join(gone))
            await self.release(name)
        self._groups |= await self._place([name])
        transport = self.config.transport
        local = transport.name if transport.name == "shm" else transport.kind
        if local in ("shm", "nvlink") and len(self._worker_nodes()) > 1:
            log.warning(
                "%s is on another node now, which transport %s does not reach: decode workers "
                "prefill by themselves; start again with --set transport.name=mooncake "
                "--set transport.kind=tcp",
                name,
                local,
            )

    async def _place(self, names: Sequence[str]) -> dict[str, Group]:
        asks = [self._ask(name) for name in names]
        home = Node(self._home.node_id, self._home.address, {}, {})
        beside_serve = {ask.name: Group(None, (home,) * ask.num) for ask in asks if not ask.bundle}
        try:
            return beside_serve | await asyncio.to_thread(
                place,
                [ask for ask in asks if ask.bundle],
                self.config.cluster.placement_timeout_s,
                can_grow=not self._home.local,
                waiting=self._wait,
            )
        finally:
            self.waiting = ""

    def _ask(self, name: str) -> Ask:
        role = self._roles[name]
        bundle = bundle_of(self.config, role)
        if role == "prefill" or role == "decode":
            part = self.config.role(role)
            return Ask(name, bundle, part.tp, SPANS[part.engine.collective])
        return Ask(name, bundle)

    def _wait(self, text: str) -> None:
        """Called now and then while groups are placed; an error gives them back."""
        if self.closing:
            raise WorldError("stopped while there was no room yet")
        self.waiting = text

    def _worker_nodes(self) -> set[str]:
        """Ids of the nodes that workers are on."""
        groups = [group for name, group in self._groups.items() if self._roles[name] != "router"]
        return {node.node_id for group in groups for node in group.nodes}
