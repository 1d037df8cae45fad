"""What speaks at a port, by what it says to a stranger: greetings that change nothing there.

So tests find out whether the table of ports, `cluster.diagnose.doors`, and `doctor --ports` say
what is so.
"""

import re
import socket
import ssl
import struct
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import StrEnum

import psutil

from worker.transfer.doors import GREETING

PATIENCE_S = 3.0  # for an answer of a busy process
SILENT_S = 1.5  # whoever speaks first has done so
MAX_BYTES = 1 << 20

ZMTP_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"  # between them a length that nobody reads
ZMTP_GREETING = b"\x03\x00CURVE".ljust(22, b"\0") + bytes(32)
ZMTP_BYTES, ZMTP_MECHANISM = 64, slice(12, 32)
HTTP2_SETTINGS = 4  # type of a frame, its fourth byte
STORE_VALIDATE, STORE_PING = 0, 13  # queries of torch's TCPStore
STORE_MAGIC, STORE_NONCE = 0x3C85F7CE, b"kvln"

LOCAL, EVERYWHERE = "127.0.0.1", ("0.0.0.0", "[::]")
OVER_HTTP = ("api", "beside", "metrics", "ray metrics", "agent page", "environments", "dashboard")

Place = tuple[str, int]


class Speech(StrEnum):
    """A protocol."""

    GRPC = "gRPC"
    CURVE = "ZeroMQ with CURVE"
    PLAIN = "ZeroMQ without keys"
    HTTP = "HTTP"
    TLS = "HTTP over TLS"
    STORE = "TCPStore"
    KV = "KV over sockets"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a port has said."""

    speech: Speech
    status: int = 0  # of HTTP


def overheard(place: Place) -> Answer | None:
    """Who speaks without being asked: gRPC, ZeroMQ and KV over sockets."""
    with suppress(OSError), _connected(place, SILENT_S) as connection:
        first = connection.recv(ZMTP_BYTES)
        connection.settimeout(PATIENCE_S)
        if len(first) > 3 and first[0] == 0 and first[3] == HTTP2_SETTINGS:
            return Answer(Speech.GRPC)
        if first.startswith(GREETING):
            return Answer(Speech.KV)
        if first[:1] == ZMTP_SIGNATURE[:1]:
            connection.sendall(ZMTP_SIGNATURE + ZMTP_GREETING)
            mechanism = _read(connection, ZMTP_BYTES, first)[ZMTP_MECHANISM].strip(b"\0")
            return Answer(Speech.CURVE if mechanism == b"CURVE" else Speech.PLAIN)
    return None


def http(place: Place, path: str) -> Answer | None:
    """Who answers HTTP, plain or over TLS."""
    asked = f"GET {path} HTTP/1.1\r\nHost: {place[0]}\r\nConnection: close\r\n\r\n".encode()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for speech in (Speech.HTTP, Speech.TLS):
        with suppress(OSError), ExitStack() as stack:
            connection = stack.enter_context(_connected(place, PATIENCE_S))
            if speech is Speech.TLS:
                connection = stack.enter_context(context.wrap_socket(connection))
            connection.sendall(asked)
            status = re.match(rb"HTTP/1\.\d (\d{3})", connection.recv(MAX_BYTES))
            if status:
                return Answer(speech, int(status[1]))
    return None


def store(place: Place) -> Answer | None:
    """Whose TCPStore sends back what it was sent."""
    with suppress(OSError), _connected(place, PATIENCE_S) as connection:
        connection.sendall(struct.pack("<BIB", STORE_VALIDATE, STORE_MAGIC, STORE_PING))
        connection.sendall(STORE_NONCE)
        if _read(connection, len(STORE_NONCE)) == STORE_NONCE:
            return Answer(Speech.STORE)
    return None


def speaks(place: Place, kind: str) -> bool:
    """Whether what speaks there is of this kind of the table, as far as a greeting shows it."""
    match kind:
        case "store":
            return store(place) is not None
        case "mooncake" | "ranks":
            return not connects(place)
        case kind if kind in OVER_HTTP:
            return http(place, "/kvlane") is not None
        case _:
            speeches = {"wire": (Speech.CURVE, Speech.PLAIN), "kv": (Speech.KV,)}
            answer = overheard(place)
            return answer is not None and answer.speech in speeches.get(kind, (Speech.GRPC,))


def listening_ports() -> set[int]:
    """Of this network namespace."""
    sockets = psutil.net_connections("tcp")
    return {one.laddr.port for one in sockets if one.status == psutil.CONN_LISTEN}


def place_of(address: str) -> Place:
    """Where to connect to an address of `doctor --ports` from its machine."""
    host, _, port = address.rpartition(":")
    return (LOCAL if host in EVERYWHERE else host), int(port)


def connects(place: Place) -> bool:
    """Whether a stranger's connection is taken at all."""
    with suppress(OSError), _connected(place, PATIENCE_S):
        return True
    return False


def _connected(place: Place, timeout_s: float) -> socket.socket:
    connection = socket.create_connection(place, PATIENCE_S)
    connection.settimeout(timeout_s)
    return connection


def _read(connection: socket.socket, num_bytes: int, begun: bytes = b"") -> bytes:
    """That many bytes, or fewer if the other side closes."""
    while len(begun) < num_bytes and (more := connection.recv(num_bytes - len(begun))):
        begun += more
    return begun
