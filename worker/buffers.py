"""A Plan made into a Batch: every tensor of one forward, built whole."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.batch import Batch
from worker.plan import Plan
from worker.state import StepState


class BatchBuffers:
    """Builds batches for one runner from its step state."""

    def __init__(self, state: StepState, page_size: int) -> None:
        self._state = state
        self._page_size = page_size

    def build(self, plan: Plan) -> Batch:
        """The batch of a plan whose row changes have been applied to the state."""
        return self._chunks(plan) if plan.chunks else self._decode(plan)

    def _chunks(self, plan: Plan) -> Batch:
        upload = self._state.upload
        counts = [len(chunk.tokens) for chunk in plan.chunks]
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        input_ids = [token for chunk in plan.chunks for token in chunk.tokens]
        positions = [chunk.start + i for chunk in plan.chunks for i in range(len(chunk.tokens))]
        owner = [i for i, count in enumerate(counts) for _ in range(count)]
        rows = upload([chunk.row for chunk in plan.chunks], torch.int64)
        ends = [chunk.start + len(chunk.tokens) for chunk in plan.chunks]
        table = self._table(rows, plan.max_seq_len_ub)
        at = upload(positions, torch.int64)
        return Batch(
            input_ids=upload(input_ids, torch.int64),
            positions=at,
            slot_mapping=self._slots(table[upload(owner, torch.int64)], at),
            query_start=upload(starts, torch.int32),
            seq_lens=upload(ends, torch.int32),
            page_table=table,
            num_reqs=len(plan.chunks),
            num_tokens=len(input_ids),
            max_query_len=max(counts),
            max_seq_len_ub=plan.max_seq_len_ub,
        )

    def _decode(self, plan: Plan) -> Batch:
        state = self._state
        num_rows = len(plan.decode)
        rows = self.live_rows(plan)
        positions = state.seq_len[rows]
        table = self._table(rows, plan.max_seq_len_ub)
        return Batch(
            input_ids=state.last_token[rows],
            positions=positions,
            slot_mapping=self._slots(table, positions),
            query_start=torch.arange(num_rows + 1, dtype=torch.int32, device=state.device),
            seq_lens=(positions + 1).to(torch.int32),
            page_table=table,
            num_reqs=num_rows,
            num_tokens=num_rows,
            max_query_len=1,
            max_seq_len_ub=plan.max_seq_len_ub,
        )

    def live_rows(self, plan: Plan) -> Tensor:
        """[len(plan.decode)] i64: the rows, those that are inactive by now replaced by row 0."""
        rows = self._state.upload(plan.decode, torch.int64)
        return rows * self._state.active[rows]

    def _table(self, rows: Tensor, max_seq_len: int) -> Tensor:
        """[len(rows), pages of max_seq_len] i32."""
        num_pages = -(-max_seq_len // self._page_size)
        return self._state.page_table[rows, :num_pages]

    def _slots(self, table: Tensor, positions: Tensor) -> Tensor:
        """[num_tokens] i64 slots of `positions`, given each token's own row of the table."""
        page = table.gather(1, (positions // self._page_size)[:, None])[:, 0].to(torch.int64)
        return page * self._page_size + positions % self._page_size
