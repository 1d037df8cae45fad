"""Start a Ray of our own or join one, and leave nothing behind.

Every process of our own Ray is a descendant of `serve`, and `serve` is their subreaper: a process
whose parent has died becomes a child of `serve`, so that all of them can be killed at the end.
Ray's files are in one directory, which is removed.

Import this module only after `cli` has prepared the environment: Ray reads it when imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ray.exceptions import RayActorError, RayError, RaySystemError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import Config
from cluster.controller import NAME, NAMESPACE, Controller, Home
from cluster.owned import OwnedDirectory
from cluster.ray_private import RAY, silence_worker_deaths, stay_on_loopback
from cluster.resolve import bundle_of, with_devices
from cluster.seats import seats_of
from worker.errors import KvlaneError, UserError, WorldError
from worker.transfer.host import process_stat

log = logging.getLogger("kvlane.launch")

PR_SET_CHILD_SUBREAPER = 36
# The path of a socket has 107 characters at most. Below this root our directory takes 16 of them,
# and Ray's names up to 64.
MAX_TEMP_PATH = 27
SHORT_TEMP = Path("/tmp")
KILL_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0


@dataclass(slots=True)
class RaySession:
    """Our connection to Ray, and what has to be cleaned up after it."""

    address: str
    local: bool
    temp_dir: OwnedDirectory | None = None
    watchdog: subprocess.Popen[bytes] | None = None  # its stdin closes when this process ends
    closed: bool = False

    def close(self) -> None:
        """Disconnect; a Ray of our own ends, and its processes and files with it."""
        if self.closed:
            return
        self.closed = True
        RAY.shutdown()
        if self.local:
            self.kill()

    def kill(self) -> None:
        """Only for a Ray of our own: SIGKILL every descendant and remove the files."""
        assert self.local
        kill_descendants()
        if self.temp_dir is not None:
            self.temp_dir.remove()


def start_local(config: Config, temp_root: Path) -> RaySession:
    """Start a Ray of our own, with the resources that `config` asks for.

    It listens on free ports of 127.0.0.1 only, and has no dashboard.

    Raises:
        WorldError: Ray did not start.
    """
    root = temp_root if len(str(temp_root)) <= MAX_TEMP_PATH else SHORT_TEMP
    temp_dir = OwnedDirectory.make(root)
    session = RaySession("", True, temp_dir, start_watchdog(temp_dir.path))
    become_subreaper()
    stay_on_loopback()
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
            _temp_dir=str(temp_dir.path),
        )
    except (RayError, RuntimeError, ValueError, OSError) as error:
        session.kill()
        raise WorldError(f"Ray did not start: {error}") from error
    except BaseException:  # Ctrl-C in the middle of it
        session.kill()
        raise
    session.address = str(context.address_info["gcs_address"])
    return session


def join(address: str, *, quiet: bool = False, loopback: bool = False) -> RaySession:
    """Connect to a running Ray cluster.

    Args:
        address: HOST:PORT of its GCS.
        quiet: do not print what its processes log.
        loopback: it was started by `start_local`.

    Raises:
        UserError: the address is that of the job API.
        WorldError: nobody answers there.
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
            address=address,
            namespace=NAMESPACE,
            logging_level=logging.ERROR,
            log_to_driver=not quiet,
        )
    except (RayError, RuntimeError, ConnectionError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise WorldError(f"cannot join the Ray cluster at {address}: {reason}") from error
    return RaySession(str(context.address_info["gcs_address"]), local=False)


def create_controller(config: Config, session: RaySession) -> Any:
    """The controller of a new cluster, on this node.

    Raises:
        UserError: this Ray cluster has one already.
    """
    if find_controller() is not None:
        raise UserError("kvlane runs on this Ray cluster already; end it first: kvlane drain")
    node_id = RAY.get_runtime_context().get_node_id()
    home = Home(node_id, RAY.util.get_node_ip_address(), session.local)
    options = RAY.remote(Controller).options(
        name=NAME,
        namespace=NAMESPACE,
        num_cpus=0,
        max_restarts=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )
    return options.remote(config, home)


def find_controller() -> Any | None:
    """The running controller, if there is one."""
    try:
        return RAY.get_actor(NAME, namespace=NAMESPACE)
    except ValueError:
        return None


def ask(method: Any, *args: object, timeout_s: float | None = None) -> Any:
    """Call the controller from outside of any event loop.

    Raises:
        KvlaneError: as the controller raised it.
        WorldError: the controller is dead.
    """
    return wait_for(method.remote(*args), timeout_s)


def wait_for(reference: Any, timeout_s: float | None = None) -> Any:
    """The result of a call under way; raises as `ask` does."""
    try:
        return RAY.get(reference, timeout=timeout_s)
    except RayTaskError as error:
        cause = cast("BaseException", error.cause)  # pyright: ignore[reportUnknownMemberType]
        if isinstance(cause, KvlaneError):
            raise cause from None
        raise
    except (RayActorError, RaySystemError) as error:
        raise WorldError(f"the controller is gone: {str(error).splitlines()[0]}") from None


def over(reference: Any, timeout_s: float) -> bool:
    """Wait for a call, but at most `timeout_s`; whether it is over. Signals are served then."""
    ready, _ = RAY.wait([reference], timeout=timeout_s)
    return bool(ready)


def num_cpus(config: Config) -> int:
    """How many CPUs Ray shall count: the machine's, or more if the configuration reserves more."""
    config = with_devices(config, has_gpus=False)
    needed = sum(bundle_of(config, seat).get("CPU", 0.0) for seat in seats_of(config))
    return max(os.cpu_count() or 1, int(-(-needed // 1)))


# Processes.


def start_watchdog(directory: Path) -> subprocess.Popen[bytes]:
    """Start `watchdog.py`, which cleans up if this process gets SIGKILL.

    It waits for the end of its stdin, which this process holds open.
    """
    script = Path(__file__).with_name("watchdog.py")
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(script), str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in a terminal must not reach it
    )


def become_subreaper() -> None:
    """Orphans below this process become its children, so that none of them escapes."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Pids below `root`, parents first."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found, queue = list[int](), [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def kill_descendants() -> None:
    """SIGKILL all processes below this one, and reap them. This process started all of them."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (pids := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def _parents() -> Iterator[tuple[int, int]]:
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(path.name), process_stat(int(path.name)).parent
