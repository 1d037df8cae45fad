"""Router processes on one port without Ray: each is forked, told its members, drained or killed."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.fault.router_doubles import HANG_S, DecodeDouble, num_live, wait_until
from tests.support.meeting import introduce
from tests.support.processes import FORKED, fork
from tests.support.router_process import serve_until_killed
from worker.api import Member


@dataclass
class Routers:
    """Processes that share a port, in front of decode doubles."""

    directory: Path
    doubles: Sequence[DecodeDouble]
    url: str = ""
    members: dict[str, Member] = field(default_factory=dict[str, Member])
    processes: dict[str, ForkServerProcess] = field(default_factory=dict[str, ForkServerProcess])
    _pipes: dict[str, Connection] = field(default_factory=dict[str, Connection])

    def add(self, *names: str) -> None:
        """Start these at once, and tell all; the very first one takes a free port, alone."""
        port = int(self.url.rpartition(":")[2] or 0)
        for name in names:
            self._pipes[name], there = FORKED.Pipe()
            self.processes[name] = fork(serve_until_killed, there, self.directory, name, port)
        for name in names:
            assert self._pipes[name].poll(HANG_S), f"{name} does not start"
            self.members[name] = introduce(self._pipes[name].recv())
            self.url = self.members[name].address
        self.tell()
        for name in names:
            wait_until(lambda name=name: num_live(self.own_url(name)) == len(self.doubles))

    def own_url(self, name: str) -> str:
        return f"http://{self.members[name].metrics_address}"

    def tell(self) -> None:
        """The members as they are now, to every process that lives."""
        members = [*self.members.values(), *(double.member for double in self.doubles)]
        for name, process in self.processes.items():
            if process.is_alive():
                self._pipes[name].send(members)

    def kill(self, name: str) -> None:
        """SIGKILL; it stays among the members until it is added again."""
        self.processes[name].kill()
        self.processes[name].join(HANG_S)

    def end(self) -> None:
        for name in self.processes:
            self.kill(name)


@contextmanager
def sharing(directory: Path, *doubles: DecodeDouble, num: int) -> Iterator[Routers]:
    """`num` routers, router-0 and so on; they and the doubles end with it."""
    routers = Routers(directory, doubles)
    try:
        routers.add("router-0")
        routers.add(*(f"router-{i}" for i in range(1, num)))
        yield routers
    finally:
        routers.end()
        for double in doubles:
            double.die()


def by_router(url: str, family: str, **labels: Any) -> Mapping[str, float]:
    """Name of a router -> sum of the samples of a counter at `url` that have these labels."""
    found: dict[str, float] = {}
    for each in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in each.samples:
            if sample.name == f"kvlane_{family}" and labels.items() <= sample.labels.items():
                name = sample.labels.get("worker", "")
                found[name] = found.get(name, 0) + sample.value
    return found
