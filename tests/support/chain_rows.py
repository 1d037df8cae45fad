"""One request's draft rows, run by a chain drafter over pages of its own."""

from dataclasses import replace

import torch
from torch import Tensor

from worker.attention.build import build_attentions
from worker.cache.layout import KVLayout
from worker.cache.pool import KVPool
from worker.drafts.build import FROM_KEY_1, regions
from worker.drafts.chain import ChainDrafter
from worker.forward.batch import Batch
from worker.forward.context import forward_context

PAGE_SIZE, NUM_PAGES = 4, 9
PAGES = [5, 2, 7, 1]  # of the one request: slot t is row t % 4 of page PAGES[t // 4]


class ChainRows:
    """The region "draft" of a drafter, filled with NaN."""

    def __init__(self, drafter: ChainDrafter) -> None:
        name = str(drafter.placement.dtype).removeprefix("torch.")
        whole, _ = regions(drafter.shape, PAGE_SIZE, name)
        region = replace(whole, num_kv_heads=drafter.heads.num_kv_heads)
        self.drafter = drafter
        self.pool = KVPool(KVLayout((region,)), NUM_PAGES, drafter.placement.device)
        self.caches = self.pool.layer(0, "draft")
        for cache in self.caches:
            cache.fill_(float("nan"))
        shape = replace(drafter.attention.attended(), mask=FROM_KEY_1, region="draft")
        names = {"prefill": "reference", "decode": "reference"}
        self._attention = build_attentions(names, self.pool, shape).decode

    def store(self, first: int, ids: Tensor, g: Tensor) -> None:
        """Rows for slots `first` and on."""
        batch = self._batch(first, ids)
        with forward_context(batch, self._attention, self._attention.plan(batch)):
            self.drafter.store(batch.input_ids, g, batch.positions)

    def forward(self, first: int, ids: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Rows for slots `first` and on, which attend to those before them."""
        batch = self._batch(first, ids)
        with forward_context(batch, self._attention, self._attention.plan(batch)):
            return self.drafter(batch.input_ids, g, batch.positions)

    def _batch(self, first: int, ids: Tensor) -> Batch:
        num, device = len(ids), self.drafter.placement.device
        positions = torch.arange(first, first + num, device=device)
        pages = torch.tensor(PAGES, device=device)
        slots = pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        lengths = torch.tensor([0, num, first + num], dtype=torch.int32, device=device)
        return Batch(
            input_ids=ids.to(device, torch.int64), positions=positions, slot_mapping=slots,
            query_start=lengths[:2], seq_lens=lengths[2:], page_table=pages[None].int(),
            num_reqs=1, num_tokens=num, max_query_len=num, max_seq_len_ub=first + num,
        )  # fmt: skip
