"""What somebody without keys gets at each kind of port: one try each, with others' own clients."""

import re
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
import httpx
import zmq

from tests.support.patience import HANG_S
from worker.api import Ping, encode
from worker.keyring import pack
from worker.transfer.doors import COUNT, GREETING, PIECE, proof, received

WAIT_S = 3.0  # for an answer that ought not to come
# Calls of Ray's that take an empty message and change nothing.
CALLS = {
    "gcs": "NodeInfoGcsService/GetAllNodeInfo",
    "raylet": "NodeManagerService/GetNodeStats",
    "objects": "ObjectManagerService/Pull",
    "core worker": "CoreWorkerService/GetCoreWorkerStats",
    "agent": "ReporterService/GetTraceback",
    "client server": "RayletDriver/ClusterInfo",
}
METRICS = re.compile(r"# HELP \w+ .+\n# TYPE \w+ \w+\n")
BODY = {"model": "tiny", "prompt": "1", "max_tokens": 1}
Row = dict[str, Any]  # of `doctor --ports --json`


def gets(row: Row, incarnations: dict[str, str]) -> bool:
    """Whether a stranger is let in at this port. incarnations: by name, of those with a wire."""
    kind = row["kind"]
    if kind in CALLS:
        return _calls(row["address"], CALLS[kind])
    if kind == "wire":
        return _is_heard(row, incarnations)
    return TRIES[kind](row["address"])


def _calls(address: str, method: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=HANG_S)
        except grpc.RpcError as error:
            # Any other error comes from whoever was let in, and has asked what makes no sense.
            return error.code() is not grpc.StatusCode.UNAUTHENTICATED
    return True


def _is_heard(row: Row, incarnations: dict[str, str]) -> bool:
    """By a wire, in the name of nobody: without keys, and with some that one makes oneself."""
    name = row["process"]
    to = f"{name}/{incarnations.get(name.partition('.')[0], '')}"
    return any(_pings(row["address"], to, with_keys) for with_keys in (False, True))


def _pings(address: str, to: str, with_keys: bool) -> bool:
    context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        if with_keys:
            dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
            dealer.curve_serverkey, _ = zmq.curve_keypair()
        dealer.connect(f"tcp://{address}")
        dealer.send(pack("s/1", to, (1, 1), encode(Ping("s/1"))))
        return bool(dealer.poll(int(WAIT_S * 1000)))
    finally:
        context.destroy(linger=0)


def _generates(address: str) -> bool:
    """And reads the list of models."""
    base = f"http://{address}"
    answers = [
        httpx.post(f"{base}/v1/completions", json=BODY, timeout=HANG_S),
        httpx.post(f"{base}/tokenize", json=BODY, timeout=HANG_S),
        httpx.get(f"{base}/v1/models", headers={"x-api-key": "sk-guess"}, timeout=HANG_S),
    ]
    codes = {answer.status_code for answer in answers}
    assert codes in ({200}, {401}), [answer.text for answer in answers]
    return codes == {200}


def _sees_metrics_alone(address: str) -> bool:
    """Whatever one asks for; a worker's page has /live beside."""
    for path in ("/metrics", "/config", "/v1/models", "/../../etc/passwd"):
        answer = httpx.get(f"http://{address}{path}", timeout=HANG_S)
        assert METRICS.match(answer.text), answer.text[:200]
    return True


def _sees_page(address: str) -> bool:
    return httpx.get(f"http://{address}/nothing", timeout=HANG_S).status_code != 401


def _lists_jobs(address: str) -> bool:
    return httpx.get(f"http://{address}/api/jobs/", timeout=HANG_S).status_code == 200


def _reads_a_byte(address: str) -> bool:
    """With a secret of our own."""
    with socket.create_connection(_place(address), HANG_S) as connection:
        nonces = received(connection, len(GREETING) + 16).removeprefix(GREETING) + bytes(16)
        connection.sendall(bytes(16) + proof(bytes(32), b"reads", nonces))
        with suppress(OSError):
            connection.sendall(COUNT.pack(1) + PIECE.pack(0, 0, 1))
            return connection.recv(1) != b""
    return False


def _meets_ranks(address: str) -> bool:
    from torch._C._distributed_c10d import TCPStore

    host, port = _place(address)
    store = TCPStore(host, port, is_master=False, wait_for_workers=False)
    store.set("stranger", "was here")
    return store.get("stranger") == b"was here"


def _connects(address: str) -> bool:
    with suppress(TimeoutError), socket.create_connection(_place(address), WAIT_S):
        return True
    return False


def _reachable(address: str) -> str:
    return address.replace("0.0.0.0", "127.0.0.1").replace("[::]", "127.0.0.1")


def _place(address: str) -> tuple[str, int]:
    host, _, port = _reachable(address).rpartition(":")
    return host, int(port)


TRIES: dict[str, Callable[[str], bool]] = {
    "api": _generates,
    "beside": _generates,
    "metrics": _sees_metrics_alone,
    "ray metrics": _sees_metrics_alone,
    "mooncake": _connects,
    "kv": _reads_a_byte,
    "store": _meets_ranks,
    "ranks": _connects,
    "agent page": _sees_page,
    "environments": _sees_page,
    "dashboard": lambda address: _lists_jobs(_reachable(address)),
}
