"""Tensor-parallel ranks of a worker without its engines: a pool and a shm transport for each."""

import ctypes
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from worker.api import Member
from worker.cache.layout import Identity, KVRegion, ModelLayout, rank_heads
from worker.cache.pool import KVPool
from worker.transfer.shm import ShmTransport
from worker.transfer.sources import LocalRank

NUM_GROUPS = 4
NOBODY = Identity("", "", "")  # whose KV all of them hold


def model_layout(num_kv_heads: int, draft_heads: int = 2) -> ModelLayout:
    """Three regions: with layer groups, with one group, and with one row a page."""
    return ModelLayout(
        (
            KVRegion("target", 8, num_kv_heads, 4, NUM_GROUPS, 4, "float16"),
            KVRegion("draft", 2, draft_heads, 2, 1, 4, "float32"),
            KVRegion("tail", 1, 1, 6, 1, 4, "float16", parts=1, rows="page"),
        )
    )


def content(layout: ModelLayout, num_pages: int, seed: int) -> list[np.ndarray]:
    """Random bytes for the whole model: of each region [group, page, kv head, the head's bytes]."""
    rng = np.random.default_rng(seed)
    return [
        rng.integers(
            0, 256,
            (region.num_groups, num_pages, region.num_kv_heads, region.head_bytes),
            np.uint8,
        )
        for region in layout.regions
    ]  # fmt: skip


def share(whole: Sequence[np.ndarray], tp_size: int, rank: int) -> list[np.ndarray]:
    """What of `content` one rank holds."""
    return [each[:, :, list(rank_heads(each.shape[2], tp_size, rank))] for each in whole]


def memory(pool: KVPool) -> list[np.ndarray]:
    """A pool's bytes by region, to read and to write: [group, page, kv head, the head's bytes]."""
    found = []
    for region, held in zip(pool.layout.regions, pool.memory(), strict=True):
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * held.num_bytes).from_address(held.address))
        shape = region.num_groups, pool.num_pages, region.num_kv_heads, region.head_bytes
        found.append(raw.reshape(shape))
    return found


class Ranks:
    """All ranks of one worker in this process; their pools hold `whole`, each its heads."""

    def __init__(
        self, layout: ModelLayout, tp_size: int, whole: Sequence[np.ndarray], name: str = "w-0"
    ) -> None:
        self.layout, self.tp_size, self.num_pages = layout, tp_size, whole[0].shape[1]
        self.pools = [
            KVPool(layout.share(tp_size, rank), self.num_pages, torch.device("cpu"))
            for rank in range(tp_size)
        ]
        self.transports = [ShmTransport("127.0.0.1", "shm") for _ in self.pools]
        for rank, (pool, transport) in enumerate(zip(self.pools, self.transports, strict=True)):
            for held, part in zip(memory(pool), share(whole, tp_size, rank), strict=True):
                held[:] = part
            transport.register(pool.memory())
        endpoints = tuple(msgspec.msgpack.encode(each.endpoint()) for each in self.transports)
        self.member = Member(name, "prefill", "i", "tcp://", endpoints=endpoints)

    def local(self, rank: int) -> LocalRank:
        """One of them, as the end of pulls."""
        return self.behind(self.transports[rank], rank)

    def behind(self, transport: Any, rank: int = 0) -> LocalRank:
        """One of them, with another transport."""
        return LocalRank(transport, self.layout, NOBODY, self.num_pages, 1.0, self.tp_size, rank)

    def close(self) -> None:
        for transport, pool in zip(self.transports, self.pools, strict=True):
            transport.close()
            pool.close()
