"""Which ports `doctor --ports` lists, whose and of which kind; and the page that says who may
reach them. Real clusters are in tests/e2e/test_ports.py."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psutil
import pytest

from cluster.config import load
from cluster.diagnose.ports import Member, RayHere, Walk, listening, report_of_ports
from tests.support.patience import HANG_S
from tests.support.security_page import PAGE, page
from worker.api import Role
from worker.errors import UserError

LOCAL = "127.0.0.1"
SESSION = "session_of_test_ports"
LISTENS = """
import socket, sys
listeners = [socket.create_server((host, 0)) for host in sys.argv[1].split()]
print(*(listener.getsockname()[1] for listener in listeners), flush=True)
sys.stdin.read()
"""


@contextmanager
def process(*words: str, hosts: str = LOCAL) -> Iterator[tuple[int, list[int]]]:
    """One with these words in its command line that listens; its pid and ports."""
    listener = subprocess.Popen(
        [sys.executable, "-c", LISTENS, hosts, *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with listener:
        assert listener.stdout is not None
        yield listener.pid, [int(port) for port in listener.stdout.readline().split()]
        listener.communicate("", HANG_S)


def ray(ports: Mapping[int, str] | None = None) -> RayHere:
    return RayHere(SESSION, "", ports or {}, 0)


def status(role: Role, pids: tuple[int, ...], address: int, metrics: int) -> Member:
    at = [f"{LOCAL}:{port}" for port in (address, metrics)]
    return Member(f"{role}-0", role, socket.gethostname(), pids, *at)


@pytest.mark.parametrize("host", [LOCAL, "0.0.0.0"])
def test_a_port_that_nobody_knows_is_unknown(host: str) -> None:
    with process(f"--session-name={SESSION}", hosts=host) as (pid, (port,)):
        (found,) = Walk([], load(None), ray(), set()).ports()
        text, code = report_of_ports([], load(None), ray(), {}, as_json=False)
        rows, _ = report_of_ports([], load(None), ray(), {}, as_json=True)
    assert (found.pid, found.address, found.asks) == (pid, f"{host}:{port}", "unknown")
    assert ("1 unknown" in text, code) == (True, 1)
    assert json.loads(rows)[0]["kind"] == "unknown"


def test_processes_of_other_clusters_are_not_listed() -> None:
    with process("--session-name=of_another"):
        assert not Walk([], load(None), ray(), set()).ports()


def test_another_user_s_process_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "net_connections", denied)
    with process() as (pid, _), pytest.raises(UserError, match="another user's"):
        listening(pid)


@pytest.mark.parametrize(("sets", "kind"), [((), "unknown"), (("transport.name=sockets",), "kv")])
def test_ports_of_a_worker_of_one_rank_are_known_one_by_one(
    sets: tuple[str, ...], kind: str
) -> None:
    with process(hosts=" ".join([LOCAL] * 4)) as (pid, (rest, wire, metrics, core)):
        member = status("decode", (pid,), wire, metrics)
        found = Walk([member], load(None, sets), ray({core: "core worker"}), {pid}).ports()
    assert {int(port.address.rpartition(":")[2]): port.kind for port in found} == {
        rest: kind, wire: "wire", metrics: "metrics", core: "core worker",
    }  # fmt: skip


def test_a_rank_says_all_that_its_port_may_be() -> None:
    sets = ["transport.name=mixed", "transport.kind=nvlink"]
    with process(hosts=f"{LOCAL} 0.0.0.0") as (first, (wire, _)), process() as (second, _):
        member = status("decode", (first, second), wire, 1)
        found = Walk([member], load(None, sets), ray(), {first, second}).ports()
    kinds = sorted((port.process, port.kind) for port in found)
    assert kinds == [
        ("decode-0", "unknown"), ("decode-0", "wire"),
        ("decode-0.1", "kv or ranks or wire"),
    ]  # fmt: skip


def test_a_router_asks_as_the_settings_say() -> None:
    with process(hosts=f"{LOCAL} {LOCAL}") as (pid, (api, beside)):
        member = status("router", (pid,), api, beside)
        for sets, asks in ((), "nothing"), (("router.api_key_file=/keys",), "an API key"):
            found = Walk([member], load(None, sets), ray(), {pid}).ports()
            assert [(port.kind, port.asks) for port in found] == [("api", asks), ("beside", asks)]


def test_the_page_has_the_table_of_the_doctor() -> None:
    assert PAGE.read_text() == page(), "python -m tests.support.security_page"
