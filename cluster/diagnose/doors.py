"""The kinds of listening ports that a cluster has: who speaks there, how it asks, what one can do.

`doctor --ports` says of the ports of a running cluster of which kind they are. The table of
.github/SECURITY.md is this one, written by `python -m tests.support.security_page`.
"""

from dataclasses import dataclass
from enum import StrEnum


class Asks(StrEnum):
    """How a port asks who one is."""

    NOTHING = "nothing"
    API_KEY = "an API key"
    CURVE = "a CURVE key of the cluster"
    TOKEN = "Ray's token"
    SECRET = "the secret of its endpoint"
    NOBODY = "nobody: it takes no connection"


class Reach(StrEnum):
    """Who has a reason to reach a port; the chart's NetworkPolicy lets in nobody else."""

    CLIENTS = "clients"
    MONITORING = "Prometheus"
    CLUSTER = "the cluster"


@dataclass(frozen=True, slots=True)
class Door:
    """One kind of port."""

    whose: str
    speaks: str
    asks: Asks  # where it asks at all
    when: str  # it asks; "": always
    reach: Reach
    can: str  # whoever is let in, or anybody where it asks nothing


WITH_TOKEN = "RAY_AUTH_MODE=token"
ONLY_METRICS = "read metrics, which name the model and the processes"


def _of_ray(whose: str, speaks: str, but: str = "") -> Door:
    """One at which whoever is let in commands Ray; for what it asks for no token."""
    can = "run any code on every node"
    return Door(whose, speaks, Asks.TOKEN, WITH_TOKEN + but, Reach.CLUSTER, can)


DOORS = {
    "api": Door(
        "routers",
        "HTTP, or HTTPS with router.tls_cert_file: the API",
        Asks.API_KEY,
        "router.api_key_file is set, but for probes and /docs",
        Reach.CLIENTS,
        "generate within its key's limits; read /config, /metrics and /dashboard, which tell the "
        "settings and addresses of all processes, and no prompt and no key: whose key says "
        "admin=yes, if any says so, or whoever comes (router.admin_access=open); with admin=yes "
        "drain workers and change their roles",
    ),
    "beside": Door(
        "routers that share a port",
        "HTTP: the API, for other routers",
        Asks.API_KEY,
        "router.api_key_file is set, but for probes and /docs",
        Reach.CLUSTER,
        "the same as at the API; it never speaks TLS",
    ),
    "metrics": Door(
        "workers", "HTTP: /metrics and /live", Asks.NOTHING, "", Reach.MONITORING, ONLY_METRICS
    ),
    "wire": Door(
        "workers and their ranks",
        "ZeroMQ: requests, tokens, transfers",
        Asks.CURVE,
        "transport.authentication is curve",
        Reach.CLUSTER,
        "ask the model without a limit; a member speaks in its own name only, and without keys "
        "anybody speaks and listens in any name",
    ),
    "mooncake": Door(
        "workers and their ranks",
        "mooncake's handshake",
        Asks.NOTHING,
        "",
        Reach.CLUSTER,
        "learn where KV lies in memory; keep others from a handshake for 60 s a time. Besides "
        "the one that serves there is one a peer that KV is pulled from",
    ),
    "mooncake data": Door(
        "workers and their ranks",
        "mooncake's data over TCP",
        Asks.NOTHING,
        "",
        Reach.CLUSTER,
        "read and write all KV: others' prompts and answers; no other memory of the process",
    ),
    "kv": Door(
        "workers and their ranks",
        "KV over sockets",
        Asks.SECRET,
        "transport.name is sockets or mixed",
        Reach.CLUSTER,
        "read all KV: others' prompts and answers; write nothing",
    ),
    "store": Door(
        "rank 0 of a worker of several",
        "torch's TCPStore, where ranks meet",
        Asks.NOTHING,
        "",
        Reach.CLUSTER,
        "change where ranks find one another, and with which keys, while they start",
    ),
    "ranks": Door(
        "ranks of a worker of several",
        "gloo or NCCL: sums of ranks",
        Asks.NOBODY,
        "it is gloo's, and the ranks have met",
        Reach.CLUSTER,
        "pose as a rank while they start",
    ),
    "gcs": _of_ray("gcs", "gRPC: Ray's GCS"),
    "raylet": _of_ray("raylet", "gRPC: Ray's node"),
    "objects": Door(
        "raylet",
        "gRPC: Ray's object manager",
        Asks.TOKEN,
        WITH_TOKEN,
        Reach.CLUSTER,
        "read and change objects, in which kvlane keeps nothing that a request brings",
    ),
    "core worker": _of_ray("every process in Ray, serve among them", "gRPC: Ray's core worker"),
    "agent": _of_ray("agent", "gRPC: Ray's agent of a node"),
    "agent page": _of_ray("agent", "HTTP: Ray's agent of a node", ", but for health checks"),
    "environments": _of_ray("runtime env agent", "HTTP: Ray's maker of environments"),
    "dashboard": _of_ray(
        "dashboard, where Ray has one",
        "HTTP: Ray's dashboard and jobs",
        ", but for its pages and health checks",
    ),
    "client server": _of_ray("client server, where Ray has one", "gRPC: Ray's clients"),
    "ray metrics": Door(
        "agent, dashboard and autoscaler",
        "HTTP: Ray's own metrics",
        Asks.NOTHING,
        "",
        Reach.CLUSTER,
        "read metrics of nodes",
    ),
}


def table() -> str:
    """All of them, as Markdown."""
    head = ("whose port", "what speaks there", "asks for", "who needs it", "what one can do there")
    rows = [(d.whose, d.speaks, asking(d), d.reach, d.can) for d in DOORS.values()]
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def asking(door: Door) -> str:
    """How it asks, and when."""
    return f"{door.asks}, if {door.when}; else {Asks.NOTHING}" if door.when else str(door.asks)
