"""The graph runners of one engine, one around the other, as `engine.graph` names them."""

from __future__ import annotations

from worker.errors import Unsupported
from worker.graph.base import GRAPHS, GraphRunner, Parts
from worker.graph.eager import EagerRunner
from worker.graph.segments import GraphMemory
from worker.registry import resolve


def build_graphs(parts: Parts) -> GraphRunner:
    """Eager at the core; what replays chunks around it, then what replays decode steps.

    Raises:
        Unsupported: graphs are asked for on a device that has none, or a runner refuses `parts`.
    """
    runner: GraphRunner = EagerRunner(parts)
    wanted = parts.config.engine.graph
    names = [name for name in (wanted.prefill, wanted.decode) if name != "eager"]
    if not names:
        return runner
    device = parts.state.device
    if device.type != "cuda":
        raise Unsupported(
            f"engine.graph: {', '.join(names)} needs CUDA, and engine.device is {device.type}; "
            "set engine.graph=eager or leave it auto",
            "engine.graph",
        )
    memory = GraphMemory(device)
    for name in names:
        runner = resolve("graph runner", name, GRAPHS)(parts, runner, memory)
    return runner
