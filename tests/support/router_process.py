"""A router in a process of its own; what it imports is in the process that it is forked from."""

import uuid
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from router.config import RouterConfig
from router.http.app import Place, RouterServer, Settings
from router.show import siblings
from worker.config import ModelConfig, PingConfig

PING = PingConfig(interval_s=0.1, max_misses=50)
TIMEOUT_S = 60.0  # for another router's page, on a machine that has much else to do


def router_at(
    directory: Path, name: str, port: int = 0, *, shared: bool = True, **config: Any
) -> RouterServer:
    """config: of RouterConfig."""
    return RouterServer(
        Settings(
            RouterConfig(**config), ModelConfig(path=str(directory), served_name="small"), PING
        ),
        Place(name, uuid.uuid4().hex[:8], port=port, shared=shared),
    )


def serve_until_killed(pipe: Connection, directory: Path, name: str, port: int) -> None:
    """The target of a process; joins the port unless it is 0."""
    siblings.TIMEOUT_S = TIMEOUT_S
    router = router_at(directory, name, port)
    pipe.send(router.start(joins=port > 0))
    while True:
        router.update_members(pipe.recv())
