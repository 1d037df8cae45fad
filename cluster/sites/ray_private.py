"""What we need of Ray, or leave out, beyond its typed interface; pinned with ray in pyproject."""

import re
from typing import TYPE_CHECKING, Any

import ray
from ray._private import node, ray_constants, state, worker

if TYPE_CHECKING:
    from cluster.diagnose.ports import RayHere

# Ray's annotations are partial. So its API is untyped here, and its results are cast where used.
RAY: Any = ray
NOWHERE = b"127.0.0.1:0"
CONTROLLER = "kvlane-controller", "kvlane"  # its name for Ray, and the namespace
# As `RAY.nodes` has them -> kinds of `diagnose.doors`.
PORTS_OF_NODE = {
    "NodeManagerPort": "raylet",
    "ObjectManagerPort": "objects",
    "MetricsExportPort": "ray metrics",
    "MetricsAgentPort": "agent",
    "DashboardAgentListenPort": "agent page",
    "RuntimeEnvAgentPort": "environments",
}


def stay_on_loopback() -> None:
    """Make a Ray started or joined by this process live on 127.0.0.1.

    This is Ray's own mode on macOS and Windows. On Linux it would take the machine's address,
    listen on every interface, and run the code of whoever connects. Measured: with it all ports of
    Ray are on 127.0.0.1, without it on *.
    """
    setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)  # noqa: B010


def start_what_is_needed() -> None:
    """Leave out what a Ray that this process starts has no use for.

    That is its autoscaler, as nothing scales here, and the server of its dashboard, which starts
    even without a dashboard. Each node's agent asks where that server is, so it is told an address
    at which nobody listens. Measured on two cores: `serve` is ready 1.7 s earlier.
    """

    def no_monitor(self: Any) -> None:
        pass

    def no_api_server(self: Any, **_: object) -> None:
        place = ray_constants.KV_NAMESPACE_DASHBOARD
        name = ray_constants.DASHBOARD_ADDRESS.encode()
        self.get_gcs_client().internal_kv_put(name, NOWHERE, True, namespace=place)

    setattr(node.Node, "start_monitor", no_monitor)  # noqa: B010
    setattr(node.Node, "start_api_server", no_api_server)  # noqa: B010


def silence_worker_deaths() -> None:
    """Keep Ray from printing a page of advice when a worker dies; the monitor prints a line."""

    def ignore(*_: object) -> None:
        pass

    setattr(worker, "listen_error_messages", ignore)  # noqa: B010


def ray_here() -> "RayHere":
    """What a Ray that this process has joined says of its ports on this machine."""
    from cluster.diagnose.ports import RayHere  # with psutil, which no process that serves needs

    private: Any = worker
    private_state: Any = state
    node_id = RAY.get_runtime_context().get_node_id()
    (mine,) = (node for node in RAY.nodes() if node["NodeID"] == node_id)
    ports = {mine[name]: kind for name, kind in PORTS_OF_NODE.items()}
    controller = 0
    for actor in private_state.actors().values():
        if actor["State"] != "ALIVE":
            continue
        if actor["Address"]["NodeID"] == node_id and actor["Name"] == CONTROLLER[0]:
            controller = actor["Pid"]
        for place in (actor["Address"], actor["OwnerAddress"]):
            if place["NodeID"] == node_id:
                ports[place["Port"]] = "core worker"
    joined = private._global_node
    return RayHere(str(joined.session_name), str(joined.gcs_address), ports, controller)


def free_resources() -> dict[str, dict[str, float]]:
    """Node id -> what is not reserved there."""
    private: Any = state
    return private.available_resources_per_node()


def reason_of(error: BaseException) -> str:
    """The sentence of one of Ray's long messages that says what happened."""
    text = " ".join(str(error).split())
    detail = re.search(r"Worker exit detail: (.+?)(?:\. |$)", text)
    if detail:
        return f"its process died ({detail.group(1)})"
    sentence = re.search(r"(The (?:actor|node|worker) .+?)(?:\. |$)", text)
    return sentence.group(1) if sentence else text or type(error).__name__
