"""Room in the Ray cluster: one placement group for every process that reserves resources.

Ray keeps a group that cannot be placed pending for ever and says nothing. So all groups are
created at once and waited for with a deadline. A failure says what each process needs and what
each node has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from cluster.ray_private import RAY, free_resources
from worker.errors import Placement

POLL_S = 0.2
HIDDEN = ("node:", "memory", "object_store_memory", "accelerator_type:", "bundle_group")


@dataclass(frozen=True, slots=True)
class Ask:
    """What one process needs, all on one node."""

    name: str
    bundle: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Node:
    """A live node of the Ray cluster, and its resources without Ray's internal ones."""

    node_id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Group:
    """A placed placement group and its node."""

    pg: PlacementGroup
    node: Node


def place(
    asks: Sequence[Ask],
    timeout_s: float,
    *,
    can_grow: bool = True,
    waiting: Callable[[str], None] = lambda text: None,
) -> dict[str, Group]:
    """Reserve room for all asks, or for none. Blocks for up to `timeout_s`.

    Args:
        asks: each gets a group.
        timeout_s: for all of them together.
        can_grow: nodes may still join. If not, asks that the nodes can never hold fail at once.
        waiting: called now and then with what is still waited for.

    Raises:
        Placement: something does not fit; the message says what and why. No group is left.
    """
    began_at = time.monotonic()
    if not can_grow and too_much(asks, nodes := live_nodes()):
        raise Placement(explain(asks, nodes, 0.0))
    groups = {ask.name: placement_group([dict(ask.bundle)], name=ask.name) for ask in asks}
    missing = list(asks)
    try:
        while True:
            missing = [ask for ask in missing if not groups[ask.name].wait(POLL_S)]
            waited_s = time.monotonic() - began_at
            if not missing:
                return {name: _placed(name, pg) for name, pg in groups.items()}
            if waited_s > timeout_s:
                raise Placement(explain(missing, live_nodes(), waited_s))
            waiting(f"waiting for room for {', '.join(ask.name for ask in missing)}")
    except BaseException:
        for pg in groups.values():
            remove(pg)
        raise


def remove(pg: PlacementGroup) -> None:
    """Give the room back; whatever still runs in it is killed by Ray."""
    remove_placement_group(pg)


def node_of(pg: PlacementGroup) -> str:
    """Id of the node that holds the only bundle of a group, or '' if it has none."""
    table = cast("dict[str, Any]", RAY.util.placement_group_table(pg))
    return str(table.get("bundles_to_node_id", {}).get(0, ""))


def _placed(name: str, pg: PlacementGroup) -> Group:
    held_by = node_of(pg)
    for node in live_nodes():
        if node.node_id == held_by:
            return Group(pg, node)
    raise Placement(f"the node that had room for {name} was lost again")


def live_nodes() -> list[Node]:
    """The nodes that Ray believes alive."""
    free = free_resources()
    rows = cast("list[dict[str, Any]]", RAY.nodes())
    return [
        Node(
            node_id=row["NodeID"],
            address=row["NodeManagerAddress"],
            total=_countable(row["Resources"]),
            free=_countable(free.get(row["NodeID"], {})),
        )
        for row in rows
        if row["Alive"]
    ]


def shortage(ask: Ask, nodes: Sequence[Node]) -> str:
    """Why no node could hold `ask` even if it were empty; '' if one could."""
    if any(_fits(ask.bundle, node.total) for node in nodes):
        return ""
    lacking: list[str] = []
    for name, amount in ask.bundle.items():
        most = max((node.total.get(name, 0.0) for node in nodes), default=0.0)
        if most == 0:
            lacking.append(f"no node has any {name}")
        elif most < amount:
            lacking.append(f"the most {name} a node has is {most:g}")
    return "; ".join(lacking) or "no single node has all of it"


def too_much(asks: Sequence[Ask], nodes: Sequence[Node]) -> bool:
    """Whether these nodes, even if empty, could not hold all asks."""
    names = {name for ask in asks for name in ask.bundle}
    wanted = {name: sum(ask.bundle.get(name, 0.0) for ask in asks) for name in names}
    total = {name: sum(node.total.get(name, 0.0) for node in nodes) for name in names}
    return not _fits(wanted, total) or any(shortage(ask, nodes) for ask in asks)


def explain(missing: Sequence[Ask], nodes: Sequence[Node], waited_s: float) -> str:
    """The message of Placement: each ask with its reason, then each node."""
    after = f" within {waited_s:.0f} s" if waited_s else ""
    lines = [f"Ray has no room{after} for {len(missing)} of the processes asked for:"]
    for ask in missing:
        reason = shortage(ask, nodes) or "nodes that are large enough have too little free"
        lines.append(f"  {ask.name} needs {_amounts(ask.bundle)}: {reason}")
    lines.append("nodes (free of total):" if nodes else "nodes: none")
    for node in nodes:
        have = (f"{name} {node.free.get(name, 0.0):g}/{t:g}" for name, t in node.total.items())
        lines.append(f"  {node.address}: {', '.join(have) or 'nothing to reserve'}")
    if any(ask.bundle.get("GPU", 0) >= 1 for ask in missing) and any(
        node.total.get("GPU") for node in nodes
    ):
        lines.append("To share a GPU: --set prefill.num_gpus=0.5 --set decode.num_gpus=0.5")
    if any("GPU" in ask.bundle for ask in missing):
        lines.append("Without GPUs: --set prefill.engine.device=cpu --set decode.engine.device=cpu")
    lines.append(
        "Ask for fewer replicas (--prefill, --decode), for less (prefill.num_cpus), or add nodes."
    )
    return "\n".join(lines)


def _fits(wanted: Mapping[str, float], have: Mapping[str, float]) -> bool:
    return all(have.get(name, 0.0) >= amount for name, amount in wanted.items())


def _countable(resources: Mapping[str, float]) -> dict[str, float]:
    """Without node labels, memory, and what Ray adds for placed groups."""
    return {
        name: amount
        for name, amount in sorted(resources.items())
        if not name.startswith(HIDDEN) and "_group_" not in name
    }


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())
