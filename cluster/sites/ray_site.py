"""`process.Site` over Ray: room for workers and routers, and the actors in it."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from cluster.config import Config
from cluster.diagnose.facts import Driver, read_driver
from cluster.resolve import ROLES, bundle_of, counts, with_collective, with_devices, with_transport
from cluster.sites.actors import LOCAL_HOST, Assignment, RankActor, RouterActor, WorkerActor
from cluster.sites.estate import Holding, Legacy, Orders
from cluster.sites.handles import Identity, Rank, RayProcess, RouterProcess, call
from cluster.sites.placement import SPANS, Ask, Group, Node, live_nodes, place
from cluster.sites.process import Record, Site
from cluster.sites.ray_private import RAY, reason_of
from cluster.sites.shared_port import SharedPort
from worker.api import Member, Role
from worker.config import WorkerConfig
from worker.errors import WorldError

log = logging.getLogger("kvlane.site")

DRIVER_TIMEOUT_S = 60.0
MAX_CONCURRENCY = 8  # run() holds one thread of an actor, and start() another


@dataclass(frozen=True, slots=True)
class Home:
    """Where `serve` runs."""

    node_id: str
    address: str  # of the node
    local: bool  # `serve` started this Ray: no other node will join


class RaySite(Site):
    """Not thread-safe; lives in the controller's event loop."""

    def __init__(self, legacy: Legacy, home: Home, orders: Orders) -> None:
        self.given = legacy.given
        self.config = legacy.config
        self.waiting = ""
        self.closing = False
        self.controller: Member | None = None  # set before the first `create`
        self._home = home
        self._orders = orders
        self._holdings = dict(legacy.holdings)
        self._ports: dict[str, SharedPort] = {}  # by id of the node

    async def open(self) -> list[Record]:
        """Reserve room for all processes, and decide what depends on where they are; their names.

        Raises NoPlacement if something does not fit, WorldError if it was set to `closing`
        meanwhile; then nothing stays reserved.
        """
        self.config = await decided(self.given, self._home)
        for role, num in counts(self.config).items():
            records = [Record(f"{role}-{i}", role) for i in range(num)]
            self._holdings |= {record.name: Holding(record) for record in records}
        await self._place(list(self._holdings))
        if self.closing:
            for name in list(self._holdings):
                await self.release(name)
            raise WorldError("stopped before anything was started")
        nodes = self._worker_nodes()
        peer_access = await peer_access_of(self.config, nodes, self._home)
        self.config = with_transport(self.config, nodes, peer_access=peer_access)
        self._orders.tell("decide", self.given, self.config)
        return [holding.record for holding in self._holdings.values()]

    async def add(self, records: Sequence[Record]) -> None:
        """Reserve room for further names. Raises NoPlacement; then they are forgotten."""
        names = [record.name for record in records]
        self._holdings |= {record.name: Holding(record) for record in records}
        try:
            await self._place(names)
        except BaseException:
            for name in names:
                del self._holdings[name]
            raise
        if len(self._worker_nodes()) > 1:
            tell_if_far(names, self.config)

    async def change(self, given: Config) -> None:
        """The configuration of processes from now on; where they are, and how KV goes, stays."""
        config = await decided(given, self._home)
        kept = {name: getattr(self.config, name) for name in ("transport", "routers")}
        self.given, self.config = given, config.model_copy(update=kept)
        self._orders.tell("decide", self.given, self.config)

    async def inherited(self) -> list[tuple[Record, RayProcess | None]]:
        """What the controller before this one has left: names, and their processes.

        A router that was starting is killed: whether it listens, nobody knows.
        """
        found: list[tuple[Record, RayProcess | None]] = []
        for name, holding in self._holdings.items():
            if holding.ranks and holding.record.role == "router" and not holding.record.member:
                await holding.ranks[0].kill()
                holding = self._holdings[name] = replace(holding, ranks=())
            process = self._process(holding) if holding.ranks else None
            found.append((holding.record, process))
        return found

    async def create(self, name: str, incarnation: str) -> RayProcess:
        group = await self._renewed_group(name)
        role = self._holdings[name].record.role
        hosts = [LOCAL_HOST if self._home.local else node.address for node in group.nodes]
        config: Config | WorkerConfig = self.config
        if role == "prefill" or role == "decode":
            config = with_collective(self.config.worker(role), hosts)
        assignment = Assignment(name, incarnation, self.config.cluster, self.controller)
        actors = [
            await self._orders.ask(
                "create",
                RouterActor if role == "router" else RankActor if rank else WorkerActor,
                _options(self.config, self._home, role, group, rank),
                (replace(assignment, host=host, rank=rank), config),
            )
            for rank, host in enumerate(hosts)
        ]
        limit_s = self.config.cluster.start_timeout_s
        try:
            asked = asyncio.gather(*(call(actor.identify) for actor in actors))
            processes: list[Identity] = await asyncio.wait_for(asked, limit_s)
            ranks = tuple(Rank(actor, who) for actor, who in zip(actors, processes, strict=True))
            now = replace(self._holdings[name].record, incarnation=incarnation, renewing=False)
            holding = Holding(replace(now, has_process=True), group, ranks)
            await self._hold(holding)
        except BaseException as error:
            for actor in actors:
                RAY.kill(actor)
            if isinstance(error, TimeoutError):
                lack = f"Ray started no process for it within {limit_s:g} s"
                raise WorldError(lack) from None
            raise
        return self._process(holding)

    async def turn(self, name: str, incarnation: str) -> None:
        holding = self._holdings[name]
        role, (rank,) = holding.record.role, holding.ranks
        assert role == "prefill" or role == "decode"
        record = replace(holding.record, incarnation=incarnation, renewing=False)
        # Noted first: the next controller asks for this incarnation, or for a new process.
        await self._hold(replace(holding, record=record))
        await call(rank.actor.turn, incarnation, self.config.worker(role))

    def remember(self, record: Record) -> None:
        holding = self._holdings.get(record.name)
        if holding is None:  # it was released meanwhile
            return
        ranks = holding.ranks if record.has_process else ()
        self._holdings[record.name] = replace(holding, record=record, ranks=ranks)
        self._orders.tell("hold", record.name, self._holdings[record.name])

    async def release(self, name: str) -> None:
        holding = self._holdings.pop(name)
        self._orders.tell("hold", name, None)
        await _given_back(holding.group)

    async def _hold(self, holding: Holding) -> None:
        """Returns once it is noted where a controller's death does not matter."""
        self._holdings[holding.record.name] = holding
        await self._orders.ask("hold", holding.record.name, holding)

    def _process(self, holding: Holding) -> RayProcess:
        if holding.record.role != "router":
            return RayProcess(holding.ranks)
        (rank,) = holding.ranks
        port = self._ports.setdefault(rank.process.node_id, SharedPort(self.config.cluster.port))
        return RouterProcess(rank, port, holding.record.member)

    async def _renewed_group(self, name: str) -> Group:
        holding = self._holdings[name]
        group = holding.group
        if group is not None:
            if group.pg is None:
                return group
            alive = {node.node_id for node in await asyncio.to_thread(live_nodes)}
            gone = {node.address for node in group.nodes if node.node_id not in alive}
            if not gone:
                return group
            log.warning("%s: node %s is gone, placing it anew", name, ", ".join(gone))
            await self._hold(replace(holding, group=None, ranks=()))
            await _given_back(group)
        await self._place([name])
        if len(self._worker_nodes()) > 1:
            tell_if_far([name], self.config)
        group = self._holdings[name].group
        assert group is not None
        return group

    async def _place(self, names: Sequence[str]) -> None:
        """Find room for names; noted at once, as nothing is in it yet."""
        loop = asyncio.get_running_loop()

        def reserve(*group: Any) -> PlacementGroup:
            asked = self._orders.ask("reserve", *group)
            return asyncio.run_coroutine_threadsafe(asked, loop).result()

        asks = [_ask(self.config, name, self._holdings[name].record.role) for name in names]
        home = Node(self._home.node_id, self._home.address, {}, {})
        found = {ask.name: Group(None, (home,) * ask.num) for ask in asks if not ask.bundle}
        try:
            found |= await asyncio.to_thread(
                place,
                [ask for ask in asks if ask.bundle],
                self.config.cluster.placement_timeout_s,
                can_grow=not self._home.local,
                reserve=reserve,
                waiting=self._wait,
            )
        finally:
            self.waiting = ""
        for name, group in found.items():
            self._holdings[name] = replace(self._holdings[name], group=group)
            self._orders.tell("hold", name, self._holdings[name])

    def _wait(self, text: str) -> None:
        """Called now and then while groups are placed; an error gives them back."""
        if self.closing:
            raise WorldError("stopped while there was no room yet")
        self.waiting = text

    def _worker_nodes(self) -> set[str]:
        """Ids of the nodes that workers are on."""
        workers = [held for held in self._holdings.values() if held.record.role != "router"]
        return {node.node_id for held in workers if held.group for node in held.group.nodes}


async def decided(config: Config, home: Home) -> Config:
    """With devices for the GPUs of the Ray cluster."""
    nodes = await asyncio.to_thread(live_nodes)
    num_gpus = sum(node.total.get("GPU", 0) for node in nodes)
    local_gpus = num_gpus if home.local else None
    return with_devices(config, has_gpus=num_gpus > 0, local_gpus=local_gpus)


def tell_if_far(names: Sequence[str], config: Config) -> None:
    """Warn where workers are on several nodes now, and their transport stays within one."""
    transport = config.transport
    local = transport.name if transport.name == "shm" else transport.kind
    if transport.name != "mixed" and local in ("shm", "nvlink"):
        log.warning(
            "%s is on another node now, which transport %s does not reach: decode workers "
            "prefill by themselves; start again with --set transport.name=sockets "
            "--set transport.kind=tcp",
            ", ".join(names),
            local,
        )


async def peer_access_of(config: Config, nodes: set[str], home: Home) -> bool | None:
    """As of `with_transport`; None where it does not matter, or the node does not tell.

    config: with devices decided. nodes: ids of those that the workers were placed on.
    """
    on_gpus = any(config.role(role).num_gpus for role in ROLES)
    if len(nodes) != 1 or not on_gpus or config.transport.kind != "auto":
        return None
    (node_id,) = nodes
    if node_id == home.node_id:
        return (await asyncio.to_thread(read_driver)).peer_access
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    ask = RAY.remote(read_driver).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    try:
        driver: Driver = await asyncio.wait_for(ask.remote(), DRIVER_TIMEOUT_S)
    except (RayError, TimeoutError) as error:
        log.warning("the node of the workers does not tell of its GPUs: %s", reason_of(error))
        return None
    return driver.peer_access


async def _given_back(group: Group | None) -> None:
    if group is not None and group.pg is not None:
        await asyncio.to_thread(remove_placement_group, group.pg)


def _options(config: Config, home: Home, role: Role, group: Group, rank: int) -> dict[str, Any]:
    """Of the actor of a rank: it is in the bundle of that rank, or beside `serve`."""
    strategy: Any
    if group.pg is None:
        strategy = NodeAffinitySchedulingStrategy(home.node_id, soft=False)
    else:
        strategy = PlacementGroupSchedulingStrategy(group.pg, placement_group_bundle_index=rank)
    rest = bundle_of(config, role)
    return {
        "max_restarts": 0,
        "max_concurrency": MAX_CONCURRENCY,
        "num_cpus": rest.pop("CPU", 0),
        "num_gpus": rest.pop("GPU", 0),
        "resources": rest,
        "scheduling_strategy": strategy,
    }


def _ask(config: Config, name: str, role: Role) -> Ask:
    bundle = bundle_of(config, role)
    if role == "prefill" or role == "decode":
        part = config.role(role)
        return Ask(name, bundle, part.tp, SPANS[part.engine.collective])
    return Ask(name, bundle)
