"""How ranks find each other and agree on everything by which they could come to differ.

Sizes of pools, digests of weights, addresses: a rank that decided them by itself would
enter other collectives than its peers, and all of them would wait for ever.
"""

from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from worker.errors import PeerLost

TIMEOUT_S = 60.0  # of a collective's rendezvous and of a call: a peer this late is gone
# Ranks load weights and capture graphs between two calls of a RankGroup. The control plane notices
# the death of a rank meanwhile, and ends all of them (`cluster.start_timeout_s`).
START_TIMEOUT_S = 1800.0


def open_store(name: str, rank: int, size: int, init_method: str) -> Store:
    """The store of a group that alone uses `init_method`; PeerLost: its keeper came too late."""
    try:
        stores = rendezvous(init_method, rank, size, timeout=timedelta(seconds=TIMEOUT_S))
        return next(iter(stores))[0]
    except RuntimeError as e:
        raise PeerLost(f"{name} rank {rank} of {size}: nobody at {init_method}: {e}") from e


def exchange(store: Any, name: str, rank: int, size: int, value: str | bytes) -> list[bytes]:
    """Every rank's `value`, in their order; all ranks call once with a `name`, or PeerLost."""
    try:
        store.set(f"{name}/{rank}", value)
        return [bytes(store.get(f"{name}/{peer}")) for peer in range(size)]
    except RuntimeError as e:
        raise PeerLost(f"rank {rank} of {size}: a peer did not say its {name}: {e}") from e


class RankGroup:
    """One rank among the ranks of its worker; rank 0 hosts the store behind them.

    Every rank makes the same calls in one order. A group of one opens nothing. Raises PeerLost if
    rank 0 does not listen at `rendezvous` ("tcp://host:port", a free port of its host) in time, or
    the port is taken. worker: name and incarnation; ranks of another one join nothing.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, rendezvous: str = "", worker: str = ""
    ) -> None:
        assert 0 <= rank < size
        self._worker = worker
        self.rank = rank
        self.size = size
        self.host = urlsplit(rendezvous).hostname or ""  # rank 0's
        self._store: Store | None = None
        self._num_calls = 0
        if size == 1:
            return
        try:
            self._store = TCPStore(
                self.host, urlsplit(rendezvous).port or 0, size, is_master=rank == 0,
                timeout=timedelta(seconds=START_TIMEOUT_S), wait_for_workers=False,
            )  # fmt: skip
        except RuntimeError as e:
            raise PeerLost(f"rank {rank} of {size}: no rendezvous at {rendezvous}: {e}") from e

    def gather(self, value: bytes) -> list[bytes]:
        """Every rank's `value`, in rank order; blocks. PeerLost: one is late, or rank 0 is gone."""
        if self._store is None:
            return [value]
        self._num_calls += 1
        name = f"{self._worker}/{self._num_calls}"
        return exchange(self._store, name, self.rank, self.size, value)

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

    def close(self) -> None:
        """Leave. When rank 0 does, values that the other ranks have not read yet are lost."""
        self._store = None
