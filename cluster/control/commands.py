"""What the command line asks of a cluster that runs."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from cluster.config import Config, WorkerRole, differences
from cluster.control.change import (
    check_change,
    check_role,
    check_scale,
    in_order,
    is_last_of_its_model,
    to_scale,
)
from cluster.control.monitor import Monitor
from cluster.control.replicas import Replica, ReplicaStatus, last_of_its_kind
from cluster.control.tasks import in_time
from cluster.diagnose.running import ClusterExamination, WorkerAnswer
from cluster.sites.estate import Orders
from cluster.sites.handles import RayProcess, call
from cluster.sites.ray_site import RaySite
from worker.api import Role
from worker.errors import KvlaneError, UserError, WorldError

log = logging.getLogger("kvlane.controller")

EXAMINE_TIMEOUT_S = 120.0


class Scaled(NamedTuple):
    """Names that came, and names that went."""

    started: dict[str, Role]
    drained: dict[str, Role]


class Commands:
    """Methods of the controller that `cli` calls, and the state that they have in common with it.

    The controller sets `_monitor`, `_placed` and `_ready`.
    """

    def __init__(self, site: RaySite, orders: Orders) -> None:
        self._site, self._orders = site, orders
        self._monitor: Monitor | None = None
        self._drained = False  # nothing is left to serve
        self._placed = asyncio.Event()  # room is reserved, or there is none
        self._ready = asyncio.Event()
        self._restarting = asyncio.Lock()

    def replicas(self) -> list[Replica]:
        """All names, once they are placed."""
        return [] if self._monitor is None else self._monitor.replicas()

    async def status(self) -> list[ReplicaStatus]:
        """One row a name."""
        return [] if self._monitor is None else await self._monitor.status()

    async def examine(self) -> ClusterExamination:
        """What `doctor` judges. One worker after another, as a worker measures its paths alone."""
        workers = [replica for replica in self.replicas() if replica.role != "router"]
        answers = [await _examined(worker) for worker in workers]
        return ClusterExamination(self._site.given, self._site.config, tuple(answers))

    async def join(self, config: Config) -> tuple[str, ...]:
        """For a second `serve`: waits until this cluster is ready; URLs of its routers.

        Raises UserError if it runs with another configuration.
        """
        if paths := differences(self._site.given, config):
            raise UserError(
                "kvlane runs on this Ray cluster already, with another value of "
                f"{', '.join(paths)}; end it first: kvlane down"
            )
        await self._ready.wait()
        return urls(self.replicas())

    async def warning(self, name: str) -> str:
        """As `last_of_its_kind`."""
        return last_of_its_kind(name, self.replicas())

    async def drain(self, name: str | None, timeout_s: float | None) -> bool:
        """Drain one name, or everything, in which case `serve` ends too.

        Returns whether all work was finished in time. Raises UserError for an unknown name.
        """
        if self._monitor is None:
            raise UserError("the cluster is still being placed")
        if name is not None:
            if warning := last_of_its_kind(name, self.replicas()):
                log.warning("%s", warning)
            return await self._monitor.drain([name], timeout_s)
        self._orders.tell("end", timeout_s)
        idle = await self._monitor.stop(timeout_s)
        self._drained = True
        return idle

    async def configuration(self, decided: bool = False) -> Config:
        """What was given to `serve`, with what `restart` has changed.

        decided: with what the cluster's machines have decided of it, too.
        """
        return self._site.config if decided else self._site.given

    async def restart(self, name: str | None, config: Config, timeout_s: float) -> None:
        """Replace the process of one name, or of all workers one after another, under `config`.

        Each hands over what it has not finished after timeout_s; but what nobody else can finish,
        as the others have another model, it finishes. Raises UserError for what cannot change so,
        and what a new process raises: then the configuration is the one before.
        """
        async with self._changing() as monitor:
            before = self._site.given
            names = in_order(monitor.replicas()) if name is None else [monitor.replica(name).name]
            if not names:
                raise UserError("there is no worker to restart; kvlane scale decode=1 starts one")
            check_change(before, config)
            await self._site.change(config)
            try:
                for one in names:
                    waits = is_last_of_its_model(monitor.replica(one), monitor.replicas())
                    await monitor.renew(one, None if waits else timeout_s)
            except KvlaneError:
                await self._site.change(before)
                raise

    async def turn(self, name: str, role: WorkerRole, timeout_s: float) -> None:
        """Make a worker one of the other role, where it is; it hands over as in `restart`.

        Raises UserError where it cannot be, and what the new process raises: then it has the role
        before.
        """
        async with self._changing() as monitor:
            replica = monitor.replica(name)
            check_role(self._site.config, replica, role, self.replicas())
            waits = is_last_of_its_model(replica, self.replicas())
            await monitor.renew(name, None if waits else timeout_s, role)

    async def scale(self, wanted: Mapping[Role, int], timeout_s: float) -> Scaled:
        """Have so many of a role; returns when those that come are ready, and others gone.

        Who leaves hands over what it has not finished after timeout_s, unless nobody else can go on
        with it. Raises UserError for what cannot be, NoPlacement, and what a new process raises:
        then none of the new ones stays.
        """
        async with self._changing() as monitor:
            check_scale(self._site.config, wanted)
            further, leaving = to_scale(wanted, monitor.replicas())
            drained: dict[str, Role] = {name: monitor.replica(name).role for name in leaving}
            staying = [r for r in monitor.replicas() if r.name not in leaving]
            last = [n for n in leaving if nobody_goes_on(monitor.replica(n), staying)]
            others = [name for name in leaving if name not in last]
            await asyncio.gather(  # first, as their room may be needed
                monitor.drain(others, timeout_s), monitor.drain(last, None)
            )
            if further:
                await self._site.add(further)
                await monitor.add(further)
        return Scaled({record.name: record.role for record in further}, drained)

    @asynccontextmanager
    async def _changing(self) -> AsyncGenerator[Monitor]:
        """Raises UserError while another change goes on, or nothing is ready yet."""
        if self._monitor is None or not self._ready.is_set() or self._restarting.locked():
            raise UserError("the cluster is being started, scaled or restarted; try again later")
        async with self._restarting:
            yield self._monitor

    async def down(self) -> bool:
        """End everything, and `serve` too, as Ctrl-C there does; whether no request was cut off."""
        if self._monitor is None:  # it is being placed: `start` fails, and so does `serve`
            self._site.closing = True
            await self._placed.wait()
            return True
        return await self.drain(None, self._site.given.cluster.drain_timeout_s)


def nobody_goes_on(replica: Replica, staying: Sequence[Replica]) -> bool:
    """Whether what it has begun ends with it: a router's streams, or those of its model."""
    return replica.role == "router" or is_last_of_its_model(replica, staying)


def urls(replicas: Iterable[Replica]) -> tuple[str, ...]:
    """Of the routers that are ready."""
    members = [r.member for r in replicas if r.role == "router" and r.member]
    return tuple(dict.fromkeys(member.address for member in members))


async def _examined(replica: Replica) -> WorkerAnswer:
    process, asked_at = replica.reachable, time.time()
    examination, error = None, "" if process else f"it is {replica.state}"
    try:
        if isinstance(process, RayProcess):
            asked = call(process.actor.examine)
            examination = await in_time(asked, EXAMINE_TIMEOUT_S, "answer the doctor")
    except WorldError as e:
        error = str(e)
    return WorkerAnswer(replica.name, asked_at, time.time(), examination, error)
