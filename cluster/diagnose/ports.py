"""Every port that a running cluster listens on here: whose, what speaks there, what it asks for.

The kernel says who listens where, Ray which of its ports are for what. Where a process may speak
one thing or another at a port, both are named. A port that nothing of a cluster's has is unknown.
"""

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from cluster.config import Config
from cluster.diagnose.doors import DOORS, Asks, Door, asking
from cluster.resolve import ROLES
from worker.api import Role
from worker.errors import UserError

UNKNOWN = "unknown"
CLIENTS = "ray.util.client.server"
# A word of the command line -> name of one of Ray's processes, and the kind of ports that Ray does
# not tell.
OF_RAY = {
    "gcs_server": ("gcs", "gcs"),
    "raylet": ("raylet", ""),
    "ray::DashboardAgent": ("agent", ""),
    "ray::RuntimeEnvAgent": ("runtime env agent", ""),
    "dashboard.py": ("dashboard", "dashboard"),
    "monitor.py": ("autoscaler", "ray metrics"),
    CLIENTS: ("client server", "client server"),
}
METRICS_PORTS = (44217, 44227)  # of Ray's autoscaler and dashboard
MOONCAKE_PORTS = range(15000, 17001)
EVERYWHERE = ("0.0.0.0", "::")


class Member(NamedTuple):
    """A worker or a router, as `status` has it."""

    name: str
    role: Role
    node: str
    pids: tuple[int, ...]  # of all ranks
    address: str
    metrics_address: str


@dataclass(frozen=True, slots=True)
class RayHere:
    """What Ray says of itself on this machine."""

    session: str  # a word of the command lines of its processes
    address: str  # of its GCS
    ports: Mapping[int, str]  # port -> kind
    controller: int  # its pid; 0: it is elsewhere


@dataclass(frozen=True, slots=True)
class Port:
    """One listening port."""

    process: str
    pid: int
    address: str
    kind: str  # of DOORS, several with " or " between them, or unknown
    speaks: str
    asks: str


@dataclass(slots=True)
class Walk:
    """The ports of this machine's processes of one cluster.

    members: of this machine. config: with what was decided. serve: pids of its `serve` here.
    """

    members: Sequence[Member]
    config: Config
    ray: RayHere
    serve: set[int]

    def ports(self) -> list[Port]:
        """All of them, by process. Raises UserError if a process is another user's."""
        family = self._family()
        modes = {environ.get("RAY_AUTH_MODE") for _, environ in family.values()}
        asks = self._asked(has_token="token" in modes)
        of_serve = [family[pid][0] for pid in self.serve if pid in family]  # it has forked others
        ports: list[Port] = []
        for pid, (words, _) in family.items():
            name, member, other = self._named(pid, words, words in of_serve)
            for host, port in listening(pid):
                kinds = self._of_member(member, pid, host, port) if member else [other]
                if told := self.ray.ports.get(port, "ray metrics" * (port in METRICS_PORTS)):
                    kinds = [told]
                doors = [DOORS[kind] for kind in kinds if kind]
                kind = " or ".join(filter(None, kinds)) or UNKNOWN
                speaks = ", or ".join(map(self._speaks, doors)) or UNKNOWN
                asked = dict.fromkeys(asks.get(door.asks, asking(door)) for door in doors)
                address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                ports.append(Port(name, pid, address, kind, speaks, ", or ".join(asked) or UNKNOWN))
        return sorted(ports, key=lambda port: (port.pid, port.kind, port.address))

    def _family(self) -> dict[int, tuple[list[str], dict[str, str]]]:
        """Pid -> words and environment of the cluster's processes and of their children."""
        running = {p.pid: p.info for p in psutil.process_iter(["cmdline", "environ", "ppid"])}
        words: dict[int, list[str]] = {
            pid: [word.strip() for word in of["cmdline"] or () if word.strip()]
            for pid, of in running.items()
        }

        def belongs(pid: int) -> bool:
            is_root = pid in words and self._is_root(pid, words[pid])
            return is_root or (pid in running and belongs(running[pid]["ppid"]))

        ours = filter(belongs, sorted(running))
        return {pid: (words[pid], running[pid]["environ"] or {}) for pid in ours}

    def _is_root(self, pid: int, words: Sequence[str]) -> bool:
        address = f"address={self.ray.address}"
        of_ray = any(self.ray.session in word or word == f"--gcs-{address}" for word in words)
        return pid in self.serve or of_ray or {CLIENTS, f"--{address}"} <= set(words)

    def _named(
        self, pid: int, words: Sequence[str], is_serve: bool
    ) -> tuple[str, Member | None, str]:
        """Its name, its member, and the kind of its ports that neither Ray nor that tells."""
        for member in self.members:
            if pid in member.pids:
                rank = member.pids.index(pid)
                return (f"{member.name}.{rank}" if rank else member.name), member, ""
        if is_serve or pid == self.ray.controller:
            return ("serve" if is_serve else "controller"), None, ""
        for word, (name, kind) in OF_RAY.items():
            if any(Path(part).name == word for part in words[:4]):
                return name, None, kind
        program = words[0].split(" ")[0] if words else UNKNOWN
        # Ray lists no processes that wait for work.
        return program.rpartition("/")[2], None, "core worker" * program.startswith("ray::")

    def _of_member(self, member: Member, pid: int, host: str, port: int) -> list[str]:
        """The kinds that a port of a router or of a worker's rank may be of; "" is none."""
        is_router, is_first = member.role == "router", pid == member.pids[0]
        if is_first and port == port_of(member.address):
            return ["api" if is_router else "wire"]
        if is_first and port == port_of(member.metrics_address):
            return ["beside" if is_router else "metrics"]
        transport, has_ranks = self.config.transport.name, len(member.pids) > 1
        if is_router:
            return []
        by_mooncake = transport == "mooncake" or self.config.transport.kind == "nvlink"
        if host in EVERYWHERE:
            return ["mooncake" * (by_mooncake and port in MOONCAKE_PORTS)]
        is_kv, is_rank = transport in ("sockets", "mixed", "mooncake"), not is_first
        return ["kv" * is_kv, "ranks" * has_ranks, "wire" * is_rank]

    def _asked(self, has_token: bool) -> dict[Asks, str]:
        """How ports ask that may, by the settings."""
        devices = {self.config.role(role).engine.device for role in ROLES}
        known = {
            Asks.API_KEY: bool(self.config.router.api_key_file),
            Asks.CURVE: self.config.transport.authentication == "curve",
            Asks.TOKEN: has_token,
            Asks.SECRET: True,  # of a port that is there
            **({Asks.NOBODY: True} if devices == {"cpu"} else {}),  # ranks have gloo, and have met
        }
        return {ask: ask if asks else Asks.NOTHING for ask, asks in known.items()}

    def _speaks(self, door: Door) -> str:
        if door is not DOORS["api"]:
            return door.speaks
        return f"{'HTTPS' if self.config.router.tls_cert_file else 'HTTP'}: the API"


def listening(pid: int) -> list[tuple[str, int]]:
    """Addresses and ports at which a process listens. Raises UserError if it is another user's."""
    try:
        sockets = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return []  # it has ended meanwhile
    except psutil.AccessDenied:
        raise UserError(f"process {pid} is another user's; ask as that user") from None
    places = [one.laddr for one in sockets if one.status == psutil.CONN_LISTEN]
    return [(place.ip.removeprefix("::ffff:"), place.port) for place in places]


def port_of(address: str) -> int:
    """The number at its end; 0: there is none."""
    port = address.rpartition(":")[2]
    return int(port) if port.isdigit() else 0


def report_of_ports(
    members: Sequence[Member], config: Config, ray: RayHere, serves: Mapping[int, str],
    *, as_json: bool,
) -> tuple[str, int]:  # fmt: skip
    """What `doctor --ports` shows of a cluster, and its exit code: 1 if a port is unknown.

    serves: pid of a `serve` of this machine -> address of its Ray. Raises as `Walk.ports`.
    """
    here = [member for member in members if member.node == socket.gethostname()]
    ours = {pid for pid, address in serves.items() if address == ray.address}
    ports = Walk(here, config, ray, ours).ports()
    num_unknown = sum(port.kind == UNKNOWN for port in ports)
    if as_json:
        return json.dumps([asdict(port) for port in ports], indent=2), int(num_unknown > 0)
    from cluster.tables import plain, table, text

    head = ("PROCESS", "PID", "ADDRESS", "SPEAKS", "ASKS FOR")
    rows = [(p.process, str(p.pid), p.address, p.speaks, p.asks) for p in ports]
    notes: list[str] = []
    if num_unknown:
        notes.append(f"{num_unknown} unknown: nothing of kvlane's listens so; find out what does")
    if num_elsewhere := sum(len(m.pids) for m in members) - sum(len(m.pids) for m in here):
        notes.append(f"{num_elsewhere} processes are on other machines: ask there, too")
    return plain([table(head, rows), *map(text, notes)]), int(num_unknown > 0)
