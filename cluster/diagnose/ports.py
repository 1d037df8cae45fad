"""Every port that a running cluster listens on here: whose, what speaks there, what it asks for.

The kernel says who listens where. What speaks there a port says itself, as it would to a stranger:
so a port that nobody knows of is seen. Only who of Ray's processes listens at which of its ports is
asked of Ray, and whether they want its token of the environment that they run with.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cluster.diagnose import greet
from cluster.diagnose.doors import DOORS, Asks
from cluster.diagnose.greet import Answer, Speech
from cluster.diagnose.sockets import Listener, environment, families, listeners, owners

UNKNOWN = "unknown"
NUM_THREADS = 32  # most ports are silent for a while
UNAUTHORIZED = 401
AUTH_MODE, WITH_TOKEN = "RAY_AUTH_MODE", "token"
CLIENTS = "ray.util.client.server"
# A word of the command line -> name of one of Ray's processes, and the kind of its HTTP ports.
OF_RAY = {
    "gcs_server": ("gcs", ""),
    "raylet": ("raylet", ""),
    "ray::DashboardAgent": ("agent", "agent page"),
    "ray::RuntimeEnvAgent": ("runtime env agent", "environments"),
    "dashboard.py": ("dashboard", "dashboard"),
    "monitor.py": ("autoscaler", "ray metrics"),
    CLIENTS: ("client server", ""),
}
GRPC = {"gcs": "gcs", "agent": "agent", "client server": "client server"}
METRICS_PORTS = (44217, 44227)  # of Ray's autoscaler and dashboard
# What is asked for by HTTP: what needs a key, if any is needed; else what nobody has.
PATHS = {"api": "/v1/models", "beside": "/v1/models", "metrics": "/live"}
NO_PATH = "/kvlane"


@dataclass(frozen=True, slots=True)
class Named:
    """A worker, a router or the controller, on this machine."""

    name: str
    role: str
    pids: tuple[int, ...]  # of all ranks
    port: int = 0  # of its address; 0: it has none
    metrics_port: int = 0

    @property
    def is_worker(self) -> bool:
        """Whether it has KV and a wire that listens."""
        return self.role in ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class RayHere:
    """What Ray says of itself on this machine."""

    session: str  # a word of the command lines of its processes
    address: str  # of its GCS
    ports: Mapping[int, str]  # port -> kind, where the process does not tell


@dataclass(frozen=True, slots=True)
class Port:
    """One listening port."""

    process: str
    pid: int
    address: str
    kind: str  # of DOORS, or unknown
    speaks: str
    asks: str


@dataclass(slots=True)
class Walk:
    """The ports of this machine's processes of one cluster."""

    named: Sequence[Named]
    ray: RayHere
    serve: set[int]  # pids of its processes here
    lines: dict[int, list[str]] = field(default_factory=dict[int, list[str]])  # by pid
    names: dict[int, tuple[str, Named | None]] = field(default_factory=dict[int, Any])
    data_ports: set[int] = field(default_factory=set[int])  # of mooncake
    with_token: bool = False  # Ray's processes here ask for one

    def ports(self) -> list[Port]:
        """All of them, by process. Raises UserError as `owners`."""
        self.lines = families(self._is_root)
        self.names = {pid: self._named(pid) for pid in self.lines}
        whose = owners(self.lines)
        ours = [(each, whose[each.inode]) for each in listeners() if each.inode in whose]
        self.with_token = self._asks_token()
        found: list[Port] = []
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            # First those that say where mooncake's data comes: so nobody has to knock there.
            for is_first in (True, False):
                turn = [one for one in ours if self._may_be_mooncake(*one) is is_first]
                found += threads.map(self._port, turn)
        return sorted(found, key=lambda port: (port.pid, port.kind, port.address))

    def _is_root(self, pid: int, line: list[str]) -> bool:
        address = f"address={self.ray.address}"
        of_ray = any(self.ray.session in word or word == f"--gcs-{address}" for word in line)
        return pid in self.serve or of_ray or {CLIENTS, f"--{address}"} <= set(line)

    def _named(self, pid: int) -> tuple[str, Named | None]:
        """Its name, and whose it is if that has a name in the cluster."""
        for each in self.named:
            if pid in each.pids:
                rank = each.pids.index(pid)
                return (f"{each.name}.{rank}" if rank else each.name), each
        line = self.lines[pid]
        for word, (name, _) in OF_RAY.items():
            if any(Path(part).name == word for part in line[:4]):
                return name, None
        if self._stems_from_serve(line):
            return "serve", None
        return (line[0] if line else UNKNOWN).split(" ")[0].rpartition("/")[2], None

    def _stems_from_serve(self, line: list[str]) -> bool:
        return line in [self.lines[pid] for pid in self.serve if pid in self.lines]

    def _asks_token(self) -> bool:
        """Whether Ray's processes here want its token."""
        of_ray = [pid for pid, (name, _) in self.names.items() if name in ("gcs", "raylet")]
        return any(environment(pid).get(AUTH_MODE) == WITH_TOKEN for pid in of_ray)

    def _may_be_mooncake(self, listener: Listener, pid: int) -> bool:
        """A worker's wire and page listen at one address, mooncake's engines at all."""
        _, of = self.names[pid]
        return of is not None and of.is_worker and listener.host == "0.0.0.0"

    def _port(self, one: tuple[Listener, int]) -> Port:
        listener, pid = one
        name, of = self.names[pid]
        kind, answer = self._met(listener, name, of)
        if not kind:  # once more: a busy process may have been late
            kind, answer = self._met(listener, name, of)
        door = DOORS.get(kind)
        if door is None:
            said = answer.speech if answer else "says nothing"
            return Port(name, pid, listener.address, UNKNOWN, said, UNKNOWN)
        asks: str = door.asks
        if answer is not None and answer.speech in (Speech.HTTP, Speech.TLS):
            asks = door.asks if answer.status == UNAUTHORIZED else Asks.NOTHING
        elif door.asks is Asks.CURVE:
            asks = Asks.CURVE if answer and answer.speech is Speech.CURVE else Asks.NOTHING
        elif door.asks is Asks.TOKEN and not self.with_token:
            asks = Asks.NOTHING
        if door.asks is Asks.NOBODY and greet.connects(listener.place):
            asks = Asks.NOTHING
        speaks = door.speaks
        if kind == "api":
            speaks = f"{'HTTPS' if answer and answer.speech is Speech.TLS else 'HTTP'}: the API"
        return Port(name, pid, listener.address, kind, speaks, asks)

    def _met(self, listener: Listener, name: str, of: Named | None) -> tuple[str, Answer | None]:
        """Kind of a port, "" if it is unknown, and what it has said."""
        if of is not None and of.is_worker:
            return self._met_worker(listener, of)
        answer = greet.overheard(listener.place)
        if answer is None:
            kind = self._http_kind(listener, name, of)
            answer = greet.http(listener.place, PATHS.get(kind, NO_PATH))
            return (kind if answer else ""), answer
        if answer.speech is Speech.GRPC:
            kind = GRPC.get(name, "") or self.ray.ports.get(listener.port, "")
            is_core = of or name == "serve" or name.startswith("ray::")
            return kind or ("core worker" if is_core else ""), answer
        return "", answer

    def _http_kind(self, listener: Listener, name: str, of: Named | None) -> str:
        if of is not None:  # a router alone has one port for both
            return {of.metrics_port: "beside", of.port: "api"}.get(listener.port, "")
        if listener.port in METRICS_PORTS or self.ray.ports.get(listener.port) == "ray metrics":
            return "ray metrics"
        return dict(OF_RAY.values()).get(name, "")

    def _met_worker(self, listener: Listener, of: Named) -> tuple[str, Answer | None]:
        place = listener.place
        if listener.port in self.data_ports:
            return "mooncake data", None
        if listener.port == of.metrics_port:
            answer = greet.http(place, PATHS["metrics"])
            return ("metrics" if answer else ""), answer
        if listener.host == "0.0.0.0":
            answer = greet.mooncake(place)
            if answer is None:
                return "", None
            self.data_ports.add(answer.data_port)
            return "mooncake", answer
        if answer := greet.overheard(place):
            return {Speech.GRPC: "core worker", Speech.KV: "kv"}.get(answer.speech, "wire"), answer
        if len(of.pids) == 1:
            return "", None
        if answer := greet.store(place):
            return "store", answer
        # It says nothing to anybody but a rank, and no other port of a rank does so.
        return ("" if listener.host == "::" else "ranks"), None


def shown(ports: Sequence[Port], num_elsewhere: int, *, as_json: bool) -> str:
    """All of them, as text or JSON."""
    if as_json:
        return json.dumps([asdict(port) for port in ports], indent=2)
    from cluster.tables import plain, table, text

    head = ("PROCESS", "PID", "ADDRESS", "SPEAKS", "ASKS FOR")
    rows = [(p.process, str(p.pid), p.address, p.speaks, p.asks) for p in ports]
    lines = [table(head, rows)]
    notes: list[str] = []
    if num_unknown := sum(port.kind == UNKNOWN for port in ports):
        notes.append(f"{num_unknown} unknown: nothing of kvlane's listens so; find out what does")
    if num_elsewhere:
        notes.append(f"{num_elsewhere} processes are on other machines: ask there, too")
    return plain([*lines, *map(text, notes)])


def port_of(address: str) -> int:
    """The number at its end; 0: there is none."""
    port = address.rpartition(":")[2]
    return int(port) if port.isdigit() else 0


def has_unknown(ports: Iterable[Port]) -> bool:
    """Whether nobody knows what one of them is for."""
    return any(port.kind == UNKNOWN for port in ports)
