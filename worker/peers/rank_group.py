"""How ranks find each other and agree on everything by which they could come to differ.

Sizes of pools, digests of weights, addresses: a rank that decided them by itself would
enter other collectives than its peers, and all of them would wait for ever.
"""

import json
import socket
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import psutil
from torch._C._distributed_c10d import TCPStore
from torch.distributed.rendezvous import rendezvous

from worker.errors import PeerLost
from worker.peers.deaf import MAPPED, hear_only

TIMEOUT_S = 60.0  # of a collective's rendezvous and of a call: a peer this late is gone
# Ranks load weights and capture graphs between two calls of a RankGroup. The control plane notices
# the death of a rank meanwhile, and ends all of them (`cluster.start_timeout_s`).
START_TIMEOUT_S = 1800.0


class Meeting:
    """Where the ranks of a group meet: a store, until all ranks have parted.

    address: "tcp://host:port", of rank 0, which listens there and nowhere else, or "file:///path".
    It keeps what anybody sends who reaches it: so no longer than the ranks need it. PeerLost: rank
    0 does not listen in time, or the port is taken.
    """

    def __init__(self, rank: int, size: int, address: str, timeout_s: float = TIMEOUT_S) -> None:
        self._me = f"rank {rank} of {size}"
        limit, parts = timedelta(seconds=timeout_s), urlsplit(address)
        self._rank, self._size, self._server = rank, size, None
        self._port = parts.port or 0
        try:
            if parts.scheme != "tcp":
                self.store: Any = next(iter(rendezvous(address, rank, size, timeout=limit)))[0]
                return
            place = parts.hostname or "", self._port
            make = partial(TCPStore, *place, size, timeout=limit, wait_for_workers=False)
            if rank == 0:
                family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
                listener = socket.create_server(place, family=family).detach()
                self._server = make(is_master=True, master_listen_fd=listener)
            self.store = make()
        except (OSError, RuntimeError) as e:
            raise PeerLost(f"{self._me}: nobody at {address}: {e}") from e

    def part(self, *, stays: bool = False) -> None:
        """Ask the store nothing more; rank 0 ends it once all ranks have parted, or PeerLost.

        stays: ranks go on with it; all others are cut off, and nobody is heard who comes later.
        """
        sockets = psutil.Process().net_connections("tcp")
        ours = [one.laddr for one in sockets if one.raddr and one.raddr.port == self._port]
        known: list[list[Any]] = []
        try:
            self.store.set(f"parted/{self._rank}", json.dumps(ours))
            for peer in range(self._size) if self._server is not None else ():
                known += json.loads(self.store.get(f"parted/{peer}"))
        except RuntimeError as e:
            raise PeerLost(f"{self._me}: a peer did not part: {e}") from e
        if not stays:
            self._server = self.store = None
        elif self._server is not None:
            hear_only(self._port, {(host.removeprefix(MAPPED), port) for host, port in known})


def exchange(store: Any, name: str, rank: int, size: int, value: str | bytes) -> list[bytes]:
    """Every rank's `value`, in their order; all ranks call once with a `name`, or PeerLost."""
    try:
        store.set(f"{name}/{rank}", value)
        return [bytes(store.get(f"{name}/{peer}")) for peer in range(size)]
    except RuntimeError as e:
        raise PeerLost(f"rank {rank} of {size}: a peer did not say its {name}: {e}") from e


class RankGroup:
    """One rank among the ranks of its worker, which tell each other things until all have started.

    Every rank makes the same calls in one order. A group of one opens nothing. rendezvous, and
    PeerLost: as of Meeting. worker: name and incarnation; ranks of another one join nothing.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, rendezvous: str = "", worker: str = ""
    ) -> None:
        assert 0 <= rank < size
        self._worker = worker
        self.rank = rank
        self.size = size
        self.host = urlsplit(rendezvous).hostname or ""  # rank 0's
        self._meeting: Meeting | None = None
        self._num_calls = 0
        if size > 1:
            self._meeting = Meeting(rank, size, rendezvous, START_TIMEOUT_S)

    def gather(self, value: bytes) -> list[bytes]:
        """Every rank's `value`, in rank order; blocks. PeerLost: one is late, or rank 0 is gone."""
        if self._meeting is None:
            assert self.size == 1, "the ranks have parted"
            return [value]
        self._num_calls += 1
        name = f"{self._worker}/{self._num_calls}"
        return exchange(self._meeting.store, name, self.rank, self.size, value)

    def broadcast(self, value: bytes) -> bytes:
        """Rank 0's value."""
        return self.gather(value if self.rank == 0 else b"")[0]

    def minimum(self, value: int) -> int:
        """The least of all ranks' values."""
        return min(map(int, self.gather(str(value).encode())))

    def check_equal(self, name: str, value: bytes) -> None:
        """Assert that the values of all ranks are equal; `name` is for the message."""
        values = self.gather(value)
        assert len(set(values)) == 1, f"ranks have come to different {name}: {values}"

    def part(self) -> None:
        """All ranks have started: nothing is gathered any more, and nobody listens. Or PeerLost."""
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.part()

    def close(self) -> None:
        """Leave. When rank 0 does, values that the other ranks have not read yet are lost."""
        self._meeting = None
