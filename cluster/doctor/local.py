"""What `serve` would meet on this machine: mistakes that it refuses, and what only costs."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

from cluster import check, hub
from cluster.config import Config
from cluster.doctor.facts import Facts
from cluster.doctor.finding import Finding, failure, ok
from cluster.doctor.machine import examine
from worker.config import SpecConfig
from worker.errors import MissingLibrary, UserError

REFUSED = "serve refuses to start with it"
WITH_REMEDY = re.compile(r"(.+?)(?:; |\. |: (?=pip |--))(.+)", re.DOTALL)
PORTS = ("cluster.host", "cluster.port")


def of_this_machine(config: Config, facts: Facts, num_gpus: int) -> Iterator[Finding]:
    """All findings, for a `serve` with a Ray of its own.

    Args:
        config: as the user wrote it.
        facts: of this machine.
        num_gpus: that Ray will count.
    """
    mistakes = check.mistakes(config, num_gpus)
    if not any(error.param in PORTS for error in mistakes):
        yield from _ports(config)
    for error in mistakes:
        if not isinstance(error, MissingLibrary):  # `machine` says more of it
            yield _refused(error)
    yield from _model(config)
    yield from examine(check.decided_here(config, num_gpus), facts)


def _ports(config: Config) -> Iterator[Finding]:
    """The router's is free; a worker's may not be."""
    port = config.cluster.worker_metrics_port
    try:
        if port:
            socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        yield failure(
            "ports",
            f"cluster.worker_metrics_port: {port}: {error.strerror}",
            "a worker serves its metrics and /live there, and ends if it cannot",
            "end what listens there, or choose another; 0: any free one",
        )
    else:
        yield ok("ports", f"{config.cluster.host}:{config.cluster.port} is free")


def _model(config: Config) -> Iterator[Finding]:
    path, drafter = config.model.path, config.spec.path
    for each in (path, drafter):
        if hub.is_name(each):
            yield ok("model", f"{each} is a name on the hub: serve looks for it there")
    if hub.is_name(path):
        return
    if hub.is_name(drafter):
        config = config.model_copy(update={"spec": SpecConfig()})
    try:
        check.check_model(config)
    except UserError as error:
        yield _refused(error)
    else:
        yield ok("model", f"{path} is whole, and of a kind that can be served")


def _refused(error: UserError) -> Finding:
    """A message of ours most often ends with the remedy."""
    subject = {"cluster": "ports", "model": "model"}.get((error.param or "").split(".")[0])
    parts = WITH_REMEDY.fullmatch(str(error))
    what, remedy = parts.groups() if parts else (str(error), f"change {error.param or 'it'}")
    return failure(subject or "config", what, REFUSED, remedy)
