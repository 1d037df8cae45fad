"""What we need of Ray, or leave out, beyond its typed interface; pinned with ray in pyproject."""

import contextlib
import inspect
import math
import random
import re
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray._private import node, ray_constants, services, state, worker

if TYPE_CHECKING:
    from cluster.diagnose.ports import RayHere

# Ray's annotations are partial. So its API is untyped here, and its results are cast where used.
RAY: Any = ray
LATELY_S = 10.0
NOWHERE = b"127.0.0.1:0"
BUILT_BY = "_build_python_executable_command_memory_profileable"  # commands of Ray's own processes
AGENTS = (ray_constants.PROCESS_TYPE_DASHBOARD_AGENT, ray_constants.PROCESS_TYPE_RUNTIME_ENV_AGENT)
LISTEN_PORT = "dashboard_agent_listen_port"
AGENT_PORTS = "metrics_agent_port", "metrics_export_port", "runtime_env_agent_port", LISTEN_PORT
LOW_PORTS = range(20_000, 32_000)
RAYLET, GCS = ray_constants.PROCESS_TYPE_RAYLET, ray_constants.PROCESS_TYPE_GCS_SERVER
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


def keep_agents(notes: Path) -> None:
    """Let the agents of a Ray that this process starts be started again by `agent.py`.

    They get ports from here. So those stay, and the raylet does not wait until agents have chosen
    some: after 15 s, as on a busy machine, it would end.
    """
    private: Any = services
    build, start_raylet = getattr(services, BUILT_BY), private.start_raylet
    keeper = [sys.executable, "-I", "-S", str(Path(__file__).with_name("agent.py")), str(notes)]

    def built(component: str, *args: Any, **more: Any) -> list[str]:
        command = build(component, *args, **more)
        return [*keeper, *command] if component in AGENTS else command

    def started(*args: Any, **more: Any) -> Any:
        given = inspect.signature(start_raylet).bind(*args, **more).arguments
        given |= dict(zip(AGENT_PORTS, free_ports(len(AGENT_PORTS)), strict=True))
        # Of this one Ray does not tell the raylet, which looks where the agent would note it.
        noted = Path(given["session_dir"], f"{LISTEN_PORT}_{given['node_id']}")
        noted.write_text(str(given[LISTEN_PORT]))
        return start_raylet(**given)

    setattr(services, BUILT_BY, built)
    private.start_raylet = started


def free_ports(num: int) -> list[int]:
    """Of 127.0.0.1, below those that the kernel gives to connections; free for now."""
    found: list[int] = []
    for port in random.sample(LOW_PORTS, len(LOW_PORTS)):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == num:
            break
    return found


def raylet_socket() -> str:
    """Path of the socket of this node's raylet, once this process has joined."""
    private: Any = worker
    return str(private._global_node.raylet_socket_name)


def ended_processes() -> dict[str, int]:
    """Of the Ray that this process has started: what of it has ended by itself -> returncode."""
    private: Any = worker
    dead = private._global_node.dead_processes()
    return {kind: process.returncode for kind, process in dead}


def start_again(kind: str) -> None:
    """Start a GCS that has ended, at its port, or a log monitor. May raise OSError."""
    private: Any = worker
    mine = private._global_node
    before = mine.all_processes.pop(kind)
    address, client = mine._gcs_address, mine._gcs_client
    try:
        if kind == GCS:
            mine._gcs_address = mine._gcs_client = None  # which `start_gcs_server` asks for
            mine.start_gcs_server()
        else:
            mine.start_log_monitor()
    finally:
        mine._gcs_address, mine._gcs_client = address, client
        mine.all_processes.setdefault(kind, before)


def hear_again() -> None:
    """Have the next GCS pass on what processes log, as the last one did. May raise RayError."""
    private: Any = worker
    if (subscriber := getattr(private.global_worker, "gcs_log_subscriber", None)) is not None:
        subscriber.subscribe()


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


@dataclass
class OomKills:
    """Processes of this machine that the kernel has killed as memory ran out."""

    path: Path = Path("/proc/vmstat")
    num: int = field(init=False)
    grew_at: float = -math.inf  # monotonic, of the last look that found more

    def __post_init__(self) -> None:
        self.num = self._counted()

    def was_one(self) -> bool:
        """Whether there was one within the last LATELY_S."""
        num, now = self._counted(), time.monotonic()
        if num > self.num:
            self.num, self.grew_at = num, now
        return now - self.grew_at < LATELY_S

    def _counted(self) -> int:
        try:
            found = re.search(r"^oom_kill (\d+)$", self.path.read_text(), re.MULTILINE)
        except OSError:
            return 0
        return int(found[1]) if found else 0


OOM_KILLS = OomKills()


def reason_of(error: BaseException) -> str:
    """What happened, in an operator's words, of one of Ray's long messages.

    Ray sees of most deaths that a connection has ended. So the rest is what can be known here: of
    a signal that a process may handle, its log has a stack; of memory, the kernel counts.
    """
    text = " ".join(str(error).split())
    detail = re.search(r"Worker exit detail: (.+?)(?:\. |\.?$)", text)
    if detail and "connection error code" in detail[1]:
        if OOM_KILLS.was_one():
            return "out of memory: the kernel killed its process (signal 9, see dmesg)"
        return "its process was killed (signal 9, kill -9), or crashed: then its log has a stack"
    if detail and "SIGTERM" in text:
        return "its process was ended from outside (signal 15, kill)"
    if detail:
        return f"its process died ({detail.group(1)})"
    sentence = re.search(r"(The (?:actor|node|worker) .+?)(?:\. |$)", text)
    return sentence.group(1) if sentence else text or type(error).__name__
