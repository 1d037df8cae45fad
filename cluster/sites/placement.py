"""Room in the Ray cluster: one placement group for every process that reserves resources.

Ray keeps a group that cannot be placed pending for ever and says nothing. So all groups are
created at once and waited for with a deadline. A failure says what the processes need and what
the nodes have.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from ray.util.placement_group import PlacementGroup, remove_placement_group

from cluster.sites.ray_private import RAY, free_resources
from worker.errors import NoPlacement

POLL_S = 0.2
MARGIN = 1e-6  # of a quotient of decimal fractions
HIDDEN = ("node:", "memory", "object_store_memory", "accelerator_type:", "bundle_group")

Span = Literal["never", "if_needed", "at_will"]
# engine.collective -> may its ranks be on several nodes? Peers' memory is read within a host only.
SPANS: Mapping[str, Span] = {
    "auto": "if_needed",
    "custom": "never",
    "gloo": "at_will",
    "nccl": "at_will",
}


@dataclass(frozen=True, slots=True)
class Ask:
    """What the processes of one worker or router need."""

    name: str
    bundle: Mapping[str, float]  # of a process, all on one node
    num: int = 1  # of processes
    span: Span = "if_needed"  # several nodes


@dataclass(frozen=True, slots=True)
class Node:
    """A live node of the Ray cluster, and its resources without Ray's internal ones."""

    node_id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Group:
    """The nodes of a worker's or router's processes, in order, and what is reserved there."""

    pg: PlacementGroup | None  # a bundle a process; None: nothing is reserved
    nodes: tuple[Node, ...]


def place(
    asks: Sequence[Ask],
    timeout_s: float,
    *,
    can_grow: bool,
    reserve: Callable[[list[dict[str, float]], str, str], PlacementGroup],
    waiting: Callable[[str], None],
) -> dict[str, Group]:
    """Reserve a group for every ask, or for none. Blocks for up to `timeout_s`.

    can_grow: nodes may still join. If not, asks that the nodes can never hold fail at once.
    reserve: as `Estate.reserve`. waiting: called now and then with what is still waited for.

    Raises NoPlacement if something does not fit; the message says what and why.
    """
    began_at = time.monotonic()
    nodes = live_nodes()
    if not can_grow and too_much(asks, nodes):
        raise NoPlacement(explain(asks, nodes, 0.0))
    # The largest first: else small ones take a bit of the nodes that one of those needs whole.
    missing = sorted(asks, key=lambda ask: -ask.num)
    groups = {
        ask.name: reserve([dict(ask.bundle)] * ask.num, strategy(ask, nodes), ask.name)
        for ask in missing
    }
    try:
        while True:
            missing = [ask for ask in missing if not groups[ask.name].wait(POLL_S)]
            waited_s = time.monotonic() - began_at
            if not missing:
                return {name: _placed(name, pg) for name, pg in groups.items()}
            if waited_s > timeout_s:
                raise NoPlacement(explain(missing, live_nodes(), waited_s))
            waiting(f"waiting for room for {', '.join(ask.name for ask in missing)}")
    except BaseException:
        for pg in groups.values():
            remove_placement_group(pg)
        raise


def strategy(ask: Ask, nodes: Sequence[Node]) -> str:
    """Ray's strategy for a group; "if_needed" is one node wherever some node is large enough.

    Ranks add up their results twice a layer. Within a node that takes microseconds; so it is better
    to wait for room on a node than to compute over the network at once.
    """
    fits = ask.span == "if_needed" and any(num_held(ask, node) >= ask.num for node in nodes)
    return "STRICT_PACK" if fits or ask.span == "never" else "PACK"


def _placed(name: str, pg: PlacementGroup) -> Group:
    table = cast("dict[str, Any]", RAY.util.placement_group_table(pg))
    held = cast("dict[int, str]", table.get("bundles_to_node_id", {}))
    alive = {node.node_id: node for node in live_nodes()}
    try:
        return Group(pg, tuple(alive[held[i]] for i in range(pg.bundle_count)))
    except KeyError:
        raise NoPlacement(f"the node that had room for {name} was lost again") from None


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


def num_held(ask: Ask, node: Node) -> int:
    """How many of the processes of `ask` the node could hold if it were empty."""
    shares = [node.total.get(name, 0.0) / amount for name, amount in ask.bundle.items()]
    return int(min(shares) + MARGIN)


def shortage(ask: Ask, nodes: Sequence[Node]) -> str:
    """Why the nodes could not hold `ask` even if they were empty; '' if they could."""
    held = [num_held(ask, node) for node in nodes]
    alone = ask.span == "never"
    if any(num >= ask.num for num in held) or (not alone and sum(held) >= ask.num):
        return ""
    if any(held):
        most = f"the most that a node can hold is {max(held)}"
        return most if alone else f"all nodes together can hold {sum(held)}"
    most = {name: max((n.total.get(name, 0.0) for n in nodes), default=0.0) for name in ask.bundle}
    lacking = [
        f"the most {name} a node has is {most[name]:g}" if most[name] else f"no node has any {name}"
        for name, amount in ask.bundle.items()
        if most[name] < amount
    ]
    return "; ".join(lacking) or "no single node has all of it"


def too_much(asks: Sequence[Ask], nodes: Sequence[Node]) -> bool:
    """Whether these nodes, even if empty, could not hold all asks."""
    for name in {name for ask in asks for name in ask.bundle}:
        wanted = sum(ask.bundle.get(name, 0.0) * ask.num for ask in asks)
        if sum(node.total.get(name, 0.0) for node in nodes) < wanted:
            return True
    return any(shortage(ask, nodes) for ask in asks)


def explain(missing: Sequence[Ask], nodes: Sequence[Node], waited_s: float) -> str:
    """The message of NoPlacement: the asks with their reasons, then the nodes."""
    after = f" within {waited_s:.0f} s" if waited_s else ""
    num = sum(ask.num for ask in missing)
    lines = [f"Ray has no room{after} for {num} of the processes asked for:"]
    for ask in missing:
        reason = shortage(ask, nodes) or "nodes that are large enough have too little free"
        lines.append(f"  {ask.name} needs {_needs(ask)}: {reason}")
    lines.append("nodes (free of total):" if nodes else "nodes: none")
    for node in nodes:
        have = (f"{name} {node.free.get(name, 0.0):g}/{t:g}" for name, t in node.total.items())
        lines.append(f"  {node.address}: {', '.join(have) or 'nothing to reserve'}")
    on_gpus = [ask for ask in missing if "GPU" in ask.bundle]
    are_gpus = any(node.total.get("GPU") for node in nodes)
    if are_gpus and any(ask.bundle["GPU"] >= 1 and ask.num == 1 for ask in on_gpus):
        lines.append("To share a GPU: --set prefill.num_gpus=0.5 --set decode.num_gpus=0.5")
    if on_gpus:
        lines.append("Without GPUs: --set prefill.engine.device=cpu --set decode.engine.device=cpu")
    if any(ask.num > 1 for ask in missing):
        lines.append("With fewer ranks: --set prefill.tp=1 --set decode.tp=1")
    if any(ask.num > 1 and ask.span != "at_will" for ask in on_gpus):
        lines.append("Over several nodes, slower: --set decode.engine.collective=nccl")
    less = "fewer replicas (--prefill, --decode), for less (prefill.num_cpus), or add nodes."
    return "\n".join([*lines, f"Ask for {less}"])


def _countable(resources: Mapping[str, float]) -> dict[str, float]:
    return {
        name: amount
        for name, amount in sorted(resources.items())
        if not name.startswith(HIDDEN) and "_group_" not in name
    }


def _needs(ask: Ask) -> str:
    amounts = ", ".join(f"{name} {amount:g}" for name, amount in ask.bundle.items())
    where = ", all on one node" if ask.span == "never" else ""
    return amounts if ask.num == 1 else f"{ask.num} times {amounts}{where}"
