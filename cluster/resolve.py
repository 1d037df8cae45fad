"""Decisions that need to know the cluster: devices before placement, the transport after it.

Each returns a new tree and logs what it chose and why. What needs to know the machine is decided in
the worker (`WorkerConfig.resolved`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from cluster.config import Config, WorkerRole
from cluster.seats import Seat

log = logging.getLogger("kvlane.config")

ROLES: tuple[WorkerRole, ...] = ("prefill", "decode")


def with_devices(config: Config, *, has_gpus: bool) -> Config:
    """`num_gpus` and, where no GPU is reserved, `engine.device` without `auto`.

    Args:
        config: as the user wrote it.
        has_gpus: some node of the Ray cluster has a GPU.
    """
    for role in ROLES:
        part = config.role(role)
        device, num_gpus = part.engine.device, part.num_gpus
        if num_gpus == "auto":
            wanted = device == "cuda" or (device == "auto" and has_gpus)
            num_gpus = 1.0 if wanted else 0.0
            reason = f"device {device}, {'GPUs' if has_gpus else 'no GPU'} in the Ray cluster"
            log.info("%s.num_gpus = %g (%s)", role, num_gpus, reason)
        if device == "auto" and num_gpus == 0:
            device = "cpu"
            log.info("%s.engine.device = cpu (no GPU is reserved for it)", role)
        changed = {"num_gpus": num_gpus, "engine": {"device": device}}
        config = _changed(config, {role: changed})
    return config


def with_transport(config: Config, nodes: Collection[str]) -> Config:
    """`transport.name` without `auto`: shm only where it can reach everybody.

    Args:
        config: with devices decided.
        nodes: ids of the nodes that the workers were placed on.
    """
    if config.transport.name != "auto":
        return config
    cpu = all(config.role(role).engine.device == "cpu" for role in ROLES)
    if cpu and len(set(nodes)) <= 1:
        name, reason = "shm", "all workers are on one node, and their KV is in host memory"
    elif cpu:
        name, reason = "mooncake", f"the workers are on {len(set(nodes))} nodes"
    else:
        name, reason = "mooncake", "KV is in device memory"
    log.info("transport.name = %s (%s)", name, reason)
    return _changed(config, {"transport": {"name": name}})


def bundle_of(config: Config, seat: Seat) -> dict[str, float]:
    """What a seat reserves in Ray; zeros left out, so a router's may be empty."""
    if seat.role == "router":
        wanted = {"CPU": config.routers.num_cpus, **config.routers.resources}
    else:
        assert seat.role != "controller"
        part = config.role(seat.role)
        assert part.num_gpus != "auto", "devices come first"
        wanted = {"CPU": part.num_cpus, "GPU": part.num_gpus, **part.resources}
    return {name: amount for name, amount in wanted.items() if amount > 0}


def _changed(config: Config, changes: Mapping[str, Mapping[str, Any]]) -> Config:
    """A new tree with some leaves replaced, validated again."""
    tree = config.model_dump()
    for section, leaves in changes.items():
        for name, value in leaves.items():
            if isinstance(value, dict):
                tree[section][name] |= value
            else:
                tree[section][name] = value
    return Config.model_validate(tree)
