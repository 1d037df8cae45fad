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


# When a port asks that does not always.
WHEN = {
    Asks.API_KEY: "router.api_key_file is set",
    Asks.CURVE: "transport.authentication is curve",
    Asks.TOKEN: "RAY_AUTH_MODE=token",
    Asks.NOBODY: "it is gloo's, and the ranks have met",
}


@dataclass(frozen=True, slots=True)
class Door:
    """One kind of port."""

    whose: str
    speaks: str
    asks: Asks  # where it asks at all
    can: str  # whoever is let in, or anybody where it asks nothing
    reach: Reach = Reach.CLUSTER
    but: str = ""  # for what it asks nothing


WORKERS = "workers and their ranks"
BUT_PROBES = "for probes and /docs"
ALL_OF_RAY = "run any code on every node"
DOORS = {
    "api": Door(
        "routers",
        "HTTP, or HTTPS with router.tls_cert_file: the API",
        Asks.API_KEY,
        "generate within its key's limits; read /config, /metrics and /dashboard, which tell the "
        "settings and addresses of all processes, and no prompt and no key: whose key says "
        "admin=yes, if any says so, or whoever comes (router.admin_access=open); with admin=yes "
        "drain workers and change their roles",
        Reach.CLIENTS,
        BUT_PROBES,
    ),
    "beside": Door(
        "routers that share a port",
        "HTTP: the API, for other routers",
        Asks.API_KEY,
        "the same as at the API; it never speaks TLS",
        but=BUT_PROBES,
    ),
    "metrics": Door(
        "workers",
        "HTTP: /metrics and /live",
        Asks.NOTHING,
        "read metrics, which name the model and the processes",
        Reach.MONITORING,
    ),
    "wire": Door(
        WORKERS,
        "ZeroMQ: requests, tokens, transfers",
        Asks.CURVE,
        "ask the model without a limit; a member speaks in its own name only, and without keys "
        "anybody speaks and listens in any name",
    ),
    "mooncake": Door(
        WORKERS,
        "mooncake's handshake, and its data over TCP",
        Asks.SECRET,
        "read and write all KV: others' prompts and answers; what has not been announced at the "
        "next port by who knows the secret is dropped by the kernel",
    ),
    "kv": Door(
        WORKERS,
        "KV over sockets, or who may connect to mooncake",
        Asks.SECRET,
        "read all KV: others' prompts and answers; write nothing, but over mooncake",
    ),
    "store": Door(
        "rank 0 of a worker of several",
        "torch's TCPStore, where ranks meet",
        Asks.NOTHING,
        "change where ranks find one another, and with which keys, and fill its memory, while "
        "they start; then it ends, or hears them alone (NCCL's)",
    ),
    "ranks": Door(
        "ranks of a worker of several",
        "gloo or NCCL: sums of ranks",
        Asks.NOBODY,
        "pose as a rank while they start",
    ),
    "gcs": Door("gcs", "gRPC: Ray's GCS", Asks.TOKEN, ALL_OF_RAY),
    "raylet": Door("raylet", "gRPC: Ray's node", Asks.TOKEN, ALL_OF_RAY),
    "objects": Door(
        "raylet",
        "gRPC: Ray's object manager",
        Asks.TOKEN,
        "read and change objects, in which kvlane keeps nothing that a request brings",
    ),
    "core worker": Door(
        "every process in Ray, serve among them", "gRPC: Ray's core worker", Asks.TOKEN, ALL_OF_RAY
    ),
    "agent": Door("agent", "gRPC: Ray's agent of a node", Asks.TOKEN, ALL_OF_RAY),
    "agent page": Door(
        "agent", "HTTP: Ray's agent of a node", Asks.TOKEN, ALL_OF_RAY, but="for health checks"
    ),
    "environments": Door(
        "runtime env agent", "HTTP: Ray's maker of environments", Asks.TOKEN, ALL_OF_RAY
    ),
    "dashboard": Door(
        "dashboard, where Ray has one",
        "HTTP: Ray's dashboard and jobs",
        Asks.TOKEN,
        ALL_OF_RAY,
        but="for its pages and health checks",
    ),
    "client server": Door(
        "client server, where Ray has one", "gRPC: Ray's clients", Asks.TOKEN, ALL_OF_RAY
    ),
    "ray metrics": Door(
        "agent, dashboard and autoscaler",
        "HTTP: Ray's own metrics",
        Asks.NOTHING,
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
    if door.asks not in WHEN:
        return str(door.asks)
    but = f", but {door.but}" if door.but else ""
    return f"{door.asks}, if {WHEN[door.asks]}{but}; else {Asks.NOTHING}"
