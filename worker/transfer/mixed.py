"""KV by the faster transport to a peer: of memory that both share within a host, sockets beyond."""

import logging
from collections.abc import Sequence

import msgspec

from worker.cache.layout import MemoryRegion
from worker.errors import TransferError
from worker.registry import resolve
from worker.transfer.base import (
    TRANSPORTS,
    Endpoint,
    KVTransport,
    Peer,
    check_kind,
    check_peer,
    describe,
)
from worker.transfer.sockets import SocketTransport

log = logging.getLogger("kvlane.transfer")

NEAR = {"shm": "shm", "nvlink": "mooncake"}  # transport within a host, by kind


class MixedTransport(KVTransport):
    """Two transports over the same memory; `kind` is that of the near one; see KVTransport."""

    name = "mixed"

    def __init__(self, host: str, kind: str) -> None:
        check_kind(self.name, kind)
        self.kind, self._endpoint = kind, None
        near: KVTransport = resolve("transport", NEAR[kind], TRANSPORTS)(host, kind)
        self._parts = near, SocketTransport(host)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        for part in self._parts:
            part.register(regions)
        ends = tuple(part.endpoint() for part in self._parts)
        whole = describe(self.name, self.kind, ends[-1].name, regions)
        self._endpoint = msgspec.structs.replace(whole, parts=ends)

    def connect(self, endpoint: Endpoint, timeout_s: float) -> Peer:
        check_peer(self.endpoint(), endpoint, same_host=False)
        (near, far), (to_near, to_far) = self._parts, endpoint.parts
        if to_near.host_key == self.endpoint().host_key:
            try:
                return near.connect(to_near, timeout_s)
            except TransferError as e:  # GPUs that cannot read each other, for one
                log.warning("%s is of this host, and reached by sockets: %s", endpoint, e)
        return far.connect(to_far, timeout_s)

    def close(self) -> None:
        for part in self._parts:
            part.close()
