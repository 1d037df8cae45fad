"""Start a Ray of our own or join one, and call the controller on it.

Import this module only after `cli` has prepared the environment: Ray reads it when imported.
"""

import logging
import socket
import time
from pathlib import Path
from typing import Any, cast

from ray.exceptions import RayActorError, RayError, RaySystemError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import Config
from cluster.control.controller import NAME, NAMESPACE, Controller
from cluster.resolve import num_cpus
from cluster.sites.estate import Legacy
from cluster.sites.ray_private import (
    RAY,
    keep_agents,
    reason_of,
    silence_worker_deaths,
    start_what_is_needed,
    stay_on_loopback,
)
from cluster.sites.ray_site import Home
from worker.errors import KvlaneError, UserError, WorldError

CONNECT_TIMEOUT_S = 5.0
AGENT_NOTES = "agents"  # a line a death of an agent
DOWN_TIMEOUT_S = 30.0  # for `serve` to end once nothing is left to serve


def start_local(config: Config, directory: Path) -> str:
    """Start a Ray of our own, with what `config` asks for; its address. May raise WorldError.

    It listens on free ports of 127.0.0.1 only, has no dashboard, and writes below `directory`,
    which no other account may enter: all may write to the one that Ray makes.
    """
    stay_on_loopback()
    start_what_is_needed()
    keep_agents(directory / AGENT_NOTES)
    silence_worker_deaths()
    asked = config.cluster.local_ray
    try:
        context = RAY.init(
            address="local",
            namespace=NAMESPACE,
            num_cpus=num_cpus(config) if asked.num_cpus == "auto" else asked.num_cpus,
            num_gpus=None if asked.num_gpus == "auto" else asked.num_gpus,
            object_store_memory=asked.object_store_bytes,
            include_dashboard=False,
            logging_level=logging.ERROR,
            _temp_dir=str(directory / "r"),
        )
    except Exception as error:  # no narrower one: Ray raises a plain Exception after a time-out
        raise WorldError(f"Ray did not start: {error}") from error
    return str(context.address_info["gcs_address"])


def join(address: str, *, quiet: bool = False, loopback: bool = False) -> str:
    """Connect to the Ray cluster whose GCS is at HOST:PORT; its address.

    quiet: do not print what its processes log. loopback: `start_local` has started it.

    Raises UserError for the address of the job API, WorldError if nobody answers.
    """
    if address.startswith(("http://", "https://")):
        raise UserError(
            f"{address} is Ray's job API; submit a job there (ray job submit --working-dir . -- "
            "python -m cluster serve …) or give the address of the cluster itself, HOST:6379"
        )
    host, _, port = address.rpartition(":")
    if port.isdigit():  # Ray itself would try for ever; without a port it looks the address up
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise WorldError(f"no Ray cluster answers at {address}: {error}") from error
    if loopback:
        stay_on_loopback()
    silence_worker_deaths()
    try:
        context = RAY.init(
            address, namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=not quiet
        )
    except (RayError, RuntimeError, ConnectionError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise WorldError(f"cannot join the Ray cluster at {address}: {reason}") from error
    return str(context.address_info["gcs_address"])


class ControllerGone(WorldError):
    """It is dead or does not answer."""


def create_controller(legacy: Legacy, *, local: bool) -> Any:
    """A controller on this node. local: this process has started Ray."""
    node_id = RAY.get_runtime_context().get_node_id()
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    made = RAY.remote(Controller).options(
        name=NAME, namespace=NAMESPACE, num_cpus=0, max_restarts=0, scheduling_strategy=here
    )
    return made.remote(Home(node_id, RAY.util.get_node_ip_address(), local), legacy)


def find_controller() -> Any | None:
    """The running controller, if there is one."""
    try:
        return RAY.get_actor(NAME, namespace=NAMESPACE)
    except ValueError:
        return None


def ask(method: Any, *args: object) -> Any:
    """Call the controller from outside of any event loop; raises as `wait_for`."""
    return wait_for(method.remote(*args))


def wait_for(reference: Any) -> Any:
    """The result of a call under way; raises what it raised, or ControllerGone."""
    try:
        return RAY.get(reference)
    except RayTaskError as error:
        cause = cast("BaseException", error.cause)  # pyright: ignore[reportUnknownMemberType]
        if isinstance(cause, KvlaneError):
            raise cause from None
        raise
    except (RayActorError, RaySystemError) as error:
        raise ControllerGone(f"the controller is gone: {reason_of(error)}") from None


def is_over(reference: Any, timeout_s: float) -> bool:
    """Wait for a call, but at most `timeout_s`. Signals are served meanwhile."""
    ready, _ = RAY.wait([reference], timeout=timeout_s)
    return bool(ready)


def wait_gone(timeout_s: float = DOWN_TIMEOUT_S) -> None:
    """Wait until Ray has forgotten a controller that ends; else raise WorldError."""
    deadline = time.monotonic() + timeout_s
    while find_controller() is not None:
        if time.monotonic() > deadline:
            raise WorldError(f"the controller is still there after {timeout_s:g} s")
        time.sleep(0.05)


def next_controller(timeout_s: float) -> Any:
    """The controller after one that is gone; ControllerGone: none has come."""
    deadline = time.monotonic() + timeout_s
    while (controller := find_controller()) is None:
        if time.monotonic() > deadline:
            raise ControllerGone(
                f"the controller is gone, and after {timeout_s:g} s no other is there"
            )
        time.sleep(0.1)
    return controller
