"""What outlives a controller: the actors and placement groups of a cluster, and notes about them.

Ray ends what a process has made when that process ends. So `serve` makes them, whose end is the
cluster's: a controller orders it, and what its successor has to know is noted there.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from cluster.config import Config
from cluster.sites.handles import Rank
from cluster.sites.placement import Group
from cluster.sites.process import Record
from cluster.sites.ray_private import RAY
from worker.errors import KvlaneError, WorldError


@dataclass(frozen=True, slots=True)
class Holding:
    """What a name has. `RaySite` fills it."""

    record: Record
    group: Group | None = None  # None: there was no room when it was placed anew
    ranks: tuple[Rank, ...] = ()  # of its last process; noted before any of them is told to start


@dataclass(frozen=True, slots=True)
class Legacy:
    """What a controller begins with."""

    given: Config
    config: Config  # that, with all that was decided when the cluster was placed
    holdings: Mapping[str, Holding]  # none: nothing has been placed
    number: int  # of the controller, from 1
    ends: bool = False  # all is to be drained, and `serve` ends
    drain_timeout_s: float | None = None  # if it ends


@dataclass(frozen=True, slots=True)
class Order:
    """A method of Estate that a controller wants called."""

    number: int
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The result of an order, or why there is none."""

    number: int
    result: Any
    error: Exception | None = None


class Estate:
    """Lives in `serve`. Its methods return at once; the first five are called by orders."""

    def __init__(self, config: Config) -> None:
        self._legacy = Legacy(config, config, {}, 0)
        self._holdings: dict[str, Holding] = {}
        self._actors: list[Any] = []  # made, and noted in no holding yet
        self._groups: list[PlacementGroup] = []

    def decide(self, given: Config, config: Config) -> None:
        """Note the configuration, and what it has become by where everything is."""
        self._legacy = replace(self._legacy, given=given, config=config)

    def end(self, drain_timeout_s: float | None) -> None:
        """Note that nothing is to be left."""
        self._legacy = replace(self._legacy, ends=True, drain_timeout_s=drain_timeout_s)

    def reserve(self, bundles: list[dict[str, float]], strategy: str, name: str) -> PlacementGroup:
        """A group, for which there may be no room yet."""
        self._groups.append(placement_group(bundles, strategy, name))
        return self._groups[-1]

    def create(self, kind: type, options: dict[str, Any], args: tuple[object, ...]) -> Any:
        """An actor of a class; its handle."""
        self._actors.append(RAY.remote(kind).options(**options).remote(*args))
        return self._actors[-1]

    def hold(self, name: str, holding: Holding | None) -> None:
        """Note what a name has now; None: it is gone. A name's handles keep its actors alive."""
        if holding is None:
            self._holdings.pop(name, None)
            return
        self._holdings[name] = holding
        noted = {rank.actor for rank in holding.ranks}
        self._actors = [actor for actor in self._actors if actor not in noted]
        pg = holding.group.pg if holding.group is not None else None
        self._groups = [group for group in self._groups if group != pg]

    def done(self, order: Order) -> Done:
        """Do what a controller wants."""
        try:
            return Done(order.number, getattr(self, order.method)(*order.args))
        except Exception as error:  # the controller's to judge
            return Done(order.number, None, error)

    def bequeath(self) -> Legacy:
        """For the next controller. What the last one has not come to note was never in use."""
        for actor in self._actors:
            RAY.kill(actor)
        for group in self._groups:
            remove_placement_group(group)
        self._actors, self._groups = [], []
        number = self._legacy.number + 1
        self._legacy = replace(self._legacy, holdings=dict(self._holdings), number=number)
        return self._legacy


@dataclass
class Orders:
    """A controller's side of the Estate: `serve` takes orders and brings results as it polls."""

    _new: list[Order] = field(default_factory=list[Order])
    _waiting: dict[int, asyncio.Future[Any]] = field(default_factory=dict[int, asyncio.Future[Any]])
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _some: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, method: str, *args: object) -> None:
        """Order what has no result. Orders are done in turn."""
        self._new.append(Order(next(self._numbers), method, args))
        self._some.set()

    async def ask(self, method: str, *args: object) -> Any:
        """The result of a method; raises what it has raised."""
        self.tell(method, *args)
        number = self._new[-1].number
        result = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            return await result
        finally:
            del self._waiting[number]

    async def exchange(self, done: Sequence[Done], timeout_s: float) -> tuple[Order, ...]:
        """Hand out results; the next orders, or none if none comes within `timeout_s`."""
        for answer in done:
            result = self._waiting.get(answer.number)
            if result is None or result.done():
                continue
            error = answer.error
            if error is None:
                result.set_result(answer.result)
            elif isinstance(error, KvlaneError):
                result.set_exception(error)
            else:
                result.set_exception(WorldError(f"{type(error).__name__}: {error}"))
        try:
            await asyncio.wait_for(self._some.wait(), timeout_s)
        except TimeoutError:
            return ()
        self._some.clear()
        new, self._new = self._new, []
        return tuple(new)
