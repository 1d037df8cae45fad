"""Processes that serve memory by a transport of the table: to be pulled from, stopped, killed."""

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import msgspec

from tests.support.patience import HANG_S, until
from tests.support.processes import FORKED, fork
from worker.cache.layout import MemoryRegion
from worker.registry import resolve
from worker.transfer.base import TRANSPORTS, Endpoint, KVTransport

HOST = "127.0.0.1"
CONNECT_S = 10.0  # generous: the machine may be loaded
Row = tuple[str, str]  # transport and kind
Serves = tuple[Sequence[MemoryRegion], object]  # what to register, and what keeps it alive


def registered(row: Row, regions: Sequence[MemoryRegion]) -> KVTransport:
    made = resolve("transport", row[0], TRANSPORTS)(HOST, row[1])
    made.register(regions)
    return made


@dataclass
class Source:
    process: ForkServerProcess
    conn: Connection
    endpoint: Endpoint

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        """SIGSTOP, and wait for it to arrive: on a busy machine threads serve on for a while."""
        self.signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        until(lambda: all(map(_is_stopped, tasks.iterdir())), "the source does not stop")

    def kill(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGKILL)
        self.process.join(HANG_S)
        self.conn.close()


def source(row: Row, make: Callable[..., Serves], *args: Any) -> Source:
    """A process that serves what `make(*args)` makes there, until it is killed."""
    ours, theirs = FORKED.Pipe()
    process = fork(_serve, row, theirs, make, *args)
    theirs.close()
    assert ours.poll(HANG_S), "the source did not start"
    endpoint = msgspec.msgpack.decode(ours.recv_bytes(), type=Endpoint)
    return Source(process, ours, endpoint)


def _serve(row: Row, conn: Connection, make: Callable[..., Serves], *args: Any) -> None:
    """Main function: serve until told to end, or until the test process is gone."""
    regions, _alive = make(*args)
    transport = registered(row, regions)
    conn.send_bytes(msgspec.msgpack.encode(transport.endpoint()))
    with contextlib.suppress(EOFError):
        conn.recv_bytes()
    os._exit(0)


def _is_stopped(task: Path) -> bool:
    """Whether a thread is in state T: proc(5), the field after the name in parentheses."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it ended meanwhile; the others are looked at once more
        return False
