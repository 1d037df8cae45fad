"""The Ray actors: what runs in the process of a worker's rank or of a router.

Ray never restarts an actor of ours (max_restarts=0). It reports a death after about 20 ms, and the
monitor decides what follows. `run` blocks one of the actor's threads, but not for ever: the call of
a controller that is gone would keep it.
"""

import asyncio
import gc
import logging
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from cluster import logs
from cluster.config import ClusterConfig, Config
from cluster.diagnose.facts import read_facts
from cluster.diagnose.finding import refuse
from cluster.diagnose.machine import of_transport
from cluster.diagnose.running import Examination, examined_here
from cluster.sites.handles import Identity, call
from cluster.sites.process import Membership, Report, Stage
from cluster.sites.ray_private import CONTROLLER, RAY
from worker.api import Member
from worker.config import WorkerConfig
from worker.errors import WorldError
from worker.observe.tracing import tracer_of
from worker.peers.rendezvous import free_rendezvous

LOCAL_HOST = "127.0.0.1"
RUN_S = 20.0  # of one call of `run`


@contextmanager
def no_collections() -> Generator[None]:
    """For imports, a fifth of whose time is spent on collections of garbage.

    What is there afterwards is left out of all later ones: every stream would wait for them.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which process of the cluster an actor is."""

    name: str  # of the worker or router
    incarnation: str
    cluster: ClusterConfig
    controller: Member | None  # the last one that we have heard of
    host: str = LOCAL_HOST  # address of its node
    rank: int = 0


class ProcessActor:
    """A process of its own. Methods that `process.Process` has too mean the same here."""

    def __init__(self, assignment: Assignment) -> None:
        name, rank = assignment.name, assignment.rank
        self._process_name = f"{name}.{rank}" if rank else name
        logs.begin(self._process_name, assignment.cluster)
        self._assignment = assignment
        self._lock = threading.Lock()
        self._version = (0, 0)  # of the last membership
        self._part: Any = None  # the Worker, Rank or RouterServer, from `start` on
        self._stage = Stage()

    def __repr__(self) -> str:
        return self._process_name  # Ray puts it before every line that the process prints

    def identify(self) -> Identity:
        """Which process this is. Asked first, because whoever kills it needs it."""
        return Identity.own()

    def stage(self) -> Stage:
        return self._stage

    def _progress(self, stage: str, done: int, total: int) -> None:
        self._stage = Stage(stage, done / total)

    def update(self, membership: Membership) -> None:
        """As `Process.update`; calls may overtake each other."""
        with self._lock:
            if membership.version > self._version:
                self._version = membership.version
                self._assignment = replace(self._assignment, controller=membership.controller)
                self._take(membership)

    def _take(self, membership: Membership) -> None:
        self._part.update_members((*membership.members, *self._callers()))

    def _callers(self) -> tuple[Member, ...]:
        """Who calls a worker that no list of members has."""
        controller = self._assignment.controller
        return () if controller is None else (controller,)

    def drain(self, address_stays: bool) -> None:
        self._part.drain()


class WorkerActor(ProcessActor):
    """A rank of a prefill or decode worker. Rank 0 is the member, which speaks for all ranks."""

    def __init__(self, assignment: Assignment, config: WorkerConfig) -> None:
        super().__init__(assignment)
        self._config = config
        self._starting = threading.Lock()
        self._member: Member | None = None
        self._rendezvous = ""
        self._kept: Any = None  # from `retire` until the worker of the next role has it

    def rendezvous(self) -> str:
        """Where its ranks shall meet: at a port of this node."""
        with self._lock:
            self._rendezvous = self._rendezvous or free_rendezvous(self._assignment.host)
        return self._rendezvous

    def start(self, rendezvous: str = "") -> Member | None:
        """Load the weights and listen; may take minutes. The member; None of a rank above 0.

        rendezvous: where its ranks meet, all of which start at the same time; "": it is alone.
        Where another controller takes over meanwhile it asks again, and gets the same result.
        """
        with self._starting:
            if self._part is None:
                self._member = self._load(rendezvous)
            elif self._kept is not None:
                raise WorldError("it has left its role")
            return self._member

    def _load(self, rendezvous: str) -> Member | None:
        me, transport = self._assignment, self._config.transport
        if transport.name == "mooncake":  # else it would be found out after the weights were read
            refuse(of_transport(transport.kind, self._config.engine, read_facts()))
        make: Callable[..., Any]
        with no_collections():  # torch: imported in this process only
            if me.rank:
                from worker.rank import Place, Rank

                make = partial(Rank, rank=me.rank)
            else:
                from worker.worker import Place, Worker

                make = partial(Worker, metrics_ports=me.cluster.metrics_ports)
                if self._kept is not None:
                    make = partial(make, kept=self._kept)
        place = Place(me.name, me.incarnation, me.host, rendezvous, self._progress)
        part: Any = make(self._config, place)
        if not me.rank:  # whoever pings it first is the controller
            part.update_members(self._callers())
        member: Member | None = part.start()
        self._part, self._kept = part, None
        gc.collect()
        gc.freeze()  # what is loaded now stays, too
        return member

    def retire(self) -> None:
        with self._starting:
            self._kept = self._part.retire()

    def turn(self, incarnation: str, config: WorkerConfig) -> None:
        """Be another incarnation from the next `start` on; `retire` comes before."""
        with self._starting:
            assert self._kept is not None, "it has no model to keep"
            self._assignment = replace(self._assignment, incarnation=incarnation)
            self._config, self._part = config, None
            gc.unfreeze()  # what belonged to the role is freed
            gc.collect()

    def run(self) -> bool:
        """Whether it has ended; it may go on after RUN_S."""
        return bool(self._part.join(RUN_S))

    def report(self) -> Report:
        return Report(idle=self._part.idle(), counters=dict(self._part.counters()))

    def examine(self) -> Examination:
        """Its machine and the ways of KV to it, for `doctor`; takes seconds."""
        return examined_here(self._part.loop.measured_paths)

    def stop(self) -> None:
        self._part.stop()


class RankActor(WorkerActor):
    """A rank above 0: its process has another name in `ps`."""


class _Operator:
    """Has the controller carry out what a router is told to."""

    def __init__(self, drain_timeout_s: float) -> None:
        self._drain_timeout_s = drain_timeout_s

    def drain(self, name: str, timeout_s: float | None) -> bool:
        return bool(self._ask("drain", timeout_s, name))

    def turn(self, name: str, role: str, timeout_s: float | None) -> None:
        self._ask("turn", timeout_s, name, role)

    def _ask(self, method: str, timeout_s: float | None, *args: str) -> Any:
        limit_s = self._drain_timeout_s if timeout_s is None else timeout_s
        name, namespace = CONTROLLER
        try:
            controller = RAY.get_actor(name, namespace=namespace)
        except ValueError:
            raise WorldError("no controller runs at present") from None
        return asyncio.run(call(getattr(controller, method), *args, limit_s))


class RouterActor(ProcessActor):
    """One router: the OpenAI API, on the port that all routers of its node share."""

    def __init__(self, assignment: Assignment, config: Config) -> None:
        super().__init__(assignment)
        self._config = config
        self._stopped = threading.Event()

    def load(self) -> None:
        """Load tokenizer and template."""
        with no_collections():
            # Its libraries are needed in this process only.
            from router.http.app import Place, RouterServer, Settings

        logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line a scrape of ours
        config, name = self._config, self._assignment.name
        node = RAY.util.get_node_ip_address()
        self._part = RouterServer(
            Settings(
                config.router,
                config.model,
                config.ping,
                config.shown(),
                config.transport.authentication,
                _Operator(config.cluster.drain_timeout_s),
            ),
            Place(
                name,
                self._assignment.incarnation,
                config.cluster.host,
                config.cluster.port,
                node="" if node == LOCAL_HOST else node,  # that is Ray's, where it is our own
                shared=config.routers.num > 1,
            ),
            tracer=tracer_of(config.tracing, "router", name),
        )

    def start(self, port: int, joins: bool) -> Member:
        """Listen. joins: routers of this cluster do so there."""
        member = cast("Member", self._part.start(port, joins=joins))
        gc.collect()
        gc.freeze()
        return member

    def _take(self, membership: Membership) -> None:
        told = membership
        self._part.update_members(told.members, told.changes, told.starting, told.roles)

    def drain(self, address_stays: bool) -> None:
        self._part.drain(others=address_stays)

    def run(self) -> bool:
        """As a worker's."""
        return self._stopped.wait(RUN_S)

    def report(self) -> Report:
        num_inflight = int(self._part.num_inflight())
        return Report(idle=num_inflight == 0, counters={"num_inflight": num_inflight})

    def stop(self) -> None:
        try:
            self._part.stop()
        finally:
            self._stopped.set()
