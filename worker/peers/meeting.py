"""Where the ranks of one worker meet at the start, and tell each other what each has found.

Everything by which ranks could come to differ is decided here together: what memory holds, what the
weights are, who listens where. A rank that decided by itself would enter other collectives than its
peers, and all of them would wait for ever.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from torch._C._distributed_c10d import TCPStore

from worker.errors import PeerLost

# Ranks load weights and capture graphs between two meetings. Who dies meanwhile is noticed by the
# control plane, which ends all of them (`cluster.start_timeout_s`), not by this.
TIMEOUT_S = 1800.0


class Meeting:
    """One rank among the ranks of its worker; the one with rank 0 hosts the store.

    Every rank makes the same calls in one order. Alone (size 1) nothing is opened. Raises PeerLost
    if rank 0 does not listen at `rendezvous` ("tcp://host:port", a free port of its host) in time,
    or the port is taken. worker: name and incarnation, so that ranks of another that come to a port
    taken twice meet nobody.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, rendezvous: str = "", worker: str = ""
    ) -> None:
        assert 0 <= rank < size
        self._worker = worker
        self.rank = rank
        self.size = size
        self.host = urlsplit(rendezvous).hostname or ""  # rank 0's
        self._store: Any = None
        self._num_calls = 0
        if size == 1:
            return
        try:
            self._store = TCPStore(
                self.host, urlsplit(rendezvous).port or 0, size, is_master=rank == 0,
                timeout=timedelta(seconds=TIMEOUT_S), wait_for_workers=False,
            )  # fmt: skip
        except RuntimeError as error:
            raise PeerLost(f"rank {rank} of {size}: no meeting at {rendezvous}: {error}") from error

    def tell(self, value: bytes) -> list[bytes]:
        """Hand `value` to all ranks; returns what each has handed over, in rank order. Blocks.

        Raises PeerLost if a rank did not come in time, or rank 0 is gone.
        """
        if self._store is None:
            return [value]
        self._num_calls += 1
        try:
            call = f"{self._worker}/{self._num_calls}"
            self._store.set(f"{call}/{self.rank}", value)
            return [bytes(self._store.get(f"{call}/{i}")) for i in range(self.size)]
        except RuntimeError as error:
            raise PeerLost(f"rank {self.rank} of {self.size}: a rank is gone: {error}") from error

    def first(self, value: bytes) -> bytes:
        """What rank 0 has handed over."""
        return self.tell(value if self.rank == 0 else b"")[0]

    def least(self, value: int) -> int:
        """The least of all ranks' values."""
        return min(int(each) for each in self.tell(str(value).encode()))

    def agree(self, subject: str, value: bytes) -> None:
        """Assert that all ranks hand over the same; `subject` is for the message."""
        values = self.tell(value)
        assert len(set(values)) == 1, f"ranks have come to different {subject}: {values}"

    def close(self) -> None:
        """Leave; nothing can be told to ranks that have not heard rank 0's last value."""
        self._store = None
